// SPDX-License-Identifier: Apache-2.0
//
// Caps the number of open connections, and reports refused ones.
#ifndef EMA_SERVER_RPC_OPEN_CONNECTIONS_H_
#define EMA_SERVER_RPC_OPEN_CONNECTIONS_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/log_event.h"
#include "server/base/log_throttle.h"
#include "server/base/observer.h"

namespace ema {

// The connections that all listeners of a server have handed to gRPC. Thread-safe.
class OpenConnections {
 public:
  // At most `limit` over TCP, and as many over unix sockets.
  explicit OpenConnections(int64_t limit) : limit_(limit) {}

  // Counts the connection `fd` until it is closed. False: there are too many.
  bool Add(int fd, bool is_unix) ABSL_LOCKS_EXCLUDED(mu_);
  int64_t count() const ABSL_LOCKS_EXCLUDED(mu_);
  int64_t limit() const { return limit_; }

 private:
  // gRPC does not report when it closes a connection, but the descriptor then refers to another
  // file or to none.
  struct Connection {
    int fd;
    ino_t inode;
    bool is_unix;
    bool IsOpen() const;
  };

  const int64_t limit_;
  mutable absl::Mutex mu_;
  std::vector<Connection> connections_ ABSL_GUARDED_BY(mu_);  // Some may be closed already.
};

// Reports a connection that was closed at once to `observer`, and to `log` if `throttle` allows it.
// `peer`: empty if unknown. `limit`: that of the exhausted resource.
void ReportRefusedConnection(ServerObserver& observer, const LogSink& log, LogThrottle& throttle,
                             ServerObserver::Refusal reason, const std::string& peer,
                             int64_t limit);

}  // namespace ema

#endif  // EMA_SERVER_RPC_OPEN_CONNECTIONS_H_
