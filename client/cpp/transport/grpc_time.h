// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_CLIENT_CPP_TRANSPORT_GRPC_TIME_H_
#define EMA_CLIENT_CPP_TRANSPORT_GRPC_TIME_H_

#include <grpc/support/time.h>

#include <chrono>

#include "server/base/steady_wait.h"

namespace ema::client_internal {

// Converts a deadline for gRPC. Uses the monotonic clock, since the system clock may be changed
// before gRPC reads the deadline.
inline gpr_timespec ToGrpc(SteadyTime time) {
  if (time == SteadyTime::max()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  const std::chrono::nanoseconds since_zero = time.time_since_epoch();
  return gpr_time_from_nanos(since_zero.count(), GPR_CLOCK_MONOTONIC);
}

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_GRPC_TIME_H_
