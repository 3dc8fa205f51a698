// SPDX-License-Identifier: Apache-2.0
//
// The models of the group that this server belongs to.
#ifndef EMA_SERVER_GROUP_GROUP_MODELS_H_
#define EMA_SERVER_GROUP_GROUP_MODELS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/core/model_config.h"
#include "server/core/model_store.h"
#include "server/group/hosted_partition.h"
#include "server/group/member.h"
#include "server/group/model_record.h"
#include "server/group/peers.h"
#include "server/rpc/model_group.h"

namespace ema::group {

// Creates and deletes the models of the group, together with the other members, and has the
// partitions that are on this server. What it has follows the registry: a partition lives as long
// as the model's record names this process for it.
//
// Thread-safe. A model whose member has been lost cannot be pushed any more; it can be deleted and
// created again.
class GroupModels final : public ModelGroup {
 public:
  struct Options {
    absl::Duration session_timeout = absl::Seconds(30);    // --session-timeout
    absl::Duration registry_patience = absl::Minutes(10);  // --etcd-patience
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

  // --- ModelGroup ---

  absl::Status CheckHome(std::string_view model) const override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckComplete(std::string_view model) const override ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<std::string> ModelNames() const override ABSL_LOCKS_EXCLUDED(mu_);
  void Complete(bool in_a_list, v1::Model& model) const override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::CreateModelResponse> CreateModel(
      const v1::CreateModelRequest& request) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status DeleteModel(const std::string& model) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::ReservePartitionResponse> ReservePartition(
      const v1::ReservePartitionRequest& request) override ABSL_LOCKS_EXCLUDED(mu_, change_mu_);
  void Prepare(const v1::PrepareRequest& request, StateReply reply) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::GroupState> Sync(const v1::SyncRequest& request) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::PublishStateResponse> PublishState(
      const v1::PublishStateRequest& request) override ABSL_LOCKS_EXCLUDED(mu_);
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
  // Drops the partition of that incarnation, if it is here.
  void Drop(const std::string& model, int64_t incarnation, const std::string& why)
      ABSL_LOCKS_EXCLUDED(mu_) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);

  // After a change of the registry; on a thread that may block.
  void Reconcile() ABSL_LOCKS_EXCLUDED(mu_, change_mu_);
  void NoteMissingMembers(const Member& member) ABSL_LOCKS_EXCLUDED(mu_);

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
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_GROUP_MODELS_H_
