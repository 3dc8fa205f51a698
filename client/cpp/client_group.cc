// SPDX-License-Identifier: Apache-2.0
//
// The call about the group of servers.
#include "client/cpp/client_impl.h"
#include "ema/client.h"
#include "ema/internal/status_macros.h"
#include "server/wire/convert_group.h"

namespace ema {

using client_internal::Stub;

absl::StatusOr<GroupInfo> Client::GetGroup(absl::Duration timeout) {
  EMA_ASSIGN_OR_RETURN(
      const v1::GetGroupResponse response,
      impl_->UnaryWithRetries(&Stub::PrepareAsyncGetGroup, v1::GetGroupRequest(), timeout));
  return FromProto(response);
}

}  // namespace ema
