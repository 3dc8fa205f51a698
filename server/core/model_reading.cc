// SPDX-License-Identifier: Apache-2.0
//
// The part of Model that serves readers.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/model.h"

namespace ema {

absl::StatusOr<std::shared_ptr<Reading>> Model::OpenReading(std::string_view track, int64_t version,
                                                            int64_t incarnation,
                                                            Selection selection) {
  if (SnapshotRef synthesized = FindSynthesized(track)) {
    const VersionRecord& record = synthesized->record;
    if (version != 0 &&
        (version != record.version || (incarnation != 0 && incarnation != record.incarnation))) {
      return MakeError(
          absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
          absl::StrCat("version: ", version, " given, but \"", std::string(track),
                       "\" has been built as version ", record.version, " for step ", record.step));
    }
    const TrackSnapshot& only = synthesized->tracks[0];
    return ShareReading(std::move(synthesized), only, std::move(selection));
  }
  const absl::Status known = CheckTrack(track);
  absl::StatusOr<SnapshotRef> snapshot = PinVersion(version, incarnation);
  const TrackSnapshot* const found = snapshot.ok() ? (*snapshot)->Find(track) : nullptr;
  // A track that was removed is still in the versions that have it.
  if (GetErrorReason(snapshot.status()) == ErrorReason::kVersionNotKept) return snapshot.status();
  if (found == nullptr) EMA_RETURN_IF_ERROR(known);
  EMA_RETURN_IF_ERROR(snapshot.status());
  if (found == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoVersion,
                     absl::StrCat("track \"", std::string(track), "\" has no value in version ",
                                  (*snapshot)->record.version, " yet"));
  }
  return ShareReading(*std::move(snapshot), *found, std::move(selection));
}

absl::StatusOr<std::shared_ptr<Reading>> Model::ReadStored(SnapshotRef snapshot,
                                                           Selection selection) {
  EMA_RETURN_IF_ERROR(closed());
  const Snapshot* const raw = snapshot.get();
  // The reading needs what is the model's.
  SnapshotRef held(raw, [model = shared_from_this(), snapshot = std::move(snapshot)](
                            const Snapshot*) mutable { snapshot.reset(); });
  return ShareReading(std::move(held), raw->tracks[0], std::move(selection));
}

absl::StatusOr<std::shared_ptr<Reading>> Model::ShareReading(SnapshotRef snapshot,
                                                             const TrackSnapshot& track,
                                                             Selection selection) {
  const VersionId id = snapshot->record.id();
  // What is read from the disk is opened for each reader, but the same.
  const auto is_same_track = [&](const Reading& reading) {
    return &reading.track() == &track || (track.stored != nullptr && reading.is_stored() &&
                                          reading.snapshot()->record.id() == id &&
                                          reading.track().track->name() == track.track->name());
  };
  const auto find = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(readings_mu_) {
    std::erase_if(readings_, [](const std::weak_ptr<Reading>& held) { return held.expired(); });
    for (const std::weak_ptr<Reading>& held : readings_) {
      std::shared_ptr<Reading> reading = held.lock();
      if (reading != nullptr && is_same_track(*reading) && reading->selection() == selection) {
        return reading;
      }
    }
    return std::shared_ptr<Reading>();
  };
  {
    absl::MutexLock lock(&readings_mu_);
    if (std::shared_ptr<Reading> reading = find()) return reading;
  }
  EMA_ASSIGN_OR_RETURN(
      std::shared_ptr<Reading> made,
      Reading::Create(std::move(snapshot), track, manifest(), *device_, *budget_, selection));
  absl::MutexLock lock(&readings_mu_);
  if (std::shared_ptr<Reading> reading = find()) return reading;  // Somebody was faster.
  readings_.push_back(made);
  return made;
}

absl::StatusOr<std::optional<VersionRecord>> Model::NewestOf(std::string_view track) {
  if (const SnapshotRef synthesized = FindSynthesized(track)) return synthesized->record;
  EMA_RETURN_IF_ERROR(CheckTrack(track));
  EMA_RETURN_IF_ERROR(closed());
  return latest();
}

bool Model::RemembersVersion(int64_t version, int64_t incarnation) const {
  absl::MutexLock lock(&mu_);
  // By ascending version.
  const auto it = std::partition_point(
      records_.begin(), records_.end(),
      [version](const VersionRecord& record) { return record.version < version; });
  return it != records_.end() && it->version == version && it->incarnation == incarnation;
}

}  // namespace ema
