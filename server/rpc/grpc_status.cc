// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/grpc_status.h"

#include <string>

#include "ema/error_reason.h"
#include "server/wire/convert_types.h"

namespace ema {

v1::ErrorDetail DetailOf(const absl::Status& status) {
  v1::ErrorDetail detail;
  detail.set_reason(static_cast<v1::ErrorReason>(GetErrorReason(status)));
  detail.set_retry_delay_ms(absl::ToInt64Milliseconds(GetRetryDelay(status)));
  const GroupHint hint = GetGroupHint(status);
  detail.set_home(hint.home);
  detail.set_round(hint.round);
  detail.set_incarnation(hint.incarnation);
  return detail;
}

grpc::Status ToGrpcStatus(const absl::Status& status, grpc::ServerContext& context) {
  // Status and detail travel as metadata, of which clients accept 8 KiB; some bytes become three.
  constexpr size_t kMaxMessageBytes = 2048;
  if (status.ok()) return grpc::Status::OK;
  context.AddTrailingMetadata(kErrorDetailKey, DetailOf(status).SerializeAsString());
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      std::string(status.message().substr(0, kMaxMessageBytes)));
}

}  // namespace ema
