// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/tcp_proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ema {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

const sockaddr* Generic(const sockaddr_in& address) {
  return static_cast<const sockaddr*>(static_cast<const void*>(&address));
}

// A sender that is so far ahead is not read.
constexpr size_t kMaxQueuedBytes = 256 << 10;
constexpr int kPollMs = 2;

void CloseWithReset(int fd) {
  const linger reset = {.l_onoff = 1, .l_linger = 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  close(fd);
}

}  // namespace

TcpProxy::TcpProxy(int target_port) : target_port_(target_port) {
  listen_fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in any = Loopback(0);
  bind(listen_fd_, Generic(any), sizeof(any));
  listen(listen_fd_, 64);
  sockaddr_in bound = {};
  socklen_t size = sizeof(bound);
  getsockname(listen_fd_, static_cast<sockaddr*>(static_cast<void*>(&bound)), &size);
  port_ = ntohs(bound.sin_port);
  thread_ = std::thread([this] { Loop(); });
}

TcpProxy::~TcpProxy() {
  stop_ = true;
  thread_.join();
  CloseAll();
  close(listen_fd_);
}

std::string TcpProxy::address() const { return absl::StrCat("127.0.0.1:", port_); }

void TcpProxy::CloseAll() {
  for (const Connection& connection : connections_) {
    CloseWithReset(connection.up.from);
    CloseWithReset(connection.up.to);
  }
  connections_.clear();
  for (const int fd : std::exchange(orphans_, {})) CloseWithReset(fd);
}

void TcpProxy::ObeyCuts() {
  if (cut_) {
    cut_count_ += static_cast<int64_t>(connections_.size());
    CloseAll();
    cut_ = false;
    cut_.notify_all();
  }
  if (half_open_) {
    cut_count_ += static_cast<int64_t>(connections_.size());
    for (const Connection& connection : connections_) {
      CloseWithReset(connection.up.from);
      orphans_.push_back(connection.up.to);
    }
    connections_.clear();
    half_open_ = false;
    half_open_.notify_all();
  }
}

void TcpProxy::Accept() {
  const int client = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC);
  if (client < 0) return;
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in target = Loopback(target_port_);
  if (connect(server, Generic(target), sizeof(target)) != 0) {
    close(server);
    close(client);
    return;
  }
  ++connection_count_;
  Connection& connection = connections_.emplace_back();
  connection.up.from = connection.down.to = client;
  connection.up.to = connection.down.from = server;
  connection.up.from_client = true;
}

bool TcpProxy::Receive(Pipe& pipe) {
  static thread_local std::vector<char> buffer(64 << 10);
  const ssize_t size = recv(pipe.from, buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (size < 0) return errno == EAGAIN;
  if (size == 0) {
    pipe.ended = true;
    return true;
  }
  const Clock::time_point due = Clock::now() + std::chrono::milliseconds(delay_ms_);
  pipe.pieces.push_back({due, std::string(buffer.data(), size)});
  pipe.queued_bytes += size;
  return Send(pipe);
}

bool TcpProxy::IsDue(const Pipe& pipe) const {
  return !pipe.pieces.empty() && pipe.pieces.front().due <= Clock::now();
}

bool TcpProxy::Send(Pipe& pipe) {
  const int64_t trickle_bytes = trickle_bytes_;
  int64_t allowed = trickle_bytes > 0 ? trickle_bytes : INT64_MAX;
  while (allowed > 0 && IsDue(pipe)) {
    std::string& bytes = pipe.pieces.front().bytes;
    const int64_t size = std::min(allowed, static_cast<int64_t>(bytes.size()));
    const ssize_t sent = send(pipe.to, bytes.data(), size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return errno == EAGAIN;
    allowed -= sent;
    pipe.queued_bytes -= sent;
    bytes.erase(0, sent);
    if (bytes.empty()) pipe.pieces.pop_front();
    if (pipe.from_client && cut_after_ > 0 && (cut_after_ -= sent) <= 0) {
      cut_after_ = 0;
      cut_ = true;
      break;
    }
  }
  return true;
}

void TcpProxy::Loop() {
  while (!stop_) {
    ObeyCuts();
    std::vector<pollfd> waiters = {{.fd = listen_fd_, .events = POLLIN, .revents = 0}};
    const bool trickles = trickle_bytes_ > 0;
    const auto events_of = [&](const Pipe& in, const Pipe& out) {
      const bool held = stalled_ || (replies_held_ && !in.from_client);
      const bool reads = !held && !in.ended && in.queued_bytes < kMaxQueuedBytes;
      const bool writes = !trickles && IsDue(out);
      return static_cast<short>((reads ? POLLIN : 0) | (writes ? POLLOUT : 0));
    };
    for (const Connection& c : connections_) {
      const short client_events = events_of(c.up, c.down);
      const short server_events = events_of(c.down, c.up);
      // Without events an end would still be reported as closed, again and again.
      waiters.push_back({.fd = client_events != 0 ? c.up.from : -1, .events = client_events});
      waiters.push_back({.fd = server_events != 0 ? c.up.to : -1, .events = server_events});
    }
    poll(waiters.data(), waiters.size(), kPollMs);
    size_t i = 1;
    for (auto it = connections_.begin(); it != connections_.end();) {
      const short client_events = waiters[i++].revents;
      const short server_events = waiters[i++].revents;
      bool lives = true;
      if ((client_events & ~POLLOUT) != 0) lives = Receive(it->up);
      if (lives && (server_events & ~POLLOUT) != 0) lives = Receive(it->down);
      for (Pipe* const pipe : {&it->up, &it->down}) {
        if (lives && IsDue(*pipe)) lives = Send(*pipe);
        if (pipe->ended && pipe->pieces.empty()) lives = false;
      }
      if (lives) {
        ++it;
      } else {
        close(it->up.from);
        close(it->up.to);
        it = connections_.erase(it);
      }
    }
    if ((waiters[0].revents & POLLIN) != 0) Accept();
  }
}

}  // namespace ema
