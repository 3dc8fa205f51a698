// SPDX-License-Identifier: Apache-2.0
//
// Converts our errors to gRPC's. No other file does.
#ifndef EMA_SERVER_RPC_GRPC_STATUS_H_
#define EMA_SERVER_RPC_GRPC_STATUS_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "ema/v1/error.pb.h"

namespace ema {

// The detail that a client gets beside code and message.
v1::ErrorDetail DetailOf(const absl::Status& status);

// The status to finish a call with. Puts the reason and the other details into `context`'s trailer
// "ema-error-detail-bin" as an ema.v1.ErrorDetail. REQUIRES: the call has not been finished. Call
// once per call.
grpc::Status ToGrpcStatus(const absl::Status& status, grpc::ServerContext& context);

}  // namespace ema

#endif  // EMA_SERVER_RPC_GRPC_STATUS_H_
