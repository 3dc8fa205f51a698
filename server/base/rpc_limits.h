// SPDX-License-Identifier: Apache-2.0
//
// Limits on calls and connections, and how much of them is in use.
#ifndef EMA_SERVER_BASE_RPC_LIMITS_H_
#define EMA_SERVER_BASE_RPC_LIMITS_H_

#include <cstdint>

#include "absl/time/time.h"

namespace ema {

struct RpcLimits {
  int64_t max_push_streams = 32;  // Each may hold a receive window of gRPC.
  int64_t max_pull_streams = 64;
  int64_t max_watch_streams = 1024;
  // Over all TCP addresses together, and as many over all unix sockets: clients that use up the
  // first must not lock out probes and operators that use the second.
  int64_t max_connections = 1024;
  int64_t max_streams_per_connection = 1024;
  int64_t max_message_bytes = int64_t{8} << 20;
  int64_t max_metadata_bytes = int64_t{8} << 10;
  absl::Duration handshake_timeout = absl::Seconds(5);  // For the TLS and HTTP/2 handshakes.
  // A peer that has been silent for keepalive_time is pinged, and must answer within
  // keepalive_timeout.
  absl::Duration keepalive_time = absl::Seconds(60);
  absl::Duration keepalive_timeout = absl::Seconds(20);
  // A connection without calls is closed after this time: its client opens another one.
  absl::Duration max_connection_idle = absl::Hours(2);
  // A step's session ends when nothing has arrived for this time, which must exceed the ranks'
  // differences in speed.
  absl::Duration session_timeout = absl::Seconds(30);
  // A push or a pull ends when its peer has sent or accepted nothing for this time. A watch does
  // not: it may be idle for as long as its connection lives.
  absl::Duration stream_timeout = absl::Seconds(30);
  // A pull that is slower than this over a third of stream_timeout may be ended when another reader
  // needs a pin. 0: never.
  int64_t min_pull_bytes_per_second = int64_t{1} << 20;
};

struct RpcUsage {
  int64_t push_streams = 0;
  int64_t pull_streams = 0;
  int64_t watch_streams = 0;
  int64_t connections = 0;  // Of gRPC, not lanes.
};

}  // namespace ema

#endif  // EMA_SERVER_BASE_RPC_LIMITS_H_
