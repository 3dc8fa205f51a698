// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/listener.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/socket_address.h"

namespace ema {
namespace {

// Pause while the system lacks resources for a connection: the backlog stays readable.
constexpr int kBackoffMs = 10;

// Makes the kernel probe peers, so that connections of a dead machine are closed: gRPC pings only
// connections with calls.
void SetKeepalive(int fd, const RpcLimits& limits) {
  constexpr int kProbes = 4;
  constexpr int64_t kMostSeconds = 32'767;  // Linux ignores larger values.
  const auto seconds = [&](absl::Duration duration) {
    const int64_t count = absl::ToInt64Seconds(absl::Ceil(duration, absl::Seconds(1)));
    return static_cast<int>(std::min(count, kMostSeconds));
  };
  const int on = 1;
  const int idle = seconds(limits.keepalive_time);
  const int interval = seconds(limits.keepalive_timeout / kProbes);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof(kProbes));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(const std::string& address) {
  constexpr std::string_view kUnix = "unix:";
  if (std::string_view(address).starts_with(kUnix)) return BindUnix(address.substr(kUnix.size()));
  return BindTcp(address);
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::BindUnix(const std::string& path) {
  EMA_ASSIGN_OR_RETURN(const int stop_fd, NewEvent());
  absl::Cleanup close_stop_fd = [stop_fd] { close(stop_fd); };
  EMA_ASSIGN_OR_RETURN(const int fd, ListenUnix(path, absl::StrCat("unix:", path)));
  std::move(close_stop_fd).Cancel();
  return std::unique_ptr<Listener>(new Listener(fd, stop_fd, /*port=*/0, path));
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::BindTcp(const std::string& address) {
  EMA_ASSIGN_OR_RETURN(const ListenSocket socket, ListenTcp(address, "--listen"));
  absl::Cleanup close_socket = [&socket] { close(socket.fd); };
  EMA_ASSIGN_OR_RETURN(const int stop_fd, NewEvent());
  std::move(close_socket).Cancel();
  return std::unique_ptr<Listener>(new Listener(socket.fd, stop_fd, socket.port, ""));
}

Listener::~Listener() {
  Stop();
  close(stop_fd_);
}

void Listener::Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor,
                     const RpcLimits& limits, OpenConnections* connections,
                     ServerObserver* observer, LogSink log) {
  grpc_acceptor_ = std::move(acceptor);
  limits_ = limits;
  connections_ = connections;
  observer_ = observer;
  log_ = std::move(log);
  thread_ = std::thread([this] { Accept(); });
}

void Listener::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(stop_fd_, &one, sizeof(one));
    thread_.join();
  }
  if (fd_ < 0) return;
  // In this order: once the socket is closed, the next server may use the path.
  if (!path_.empty()) unlink(path_.c_str());
  close(std::exchange(fd_, -1));
}

void Listener::Accept() {
  using Outcome = ConnectionAcceptor::Outcome;
  pollfd polled[] = {{fd_, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
  while (true) {
    poll(polled, 2, -1);
    if (polled[1].revents != 0) return;
    const auto [outcome, fd, refused_peer] =
        connection_acceptor_.Accept(SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (outcome == Outcome::kExhausted) poll(nullptr, 0, kBackoffMs);
    if (outcome == Outcome::kRefused) {
      rlimit files{};
      getrlimit(RLIMIT_NOFILE, &files);
      ReportRefusedConnection(*observer_, log_, refusals_, ServerObserver::Refusal::kDescriptors,
                              refused_peer, static_cast<int64_t>(files.rlim_cur));
    }
    if (outcome != Outcome::kAccepted) continue;
    if (!connections_->Add(fd, is_unix())) {
      sockaddr_storage address{};
      auto* const peer = reinterpret_cast<sockaddr*>(&address);
      socklen_t size = sizeof(address);
      getpeername(fd, peer, &size);
      close(fd);
      ReportRefusedConnection(*observer_, log_, refusals_, ServerObserver::Refusal::kLimit,
                              PeerText(peer), connections_->limit());
      continue;
    }
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    SetKeepalive(fd, limits_);
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = fd_;
    connection.fd = fd;
    grpc_acceptor_->HandleNewConnection(&connection);
  }
}

}  // namespace ema
