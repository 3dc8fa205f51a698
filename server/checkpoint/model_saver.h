// SPDX-License-Identifier: Apache-2.0
//
// Saves versions of one model.
#ifndef EMA_SERVER_CHECKPOINT_MODEL_SAVER_H_
#define EMA_SERVER_CHECKPOINT_MODEL_SAVER_H_

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/checkpoint/checkpoint_folder.h"
#include "server/checkpoint/stored_versions.h"
#include "server/core/checkpoints.h"
#include "server/core/snapshot.h"

namespace ema {

// Saves versions of one model, at once or through the SaveQueue, and has a record of each
// checkpoint that is being saved, is queued, or has failed and not been saved since.
//
// Thread-safe. Saves block on the disk.
class ModelSaver : public std::enable_shared_from_this<ModelSaver> {
 public:
  using Saved = Checkpoints::Saved;
  using SaveOptions = CheckpointFolder::SaveOptions;

  // The log event of a failed save, of which the observer has been informed.
  static constexpr std::string_view kSaveFailed = "checkpoint failed";

  explicit ModelSaver(const ModelContext& context) : context_(context), versions_(context) {}

  // Checkpoints::Save().
  absl::StatusOr<Saved> Save(const Checkpoints::SaveRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  // Saves `snapshot`, records how that ends, and logs a failure unless the last save has failed
  // with the same error.
  absl::StatusOr<Saved> SaveSnapshot(const SnapshotRef& snapshot, const SaveOptions& options)
      ABSL_LOCKS_EXCLUDED(mu_);
  // SaveSnapshot(), but the caller logs a failure.
  absl::StatusOr<Saved> TrySave(const SnapshotRef& snapshot, const SaveOptions& options)
      ABSL_LOCKS_EXCLUDED(mu_);
  // `snapshot` is null if no version could be pinned. `more`: fields that precede the error.
  void LogFailure(const SnapshotRef& snapshot, const std::vector<std::string>& tracks,
                  const absl::Status& status, const std::vector<LogField>& more) const;
  // CheckpointFolder::PutLabel(), with a line in the log.
  absl::Status PutLabel(const CheckpointLabel& label) const;

  // Checkpoints::List(): what is on the disk, with the records of saves; all, or those of that
  // name.
  absl::StatusOr<CheckpointList> List(std::optional<std::string_view> name) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Checkpoints::Get().
  absl::StatusOr<CheckpointInfo> Get(std::string_view name) const ABSL_LOCKS_EXCLUDED(mu_);
  size_t failed_count() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // A checkpoint that is being saved or is queued.
  struct Saving {
    CheckpointInfo info;
    int count = 0;  // Calls and queued saves that are saving it.
    bool is_queued = false;
    std::vector<std::string> labels;  // Labels that a queued save still has to set.
  };

  // The error of Save() for a version that is neither in memory nor on the disk with all tracks;
  // `status` is that of pinning it.
  absl::Status NotPinnedError(const VersionId& id, const absl::Status& status) const;
  // Save() of a version that is not in memory any more.
  absl::StatusOr<Saved> FindSaved(const Checkpoints::SaveRequest& request,
                                  const absl::Status& not_pinned) const;
  absl::StatusOr<Saved> Enqueue(const SnapshotRef& snapshot,
                                const Checkpoints::SaveRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  // RESOURCE_EXHAUSTED, TOO_MANY_PINS: if this version were queued, too, all pins would be used for
  // saves, and none for readers. A version that waits for the scheduler is not counted.
  absl::Status CheckMayWaitLocked(const VersionId& id) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Makes a queued save and puts its labels.
  void SaveQueued(const std::string& name, SnapshotRef snapshot,
                  const std::vector<std::string>& tracks) ABSL_LOCKS_EXCLUDED(mu_);
  // Records `status`, the result of a save that a client requested. True: log it, because it is an
  // error of another kind than that of the last such save, or the server is stopping.
  bool IsNewFailure(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void NoteEndLocked(const std::string& name, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LogLabel(std::string_view label, int64_t version, int64_t step) const;

  const ModelContext context_;
  const StoredVersions versions_;

  mutable absl::Mutex mu_;  // Never held across a call that may block.
  std::map<std::string, Saving> saving_ ABSL_GUARDED_BY(mu_);  // By name.
  std::deque<CheckpointInfo> failed_ ABSL_GUARDED_BY(mu_);     // Oldest first.
  absl::Status last_requested_error_
      ABSL_GUARDED_BY(mu_);  // The last save that a client requested.
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_MODEL_SAVER_H_
