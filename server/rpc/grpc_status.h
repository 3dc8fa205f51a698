// SPDX-License-Identifier: Apache-2.0
//
// The one place where our errors, and exceptions of a call, become gRPC's.
#ifndef EMA_SERVER_RPC_GRPC_STATUS_H_
#define EMA_SERVER_RPC_GRPC_STATUS_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <exception>

#include "absl/status/status.h"
#include "ema/v1/error.pb.h"

namespace ema {

// What a client is told beside code and message.
v1::ErrorDetail DetailOf(const absl::Status& status);

// The status to finish a call with. Puts the reason and the retry delay into `context`'s trailer
// "ema-error-detail-bin" as an ema.v1.ErrorDetail. REQUIRES: the call has not been finished. Call
// once per call.
grpc::Status ToGrpcStatus(const absl::Status& status, grpc::ServerContext& context);

// RESOURCE_EXHAUSTED, MEMORY_BUDGET, for memory that could not be allocated; else INTERNAL.
absl::Status ToStatus(const std::exception& exception);

// The result of `function`, an absl::Status or StatusOr. An exception of it ends only the call that
// it serves: the result is then ToStatus().
template <typename Function>
auto CatchExceptions(const Function& function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::exception& exception) {
    return ToStatus(exception);
  }
}

}  // namespace ema

#endif  // EMA_SERVER_RPC_GRPC_STATUS_H_
