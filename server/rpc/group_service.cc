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
// The last argument, if any, chooses where the call runs; without one, on the queue's thread.
#define EMA_LISTEN(method, ...)                                                                \
  ListenUnary(rpc, queue, service, "/ema.v1.GroupService/" #method, &Service::Request##method, \
              [group](const v1::method##Request& request, const Access&) {                     \
                return group->method(request);                                                 \
              } __VA_OPT__(, ) __VA_ARGS__)
  EMA_LISTEN(ReservePartition, On(workers.reserving));
  EMA_LISTEN(ProposeTracks, On(workers.reserving));
  EMA_LISTEN(Sync);
  EMA_LISTEN(PublishState);
  EMA_LISTEN(SavePart, On(workers.saving_parts));
  EMA_LISTEN(WriteCopy, On(workers.copying_parts));
  EMA_LISTEN(FetchCopy, On(workers.copying_parts));
  EMA_LISTEN(ReadCopy, On(workers.reading_copies));
  EMA_LISTEN(GetPartStatistics, On(workers.computing_parts));
  EMA_LISTEN(SynthesizePart, On(workers.computing_parts));
  EMA_LISTEN(DescribeMember);
#undef EMA_LISTEN
  ListenHeld(rpc, queue, service, "/ema.v1.GroupService/Vote", &Service::RequestVote,
             [group](const v1::VoteRequest& request, const Access&, auto reply) {
               group->Vote(request, std::move(reply));
             });
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
      On(workers.saving));
}

}  // namespace ema
