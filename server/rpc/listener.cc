// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/listener.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ema {
namespace {

// Where the system lacks what a connection takes, and the backlog stays readable.
constexpr int kBackoffMs = 10;

bool IsLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  }
  return address->sa_family == AF_INET &&
         ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24 == 127;
}

int OpenSpare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(
        "listen address \"", address, "\": expected host:port, such as 127.0.0.1:50051"));
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found);
      error != 0) {
    return absl::NotFoundError(
        absl::StrCat("listen address \"", address, "\": ", gai_strerror(error)));
  }
  const absl::Cleanup free_found = [&] { freeaddrinfo(found); };

  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return absl::InternalError(absl::StrCat("socket: ", std::strerror(errno)));
  absl::Cleanup close_fd = [fd] { close(fd); };
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  // bbr, some systems' default, paces loopback. Connections inherit this.
  if (IsLoopback(found->ai_addr)) setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  if (bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, SOMAXCONN) != 0) {
    const int error = errno;
    const std::string message =
        absl::StrCat("cannot listen on ", address, ": ", std::strerror(error));
    if (error == EADDRINUSE) {
      return absl::AlreadyExistsError(
          absl::StrCat(message, "; stop the other server or choose another port with --listen"));
    }
    return absl::InternalError(message);
  }
  sockaddr_storage bound{};
  socklen_t bound_size = sizeof(bound);
  getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &bound_size);
  const int bound_port = bound.ss_family == AF_INET6
                             ? ntohs(reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port)
                             : ntohs(reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  std::move(close_fd).Cancel();
  return std::unique_ptr<Listener>(
      new Listener(fd, eventfd(0, EFD_CLOEXEC), OpenSpare(), bound_port));
}

Listener::~Listener() {
  Stop();
  close(stop_fd_);
  if (spare_fd_ >= 0) close(spare_fd_);
}

void Listener::Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor) {
  acceptor_ = std::move(acceptor);
  thread_ = std::thread([this] { Accept(); });
}

void Listener::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(stop_fd_, &one, sizeof(one));
    thread_.join();
  }
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

void Listener::Accept() {
  pollfd polled[] = {{fd_, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
  while (true) {
    poll(polled, 2, -1);
    if (polled[1].revents != 0) return;
    const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      const int on = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.listener_fd = fd_;
      connection.fd = fd;
      acceptor_->HandleNewConnection(&connection);
    } else if (errno == EMFILE || errno == ENFILE) {
      // Refuse the connection with the spare descriptor; left in the backlog, it would be found
      // readable for ever.
      close(spare_fd_);
      const int refused = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
      if (refused >= 0) close(refused);
      spare_fd_ = OpenSpare();
      if (spare_fd_ < 0) poll(nullptr, 0, kBackoffMs);
    } else if (errno == ENOBUFS || errno == ENOMEM) {
      poll(nullptr, 0, kBackoffMs);
    }
  }
}

}  // namespace ema
