// SPDX-License-Identifier: Apache-2.0
//
// What is told of connections that are closed at once.
#ifndef EMA_SERVER_RPC_REFUSED_CONNECTIONS_H_
#define EMA_SERVER_RPC_REFUSED_CONNECTIONS_H_

#include <cstdint>
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
    throttle_.Tell(log, LogLevel::kWarning, "connection refused",
                   {{"peer", peer}, {"reason", RefusalName(reason)}, {"limit", limit}});
  }

 private:
  LogThrottle throttle_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_REFUSED_CONNECTIONS_H_
