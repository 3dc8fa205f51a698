// SPDX-License-Identifier: Apache-2.0
//
// What the group's registry has about the checkpoints of one model.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_RECORDS_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_RECORDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/version.h"
#include "server/checkpoint/partitioned_saves.h"
#include "server/core/model.h"
#include "server/format/checkpoint_name.h"

namespace ema {

// Records the checkpoints of a CheckpointFolder in the registry, and remembers the last one if the
// attempt to record it has failed, so that the registry perhaps does not have it.
//
// Not in a group, calls do nothing and succeed. Calls block on the registry. Not thread-safe: the
// folder calls it under its lock.
class CheckpointRecords {
 public:
  // Starts to remove the checkpoint of that name: CheckpointFolder::StartRemovingLocked().
  using StartRemoving = absl::FunctionRef<absl::StatusOr<bool>(const std::string& name)>;

  // `partitions`: null: this is no group. Outlives this.
  CheckpointRecords(PartitionedSaves* partitions, std::string_view model_name)
      : partitions_(partitions), model_name_(model_name) {}

  bool is_in_group() const { return partitions_ != nullptr; }
  // Whether the registry has the version. Errors as PartitionedSaves::Recorded(). REQUIRES:
  // is_in_group().
  absl::StatusOr<bool> Has(const VersionId& id) const;

  // Records a checkpoint that has its final name; `was_recorded`: an earlier call has done that
  // already, and only `keep` is new. Errors as PartitionedSaves::Commit(). If no later call can
  // record it, it is removed at once.
  absl::Status Record(Model& home, const Version& record, int64_t total_bytes, bool keep,
                      bool was_recorded, StartRemoving remove);
  // Starts to remove the checkpoint whose last Record() failed, if it is not `saved`, so that saves
  // do not fill the disk while the registry is unavailable.
  absl::Status RemoveUnrecorded(const std::optional<CheckpointId>& saved, StartRemoving remove);
  // The files of that checkpoint have been set aside.
  void ForgetUnrecorded() { unrecorded_.reset(); }

  // Before the files of a checkpoint are removed. Errors as PartitionedSaves::Remove().
  absl::Status Erase(Model* home, const VersionId& id);

 private:
  PartitionedSaves* const partitions_;
  const std::string model_name_;
  // Its folder has the final name, but the registry may not have it.
  std::optional<CheckpointId> unrecorded_;
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_RECORDS_H_
