// SPDX-License-Identifier: Apache-2.0
//
// The unary calls about models: their runs, versions, checkpoints and labels.
#ifndef EMA_SERVER_RPC_MODEL_SERVICE_H_
#define EMA_SERVER_RPC_MODEL_SERVICE_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "server/base/log_event.h"
#include "server/core/checkpoints.h"
#include "server/rpc/group_calls.h"
#include "server/rpc/rpc_context.h"

namespace ema {

// Answers every unary call about models. Thread-safe from Listen() on.
class ModelService {
 public:
  // `checkpoints` and `group` outlive this. Null `group`: the server is not in one. `log` gets an
  // event for each model created, changed or deleted.
  ModelService(std::shared_ptr<ModelStore> store, Checkpoints* checkpoints, GroupCalls* group,
               LogSink log)
      : store_(std::move(store)), checkpoints_(*checkpoints), group_(group), log_(std::move(log)) {}

  // Sets the answer of GetLane(). REQUIRES: before Listen().
  void OfferLane(const std::string& socket_name);

  // Each runs one kind of call on a thread of its own.
  struct Workers {
    // Calls that make tables of very many tensors and tracks.
    Worker* creating;
    // Calls that read the disk, but wait for no save.
    Worker* disk;
    // Calls that save, or wait for a save. While they are queued, the version that they name stays
    // pinned, if readers can still pin another.
    Worker* saving;
    // In a group, calls that make or change models, and wait for other servers.
    Worker* changing;
    // In a group, calls that move a model to other servers, for minutes.
    Worker* moving;
    // Calls that make an earlier version the newest, for minutes.
    Worker* restoring;
    // Calls that compute over whole versions, for minutes.
    Worker* computing;
  };
  // Waits for the next call of each method on `queue`. This outlives the queue.
  void Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue, const Workers& workers);

 private:
  // The model that a call concerns as a whole. Errors as ModelStore::Get(), and in a group as
  // GroupCalls::CheckHome().
  absl::StatusOr<std::shared_ptr<Model>> FindModel(const std::string& name) const;
  // The model, or in a group this server's partition of it. Errors as ModelStore::Get(), and
  // GroupCalls::CheckLoaded().
  absl::StatusOr<std::shared_ptr<Model>> FindPartition(const std::string& name) const;
  v1::Model Describe(const Model& model, bool in_a_list) const;
  absl::StatusOr<v1::CreateModelResponse> CreateModel(const v1::CreateModelRequest& request);
  absl::StatusOr<v1::Model> GetModel(const v1::GetModelRequest& request);
  // Lists the models that the token of the call covers.
  v1::ListModelsResponse ListModels(const Access& access);
  absl::StatusOr<v1::Model> UpdateModel(const v1::UpdateModelRequest& request);
  absl::StatusOr<v1::Empty> DeleteModel(const v1::DeleteModelRequest& request);
  absl::StatusOr<v1::RecoverModelResponse> RecoverModel(const v1::RecoverModelRequest& request);
  absl::StatusOr<v1::RebalanceModelResponse> RebalanceModel(
      const v1::RebalanceModelRequest& request);
  absl::StatusOr<v1::Empty> AttachFile(const v1::AttachFileRequest& request);
  absl::StatusOr<v1::GetAttachedFileResponse> GetAttachedFile(
      const v1::GetAttachedFileRequest& request);
  absl::StatusOr<v1::OpenRunResponse> OpenRun(const v1::OpenRunRequest& request);
  absl::StatusOr<v1::QueryPushResponse> QueryPush(const v1::QueryPushRequest& request);
  absl::StatusOr<v1::GetLaneResponse> GetLane(const v1::GetLaneRequest&) { return lane_; }
  absl::StatusOr<v1::ListVersionsResponse> ListVersions(const v1::ListVersionsRequest& request);
  absl::StatusOr<v1::VersionRecord> GetStatistics(const v1::GetStatisticsRequest& request);
  absl::StatusOr<v1::CreateCheckpointResponse> CreateCheckpoint(
      const v1::CreateCheckpointRequest& request);
  absl::StatusOr<v1::Checkpoint> GetCheckpoint(const v1::GetCheckpointRequest& request);
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(
      const v1::ListCheckpointsRequest& request);
  absl::StatusOr<v1::Empty> DeleteCheckpoint(const v1::DeleteCheckpointRequest& request);
  absl::StatusOr<v1::VersionRecord> RestoreCheckpoint(const v1::RestoreCheckpointRequest& request);
  absl::StatusOr<v1::Label> SetLabel(const v1::SetLabelRequest& request);
  absl::StatusOr<v1::ReportMetricResponse> ReportMetric(const v1::ReportMetricRequest& request);
  absl::StatusOr<v1::SynthesizeResponse> Synthesize(const v1::SynthesizeRequest& request);

  const std::shared_ptr<ModelStore> store_;
  Checkpoints& checkpoints_;
  GroupCalls* const group_;
  const LogSink log_;
  v1::GetLaneResponse lane_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_MODEL_SERVICE_H_
