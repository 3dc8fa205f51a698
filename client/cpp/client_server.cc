// SPDX-License-Identifier: Apache-2.0
//
// The calls about the server itself, and its group.
#include "client/cpp/client_impl.h"
#include "ema/client.h"
#include "ema/internal/status_macros.h"
#include "server/wire/convert_group.h"

namespace ema {

using client_internal::Stub;

absl::StatusOr<Client::ServerInfo> Client::GetServerInfo(absl::Duration timeout) {
  EMA_ASSIGN_OR_RETURN(const v1::GetServerInfoResponse response,
                       impl_->UnaryWithRetries(&Stub::PrepareAsyncGetServerInfo,
                                               v1::GetServerInfoRequest(), timeout));
  ServerInfo info{.version = response.version(),
                  .device = response.device(),
                  .incarnation = response.incarnation(),
                  .start_time = absl::FromUnixMicros(response.start_time_us()),
                  .not_serving = response.not_serving(),
                  .memory_budget_bytes = response.memory_budget_bytes(),
                  .memory_reserved_bytes = response.memory_reserved_bytes(),
                  .memory_used_bytes = response.memory_used_bytes()};
  for (const v1::GetServerInfoResponse::Limit& limit : response.limits()) {
    info.limits.push_back(
        {limit.name(), limit.has_in_use() ? std::optional<int64_t>(limit.in_use()) : std::nullopt,
         limit.limit()});
  }
  return info;
}

absl::StatusOr<Client::LogLevels> Client::SetLogLevel(std::string_view level,
                                                      absl::Duration timeout) {
  v1::SetLogLevelRequest request;
  request.set_level(std::string(level));
  EMA_ASSIGN_OR_RETURN(const v1::SetLogLevelResponse response,
                       impl_->UnaryWithRetries(&Stub::PrepareAsyncSetLogLevel, request, timeout));
  return LogLevels{response.old_level(), response.level()};
}

absl::StatusOr<Client::DrainResult> Client::Drain(absl::Duration timeout) {
  // Once: a server that was started again must not be drained, too.
  EMA_ASSIGN_OR_RETURN(const v1::DrainResponse response,
                       impl_->UnaryOnce(&Stub::PrepareAsyncDrain, v1::DrainRequest(), timeout));
  return DrainResult{absl::Seconds(response.delay_seconds()),
                     absl::Seconds(response.grace_seconds()), response.began()};
}

absl::StatusOr<GroupInfo> Client::GetGroup(absl::Duration timeout) {
  EMA_ASSIGN_OR_RETURN(
      const v1::GetGroupResponse response,
      impl_->UnaryWithRetries(&Stub::PrepareAsyncGetGroup, v1::GetGroupRequest(), timeout));
  return FromProto(response);
}

}  // namespace ema
