// SPDX-License-Identifier: Apache-2.0
//
// The versions of a model in memory, their pins, and the records of past versions.
#ifndef EMA_SERVER_CORE_VERSION_HISTORY_H_
#define EMA_SERVER_CORE_VERSION_HISTORY_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ema/version.h"
#include "ema/version_id.h"
#include "server/core/snapshot.h"
#include "server/core/version_records.h"

namespace ema {

// Invariant: keeps the newest version and at most max_older_count() older ones, all pinned versions
// among them. A rollback may pin its version in excess of that; then no other version is built.
//
// Thread-safe, and never waits for a commit: its lock is not held while memory is freed. The model
// changes it under its own lock, so reads under the model's lock are consistent.
class VersionHistory {
 public:
  struct Options {
    std::string model_name;
    int64_t incarnation = 1;  // The model's; in every record.
    int64_t max_pinned_versions = 0;
    bool has_data_dir = false;
    KeepAlive keep_alive;  // Every pin keeps this owner alive.
  };
  explicit VersionHistory(Options options)
      : options_(std::move(options)), incarnation_(options_.incarnation) {}

  // Versions whose memory is reserved: the newest, the one that is being built, and older ones.
  int64_t version_count() const { return 2 + max_older_count(); }
  // The same for a model without a data directory.
  static int64_t VersionCount(int64_t max_pinned_versions) { return 2 + max_pinned_versions; }

  // --- Pins ---

  // Keeps a version alive for a reader until the result is dropped: O(1), no copy. `version` 0: the
  // newest; `incarnation` 0: any. FAILED_PRECONDITION, NO_VERSION. OUT_OF_RANGE: VERSION_NOT_KEPT,
  // VERSION_NOT_YET. RESOURCE_EXHAUSTED, TOO_MANY_PINS: readers hold max_pinned_versions others. Or
  // the status given to Close().
  absl::StatusOr<SnapshotRef> Pin(int64_t version, int64_t incarnation = 0)
      ABSL_LOCKS_EXCLUDED(mu_);
  // As Pin(), for a caller who may hold the version for long: fails unless one more pin remains
  // available after this one. REQUIRES: `version` is not 0.
  absl::StatusOr<SnapshotRef> PinLeavingOneFree(int64_t version, int64_t incarnation)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Like Pin(), for a save to the data directory: one version that is being saved may be pinned in
  // addition to those of readers.
  absl::StatusOr<SnapshotRef> PinForSave(int64_t version, int64_t incarnation = 0)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Pins the version that a rollback has just published, even beyond the limits: like PinForSave(),
  // or without a data directory like Pin().
  SnapshotRef PinRestored(const SnapshotRef& restored) ABSL_LOCKS_EXCLUDED(mu_);
  bool IsPinned(const Snapshot& version) const ABSL_LOCKS_EXCLUDED(mu_);
  // The numbers of the versions that readers and saves have pinned, ascending.
  std::vector<int64_t> PinnedVersions() const ABSL_LOCKS_EXCLUDED(mu_);

  // Records that a reader got TOO_MANY_PINS.
  void NotePinShortage() { has_pin_shortage_.store(true, std::memory_order_relaxed); }
  // The versions that readers pin, oldest first, if a shortage has been noted since the last call
  // and still lasts; else none.
  std::vector<VersionId> TakeVersionsBlockingReaders() ABSL_LOCKS_EXCLUDED(mu_);

  // --- Queries ---

  // OK, or the status given to Close().
  absl::Status CheckOpen() const ABSL_LOCKS_EXCLUDED(mu_);
  // The newest version, as a reference that does not pin it; null: there is none. REQUIRES: no
  // commit can happen while the result is held, as it might reuse the version's memory: the caller
  // holds the model's lock, or has drained the model.
  SnapshotRef newest() const ABSL_LOCKS_EXCLUDED(mu_);
  // The record of the newest version, with its statistics.
  std::optional<Version> latest() const ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<TrackStates> NewestStates() const ABSL_LOCKS_EXCLUDED(mu_);
  bool NewestHasTrack(std::string_view name) const ABSL_LOCKS_EXCLUDED(mu_);
  // The newest version of `step` that can be pinned, among those on the branch that the model is on
  // (see BranchWalk); nullopt: none is in memory. FAILED_PRECONDITION, NO_VERSION. OUT_OF_RANGE,
  // VERSION_NOT_YET. Or the status given to Close().
  absl::StatusOr<std::optional<VersionId>> FindStep(int64_t step) const ABSL_LOCKS_EXCLUDED(mu_);

  struct RecordEntry {
    Version record;
    bool available = false;
  };
  // The records after (`incarnation`, `version`) that are remembered, oldest first, at most
  // `limit`. `incarnation` 0: of any.
  std::vector<RecordEntry> RecordsAfter(int64_t version, int64_t incarnation, int64_t limit) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // nullopt: it was not committed or loaded since the server's start, or too long ago.
  std::optional<Version> FindRecord(const VersionId& id) const ABSL_LOCKS_EXCLUDED(mu_);
  // Calls `visit` with the records, newest first, until it returns false. It is called with the
  // lock held.
  void VisitRecords(absl::FunctionRef<bool(const Version&)> visit) const ABSL_LOCKS_EXCLUDED(mu_);
  void AddStatistics(const VersionId& id, const TrackStatistics& statistics)
      ABSL_LOCKS_EXCLUDED(mu_);

  // --- Changes, by the model under its lock ---

  // UNAVAILABLE, MODEL_BUSY: the pinned versions leave no memory for another one.
  absl::Status CheckRoomForNext() const ABSL_LOCKS_EXCLUDED(mu_);
  // Makes `next` the newest version, and completes its record. Returns the evicted version, which
  // may be null, for Free(): the oldest one that is not pinned, but one of `home_pinned_versions`
  // only if there is no other.
  [[nodiscard]] SnapshotRef Publish(const std::shared_ptr<Snapshot>& next, absl::Time commit_time,
                                    const std::vector<int64_t>& home_pinned_versions)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The same for a copy of a version of another server, whose record stays as it is. The record's
  // incarnation becomes the current one. REQUIRES: its number is above the newest version's.
  [[nodiscard]] SnapshotRef PublishCopy(SnapshotRef copy) ABSL_LOCKS_EXCLUDED(mu_);
  // Frees the result of Publish() or PublishCopy(). To be called without a lock that readers take.
  void Free(SnapshotRef evicted) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until the evicted version has been freed: the next version is built in its memory.
  void AwaitFreed() const ABSL_LOCKS_EXCLUDED(mu_);
  // Makes a version from a checkpoint the newest one. The incarnation continues above the record's.
  // REQUIRES: there is no version.
  void Restore(SnapshotRef snapshot) ABSL_LOCKS_EXCLUDED(mu_);
  // Readers get `status` from here on. Versions that are pinned stay until they are released.
  void Close(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // How many references readers and saves hold to a pinned version.
  struct Pins {
    int64_t reader_count = 0;
    int64_t save_count = 0;
  };

  // The versions that readers may pin, and one that is being saved.
  int64_t max_older_count() const {
    return options_.max_pinned_versions + (options_.has_data_dir ? 1 : 0);
  }
  // Makes `next` the newest version. Returns the evicted one, as Publish().
  [[nodiscard]] SnapshotRef AddLocked(SnapshotRef next,
                                      const std::vector<int64_t>& home_pinned_versions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckHasVersionLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  SnapshotRef FindLocked(const VersionId& id) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // The version to pin. Errors as Pin(), but for TOO_MANY_PINS.
  absl::StatusOr<SnapshotRef> FindToPinLocked(int64_t version, int64_t incarnation) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Pins it for a reader, if `min_free_pins` others could still be pinned then; else TOO_MANY_PINS.
  absl::StatusOr<SnapshotRef> PinLeavingFreeLocked(int64_t min_free_pins,
                                                   const SnapshotRef& snapshot)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t ReaderPinCountLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Whether `version` is pinned already, or there is memory to pin one more.
  bool HasRoomToPinLocked(const Snapshot& version) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Pins a version until the last copy of the result is dropped; `count`: for a reader or a save.
  SnapshotRef PinLocked(const SnapshotRef& snapshot, int64_t Pins::*count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Unpin(const Snapshot* snapshot, int64_t Pins::*count) ABSL_LOCKS_EXCLUDED(mu_);
  bool HasFreedLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !is_freeing_; }

  const Options options_;
  std::atomic<bool> has_pin_shortage_ = false;  // Relaxed: it is polled.

  mutable absl::Mutex mu_;
  int64_t incarnation_ ABSL_GUARDED_BY(mu_);
  SnapshotRef newest_ ABSL_GUARDED_BY(mu_);
  std::deque<SnapshotRef> older_ ABSL_GUARDED_BY(mu_);  // Oldest first.
  absl::flat_hash_map<const Snapshot*, Pins> pins_ ABSL_GUARDED_BY(mu_);
  VersionRecords records_ ABSL_GUARDED_BY(mu_);
  bool is_freeing_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status closed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_VERSION_HISTORY_H_
