// SPDX-License-Identifier: Apache-2.0
//
// The models of the group that this server belongs to.
#ifndef EMA_SERVER_GROUP_GROUP_MODELS_H_
#define EMA_SERVER_GROUP_GROUP_MODELS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/core/model_config.h"
#include "server/core/model_store.h"
#include "server/group/copy_directory.h"
#include "server/group/copy_maker.h"
#include "server/group/group_overview.h"
#include "server/group/hosted_models.h"
#include "server/group/hosted_partition.h"
#include "server/group/member.h"
#include "server/group/model_lifecycle.h"
#include "server/group/model_record.h"
#include "server/group/part_copies.h"
#include "server/group/peers.h"
#include "server/group/registry_follower.h"
#include "server/group/replacer.h"
#include "server/rpc/group_calls.h"

namespace ema::group {

// Answers the calls about the models of the group: what is on this server, and where the rest is.
// ModelLifecycle creates and deletes models, RegistryFollower makes the partitions on this server
// follow the registry, and HostedModels is the table of these partitions.
//
// Thread-safe. A model whose member has been lost cannot be pushed until that member is back, or
// has been replaced: by RebalanceModel(), or by the Replacer.
class GroupModels final : public GroupCalls {
 public:
  struct Options {
    absl::Duration session_timeout = absl::Seconds(30);      // --session-timeout
    absl::Duration max_registry_outage = absl::Minutes(10);  // --max-registry-outage
    // --replace-after; zero: never. Otherwise `checkpoints` is not null.
    absl::Duration replace_after;
    // Of the data directory that all members share; outlives this. Null: there is none.
    CheckpointStore* checkpoints = nullptr;
    // Of --copy-dir; outlives this. Null: there are no copies. Otherwise `checkpoints` is not null.
    CopyDirectory* copies = nullptr;
    absl::Duration copy_interval = absl::Minutes(1);  // --copy-every
    LogSink log;
  };
  // `store` and `peers` outlive this.
  GroupModels(ModelStore* store, Peers* peers, Options options);

  // Starts the work of this server as `member`, which must live until Stop() returns. Call once.
  // Before it, and after Stop(), CheckHome(), CreateModel(), DeleteModel() and ReservePartition()
  // fail with UNAVAILABLE, GROUP_DEGRADED, and ModelNames() is empty.
  void Start(Member* member);
  // Ends the exchange of messages with other members; the models remain in the store. Call when no
  // RPC runs any more.
  void Stop();

  // Where the partitions of a model are, for its home.
  struct Placement {
    std::vector<Partition> partitions;
    std::vector<std::string> addresses;  // By partition; empty: the process is not in the registry.
    ModelConfig config;                  // The whole model's.
  };
  // ABORTED, FENCED: this server does not have that incarnation.
  absl::StatusOr<Placement> PlacementOf(const std::string& model, int64_t incarnation) const;
  // The configuration of a whole model after the next commit. Errors as PlacementOf(), and
  // NOT_FOUND, MODEL_NOT_FOUND. REQUIRES: this is the home.
  absl::StatusOr<ModelConfig> CurrentConfig(const std::string& model) const;
  // The record of a model, from the cache of the registry if it is there. NOT_FOUND,
  // MODEL_NOT_FOUND. UNAVAILABLE, REGISTRY_UNAVAILABLE.
  absl::StatusOr<ModelRecord> RecordOf(const std::string& model) const;
  // Runs `call` for each partition of `placement` but the home's, with its index and the address of
  // its process. It may only start calls of `peers`, all of which will end. UNAVAILABLE,
  // GROUP_DEGRADED, before the first one: a process is not in the registry, or this server is
  // leaving the group. REQUIRES: this is the home.
  absl::Status StartAtOthers(
      const Placement& placement,
      absl::FunctionRef<void(Peers& peers, size_t partition, const std::string& address)> call)
      const;
  // Replaces the record of a model of that incarnation by what `change` returns, and repeats that
  // if the record was changed meanwhile. Errors of `change`, and NOT_FOUND, MODEL_NOT_FOUND.
  // ABORTED, FENCED: the model has another incarnation. UNAVAILABLE, REGISTRY_UNAVAILABLE. Blocks.
  absl::Status ChangeRecord(
      const std::string& model, int64_t incarnation,
      absl::FunctionRef<absl::StatusOr<ModelRecord>(const ModelRecord&)> change);
  // Makes a model of that incarnation return to its checkpoint of version `id`; its runs up to
  // `fenced_run_epoch` may not continue. The incarnation has ended then, and all members
  // begin to load the checkpoint. Errors as ChangeRecord() and BeginIncarnation(). UNAVAILABLE,
  // GROUP_DEGRADED: a member is not there, and nothing has changed. REQUIRES: this is the home.
  absl::Status RollBack(const std::string& model, int64_t incarnation, const VersionId& id,
                        int64_t fenced_run_epoch);
  // For the metrics and the status page.
  const GroupOverview& overview() const { return overview_; }
  // Before this server stops: makes the homes of its partitions save their newest versions, and
  // accept no pushes from then on. Errors are in the log. Blocks for at most `timeout`. REQUIRES:
  // no push to this server begins any more.
  void SaveAtHomes(absl::Duration timeout);

  // --- GroupCalls ---

  absl::Status CheckHome(std::string_view model) const override;
  absl::Status CheckAllServersRun(std::string_view model) const override;
  absl::Status CheckLoaded(std::string_view model) const override;
  std::vector<std::string> ModelNames() const override;
  void DescribeWhole(bool in_a_list, v1::Model& model) const override;
  void DescribeGroup(GroupReply reply) override;
  absl::StatusOr<v1::CreateModelResponse> CreateModel(
      const v1::CreateModelRequest& request) override;
  absl::StatusOr<Version> ComputeStatistics(Model& home, const VersionId& id,
                                            absl::Span<const std::string> tracks) override;
  absl::Status UpdateTracks(const v1::UpdateModelRequest& request) override
      ABSL_LOCKS_EXCLUDED(update_mu_);
  absl::Status DeleteModel(const std::string& model, bool purge) override;
  absl::StatusOr<v1::RecoverModelResponse> RecoverModel(const std::string& model) override;
  absl::StatusOr<v1::RebalanceModelResponse> RebalanceModel(
      const v1::RebalanceModelRequest& request, absl::FunctionRef<absl::Status()> save) override
      ABSL_LOCKS_EXCLUDED(update_mu_);
  absl::StatusOr<v1::ReservePartitionResponse> ReservePartition(
      const v1::ReservePartitionRequest& request) override;
  absl::StatusOr<v1::ProposeTracksResponse> ProposeTracks(
      const v1::ProposeTracksRequest& request) override;
  void Vote(const v1::VoteRequest& request, StateReply reply) override;
  absl::StatusOr<v1::GroupState> Sync(const v1::SyncRequest& request) override;
  absl::StatusOr<v1::PublishStateResponse> PublishState(
      const v1::PublishStateRequest& request) override;
  absl::StatusOr<v1::GetPartStatisticsResponse> GetPartStatistics(
      const v1::GetPartStatisticsRequest& request) override;
  absl::StatusOr<v1::SynthesizePartResponse> SynthesizePart(
      const v1::SynthesizePartRequest& request) override;
  absl::StatusOr<v1::SavePartResponse> SavePart(const v1::SavePartRequest& request) override;
  absl::StatusOr<v1::WriteCopyResponse> WriteCopy(const v1::WriteCopyRequest& request) override;
  absl::StatusOr<v1::FetchCopyResponse> FetchCopy(const v1::FetchCopyRequest& request) override;
  absl::StatusOr<v1::ReadCopyResponse> ReadCopy(const v1::ReadCopyRequest& request) override;
  absl::StatusOr<v1::DescribeMemberResponse> DescribeMember(
      const v1::DescribeMemberRequest& request) override;
  absl::Status RejectPushesForStop(const v1::SaveNowRequest& request) override;
  void ReleaseHeldCalls() override;

 private:
  // NOT_FOUND, MODEL_NOT_FOUND.
  absl::StatusOr<std::shared_ptr<HostedPartition>> FindForMessage(const std::string& model) const;
  // This server's partition. ABORTED, FENCED: `boot` or `incarnation` is not its own.
  absl::StatusOr<std::shared_ptr<Model>> FindForCall(const std::string& model,
                                                     const std::string& boot,
                                                     int64_t incarnation) const;
  // NOT_HOME with the home's address, or GROUP_DEGRADED if the home does not run.
  absl::Status RedirectError(std::string_view model,
                             const std::vector<Partition>& partitions) const;
  // Whether a step of the model is open or not saved, so that a stop of this server could lose it.
  // REQUIRES: the model has a partition here.
  bool MayLose(const std::string& model) const;
  // UNAVAILABLE, GROUP_DEGRADED: the process of that partition is not in the registry.
  absl::Status CheckRuns(std::string_view model, const std::vector<Partition>& partitions,
                         size_t partition) const;
  // OK: this server does not have to load a partition of the model. UNAVAILABLE, GROUP_DEGRADED: it
  // has to. REQUIRES: it has no partition of the model.
  absl::Status CheckNothingToLoad(std::string_view model, const Member& member) const;
  void Describe(const std::vector<Partition>& partitions, int64_t incarnation,
                v1::Model& model) const;
  // OK: `config` is that of the existing model, whose record is `record`, and this is its home.
  absl::Status CheckIsSame(const ModelConfig& config, const ModelRecord& record) const;
  // Sends a withdrawal to the process at `address` repeatedly, until it has answered, or the
  // incarnation has ended.
  void SendWithdrawal(const std::string& address, const v1::ProposeTracksRequest& withdrawal);
  // The partition of the model that is here, as the answer to CreateModel().
  absl::StatusOr<v1::CreateModelResponse> DescribeCreated(const std::string& model) const;

  const Options options_;
  ModelStore& store_;
  Peers& peers_;
  HostedModels hosted_;
  ModelLifecycle lifecycle_;
  PartCopies copies_;
  RegistryFollower follower_;
  std::optional<Replacer> replacer_;     // Nullopt without Options::replace_after.
  std::optional<CopyMaker> copy_maker_;  // Nullopt without Options::copies.
  const GroupOverview overview_;

  absl::Mutex update_mu_;  // Serializes UpdateTracks() and RebalanceModel().
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_GROUP_MODELS_H_
