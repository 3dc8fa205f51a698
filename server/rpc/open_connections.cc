// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/open_connections.h"

#include <sys/stat.h>

#include <algorithm>
#include <utility>

namespace ema {
namespace {

bool IsOpen(const OpenConnections::Connection& connection) {
  struct stat about {};
  return fstat(connection.fd, &about) == 0 && about.st_ino == connection.inode;
}

template <typename Predicate>
int64_t Count(const std::vector<OpenConnections::Connection>& connections, Predicate is_counted) {
  return std::count_if(connections.begin(), connections.end(), is_counted);
}

}  // namespace

int64_t OpenConnections::count() const {
  absl::MutexLock lock(&mu_);
  return Count(connections_, IsOpen);
}

std::optional<ServerObserver::Refusal> OpenConnections::Keep(Connection connection) {
  absl::MutexLock lock(&mu_);
  std::erase_if(connections_, [](const Connection& other) { return !IsOpen(other); });
  const int64_t of_kind = Count(
      connections_, [&](const Connection& other) { return other.is_unix == connection.is_unix; });
  if (of_kind >= limits_.max_connections) return ServerObserver::Refusal::kLimit;
  const int64_t of_network = Count(
      connections_, [&](const Connection& other) { return other.network == connection.network; });
  if (!connection.network.empty() && of_network >= limits_.max_connections_per_peer) {
    return ServerObserver::Refusal::kPeerLimit;
  }
  connections_.push_back(std::move(connection));
  return std::nullopt;
}

}  // namespace ema
