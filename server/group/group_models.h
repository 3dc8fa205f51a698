// SPDX-License-Identifier: Apache-2.0
//
// The models of the group that this server belongs to.
#ifndef EMA_SERVER_GROUP_GROUP_MODELS_H_
#define EMA_SERVER_GROUP_GROUP_MODELS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/base/steady_wait.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/core/model_config.h"
#include "server/core/model_store.h"
#include "server/group/hosted_partition.h"
#include "server/group/member.h"
#include "server/group/model_record.h"
#include "server/group/peers.h"
#include "server/group/retried_work.h"
#include "server/rpc/model_group.h"

namespace ema::group {

// Creates and deletes the models of the group, together with the other members, and has the
// partitions that are on this server. What it has follows the registry: a partition lives as long
// as the model's record names this process for it. If the record says that a new incarnation begins
// with a checkpoint, the partition is made again and loads its tensors.
//
// Thread-safe. A model whose member has been lost cannot be pushed until that member is back.
class GroupModels final : public ModelGroup {
 public:
  struct Options {
    absl::Duration session_timeout = absl::Seconds(30);    // --session-timeout
    absl::Duration registry_patience = absl::Minutes(10);  // --etcd-patience
    // Of the data directory that all members share; outlives this. Null: there is none.
    CheckpointStore* checkpoints = nullptr;
    LogSink log;
  };
  // `store` and `peers` outlive this.
  GroupModels(ModelStore* store, Peers* peers, Options options)
      : options_(std::move(options)), store_(*store), peers_(*peers) {}

  // Starts the work of this server as `member`, which must live until Stop() returns. Call once.
  // Before it, and after Stop(), CheckHome(), CreateModel(), DeleteModel() and ReservePartition()
  // fail with UNAVAILABLE, GROUP_DEGRADED, and ModelNames() is empty.
  void Start(Member* member) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the exchange of messages with other members; the models remain in the store. Call when no
  // RPC runs any more.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_, change_mu_);

  // Where the partitions of a model are, for its home.
  struct Placement {
    std::vector<Partition> partitions;
    std::vector<std::string> addresses;  // By partition; empty: the process is not in the registry.
    ModelConfig config;                  // Of the whole model.
  };
  // ABORTED, FENCED: this server does not have that incarnation.
  absl::StatusOr<Placement> PlacementOf(const std::string& model, int64_t incarnation) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Replaces the record of a model of that incarnation by what `change` returns, and repeats that
  // if the record was changed meanwhile. Errors of `change`, and NOT_FOUND, MODEL_NOT_FOUND.
  // ABORTED, FENCED: the model has another incarnation. UNAVAILABLE, REGISTRY_AWAY. Blocks.
  absl::Status ChangeRecord(
      const std::string& model, int64_t incarnation,
      absl::FunctionRef<absl::StatusOr<ModelRecord>(const ModelRecord&)> change)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Makes a model of that incarnation return to its checkpoint of version `id`; its runs up to
  // `fenced_run_epoch` may not continue. The incarnation has ended then; AwaitHome() waits for the
  // next one. Errors as ChangeRecord() and Reform(). UNAVAILABLE, GROUP_DEGRADED: a member is not
  // there. After an error nothing has changed. REQUIRES: this is the home.
  absl::Status RollBack(const std::string& model, int64_t incarnation, const VersionId& id,
                        int64_t fenced_run_epoch) ABSL_LOCKS_EXCLUDED(mu_, change_mu_);
  // Before this server stops: makes the homes of its partitions save their newest versions. Errors
  // are in the log. Blocks for at most `timeout`.
  void SaveAtHomes(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

  // --- ModelGroup ---

  absl::Status CheckHome(std::string_view model) const override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckAllServersRun(std::string_view model) const override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckLoaded(std::string_view model) const override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status AwaitHome(const std::string& model) override ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<std::string> ModelNames() const override ABSL_LOCKS_EXCLUDED(mu_);
  void DescribeWhole(bool in_a_list, v1::Model& model) const override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::CreateModelResponse> CreateModel(
      const v1::CreateModelRequest& request) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status DeleteModel(const std::string& model, bool purge) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::ReservePartitionResponse> ReservePartition(
      const v1::ReservePartitionRequest& request) override ABSL_LOCKS_EXCLUDED(mu_, change_mu_);
  void Prepare(const v1::PrepareRequest& request, StateReply reply) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::GroupState> Sync(const v1::SyncRequest& request) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::PublishStateResponse> PublishState(
      const v1::PublishStateRequest& request) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::SavePartResponse> SavePart(const v1::SavePartRequest& request) override
      ABSL_LOCKS_EXCLUDED(mu_);
  void StopHolding() override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // A model of which this server has a partition.
  struct Hosted {
    std::shared_ptr<HostedPartition> partition;
    ModelConfig config;          // Of the whole model.
    int64_t reserved_bytes = 0;  // Of the whole model.
  };

  // UNAVAILABLE: this server has not joined the group.
  absl::StatusOr<Member*> GetMember() const ABSL_LOCKS_EXCLUDED(mu_);
  // Null: there is none here.
  std::shared_ptr<HostedPartition> Find(std::string_view model) const ABSL_LOCKS_EXCLUDED(mu_);
  // NOT_FOUND, MODEL_NOT_FOUND.
  absl::StatusOr<std::shared_ptr<HostedPartition>> FindForMessage(const std::string& model) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // NOT_HOME with the home's address, or GROUP_DEGRADED if the home does not run.
  absl::Status RedirectLocked(std::string_view model,
                              const std::vector<Partition>& partitions) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status CheckRunsLocked(std::string_view model, const std::vector<Partition>& partitions,
                               size_t partition) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // OK: this server does not have to load a partition of the model. UNAVAILABLE, GROUP_DEGRADED: it
  // has to. REQUIRES: `hosted_` has no partition of the model.
  absl::Status CheckNothingToLoadLocked(std::string_view model, const Member& member) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Empty: the process of the partition is not in the registry.
  std::string AddressLocked(const Partition& partition) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void DescribeLocked(const std::vector<Partition>& partitions, int64_t incarnation,
                      v1::Model& model) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  // The answer to CreateModel for a model that exists. Errors also as ModelStore::Create().
  absl::StatusOr<v1::CreateModelResponse> AnswerExisting(const ModelConfig& config,
                                                         const ModelRecord& record)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::CreateModelResponse> CreateNew(Member& member,
                                                    const v1::CreateModelRequest& request,
                                                    const ModelConfig& config)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Makes all members reserve their partitions. The error names the member.
  absl::Status ReserveAll(const Member& member, const v1::CreateModelRequest& request,
                          const ModelRecord& record);
  absl::StatusOr<std::shared_ptr<HostedPartition>> Reserve(
      Member& member, const v1::ReservePartitionRequest& request) ABSL_LOCKS_EXCLUDED(mu_)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);
  // Makes the partition with that index for this process, as `record` has it. `config`: of the
  // whole model, validated.
  absl::StatusOr<std::shared_ptr<HostedPartition>> Host(Member& member, const ModelRecord& record,
                                                        int64_t index, ModelConfig config)
      ABSL_LOCKS_EXCLUDED(mu_) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);
  // Drops the partition of that incarnation, if it is here. `why_deleted` empty: the model has a
  // newer incarnation.
  void Drop(const std::string& model, int64_t incarnation, const std::string& why_deleted)
      ABSL_LOCKS_EXCLUDED(mu_) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);
  // The second part of DeleteModel(), for a record that is DELETING. Errors as DeleteModel().
  absl::Status FinishDeletion(Member& member, const std::string& model, int64_t revision,
                              bool purge);

  // After a change of the registry. Errors: the registry or the disk failed.
  absl::Status Reconcile() ABSL_LOCKS_EXCLUDED(mu_, change_mu_);
  absl::Status FollowRecord(Member& member, const std::string& model, HostedPartition& partition)
      ABSL_LOCKS_EXCLUDED(mu_) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);
  void NoteMissingMembers(const Member& member) ABSL_LOCKS_EXCLUDED(mu_);

  // Loads all partitions that do not have the first version of their incarnation yet. Blocks for as
  // long as reading them takes.
  absl::Status LoadPartitions() ABSL_LOCKS_EXCLUDED(mu_, change_mu_);
  bool MustLoad(const Member& member, const std::string& model, const ModelRecord& record) const
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status LoadPartition(Member& member, const std::string& model, const ModelRecord& record)
      ABSL_LOCKS_EXCLUDED(mu_, change_mu_);

  const Options options_;
  ModelStore& store_;
  Peers& peers_;

  // Serializes changes of hosted_; held while they read the registry.
  absl::Mutex change_mu_ ABSL_ACQUIRED_BEFORE(mu_);
  mutable absl::Mutex mu_;
  Member* member_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::map<std::string, Hosted, std::less<>> hosted_ ABSL_GUARDED_BY(mu_);
  // When a process of the models' records was first missing in the registry: by member and boot.
  std::map<std::pair<std::string, std::string>, absl::Time> missing_since_ ABSL_GUARDED_BY(mu_);
  // By model: why its partition here could not be made the last time.
  std::map<std::string, absl::Status, std::less<>> host_errors_ ABSL_GUARDED_BY(mu_);

  SteadyWait stop_wait_;                   // Woken when `is_stopping_` changes.
  std::atomic<bool> is_stopping_ = false;  // Relaxed: ends a running load a moment later.
  // Their threads use all of the above.
  RetriedWork reconciling_{[this] { return Reconcile(); }};
  RetriedWork loading_{[this] { return LoadPartitions(); }};
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_GROUP_MODELS_H_
