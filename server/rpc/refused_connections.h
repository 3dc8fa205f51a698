// SPDX-License-Identifier: Apache-2.0
//
// What is told of connections that are closed at once.
#ifndef EMA_SERVER_RPC_REFUSED_CONNECTIONS_H_
#define EMA_SERVER_RPC_REFUSED_CONNECTIONS_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "server/base/log_event.h"
#include "server/base/log_throttle.h"
#include "server/base/observer.h"

namespace ema {

// Thread-safe, as its throttle is.
class RefusedConnections {
 public:
  // Tells `observer` of each, and `log` of not as many as there may be. `peer`: empty if nobody
  // knows it. `limit`: of what there is no more.
  void Tell(ServerObserver& observer, const LogSink& log, ServerObserver::Refusal reason,
            const std::string& peer, int64_t limit) {
    observer.OnConnectionRefused(reason);
    const std::optional<int64_t> unsaid = throttle_.Take(std::chrono::steady_clock::now());
    if (!unsaid.has_value()) return;
    LogTo(log, LogLevel::kWarning, "connection refused",
          {{"peer", peer},
           {"reason", RefusalName(reason)},
           {"limit", limit},
           {"more_before", *unsaid}});
  }

 private:
  LogThrottle throttle_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_REFUSED_CONNECTIONS_H_
