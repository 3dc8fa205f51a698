// SPDX-License-Identifier: Apache-2.0
//
// How many connections there may be.
#ifndef EMA_SERVER_RPC_OPEN_CONNECTIONS_H_
#define EMA_SERVER_RPC_OPEN_CONNECTIONS_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/observer.h"
#include "server/base/rpc_limits.h"

namespace ema {

// The connections that a server's listeners have handed to gRPC, all of them together. Thread-safe.
class OpenConnections {
 public:
  // gRPC does not tell when it closes one, but then the descriptor is another file, or none.
  struct Connection {
    int fd = -1;
    ino_t inode = 0;
    bool is_unix = false;
    std::string network;  // Of its peer; empty: of this host.
  };

  // Of `limits` those of connections count.
  explicit OpenConnections(const RpcLimits& limits) : limits_(limits) {}

  // Counts it among those that are open; or why it may not be.
  std::optional<ServerObserver::Refusal> Keep(Connection connection) ABSL_LOCKS_EXCLUDED(mu_);
  int64_t count() const ABSL_LOCKS_EXCLUDED(mu_);
  const RpcLimits& limits() const { return limits_; }

 private:
  const RpcLimits limits_;
  mutable absl::Mutex mu_;
  std::vector<Connection> connections_ ABSL_GUARDED_BY(mu_);  // And some that are closed.
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_OPEN_CONNECTIONS_H_
