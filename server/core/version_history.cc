// SPDX-License-Identifier: Apache-2.0
#include "server/core/version_history.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/known_versions.h"

namespace ema {

absl::Status VersionHistory::CheckHasVersionLocked() const {
  EMA_RETURN_IF_ERROR(closed_);
  if (newest_ == nullptr) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kNoVersion,
        absl::StrCat("model \"", options_.model_name, "\": nothing has been committed yet"));
  }
  return absl::OkStatus();
}

SnapshotRef VersionHistory::FindLocked(const VersionId& id) const {
  const auto matches = [&](const SnapshotRef& snapshot) {
    return id.Matches(snapshot->record.id());
  };
  if (matches(newest_)) return newest_;
  const auto it = std::find_if(older_.begin(), older_.end(), matches);
  return it != older_.end() ? *it : nullptr;
}

absl::StatusOr<SnapshotRef> VersionHistory::Pin(int64_t version, int64_t incarnation) {
  absl::MutexLock lock(&mu_);
  EMA_ASSIGN_OR_RETURN(const SnapshotRef snapshot, FindToPinLocked(version, incarnation));
  return PinLeavingFreeLocked(/*min_free_pins=*/0, snapshot);
}

absl::StatusOr<SnapshotRef> VersionHistory::PinLeavingOneFree(int64_t version,
                                                              int64_t incarnation) {
  absl::MutexLock lock(&mu_);
  EMA_ASSIGN_OR_RETURN(const SnapshotRef snapshot, FindToPinLocked(version, incarnation));
  return PinLeavingFreeLocked(/*min_free_pins=*/1, snapshot);
}

absl::StatusOr<SnapshotRef> VersionHistory::PinForSave(int64_t version, int64_t incarnation) {
  absl::MutexLock lock(&mu_);
  EMA_ASSIGN_OR_RETURN(const SnapshotRef snapshot, FindToPinLocked(version, incarnation));
  const auto is_saved = [](const auto& pinned) { return pinned.second.save_count > 0; };
  const auto own = pins_.find(snapshot.get());
  const bool has_place = own != pins_.end() && is_saved(*own)
                             ? true
                             : options_.has_data_dir && HasRoomToPinLocked(*snapshot) &&
                                   std::none_of(pins_.begin(), pins_.end(), is_saved);
  if (has_place) return PinLocked(snapshot, &Pins::save_count);
  return PinLeavingFreeLocked(/*min_free_pins=*/0, snapshot);
}

absl::StatusOr<SnapshotRef> VersionHistory::FindToPinLocked(int64_t version,
                                                            int64_t incarnation) const {
  EMA_RETURN_IF_ERROR(CheckHasVersionLocked());
  const Version& latest = newest_->record;
  SnapshotRef snapshot = version == 0 ? newest_ : FindLocked({version, incarnation});
  if (snapshot == nullptr) {
    const bool future = version > latest.number && incarnation >= 0 &&
                        (incarnation == 0 || incarnation == incarnation_);
    return MakeError(absl::StatusCode::kOutOfRange,
                     future ? ErrorReason::kVersionNotYet : ErrorReason::kVersionNotKept,
                     absl::StrCat("model \"", options_.model_name, "\": version ", version,
                                  future ? " is not committed yet" : " is not kept",
                                  "; the newest is ", latest.number));
  }
  return snapshot;
}

absl::StatusOr<SnapshotRef> VersionHistory::PinLeavingFreeLocked(int64_t min_free_pins,
                                                                 const SnapshotRef& snapshot) {
  const int64_t pinned = ReaderPinCountLocked();
  const auto own = pins_.find(snapshot.get());
  const bool is_new = own == pins_.end() || own->second.reader_count == 0;
  // What is pinned can be pinned again, also where a rollback has pinned one too many.
  const int64_t needed = pinned + (is_new ? 1 : 0) + min_free_pins;
  const bool has_place = needed <= options_.max_pinned_versions && HasRoomToPinLocked(*snapshot);
  if ((!is_new && min_free_pins == 0) || has_place) {
    return PinLocked(snapshot, &Pins::reader_count);
  }
  return MakeError(
      absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyPins,
      absl::StrCat("model \"", options_.model_name, "\": readers hold ", pinned, " of the ",
                   options_.max_pinned_versions, " versions that max_pinned_versions allows",
                   min_free_pins > 0 ? ", and one must stay free for other readers" : ""),
      absl::Milliseconds(100));
}

int64_t VersionHistory::ReaderPinCountLocked() const {
  return std::count_if(pins_.begin(), pins_.end(),
                       [](const auto& pinned) { return pinned.second.reader_count > 0; });
}

bool VersionHistory::HasRoomToPinLocked(const Snapshot& version) const {
  return pins_.contains(&version) || static_cast<int64_t>(pins_.size()) < max_older_count();
}

std::vector<VersionId> VersionHistory::TakeVersionsBlockingReaders() {
  if (!has_pin_shortage_.exchange(false, std::memory_order_relaxed)) return {};
  absl::MutexLock lock(&mu_);
  // It may be over by now.
  if (ReaderPinCountLocked() < options_.max_pinned_versions) return {};
  std::vector<VersionId> pinned;
  for (const auto& [version, pins] : pins_) {
    if (pins.reader_count > 0) pinned.push_back(version->record.id());
  }
  std::sort(pinned.begin(), pinned.end());
  return pinned;
}

SnapshotRef VersionHistory::PinLocked(const SnapshotRef& snapshot, int64_t Pins::*count) {
  ++(pins_[snapshot.get()].*count);
  return SnapshotRef(snapshot.get(), [this, owner = options_.keep_alive(), held = snapshot,
                                      count](const Snapshot* pinned) mutable {
    held = nullptr;  // So that a commit which evicts it after Unpin() drops the last reference.
    Unpin(pinned, count);
  });
}

void VersionHistory::Unpin(const Snapshot* snapshot, int64_t Pins::*count) {
  absl::MutexLock lock(&mu_);
  const auto it = pins_.find(snapshot);
  --(it->second.*count);
  if (it->second.reader_count + it->second.save_count == 0) pins_.erase(it);
}

bool VersionHistory::IsPinned(const Snapshot& version) const {
  absl::MutexLock lock(&mu_);
  return pins_.contains(&version);
}

std::vector<int64_t> VersionHistory::PinnedVersions() const {
  absl::MutexLock lock(&mu_);
  std::vector<int64_t> numbers;
  for (const auto& [version, pins] : pins_) numbers.push_back(version->record.number);
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

SnapshotRef VersionHistory::PinRestored(const SnapshotRef& restored) {
  absl::MutexLock lock(&mu_);
  return PinLocked(restored, options_.has_data_dir ? &Pins::save_count : &Pins::reader_count);
}

absl::Status VersionHistory::CheckOpen() const {
  absl::MutexLock lock(&mu_);
  return closed_;
}

SnapshotRef VersionHistory::newest() const {
  absl::MutexLock lock(&mu_);
  return newest_;
}

std::optional<Version> VersionHistory::latest() const {
  absl::MutexLock lock(&mu_);
  if (newest_ == nullptr) return std::nullopt;
  return records_.all().back();
}

std::optional<TrackStates> VersionHistory::NewestStates() const {
  absl::MutexLock lock(&mu_);
  if (newest_ == nullptr) return std::nullopt;
  return TrackStatesOf(*newest_);
}

bool VersionHistory::NewestHasTrack(std::string_view name) const {
  absl::MutexLock lock(&mu_);
  return newest_ != nullptr && newest_->Find(name) != nullptr;
}

absl::StatusOr<std::optional<VersionId>> VersionHistory::FindStep(int64_t step) const {
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(CheckHasVersionLocked());
  const Version& latest = newest_->record;
  if (step > latest.step)
    return StepNotYetError(options_.model_name, step, latest.id(), latest.step);
  BranchWalk walk(latest);
  for (auto record = records_.all().rbegin(); record != records_.all().rend(); ++record) {
    if (!walk.AdvanceIfOnBranch(record->id(), record->step, record->restored_from)) continue;
    if (record->step < step) break;
    if (record->step == step && FindLocked(record->id()) != nullptr) return record->id();
  }
  return std::nullopt;
}

std::vector<VersionHistory::RecordEntry> VersionHistory::RecordsAfter(int64_t version,
                                                                      int64_t incarnation,
                                                                      int64_t limit) const {
  absl::MutexLock lock(&mu_);
  const std::deque<Version>& records = records_.all();
  std::vector<RecordEntry> entries;
  auto it = std::partition_point(records.begin(), records.end(), [&](const Version& r) {
    const int64_t of = incarnation == 0 ? 0 : r.incarnation;
    return std::pair(of, r.number) <= std::pair(incarnation, version);
  });
  for (; it != records.end() && static_cast<int64_t>(entries.size()) < limit; ++it) {
    entries.push_back({*it, FindLocked(it->id()) != nullptr});
  }
  return entries;
}

std::optional<Version> VersionHistory::FindRecord(const VersionId& id) const {
  absl::MutexLock lock(&mu_);
  const Version* const record = records_.Find(id);
  return record != nullptr ? std::optional(*record) : std::nullopt;
}

void VersionHistory::VisitRecords(absl::FunctionRef<bool(const Version&)> visit) const {
  absl::MutexLock lock(&mu_);
  for (auto record = records_.all().rbegin(); record != records_.all().rend(); ++record) {
    if (!visit(*record)) return;
  }
}

void VersionHistory::AddStatistics(const VersionId& id, const TrackStatistics& statistics) {
  absl::MutexLock lock(&mu_);
  records_.AddStatistics(id, statistics);
}

absl::Status VersionHistory::CheckRoomForNext() const {
  absl::MutexLock lock(&mu_);
  const auto pinned = static_cast<int64_t>(pins_.size());
  if (pinned <= max_older_count()) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
      absl::StrCat("model \"", options_.model_name, "\": readers and saves hold ", pinned - 1,
                   " versions besides the one that it was rolled back to; no memory is reserved "
                   "for another version until one is released"),
      absl::Milliseconds(100));
}

SnapshotRef VersionHistory::Publish(const std::shared_ptr<Snapshot>& next, absl::Time commit_time,
                                    const std::vector<int64_t>& home_pinned_versions) {
  absl::MutexLock lock(&mu_);
  next->record.incarnation = incarnation_;
  next->record.commit_time = commit_time;
  return AddLocked(next, home_pinned_versions);
}

SnapshotRef VersionHistory::PublishCopy(SnapshotRef copy) {
  absl::MutexLock lock(&mu_);
  incarnation_ = copy->record.incarnation;
  return AddLocked(std::move(copy), /*home_pinned_versions=*/{});
}

SnapshotRef VersionHistory::AddLocked(SnapshotRef next,
                                      const std::vector<int64_t>& home_pinned_versions) {
  is_freeing_ = true;
  if (newest_ != nullptr) older_.push_back(std::move(newest_));
  newest_ = std::move(next);
  records_.Add(newest_->record);
  if (static_cast<int64_t>(older_.size()) <= max_older_count()) return nullptr;
  const auto is_unpinned = [&](const SnapshotRef& s) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !pins_.contains(s.get());
  };
  auto it = std::find_if(
      older_.begin(), older_.end(), [&](const SnapshotRef& s) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return is_unpinned(s) && !absl::c_linear_search(home_pinned_versions, s->record.number);
      });
  // Exists: at most max_older_count() are pinned (see CheckRoomForNext()).
  if (it == older_.end()) it = std::find_if(older_.begin(), older_.end(), is_unpinned);
  SnapshotRef evicted = std::move(*it);
  older_.erase(it);
  return evicted;
}

void VersionHistory::Free(SnapshotRef evicted) {
  evicted.reset();
  absl::MutexLock lock(&mu_);
  is_freeing_ = false;
}

void VersionHistory::AwaitFreed() const {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &VersionHistory::HasFreedLocked));
}

void VersionHistory::Restore(SnapshotRef snapshot) {
  absl::MutexLock lock(&mu_);
  records_.Add(snapshot->record);
  incarnation_ = std::max(incarnation_, snapshot->record.incarnation + 1);
  newest_ = std::move(snapshot);
}

void VersionHistory::Close(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  closed_ = status;
}

}  // namespace ema
