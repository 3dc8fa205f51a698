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

}  // namespace

int64_t OpenConnections::count() const {
  absl::MutexLock lock(&mu_);
  return std::count_if(connections_.begin(), connections_.end(), IsOpen);
}

std::optional<ServerObserver::Refusal> OpenConnections::Keep(Connection connection) {
  absl::MutexLock lock(&mu_);
  std::erase_if(connections_, [](const Connection& other) { return !IsOpen(other); });
  const auto count = [&open = connections_](const auto& is_counted) {
    return static_cast<int64_t>(std::count_if(open.begin(), open.end(), is_counted));
  };
  if (count([&](const Connection& other) { return other.is_unix == connection.is_unix; }) >=
      limits_.connections) {
    return ServerObserver::Refusal::kLimit;
  }
  if (!connection.network.empty() && count([&](const Connection& other) {
                                       return other.network == connection.network;
                                     }) >= limits_.connections_per_peer) {
    return ServerObserver::Refusal::kPeerLimit;
  }
  connections_.push_back(std::move(connection));
  return std::nullopt;
}

}  // namespace ema
