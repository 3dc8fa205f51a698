// SPDX-License-Identifier: Apache-2.0
//
// Rolls one model back to an earlier version.
#ifndef EMA_SERVER_CHECKPOINT_MODEL_ROLLBACK_H_
#define EMA_SERVER_CHECKPOINT_MODEL_ROLLBACK_H_

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/model_saver.h"
#include "server/checkpoint/stored_versions.h"
#include "server/core/known_versions.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"

namespace ema {

// Rolls one model back, on request or because a trainer resumes at an earlier step; a rollback that
// is reported as done is on the disk.
//
// Thread-safe; has no state of its own. Calls block on the disk.
class ModelRollback {
 public:
  // `saver` outlives this.
  ModelRollback(const ModelContext& context, ModelSaver& saver)
      : context_(context), versions_(context), saver_(saver) {}

  // Checkpoints::Restore().
  absl::StatusOr<Version> Restore(const VersionId& id, std::string_view label) const;
  // Checkpoints::Resume().
  absl::StatusOr<std::optional<VersionId>> Resume(const Launch& launch,
                                                  const ResumePoint& point) const;

 private:
  // Rolls back to a version in memory or on the disk, and saves that.
  absl::StatusOr<Version> RollBack(const VersionId& id) const;
  absl::StatusOr<SnapshotRef> RollBackToStored(const CheckpointEntry& stored) const;
  // The same for a model on several servers, which return to that version itself; the model is
  // closed then. A version that is in memory only is saved first.
  absl::StatusOr<Version> RollBackPartitions(const VersionId& id) const;
  // Reads a checkpoint to verify it; takes no memory for the weights.
  absl::StatusOr<CheckpointManifest> Verify(const CheckpointEntry& stored) const;
  PauseHook StopHook() const;
  // Saves `newest`, which is `rollback` or a later version. UNAVAILABLE: the rollback is in memory
  // only.
  absl::Status SaveRollback(const Version& rollback, const SnapshotRef& newest) const;
  // The same, if there is a rollback after the newest version on the disk.
  absl::Status SaveRollbackInMemory() const;
  // The version that Resume() must roll back to; nullopt: the model, at `latest`, is there already.
  absl::StatusOr<std::optional<VersionId>> TargetAtVersion(
      const ResumePoint& point, const std::optional<Version>& latest) const;
  absl::StatusOr<std::optional<VersionId>> TargetAtStep(const ResumePoint& point,
                                                        const std::optional<Version>& latest) const;
  // The states of all tracks at a version in memory or on the disk.
  absl::StatusOr<TrackStates> TrackStatesAt(const VersionId& id) const;
  // RESUME_MISMATCH: an update of a track was due between `from` and `point`, which has a time.
  absl::Status CheckNotDue(const ResumePoint& point, const std::optional<TrackStates>& from,
                           const std::string& where) const;
  // RESUME_MISMATCH, listing the known versions.
  absl::Status ResumeMismatchError(const ResumePoint& point, const std::string& why) const;

  const ModelContext context_;
  const StoredVersions versions_;
  ModelSaver& saver_;
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_MODEL_ROLLBACK_H_
