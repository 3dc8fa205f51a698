// SPDX-License-Identifier: Apache-2.0
//
// The interface to the group that this server belongs to, called by the RPC layer and implemented
// by the group layer.
#ifndef EMA_SERVER_RPC_GROUP_CALLS_H_
#define EMA_SERVER_RPC_GROUP_CALLS_H_

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/v1/ema_service.pb.h"
#include "ema/v1/group.pb.h"
#include "ema/version.h"
#include "ema/version_id.h"
#include "server/core/model.h"

namespace ema {

// What calls need to know and to do in a group of servers. Each server has at most one partition of
// a model, which is a model of the same name in its ModelStore. The server of partition 0, the
// home, answers all calls that concern the whole model. Thread-safe.
class GroupCalls {
 public:
  virtual ~GroupCalls() = default;

  // --- For calls about models; they do not block unless their comments say so ---

  // OK: this server is the model's home. NOT_FOUND, MODEL_NOT_FOUND. FAILED_PRECONDITION, NOT_HOME,
  // with the home's address. UNAVAILABLE: GROUP_DEGRADED, the home does not run, or this server has
  // not joined its group; MODEL_BUSY, the model is being created.
  virtual absl::Status CheckHome(std::string_view model) const = 0;
  // OK: the servers of all partitions run. UNAVAILABLE, GROUP_DEGRADED: the message names a missing
  // member and says since when. REQUIRES: CheckHome() is OK.
  virtual absl::Status CheckAllServersRun(std::string_view model) const = 0;
  // OK: this server has its partition of the model in memory, or there is no such model.
  // UNAVAILABLE, GROUP_DEGRADED: the partition is being loaded, or this server has not joined its
  // group. ABORTED, FENCED: the model is on other servers.
  virtual absl::Status CheckLoaded(std::string_view model) const = 0;
  // All models of the group, sorted by name.
  virtual std::vector<std::string> ModelNames() const = 0;
  // Adds partitions and incarnation to a model's description. If this server has a partition of the
  // model, it also replaces the manifest, its digest and the reserved bytes with those of the whole
  // model; an entry of a list gets no manifest.
  virtual void DescribeWhole(bool in_a_list, v1::Model& model) const = 0;
  // Handles CreateModel of ema_service.proto, on any server. Blocks until all partitions are
  // reserved. FAILED_PRECONDITION, NOT_HOME, with the home's address: the model exists now, perhaps
  // created by this call; its home returns it when the call is repeated there.
  virtual absl::StatusOr<v1::CreateModelResponse> CreateModel(
      const v1::CreateModelRequest& request) = 0;
  // As ComputeStatistics() of the server/core folder, for the whole model of which `home` is
  // partition 0. Errors also as the calls of the other servers. Blocks on them.
  virtual absl::StatusOr<Version> ComputeStatistics(Model& home, const VersionId& id,
                                                    absl::Span<const std::string> tracks) = 0;
  // Changes the tracks of a whole model, as Model::UpdateTracks() does on one server, in all
  // partitions or in none. Errors also as CheckAllServersRun(). Blocks on the other servers.
  // REQUIRES: CheckHome() is OK.
  virtual absl::Status UpdateTracks(const v1::UpdateModelRequest& request) = 0;
  // Deletes the model on all servers and sets its checkpoints aside, or removes them if `purge`.
  // Can be called on any of the servers. OK if there is no such model. Blocks on the registry and
  // the disk.
  virtual absl::Status DeleteModel(const std::string& model, bool purge) = 0;

  // Handles RecoverModel of ema_service.proto, on any server. Blocks on the registry and the disk.
  virtual absl::StatusOr<v1::RecoverModelResponse> RecoverModel(const std::string& model) = 0;
  // Handles RebalanceModel of ema_service.proto, on any server. `save` makes the newest version of
  // the model durable, if this is its home. Blocks on the registry, the disk and the save.
  virtual absl::StatusOr<v1::RebalanceModelResponse> RebalanceModel(
      const v1::RebalanceModelRequest& request, absl::FunctionRef<absl::Status()> save) = 0;
  // Describes the group for GetGroup of ema_service.proto, with all models. Calls `reply` once,
  // from any thread, after at most about a second. UNAVAILABLE, GROUP_DEGRADED: this server has not
  // joined its group.
  using GroupReply = std::function<void(absl::StatusOr<v1::GetGroupResponse>)>;
  virtual void DescribeGroup(GroupReply reply) = 0;

  // --- Calls of GroupService ---

  // Blocks.
  virtual absl::StatusOr<v1::ReservePartitionResponse> ReservePartition(
      const v1::ReservePartitionRequest& request) = 0;
  // May make the tables of very many tensors.
  virtual absl::StatusOr<v1::ProposeTracksResponse> ProposeTracks(
      const v1::ProposeTracksRequest& request) = 0;
  // Called once, from any thread, perhaps inside Vote().
  using StateReply = std::function<void(const absl::StatusOr<v1::GroupState>&)>;
  virtual void Vote(const v1::VoteRequest& request, StateReply reply) = 0;
  virtual absl::StatusOr<v1::GroupState> Sync(const v1::SyncRequest& request) = 0;
  virtual absl::StatusOr<v1::PublishStateResponse> PublishState(
      const v1::PublishStateRequest& request) = 0;
  // Blocks for as long as it takes to read the tracks of the partition.
  virtual absl::StatusOr<v1::GetPartStatisticsResponse> GetPartStatistics(
      const v1::GetPartStatisticsRequest& request) = 0;
  // Blocks for as long as it takes to read the checkpoints.
  virtual absl::StatusOr<v1::SynthesizePartResponse> SynthesizePart(
      const v1::SynthesizePartRequest& request) = 0;
  // Blocks for as long as it takes to write the partition.
  virtual absl::StatusOr<v1::SavePartResponse> SavePart(const v1::SavePartRequest& request) = 0;
  // Blocks for as long as it takes to write the partition.
  virtual absl::StatusOr<v1::WriteCopyResponse> WriteCopy(const v1::WriteCopyRequest& request) = 0;
  // Blocks on another server, which sends a partition.
  virtual absl::StatusOr<v1::FetchCopyResponse> FetchCopy(const v1::FetchCopyRequest& request) = 0;
  // Waits for the disk.
  virtual absl::StatusOr<v1::ReadCopyResponse> ReadCopy(const v1::ReadCopyRequest& request) = 0;
  // The first part of SaveNow(): ends the open round of the model, and permits no pushes until the
  // sender has left, or for 20 minutes. Blocks until everything that has been committed is
  // published here. NOT_FOUND, MODEL_NOT_FOUND. ABORTED, FENCED.
  virtual absl::Status RejectPushesForStop(const v1::SaveNowRequest& request) = 0;
  virtual absl::StatusOr<v1::DescribeMemberResponse> DescribeMember(
      const v1::DescribeMemberRequest& request) = 0;
  // Ends the open rounds of the models whose home this is, and begins no others.
  // Answers all held Vote() calls before it returns, and later ones at once; everything that has
  // been committed is then published here. May be repeated.
  virtual void ReleaseHeldCalls() = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_GROUP_CALLS_H_
