// SPDX-License-Identifier: Apache-2.0
//
// The part of Model that serves readers.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/known_versions.h"
#include "server/core/model.h"

namespace ema {

absl::StatusOr<std::shared_ptr<Reading>> Model::OpenReading(std::string_view track, int64_t version,
                                                            int64_t incarnation,
                                                            Selection selection) {
  if (SnapshotRef synthesized = FindSynthesized(track)) {
    const Version& record = synthesized->record;
    if (version != 0 && !VersionId{version, incarnation}.Names(record.id())) {
      return MakeError(
          absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
          absl::StrCat("version: ", version, " given, but \"", std::string(track),
                       "\" has been built as version ", record.number, " for step ", record.step));
    }
    const TrackSnapshot& only = synthesized->tracks[0];
    return readings_.Open(std::move(synthesized), only, selection);
  }
  absl::StatusOr<SnapshotRef> snapshot = PinVersion(version, incarnation);
  if (!snapshot.ok()) {
    const ErrorReason reason = GetErrorReason(snapshot.status());
    // A version elsewhere may have the track.
    if (reason != ErrorReason::kVersionNotKept) EMA_RETURN_IF_ERROR(CheckTrack(track));
    if (reason == ErrorReason::kTooManyPins) {
      has_pin_shortage_.store(true, std::memory_order_relaxed);
    }
    return snapshot.status();
  }
  EMA_ASSIGN_OR_RETURN(const TrackSnapshot* const found, FindTrack(**snapshot, track));
  return readings_.Open(*std::move(snapshot), *found, selection);
}

absl::StatusOr<const TrackSnapshot*> Model::FindTrack(const Snapshot& version,
                                                      std::string_view name) const {
  // A track that was removed is still in the versions that have it.
  if (const TrackSnapshot* const found = version.Find(name)) return found;
  EMA_RETURN_IF_ERROR(CheckTrack(name));
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoVersion,
                   absl::StrCat("track \"", std::string(name), "\" has no value in version ",
                                version.record.number, " yet"));
}

absl::StatusOr<std::shared_ptr<Reading>> Model::ReadStored(SnapshotRef snapshot,
                                                           Selection selection) {
  EMA_RETURN_IF_ERROR(closed());
  const Snapshot* const raw = snapshot.get();
  // The reading needs what is the model's.
  SnapshotRef held(raw, [model = shared_from_this(), snapshot = std::move(snapshot)](
                            const Snapshot*) mutable { snapshot.reset(); });
  return readings_.Open(std::move(held), raw->tracks[0], selection);
}

std::shared_ptr<Reading> Model::FindStoredReading(const VersionId& id, std::string_view track,
                                                  const Selection& selection) {
  if (!closed().ok()) return nullptr;
  return readings_.FindStored(id, track, selection);
}

absl::StatusOr<std::optional<Version>> Model::NewestOf(std::string_view track) {
  if (FindSynthesized(track) != nullptr) return std::nullopt;
  EMA_RETURN_IF_ERROR(CheckTrack(track));
  EMA_RETURN_IF_ERROR(closed());
  return latest();
}

absl::StatusOr<std::optional<VersionId>> Model::FindStep(std::string_view track, int64_t step) {
  if (const SnapshotRef synthesized = FindSynthesized(track)) {
    const Version& record = synthesized->record;
    if (record.step == step) return record.id();
    return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                     absl::StrCat("step: ", step, " given, but \"", std::string(track),
                                  "\" has been built for step ", record.step));
  }
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(CheckHasVersionLocked());
  const Version& latest = current_->record;
  if (step > latest.step) return StepNotYet(config_.name, step, latest.id(), latest.step);
  BranchWalk walk(latest);
  for (auto record = records_.rbegin(); record != records_.rend(); ++record) {
    if (!walk.Takes(record->id(), record->step, record->restored_from)) continue;
    if (record->step < step) break;
    if (record->step == step && FindSnapshotLocked(record->id()) != nullptr) {
      return record->id();
    }
  }
  return std::nullopt;
}

bool Model::RemembersVersion(int64_t version, int64_t incarnation) const {
  absl::MutexLock lock(&mu_);
  return FindRecordLocked({version, incarnation}) != records_.end();
}

absl::Status Model::CheckHasVersionLocked() const {
  EMA_RETURN_IF_ERROR(closed_);
  if (current_ == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoVersion,
                     absl::StrCat("model \"", config_.name, "\": nothing has been committed yet"));
  }
  return absl::OkStatus();
}

SnapshotRef Model::FindSnapshotLocked(const VersionId& id) const {
  const auto matches = [&](const SnapshotRef& snapshot) { return id.Names(snapshot->record.id()); };
  if (matches(current_)) return current_;
  const auto it = std::find_if(older_.begin(), older_.end(), matches);
  return it != older_.end() ? *it : nullptr;
}

absl::StatusOr<SnapshotRef> Model::PinVersion(int64_t version, int64_t incarnation) {
  absl::MutexLock lock(&mu_);
  EMA_ASSIGN_OR_RETURN(const SnapshotRef snapshot, FindToPinLocked(version, incarnation));
  return PinLeavingLocked(/*spare_count=*/0, snapshot);
}

absl::StatusOr<SnapshotRef> Model::PinSpare(int64_t version, int64_t incarnation) {
  absl::MutexLock lock(&mu_);
  EMA_ASSIGN_OR_RETURN(const SnapshotRef snapshot, FindToPinLocked(version, incarnation));
  return PinLeavingLocked(/*spare_count=*/1, snapshot);
}

absl::StatusOr<SnapshotRef> Model::PinForSave(int64_t version, int64_t incarnation) {
  absl::MutexLock lock(&mu_);
  EMA_ASSIGN_OR_RETURN(const SnapshotRef snapshot, FindToPinLocked(version, incarnation));
  const auto is_saved = [](const auto& pinned) { return pinned.second.save_count > 0; };
  const auto own = pins_.find(snapshot.get());
  const bool has_place = own != pins_.end() && is_saved(*own)
                             ? true
                             : options_.has_data_dir && CanPinLocked(*snapshot) &&
                                   std::none_of(pins_.begin(), pins_.end(), is_saved);
  if (has_place) return PinLocked(snapshot, &Pins::save_count);
  return PinLeavingLocked(/*spare_count=*/0, snapshot);
}

absl::StatusOr<SnapshotRef> Model::FindToPinLocked(int64_t version, int64_t incarnation) const {
  EMA_RETURN_IF_ERROR(CheckHasVersionLocked());
  const Version& latest = current_->record;
  SnapshotRef snapshot = version == 0 ? current_ : FindSnapshotLocked({version, incarnation});
  if (snapshot == nullptr) {
    const bool future = version > latest.number && incarnation >= 0 &&
                        (incarnation == 0 || incarnation == runs_.incarnation());
    return MakeError(absl::StatusCode::kOutOfRange,
                     future ? ErrorReason::kVersionNotYet : ErrorReason::kVersionNotKept,
                     absl::StrCat("model \"", config_.name, "\": version ", version,
                                  future ? " is not committed yet" : " is not kept",
                                  "; the newest is ", latest.number));
  }
  return snapshot;
}

absl::StatusOr<SnapshotRef> Model::PinLeavingLocked(int64_t spare_count,
                                                    const SnapshotRef& snapshot) {
  const int64_t pinned = ReaderPinCountLocked();
  const auto own = pins_.find(snapshot.get());
  const bool is_new = own == pins_.end() || own->second.reader_count == 0;
  // What is pinned can be pinned again, also where a rollback has pinned one too many.
  const int64_t needed = pinned + (is_new ? 1 : 0) + spare_count;
  const bool has_place = needed <= config_.max_pinned_versions && CanPinLocked(*snapshot);
  if ((!is_new && spare_count == 0) || has_place) {
    return PinLocked(snapshot, &Pins::reader_count);
  }
  return MakeError(
      absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyPins,
      absl::StrCat("model \"", config_.name, "\": readers hold ", pinned, " of the ",
                   config_.max_pinned_versions, " versions that max_pinned_versions allows",
                   spare_count > 0 ? ", and one must be left to them" : ""),
      absl::Milliseconds(100));
}

int64_t Model::ReaderPinCountLocked() const {
  return std::count_if(pins_.begin(), pins_.end(),
                       [](const auto& pinned) { return pinned.second.reader_count > 0; });
}

bool Model::CanPinLocked(const Snapshot& version) const {
  return pins_.contains(&version) || static_cast<int64_t>(pins_.size()) < max_older_count();
}

std::optional<VersionId> Model::TakePinShortage() {
  if (!has_pin_shortage_.exchange(false, std::memory_order_relaxed)) return std::nullopt;
  absl::MutexLock lock(&mu_);
  std::optional<VersionId> oldest;
  // It may be over by now.
  if (ReaderPinCountLocked() < config_.max_pinned_versions) return oldest;
  for (const auto& [version, pins] : pins_) {
    if (pins.reader_count == 0) continue;
    oldest = std::min(oldest.value_or(version->record.id()), version->record.id());
  }
  return oldest;
}

SnapshotRef Model::PinLocked(const SnapshotRef& snapshot, int64_t Pins::*count) {
  ++(pins_[snapshot.get()].*count);
  return SnapshotRef(snapshot.get(), [model = shared_from_this(), held = snapshot,
                                      count](const Snapshot* pinned) mutable {
    held = nullptr;  // A commit that evicts it after Unpin() is to be the last to let go of it.
    model->Unpin(pinned, count);
  });
}

void Model::Unpin(const Snapshot* snapshot, int64_t Pins::*count) {
  absl::MutexLock lock(&mu_);
  const auto it = pins_.find(snapshot);
  --(it->second.*count);
  if (it->second.reader_count + it->second.save_count == 0) pins_.erase(it);
}

bool Model::IsPinned(const Snapshot& version) const {
  absl::MutexLock lock(&mu_);
  return pins_.contains(&version);
}

SnapshotRef Model::NewestAfterDrain() const {
  absl::MutexLock lock(&mu_);
  return current_;
}

std::deque<Version>::const_iterator Model::FindRecordLocked(const VersionId& id) const {
  // By ascending version.
  const auto it =
      std::partition_point(records_.begin(), records_.end(),
                           [&id](const Version& record) { return record.number < id.version; });
  return it != records_.end() && it->id() == id ? it : records_.end();
}

}  // namespace ema
