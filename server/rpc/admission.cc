// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admission.h"

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/model_store.h"
#include "server/rpc/authorization.h"

namespace ema {

absl::StatusOr<Caller> Admission::Admit(std::string_view method, const grpc::ServerContext& context,
                                        std::optional<std::string_view> model) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("authorization");
  std::string_view authorization;
  if (found != metadata.end()) authorization = {found->second.data(), found->second.size()};
  return Admit(method, authorization, context.peer(), model);
}

absl::StatusOr<Caller> Admission::Admit(std::string_view method, std::string_view authorization,
                                        std::string peer, std::optional<std::string_view> model) {
  const absl::StatusOr<Access> access = Authorize(authenticator_, method, authorization, model);
  if (!access.ok()) {
    refusals_.Log(log_, LogLevel::kWarning, "call refused",
                  {{"rpc", ShortName(method)},
                   {"peer", peer},
                   {"reason", ErrorReasonName(GetErrorReason(access.status()))},
                   {"error", access.status().message()}});
    return access.status();
  }
  if (is_draining_.load(std::memory_order_relaxed) && IsRejectedWhileDraining(method)) {
    return DrainingError();
  }
  if (followed_ != nullptr) EMA_RETURN_IF_ERROR(CheckFollower(method, model.has_value()));
  Caller caller{.access = *access,
                .authorization = {},
                .log = {.peer = std::move(peer), .role = {}},
                .active_call = admitted_.Add()};
  if (authenticator_ != nullptr) {
    caller.authorization = authorization;
    caller.log.role = RoleName(access->role);
  }
  return caller;
}

absl::Status Admission::CheckFollower(std::string_view method, bool has_model) const {
  if (IsRefusedByFollower(method)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kReadOnly,
                     absl::StrCat(std::string(ShortName(method)), ": this server follows ",
                                  followed_->url, " and is read-only: call that server"));
  }
  return has_model ? followed_->check_readable() : absl::OkStatus();
}

}  // namespace ema
