// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_records.h"

#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/format/manifest_json.h"

namespace ema {

absl::StatusOr<bool> CheckpointRecords::Has(const VersionId& id) const {
  EMA_ASSIGN_OR_RETURN(const RecordedCheckpoints recorded, partitions_->Recorded(model_name_));
  return recorded.Has(id);
}

absl::Status CheckpointRecords::Record(Model& home, const Version& record, int64_t total_bytes,
                                       bool keep, bool was_recorded, StartRemoving remove) {
  if (!is_in_group()) return absl::OkStatus();
  absl::Status status = partitions_->Commit(home, record, total_bytes, keep);
  const CheckpointId id = IdOf(record);
  if (status.ok()) {
    if (unrecorded_ == id) unrecorded_.reset();
    return status;
  }
  if (was_recorded) return status;
  unrecorded_ = id;
  // Its incarnation has ended, or the model was deleted: no later call records it. If an earlier
  // Commit() has reached the registry without an answer, the new incarnation may load it: then
  // PartitionedSaves::Remove() keeps the files.
  if (absl::IsAborted(status) || absl::IsNotFound(status)) {
    RemoveUnrecorded(std::nullopt, remove).IgnoreError();
  }
  return status;
}

absl::Status CheckpointRecords::RemoveUnrecorded(const std::optional<CheckpointId>& saved,
                                                 StartRemoving remove) {
  if (!unrecorded_.has_value() || unrecorded_ == saved) return absl::OkStatus();
  absl::Status status = remove(CheckpointName(*unrecorded_)).status();
  // In use: the registry has it after all.
  if (!status.ok() && GetErrorReason(status) != ErrorReason::kCheckpointInUse) return status;
  unrecorded_.reset();  // If it is held, retention removes it later.
  return absl::OkStatus();
}

absl::Status CheckpointRecords::Erase(Model* home, const VersionId& id) {
  return is_in_group() ? partitions_->Remove(*home, id) : absl::OkStatus();
}

}  // namespace ema
