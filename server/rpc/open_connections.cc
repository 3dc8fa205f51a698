// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/open_connections.h"

#include <sys/stat.h>

#include <algorithm>

namespace ema {

bool OpenConnections::Connection::IsOpen() const {
  struct stat about {};
  return fstat(fd, &about) == 0 && about.st_ino == inode;
}

int64_t OpenConnections::count() const {
  absl::MutexLock lock(&mu_);
  return std::count_if(connections_.begin(), connections_.end(),
                       [](const Connection& connection) { return connection.IsOpen(); });
}

bool OpenConnections::Add(int fd, bool is_unix) {
  struct stat about {};
  if (fstat(fd, &about) != 0) return false;
  absl::MutexLock lock(&mu_);
  std::erase_if(connections_, [](const Connection& connection) { return !connection.IsOpen(); });
  const int64_t count =
      std::count_if(connections_.begin(), connections_.end(),
                    [is_unix](const Connection& other) { return other.is_unix == is_unix; });
  if (count >= limit_) return false;
  connections_.push_back({fd, about.st_ino, is_unix});
  return true;
}

void ReportRefusedConnection(ServerObserver& observer, const LogSink& log, LogThrottle& throttle,
                             ServerObserver::Refusal reason, const std::string& peer,
                             int64_t limit) {
  observer.OnConnectionRefused(reason);
  throttle.Log(log, LogLevel::kWarning, "connection refused",
               {{"peer", peer}, {"reason", RefusalName(reason)}, {"limit", limit}});
}

}  // namespace ema
