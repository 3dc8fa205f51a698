// SPDX-License-Identifier: Apache-2.0
//
// The half of ModelService that answers calls about checkpoints and labels.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/model_service.h"

namespace ema {
namespace {

constexpr char kDefaultMetricLabel[] = "best";

absl::StatusOr<VersionId> ReadVersion(int64_t version, int64_t incarnation) {
  if (version >= 0 && incarnation >= 0) return VersionId{version, incarnation};
  return BadRequest(absl::StrCat("version: ", version, " of incarnation ", incarnation,
                                 " given, expected 0 or more of both"));
}

}  // namespace

absl::StatusOr<v1::CreateCheckpointResponse> ModelService::CreateCheckpoint(
    const v1::CreateCheckpointRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, store_->Get(request.model()));
  Checkpoints::SaveRequest wanted{.async = request.async(), .label = request.label()};
  EMA_ASSIGN_OR_RETURN(wanted.id, ReadVersion(request.version(), request.incarnation()));
  wanted.tracks.assign(request.tracks().begin(), request.tracks().end());
  EMA_ASSIGN_OR_RETURN(const Checkpoints::Saved saved, checkpoints_.Save(*model, wanted));
  v1::CreateCheckpointResponse response;
  *response.mutable_version() = ToProto(saved.record);
  response.set_checkpoint(saved.name);
  response.set_total_bytes(saved.total_bytes);
  response.set_state(static_cast<v1::Checkpoint::State>(saved.state));
  return response;
}

absl::StatusOr<v1::GetCheckpointResponse> ModelService::GetCheckpoint(
    const v1::GetCheckpointRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, store_->Get(request.model()));
  EMA_ASSIGN_OR_RETURN(const CheckpointInfo checkpoint,
                       checkpoints_.Get(*model, request.checkpoint()));
  v1::GetCheckpointResponse response;
  *response.mutable_checkpoint() = ToProto(checkpoint);
  return response;
}

absl::StatusOr<v1::ListCheckpointsResponse> ModelService::ListCheckpoints(
    const v1::ListCheckpointsRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, store_->Get(request.model()));
  EMA_ASSIGN_OR_RETURN(const Checkpoints::Listing listing, checkpoints_.List(*model));
  v1::ListCheckpointsResponse response;
  for (const CheckpointInfo& checkpoint : listing.checkpoints) {
    *response.add_checkpoints() = ToProto(checkpoint);
  }
  for (const CheckpointLabel& label : listing.labels) *response.add_labels() = ToProto(label);
  return response;
}

absl::StatusOr<v1::DeleteCheckpointResponse> ModelService::DeleteCheckpoint(
    const v1::DeleteCheckpointRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, store_->Get(request.model()));
  EMA_RETURN_IF_ERROR(checkpoints_.Delete(*model, request.checkpoint()));
  return v1::DeleteCheckpointResponse();
}

absl::StatusOr<v1::RestoreCheckpointResponse> ModelService::RestoreCheckpoint(
    const v1::RestoreCheckpointRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, store_->Get(request.model()));
  EMA_ASSIGN_OR_RETURN(const VersionId id, ReadVersion(request.version(), request.incarnation()));
  EMA_ASSIGN_OR_RETURN(const Version record, checkpoints_.Restore(*model, id, request.label()));
  v1::RestoreCheckpointResponse response;
  *response.mutable_version() = ToProto(record);
  return response;
}

absl::StatusOr<v1::SetLabelResponse> ModelService::SetLabel(const v1::SetLabelRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, store_->Get(request.model()));
  v1::SetLabelResponse response;
  if (request.remove()) {
    EMA_RETURN_IF_ERROR(checkpoints_.RemoveLabel(*model, request.label()));
    return response;
  }
  EMA_ASSIGN_OR_RETURN(const VersionId id, ReadVersion(request.version(), request.incarnation()));
  EMA_ASSIGN_OR_RETURN(const CheckpointLabel label,
                       checkpoints_.SetLabel(*model, request.label(), id));
  *response.mutable_label() = ToProto(label);
  return response;
}

absl::StatusOr<v1::ReportMetricResponse> ModelService::ReportMetric(
    const v1::ReportMetricRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, store_->Get(request.model()));
  CheckpointLabel score{.name = request.label().empty() ? kDefaultMetricLabel : request.label(),
                        .metric = request.value(),
                        .lower_is_better = request.lower_is_better()};
  EMA_ASSIGN_OR_RETURN(score.id, ReadVersion(request.version(), request.incarnation()));
  if (score.id.version == 0) {
    return BadRequest("version: 0 given, expected the version that was evaluated, 1 or more");
  }
  EMA_ASSIGN_OR_RETURN(const Checkpoints::MetricResult result,
                       checkpoints_.ReportMetric(*model, score));
  v1::ReportMetricResponse response;
  *response.mutable_label() = ToProto(result.label);
  response.set_moved(result.moved);
  return response;
}

}  // namespace ema
