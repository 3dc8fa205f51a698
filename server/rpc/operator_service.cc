// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/operator_service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/rpc/unary_call.h"

namespace ema {
namespace {

absl::Status CannotDo(std::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kBadRequest,
                   absl::StrCat("this server ", std::string(what)));
}

// Removes what the caller may not read.
void RemoveHidden(const Access& access, v1::GetGroupResponse& response) {
  auto& models = *response.mutable_models();
  const auto hidden = std::remove_if(models.begin(), models.end(), [&](const auto& model) {
    return !access.Covers(model.name());
  });
  models.erase(hidden, models.end());
  if (access.CoversAll()) return;
  response.clear_last_incident();
  response.clear_last_incident_time_us();
}

}  // namespace

void OperatorService::Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue) {
#define EMA_LISTEN(method)                                      \
  ListenUnary(                                                  \
      rpc, queue, &rpc->service, "/ema.v1.EmaService/" #method, \
      &RpcContext::EmaService::Request##method,                 \
      [this](const v1::method##Request& request, const Access&) { return method(request); })
  EMA_LISTEN(GetServerInfo);
  EMA_LISTEN(SetLogLevel);
  EMA_LISTEN(Drain);
#undef EMA_LISTEN
  ListenHeld(rpc, queue, &rpc->service, "/ema.v1.EmaService/GetGroup",
             &RpcContext::EmaService::RequestGetGroup,
             [group = rpc->group](const v1::GetGroupRequest&, const Access& access, auto reply) {
               if (group == nullptr) return reply(CannotDo("does not belong to a group"));
               group->DescribeGroup([access, reply = std::move(reply)](
                                        absl::StatusOr<v1::GetGroupResponse> response) {
                 if (response.ok()) RemoveHidden(access, *response);
                 reply(response);
               });
             });
}

absl::StatusOr<v1::GetServerInfoResponse> OperatorService::GetServerInfo(
    const v1::GetServerInfoRequest&) {
  v1::GetServerInfoResponse response;
  response.set_version(process_.version);
  response.set_device(store_->device().name());
  response.set_incarnation(process_.incarnation);
  response.set_start_time_us(absl::ToUnixMicros(process_.start_time));
  response.set_not_serving(std::string(view_.health().message()));
  response.set_memory_budget_bytes(store_->budget().total_bytes());
  response.set_memory_reserved_bytes(store_->budget().reserved_bytes());
  response.set_memory_used_bytes(store_->device().memory_use().block_bytes);
  for (const Limit& limit : view_.limits()) {
    v1::GetServerInfoResponse::Limit& out = *response.add_limits();
    out.set_name(limit.name);
    if (limit.in_use.has_value()) out.set_in_use(*limit.in_use);
    out.set_limit(limit.limit);
  }
  return response;
}

absl::StatusOr<v1::SetLogLevelResponse> OperatorService::SetLogLevel(
    const v1::SetLogLevelRequest& request) {
  if (!process_.set_log_level) return CannotDo("does not support changing its log level");
  EMA_ASSIGN_OR_RETURN(const ServingProcess::LogLevels levels,
                       process_.set_log_level(request.level()));
  v1::SetLogLevelResponse response;
  response.set_old_level(levels.before);
  response.set_level(levels.now);
  return response;
}

absl::StatusOr<v1::DrainResponse> OperatorService::Drain(const v1::DrainRequest&) {
  if (!process_.drain) return CannotDo("does not support Drain");
  v1::DrainResponse response;
  response.set_delay_seconds(absl::ToDoubleSeconds(process_.drain_delay));
  response.set_grace_seconds(absl::ToDoubleSeconds(process_.drain_grace));
  response.set_began(process_.drain());
  return response;
}

}  // namespace ema
