// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/lane_server.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <system_error>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/random_hex.h"
#include "server/rpc/lane_connection.h"
#include "server/rpc/open_connections.h"
#include "server/wire/lane_pipe.h"

namespace ema {
namespace {

// How long it may take until a stop, or the end of a lane, is noticed.
constexpr int kPollMs = 100;

}  // namespace

absl::StatusOr<std::unique_ptr<LaneServer>> LaneServer::Start(RpcContext* rpc, const Limits& limits,
                                                              const std::string& socket_file) {
  const std::string name =
      socket_file.empty() ? absl::StrCat("ema-lane-", RandomHex(4)) : socket_file;
  EMA_ASSIGN_OR_RETURN(const int fd,
                       socket_file.empty()
                           ? ListenForLanes(name)
                           : ListenUnix(socket_file, absl::StrCat("--lane-socket ", socket_file)));
  std::unique_ptr<LaneServer> server(new LaneServer(rpc, limits, name, fd));
  server->accepting_ = std::thread([server = server.get()] { server->Accept(); });
  return server;
}

void LaneServer::Stop() {
  if (is_stopping_.exchange(true)) return;
  accepting_.join();
  for (Lane& lane : lanes_) lane.thread.join();
  if (socket_name_.starts_with('/')) unlink(socket_name_.c_str());
  close(fd_);
}

void LaneServer::Accept() {
  while (!is_stopping_.load()) {
    pollfd polled{fd_, POLLIN, 0};
    const int ready = poll(&polled, 1, kPollMs);
    for (auto lane = lanes_.begin(); lane != lanes_.end();) {
      if (!lane->has_ended.load()) {
        ++lane;
        continue;
      }
      lane->thread.join();
      lane = lanes_.erase(lane);
    }
    if (ready <= 0) continue;
    // A client that is refused for lack of a descriptor uses gRPC.
    const ConnectionAcceptor::Accepted accepted = acceptor_.Accept(SOCK_CLOEXEC);
    if (accepted.outcome == ConnectionAcceptor::Outcome::kExhausted) poll(nullptr, 0, kPollMs);
    if (accepted.outcome != ConnectionAcceptor::Outcome::kAccepted) continue;
    const int fd = accepted.fd;
    if (static_cast<int64_t>(lanes_.size()) >= max_lanes_) {
      const std::string peer = PeerName(fd);
      close(fd);
      ReportRefusedConnection(*rpc_->observer, rpc_->log, refusals_,
                              ServerObserver::Refusal::kLanes, peer, max_lanes_);
      continue;
    }
    Lane& lane = lanes_.emplace_back();
    try {
      lane.thread = std::thread([this, fd, &lane] {
        LaneConnection(rpc_, &windows_, &is_stopping_).Run(fd);
        lane.has_ended.store(true);
      });
    } catch (const std::system_error&) {  // Out of threads.
      lanes_.pop_back();
      close(fd);
    }
  }
}

}  // namespace ema
