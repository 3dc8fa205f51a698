// SPDX-License-Identifier: Apache-2.0
//
// Accepts the same-host lanes of clients.
#ifndef EMA_SERVER_RPC_LANE_SERVER_H_
#define EMA_SERVER_RPC_LANE_SERVER_H_

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "server/base/listen_socket.h"
#include "server/base/log_throttle.h"
#include "server/core/memory_budget.h"
#include "server/rpc/rpc_context.h"

namespace ema {

// Each lane has a thread. Stop() and the destructor are for one thread; the rest is thread-safe.
class LaneServer {
 public:
  struct Limits {
    int64_t max_lanes = 0;         // Further lanes are closed, and their clients use gRPC.
    int64_t max_window_bytes = 0;  // Of all lanes. Further windows are not mapped.
  };
  // Listens on the socket file `socket_file`, or, if that is empty, on an abstract socket with a
  // random name. `rpc` outlives it. UNAVAILABLE: the system refuses. Other errors: ListenUnix()'s.
  static absl::StatusOr<std::unique_ptr<LaneServer>> Start(RpcContext* rpc, const Limits& limits,
                                                           const std::string& socket_file);
  ~LaneServer() { Stop(); }

  // For LanePipe::Connect().
  const std::string& socket_name() const { return socket_name_; }

  // Ends all lanes, even during a call, and removes the socket file.
  void Stop();

 private:
  LaneServer(RpcContext* rpc, const Limits& limits, const std::string& socket_name, int fd)
      : rpc_(rpc),
        max_lanes_(limits.max_lanes),
        windows_(limits.max_window_bytes),
        socket_name_(socket_name),
        fd_(fd),
        acceptor_(fd, kReservedFiles) {}

  void Accept();

  RpcContext* const rpc_;
  const int64_t max_lanes_;
  MemoryBudget windows_;
  const std::string socket_name_;
  const int fd_;
  ConnectionAcceptor acceptor_;  // Only for the accepting thread.
  LogThrottle refusals_;
  std::atomic<bool> is_stopping_ = false;
  struct Lane {
    std::thread thread;
    std::atomic<bool> has_ended = false;
  };
  std::list<Lane> lanes_;  // Only for the accepting thread, until that has ended.
  std::thread accepting_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_LANE_SERVER_H_
