// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/rpc_context.h"

#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/model_store.h"

namespace ema {

absl::StatusOr<Caller> RpcContext::Admit(std::string_view method,
                                         const grpc::ServerContext& context) {
  // Probes must get through whatever else their address does, and to refuse one costs what its
  // answer does.
  if (RoleFor(method) != Role::kNobody) {
    EMA_RETURN_IF_ERROR(rate.Take(context.peer(), SteadyNow()));
  }
  return Admit(method, AuthorizationOf(context), context.peer());
}

absl::StatusOr<Caller> RpcContext::Admit(std::string_view method, std::string_view authorization,
                                         std::string peer) {
  const absl::StatusOr<Access> access = Authorize(authenticator, method, authorization);
  if (!access.ok()) {
    LogRefused(method, peer, access.status());
    return access.status();
  }
  if (refuses_work.load(std::memory_order_relaxed) && BeginsWork(method)) {
    return DrainingError();
  }
  Caller caller{.access = *access, .log = {.peer = std::move(peer), .role = {}}};
  if (authenticator != nullptr) {
    caller.authorization = authorization;
    caller.log.role = RoleName(access->role);
  }
  return caller;
}

absl::Status RpcContext::CheckModel(std::string_view method, const Caller& caller,
                                    std::optional<std::string_view> model) {
  if (!model.has_value()) return absl::OkStatus();
  absl::Status status = CheckCovers(caller.access, *model);
  if (!status.ok()) LogRefused(method, caller.log.peer, status);
  return status;
}

void RpcContext::LogRefused(std::string_view method, std::string_view peer,
                            const absl::Status& status) {
  refusals.Tell(log, LogLevel::kWarning, "call refused",
                {{"rpc", ShortName(method)},
                 {"peer", peer},
                 {"reason", ErrorReasonName(GetErrorReason(status))},
                 {"error", status.message()}});
}

}  // namespace ema
