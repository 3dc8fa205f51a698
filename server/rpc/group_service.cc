// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/group_service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "ema/internal/status_macros.h"
#include "server/rpc/unary_call.h"

namespace ema {

void ListenToGroup(RpcContext* rpc, grpc::ServerCompletionQueue* queue,
                   const GroupWorkers& workers) {
  using Service = v1::GroupService::AsyncService;
  Service* const service = &rpc->group_service;
  GroupCalls* const group = rpc->group;
  const auto on = [](Worker* worker) {
    return [worker](const auto&) { return WorkerChoice{.worker = worker, .held = nullptr}; };
  };
  ListenUnary(
      rpc, queue, service, "/ema.v1.GroupService/ReservePartition",
      &Service::RequestReservePartition,
      [group](const v1::ReservePartitionRequest& request, const Access&) {
        return group->ReservePartition(request);
      },
      on(workers.reserving));
  ListenUnary(
      rpc, queue, service, "/ema.v1.GroupService/ProposeTracks", &Service::RequestProposeTracks,
      [group](const v1::ProposeTracksRequest& request, const Access&) {
        return group->ProposeTracks(request);
      },
      on(workers.reserving));
  ListenHeld(rpc, queue, service, "/ema.v1.GroupService/Vote", &Service::RequestVote,
             [group](const v1::VoteRequest& request, const Access&, auto reply) {
               group->Vote(request, std::move(reply));
             });
  ListenUnary(
      rpc, queue, service, "/ema.v1.GroupService/Sync", &Service::RequestSync,
      [group](const v1::SyncRequest& request, const Access&) { return group->Sync(request); });
  ListenUnary(rpc, queue, service, "/ema.v1.GroupService/PublishState",
              &Service::RequestPublishState,
              [group](const v1::PublishStateRequest& request, const Access&) {
                return group->PublishState(request);
              });
  ListenUnary(
      rpc, queue, service, "/ema.v1.GroupService/SavePart", &Service::RequestSavePart,
      [group](const v1::SavePartRequest& request, const Access&) {
        return group->SavePart(request);
      },
      on(workers.saving_parts));
  ListenUnary(
      rpc, queue, service, "/ema.v1.GroupService/GetPartStatistics",
      &Service::RequestGetPartStatistics,
      [group](const v1::GetPartStatisticsRequest& request, const Access&) {
        return group->GetPartStatistics(request);
      },
      on(workers.computing_parts));
  ListenUnary(
      rpc, queue, service, "/ema.v1.GroupService/SynthesizePart", &Service::RequestSynthesizePart,
      [group](const v1::SynthesizePartRequest& request, const Access&) {
        return group->SynthesizePart(request);
      },
      on(workers.computing_parts));
  ListenUnary(
      rpc, queue, service, "/ema.v1.GroupService/SaveNow", &Service::RequestSaveNow,
      [rpc](const v1::SaveNowRequest& request,
            const Access&) -> absl::StatusOr<v1::SaveNowResponse> {
        const std::string& name = request.from().model();
        EMA_RETURN_IF_ERROR(rpc->group->CheckHome(name));
        EMA_RETURN_IF_ERROR(rpc->group->RejectPushesForStop(request));
        EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, rpc->store->Get(name));
        if (model->history().latest().has_value()) {
          EMA_RETURN_IF_ERROR(rpc->checkpoints->Save(*model, {}).status());
        }
        return v1::SaveNowResponse();
      },
      on(workers.saving));
  ListenUnary(rpc, queue, service, "/ema.v1.GroupService/DescribeMember",
              &Service::RequestDescribeMember,
              [group](const v1::DescribeMemberRequest& request, const Access&) {
                return group->DescribeMember(request);
              });
}

}  // namespace ema
