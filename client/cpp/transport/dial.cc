// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/dial.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/socket_address.h"

namespace ema::client_internal {
namespace {

// For one of a host's addresses: a lost SYN is sent again after 1 and 3 seconds.
constexpr absl::Duration kConnectTimeout = absl::Seconds(5);
// How long a name service is waited for when the host has been found before.
constexpr absl::Duration kFindAgainTimeout = absl::Milliseconds(500);
// How soon a fired interrupt is noticed.
constexpr absl::Duration kDialPollInterval = absl::Milliseconds(20);
// How long sent bytes may stay unacknowledged, or the peer's window closed. As long as gRPC waits
// for the answer to a keepalive.
constexpr unsigned kUserTimeoutMs = 20'000;

// One query to the name service. getaddrinfo() has no timeout and cannot be cancelled, so it runs
// in a thread of its own, and a caller may stop waiting before it ends.
struct Lookup {
  const Address address;
  absl::Mutex mu;
  SteadyWait wait;  // Woken when it is done.
  bool done ABSL_GUARDED_BY(mu) = false;
  int error ABSL_GUARDED_BY(mu) = 0;
  std::shared_ptr<const addrinfo> found ABSL_GUARDED_BY(mu);

  explicit Lookup(Address a) : address(std::move(a)) {}

  void Ask() {
    addrinfo hints = {};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    addrinfo* list = nullptr;
    const int result = getaddrinfo(address.host.c_str(), address.port.c_str(), &hints, &list);
    absl::MutexLock lock(&mu);
    if (result == 0)
      found = std::shared_ptr<const addrinfo>(list, [list](auto*) { freeaddrinfo(list); });
    error = result;
    done = true;
    wait.WakeAll();
  }
};

void SetOptions(int fd, const sockaddr* peer) {
  // Each only makes things better, so a system that lacks one does without.
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs, sizeof(kUserTimeoutMs));
  // Before connect(): a socket that was connected with bbr continues to be paced.
  if (IsLoopback(peer)) setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

absl::Status Unavailable(std::string_view text, int error) {
  return absl::UnavailableError(absl::StrCat(std::string(text), ": ", std::strerror(error)));
}

// OK: `fd` is connected.
absl::Status Connect(int fd, const addrinfo& address, SteadyTime deadline, Interrupt* interrupt) {
  if (connect(fd, address.ai_addr, address.ai_addrlen) == 0) return absl::OkStatus();
  if (errno != EINPROGRESS) return Unavailable("cannot connect", errno);
  const SteadyTime wait_end = std::min(deadline, After(SteadyNow(), kConnectTimeout));
  pollfd waiter = {.fd = fd, .events = POLLOUT, .revents = 0};
  while (poll(&waiter, 1, static_cast<int>(absl::ToInt64Milliseconds(kDialPollInterval))) <= 0) {
    if (interrupt->fired()) return absl::CancelledError("interrupted");
    if (SteadyNow() >= deadline) return absl::DeadlineExceededError("no answer in time");
    if (SteadyNow() >= wait_end) return Unavailable("cannot connect", ETIMEDOUT);
  }
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  return error == 0 ? absl::OkStatus() : Unavailable("cannot connect", error);
}

bool IsHostCharacter(char c) {
  return c > ' ' && c != 0x7f && c != '/' && c != '[' && c != ']' && c != '@';
}

}  // namespace

absl::StatusOr<Address> Address::Parse(std::string_view text) {
  const absl::Status error = BadRequest(absl::StrCat(
      "address \"", std::string(text), "\": must be host:port, such as \"127.0.0.1:50051\" or ",
      "\"[::1]:50051\", emas://host:port over TLS, or unix:/path"));
  if (constexpr std::string_view kUnix = "unix:"; text.starts_with(kUnix)) {
    const std::string_view path = text.substr(kUnix.size());
    if (!path.starts_with('/') || path.size() >= sizeof(sockaddr_un::sun_path)) return error;
    return Address{.path = std::string(path)};
  }
  const auto has_had = [&text](std::string_view prefix) {
    if (!text.starts_with(prefix)) return false;
    text.remove_prefix(prefix.size());
    return true;
  };
  const bool is_tls_url = has_had("emas://");
  const bool is_url = is_tls_url || has_had("ema://");
  const bool is_tls = is_tls_url || (!is_url && has_had("tls:"));
  if (is_url && text.ends_with('/')) text.remove_suffix(1);
  std::string_view host = text;
  std::string port = "50051";
  // Of an IPv6 address the colons are inside brackets.
  if (const size_t colon = text.rfind(':'); colon != std::string_view::npos && text.back() != ']') {
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
  }
  const bool is_bracketed = host.size() >= 2 && host.front() == '[' && host.back() == ']';
  if (is_bracketed) host = host.substr(1, host.size() - 2);
  const bool has_colon = host.find(':') != std::string_view::npos;
  int number = 0;
  if (host.empty() || has_colon != is_bracketed ||
      !std::all_of(host.begin(), host.end(), IsHostCharacter) ||
      port.find_first_not_of("0123456789") != std::string::npos ||
      !absl::SimpleAtoi(port, &number) || number < 1 || number > 65535) {
    return error;
  }
  return Address{.host = std::string(host), .port = absl::StrCat(number), .is_tls = is_tls};
}

absl::StatusOr<std::vector<Address>> Address::ParseList(std::string_view text) {
  const bool is_unix = text.starts_with("unix:");
  std::string_view prefix;
  for (const std::string_view scheme : {"emas://", "ema://", "tls:"}) {
    if (text.starts_with(scheme)) prefix = scheme;
  }
  std::string_view rest = text.substr(prefix.size());
  std::vector<Address> addresses;
  while (true) {
    const size_t comma = is_unix ? std::string_view::npos : rest.find(',');
    EMA_ASSIGN_OR_RETURN(Address address, Parse(absl::StrCat(std::string(prefix),
                                                             std::string(rest.substr(0, comma)))));
    addresses.push_back(std::move(address));
    if (comma == std::string_view::npos) return addresses;
    rest.remove_prefix(comma + 1);
  }
}

std::string Address::ToString() const {
  if (!path.empty()) return absl::StrCat("unix:", path);
  return absl::StrCat(is_tls ? "tls:" : "", Authority());
}

std::string Address::Authority() const {
  const bool is_v6 = host.find(':') != std::string::npos;
  return is_v6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

absl::Status Dialer::Find(SteadyTime deadline, Interrupt* interrupt) {
  const auto lookup = std::make_shared<Lookup>(address_);
  try {
    std::thread([lookup] { lookup->Ask(); }).detach();
  } catch (const std::system_error& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot look up host \"", address_.host, "\": ", error.what()));
  }
  const SteadyTime wait_end =
      found_ == nullptr ? deadline : std::min(deadline, After(SteadyNow(), kFindAgainTimeout));
  absl::MutexLock lock(&lookup->mu);
  const auto is_done = [&lookup]() ABSL_SHARED_LOCKS_REQUIRED(lookup->mu) { return lookup->done; };
  while (!lookup->wait.AwaitUntil(
      lookup->mu, std::min(wait_end, After(SteadyNow(), kDialPollInterval)), is_done)) {
    // Not under the lock: asking may run the user's code.
    lookup->mu.Unlock();
    const bool is_fired = interrupt->fired();
    lookup->mu.Lock();
    if (is_fired) return absl::CancelledError("interrupted");
    if (SteadyNow() < wait_end) continue;
    if (found_ != nullptr) return absl::OkStatus();
    return absl::DeadlineExceededError(
        absl::StrCat("the name service does not answer for host \"", address_.host, "\""));
  }
  if (lookup->error == 0) found_ = lookup->found;
  if (found_ != nullptr) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cannot find host \"", address_.host, "\": ", gai_strerror(lookup->error)));
}

absl::StatusOr<int> Dialer::DialUnix() const {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, address_.path.data(), address_.path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return Unavailable("cannot create a socket", errno);
  // Succeeds at once, or fails because no process listens or the backlog is full.
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
  const absl::Status status = Unavailable("cannot connect", errno);
  close(fd);
  return status;
}

absl::StatusOr<int> Dialer::Dial(SteadyTime deadline, Interrupt* interrupt) {
  if (!address_.path.empty()) return DialUnix();
  EMA_RETURN_IF_ERROR(Find(deadline, interrupt));
  absl::Status status = absl::UnavailableError("the host has no address");
  for (const addrinfo* next = found_.get(); next != nullptr; next = next->ai_next) {
    const int fd = socket(next->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      status = Unavailable("cannot create a socket", errno);
      continue;
    }
    SetOptions(fd, next->ai_addr);
    status = Connect(fd, *next, deadline, interrupt);
    if (status.ok()) return fd;
    close(fd);
    if (status.code() != absl::StatusCode::kUnavailable) return status;
  }
  return status;
}

}  // namespace ema::client_internal
