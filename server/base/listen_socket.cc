// SPDX-License-Identifier: Apache-2.0
#include "server/base/listen_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/base/socket_address.h"

namespace ema {

namespace {

int OpenSpare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

}  // namespace

absl::StatusOr<int> NewEvent() {
  const int fd = eventfd(0, EFD_CLOEXEC);
  if (fd < 0) return absl::InternalError(absl::StrCat("eventfd: ", std::strerror(errno)));
  return fd;
}

ConnectionAcceptor::ConnectionAcceptor(int listen_fd, int64_t reserved_files)
    : listen_fd_(listen_fd), reserved_files_(reserved_files), spare_fd_(OpenSpare()) {}

ConnectionAcceptor::~ConnectionAcceptor() {
  if (spare_fd_ >= 0) close(spare_fd_);
}

bool ConnectionAcceptor::IsReserved(int fd) const {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_cur == RLIM_INFINITY) return false;
  const auto limit = static_cast<int64_t>(files.rlim_cur);
  // A new descriptor is the lowest that is free: all below it are taken.
  return fd >= limit - std::min(reserved_files_, limit / 4);
}

ConnectionAcceptor::Accepted ConnectionAcceptor::Accept(int flags) {
  sockaddr_storage address{};
  auto* const peer = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof(address);
  const int fd = accept4(listen_fd_, peer, &size, flags);
  if (fd >= 0 && IsReserved(fd)) {
    close(fd);
    return {.outcome = Outcome::kRefused, .peer = PeerText(peer)};
  }
  if (fd >= 0) return {Outcome::kAccepted, fd};
  if (errno == ENOBUFS || errno == ENOMEM) return {Outcome::kExhausted};
  if (errno != EMFILE && errno != ENFILE) return {Outcome::kNone};
  if (spare_fd_ >= 0) close(spare_fd_);
  size = sizeof(address);
  const int refused = accept4(listen_fd_, peer, &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (refused >= 0) close(refused);
  spare_fd_ = OpenSpare();
  if (spare_fd_ < 0 || refused < 0) return {Outcome::kExhausted};
  return {.outcome = Outcome::kRefused, .peer = PeerText(peer)};
}

absl::StatusOr<ListenSocket> ListenTcp(const std::string& address, std::string_view option) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("listen address \"", address,
                     "\": expected host:port, such as 127.0.0.1:50051, or unix:/path"));
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
      return absl::AlreadyExistsError(absl::StrCat(
          message, "; stop the other server or choose another port with ", std::string(option)));
    }
    return absl::InternalError(message);
  }
  sockaddr_storage bound{};
  socklen_t bound_size = sizeof(bound);
  getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &bound_size);
  std::move(close_fd).Cancel();
  ListenSocket result{.fd = fd};
  result.port = bound.ss_family == AF_INET6
                    ? ntohs(reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port)
                    : ntohs(reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  result.text = absl::StrCat(address.substr(0, colon), ":", result.port);
  return result;
}

absl::StatusOr<int> ListenUnix(const std::string& path, const std::string& address) {
  const std::string failed = absl::StrCat("cannot listen on ", address, ": ");
  sockaddr_un name{};
  if (!path.starts_with('/') || path.size() >= sizeof(name.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(failed, "expected an absolute path of at most ",
                                                   sizeof(name.sun_path) - 1,
                                                   " bytes, such as /run/ema/server.sock"));
  }
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.data(), path.size());
  const auto* const as_any = reinterpret_cast<const sockaddr*>(&name);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return absl::InternalError(absl::StrCat("socket: ", std::strerror(errno)));
  absl::Cleanup close_fd = [fd] { close(fd); };
  // bind() makes the file with this mode, less the process's umask, which must not decide who may
  // connect.
  if (fchmod(fd, S_IRUSR | S_IWUSR) != 0) {
    return absl::InternalError(absl::StrCat("fchmod: ", std::strerror(errno)));
  }
  int bound = bind(fd, as_any, sizeof(name));
  if (bound != 0 && errno == EADDRINUSE) {
    // connect() would be refused for any other file, too. A symbolic link is not ours to remove
    // either.
    struct stat there {};
    if (lstat(path.c_str(), &there) == 0 && !S_ISSOCK(there.st_mode)) {
      return absl::AlreadyExistsError(absl::StrCat(failed, "the path exists and is not a socket"));
    }
    // A server that was killed leaves its file behind, which refuses connections.
    const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0) return absl::InternalError(absl::StrCat(failed, std::strerror(errno)));
    const bool is_left = connect(probe, as_any, sizeof(name)) != 0 && errno == ECONNREFUSED;
    close(probe);
    if (!is_left) {
      return absl::AlreadyExistsError(absl::StrCat(failed, "another server listens on it"));
    }
    unlink(path.c_str());
    bound = bind(fd, as_any, sizeof(name));
  }
  if (bound != 0 || listen(fd, SOMAXCONN) != 0) {
    return absl::InternalError(absl::StrCat(failed, std::strerror(errno)));
  }
  std::move(close_fd).Cancel();
  return fd;
}

}  // namespace ema
