// SPDX-License-Identifier: Apache-2.0
#include "server/core/reading_cache.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// Matches the readings of that track of that version from the disk.
auto IsStoredAs(const VersionId& id, std::string_view track) {
  return [id, track](const Reading& reading) {
    return reading.is_stored() && reading.snapshot()->record.id() == id &&
           reading.track().track->name() == track;
  };
}

}  // namespace

absl::StatusOr<std::shared_ptr<Reading>> ReadingCache::Open(std::string_view track, int64_t version,
                                                            int64_t incarnation,
                                                            const Selection& selection) {
  if (SnapshotRef synthesized = tracks_->FindSynthesized(track)) {
    const Version& record = synthesized->record;
    if (version != 0 && !VersionId{version, incarnation}.Matches(record.id())) {
      return MakeError(
          absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
          absl::StrCat("version: ", version, " given, but \"", std::string(track),
                       "\" has been built as version ", record.number, " for step ", record.step));
    }
    const TrackSnapshot& only = synthesized->tracks[0];
    return Share(std::move(synthesized), only, selection);
  }
  absl::StatusOr<SnapshotRef> snapshot = history_->Pin(version, incarnation);
  if (!snapshot.ok()) {
    const ErrorReason reason = GetErrorReason(snapshot.status());
    // A version elsewhere may have the track.
    if (reason != ErrorReason::kVersionNotKept) EMA_RETURN_IF_ERROR(tracks_->CheckTrack(track));
    if (reason == ErrorReason::kTooManyPins) history_->NotePinShortage();
    return snapshot.status();
  }
  EMA_ASSIGN_OR_RETURN(const TrackSnapshot* const found, tracks_->FindIn(**snapshot, track));
  return Share(*std::move(snapshot), *found, selection);
}

absl::StatusOr<std::shared_ptr<Reading>> ReadingCache::OpenStored(SnapshotRef snapshot,
                                                                  const Selection& selection) {
  EMA_RETURN_IF_ERROR(history_->CheckOpen());
  const TrackSnapshot& only = snapshot->tracks[0];
  return Share(WithOwner(std::move(snapshot), keep_alive_()), only, selection);
}

absl::StatusOr<std::shared_ptr<Reading>> ReadingCache::Share(SnapshotRef snapshot,
                                                             const TrackSnapshot& track,
                                                             const Selection& selection) {
  // Each reader opens a stored version for itself: another object with the same bytes.
  const auto is_stored = IsStoredAs(snapshot->record.id(), track.track->name());
  const auto is_same = [&](const Reading& reading) {
    return &reading.track() == &track || (track.stored != nullptr && is_stored(reading));
  };
  if (std::shared_ptr<Reading> reading = Find(selection, is_same)) return reading;
  EMA_ASSIGN_OR_RETURN(
      std::shared_ptr<Reading> made,
      Reading::Create(std::move(snapshot), track, *manifest_, *device_, *budget_, selection));
  // Another thread may have made the same meanwhile.
  return Find(selection, is_same, made);
}

std::shared_ptr<Reading> ReadingCache::FindStored(const VersionId& id, std::string_view track,
                                                  const Selection& selection) {
  if (!history_->CheckOpen().ok()) return nullptr;
  return Find(selection, IsStoredAs(id, track));
}

std::shared_ptr<Reading> ReadingCache::Find(const Selection& selection,
                                            absl::FunctionRef<bool(const Reading&)> matches,
                                            const std::shared_ptr<Reading>& made) {
  // One of these may become the last reference, which frees much: it is dropped without the lock.
  std::vector<std::shared_ptr<Reading>> others;
  absl::MutexLock lock(&mu_);
  std::erase_if(readings_, [](const std::weak_ptr<Reading>& held) { return held.expired(); });
  for (const std::weak_ptr<Reading>& held : readings_) {
    std::shared_ptr<Reading> reading = held.lock();
    if (reading == nullptr) continue;
    if (matches(*reading) && reading->selection() == selection) return reading;
    others.push_back(std::move(reading));
  }
  if (made != nullptr) readings_.push_back(made);
  return made;
}

absl::StatusOr<std::optional<Version>> ReadingCache::NewestOf(std::string_view track) {
  if (tracks_->FindSynthesized(track) != nullptr) return std::nullopt;
  EMA_RETURN_IF_ERROR(tracks_->CheckTrack(track));
  EMA_RETURN_IF_ERROR(history_->CheckOpen());
  return history_->latest();
}

absl::StatusOr<std::optional<VersionId>> ReadingCache::FindStep(std::string_view track,
                                                                int64_t step) {
  if (const SnapshotRef synthesized = tracks_->FindSynthesized(track)) {
    const Version& record = synthesized->record;
    if (record.step == step) return record.id();
    return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                     absl::StrCat("step: ", step, " given, but \"", std::string(track),
                                  "\" has been built for step ", record.step));
  }
  return history_->FindStep(step);
}

}  // namespace ema
