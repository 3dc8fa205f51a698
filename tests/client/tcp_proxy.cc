// SPDX-License-Identifier: Apache-2.0
#include "tests/client/tcp_proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

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
  listen(listen_fd_, 16);
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
  for (const Pair& pair : pairs_) {
    CloseWithReset(pair.client);
    CloseWithReset(pair.server);
  }
  pairs_.clear();
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
  pairs_.push_back({client, server});
}

bool TcpProxy::Forward(int from, int to, bool counted) {
  static thread_local std::vector<char> buffer(64 << 10);
  const ssize_t size = recv(from, buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (size <= 0) return size < 0 && errno == EAGAIN;
  for (ssize_t sent = 0; sent < size;) {
    const ssize_t now = send(to, buffer.data() + sent, size - sent, MSG_NOSIGNAL);
    if (now <= 0) return false;
    sent += now;
  }
  if (counted && cut_after_ > 0 && (cut_after_ -= size) <= 0) {
    cut_after_ = 0;
    cut_ = true;
  }
  return true;
}

void TcpProxy::Loop() {
  while (!stop_) {
    if (cut_) {
      CloseAll();
      cut_ = false;
      cut_.notify_all();
    }
    std::vector<pollfd> waiters = {{.fd = listen_fd_, .events = POLLIN, .revents = 0}};
    if (!stalled_) {
      for (const Pair& pair : pairs_) {
        waiters.push_back({.fd = pair.client, .events = POLLIN, .revents = 0});
        waiters.push_back({.fd = pair.server, .events = POLLIN, .revents = 0});
      }
    }
    poll(waiters.data(), waiters.size(), 2);
    if ((waiters[0].revents & POLLIN) != 0) Accept();
    std::vector<int> ended;
    for (size_t i = 1; i < waiters.size(); ++i) {
      if (waiters[i].revents == 0) continue;
      const auto pair = std::find_if(pairs_.begin(), pairs_.end(), [&](const Pair& p) {
        return p.client == waiters[i].fd || p.server == waiters[i].fd;
      });
      const bool from_client = pair->client == waiters[i].fd;
      if (!Forward(waiters[i].fd, from_client ? pair->server : pair->client, from_client)) {
        ended.push_back(pair->client);
      }
    }
    std::erase_if(pairs_, [&](const Pair& pair) {
      if (std::find(ended.begin(), ended.end(), pair.client) == ended.end()) return false;
      close(pair.client);
      close(pair.server);
      return true;
    });
  }
}

}  // namespace ema
