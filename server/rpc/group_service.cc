// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/group_service.h"

#include <utility>

#include "server/rpc/unary_call.h"

namespace ema {

void ListenToGroup(RpcContext* rpc, grpc::ServerCompletionQueue* queue, Worker* reserving) {
  using Service = v1::GroupService::AsyncService;
  Service* const service = &rpc->group_service;
  ModelGroup* const group = rpc->group;
  ListenUnary(
      rpc, queue, service, "/ema.v1.GroupService/ReservePartition",
      &Service::RequestReservePartition,
      [group](const v1::ReservePartitionRequest& request, const Access&) {
        return group->ReservePartition(request);
      },
      [reserving](const auto&) { return Placement{.worker = reserving, .held = nullptr}; });
  ListenHeld(rpc, queue, service, "/ema.v1.GroupService/Prepare", &Service::RequestPrepare,
             [group](const v1::PrepareRequest& request, auto reply) {
               group->Prepare(request, std::move(reply));
             });
  ListenUnary(
      rpc, queue, service, "/ema.v1.GroupService/Sync", &Service::RequestSync,
      [group](const v1::SyncRequest& request, const Access&) { return group->Sync(request); });
  ListenUnary(rpc, queue, service, "/ema.v1.GroupService/PublishState",
              &Service::RequestPublishState,
              [group](const v1::PublishStateRequest& request, const Access&) {
                return group->PublishState(request);
              });
}

}  // namespace ema
