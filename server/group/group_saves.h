// SPDX-License-Identifier: Apache-2.0
//
// The home's side of the checkpoints of models on several servers.
#ifndef EMA_SERVER_GROUP_GROUP_SAVES_H_
#define EMA_SERVER_GROUP_GROUP_SAVES_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/partitioned_saves.h"
#include "server/group/group_models.h"

namespace ema::group {

// Makes all partitions of a model write their files, and records its checkpoints in the registry.
// Thread-safe. Calls block.
class GroupSaves final : public PartitionedSaves {
 public:
  // Before Start() and after Stop(), calls fail with UNAVAILABLE, GROUP_DEGRADED. The arguments
  // outlive this.
  void Start(GroupModels* models, CheckpointStore* checkpoints) ABSL_LOCKS_EXCLUDED(mu_);
  // Later calls fail. Running calls may continue until Peers::Stop(), so call that next.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  // --- PartitionedSaves ---

  absl::StatusOr<CheckpointManifest> Write(const std::string& path, Model& home,
                                           const Snapshot& snapshot,
                                           const WriteOptions& given) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Commit(Model& home, const Version& record, int64_t total_bytes, bool keep) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<RecordedCheckpoints> Recorded(const std::string& model) const override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Remove(Model& home, const VersionId& id) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<std::shared_ptr<const Manifest>> WholeManifest(const Model& home) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Synthesize(Model& home, const SynthesisOrder& order) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status RollBack(Model& home, const VersionId& id) override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  absl::StatusOr<GroupModels*> GetModels() const ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<DataDirectory*> GetData() const ABSL_LOCKS_EXCLUDED(mu_);

  mutable absl::Mutex mu_;
  // Null unless it has been started and not stopped.
  GroupModels* models_ ABSL_GUARDED_BY(mu_) = nullptr;
  CheckpointStore* checkpoints_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_GROUP_SAVES_H_
