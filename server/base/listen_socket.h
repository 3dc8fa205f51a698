// SPDX-License-Identifier: Apache-2.0
//
// A TCP socket that listens.
#ifndef EMA_SERVER_BASE_LISTEN_SOCKET_H_
#define EMA_SERVER_BASE_LISTEN_SOCKET_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace ema {

struct ListenSocket {
  int fd = -1;  // The caller's: not blocking, closed in programs that are run.
  int port = 0;
  std::string text;  // Address and port, as in a URL.
};

// Listens on "host:port", with an IP address ("[...]" around IPv6) or a name; port 0: any free one.
// `option` is what the messages of errors call it. INVALID_ARGUMENT: not of that form.
// ALREADY_EXISTS: somebody listens there. NOT_FOUND: no such host. INTERNAL: the system refuses.
absl::StatusOr<ListenSocket> ListenTcp(const std::string& address, std::string_view option);

// A descriptor that is readable once 8 bytes have been written to it; the caller's. INTERNAL: the
// system refuses.
absl::StatusOr<int> NewEvent();

// What connections of clients leave to checkpoints, the log and the HTTP page.
inline constexpr int64_t kReservedFiles = 64;

// Accepts connections, and gets over having no file descriptor left: a spare one is kept, to refuse
// with what would else stay in the backlog. For one thread.
class ConnectionAcceptor {
 public:
  enum class Outcome {
    kAccepted,
    kNone,       // It has gone again.
    kRefused,    // There was no descriptor for it, but reserved ones.
    kExhausted,  // The system lacks something: wait a little; the backlog stays readable.
  };
  struct Accepted {
    Outcome outcome = Outcome::kNone;
    int fd = -1;       // The caller's, if kAccepted.
    std::string peer;  // As PeerText(), if kRefused.
  };

  // `listen_fd` stays the caller's. Connections leave the last `reserved_files` descriptors of the
  // process to others, at most a quarter of all.
  explicit ConnectionAcceptor(int listen_fd, int64_t reserved_files = 0);
  ~ConnectionAcceptor();
  ConnectionAcceptor(const ConnectionAcceptor&) = delete;
  ConnectionAcceptor& operator=(const ConnectionAcceptor&) = delete;

  // REQUIRES: the socket is readable, or does not block. `flags` as accept4().
  Accepted Accept(int flags);

 private:
  bool IsReserved(int fd) const;

  const int listen_fd_;
  const int64_t reserved_files_;
  int spare_fd_;  // -1: there is none.
};

}  // namespace ema

#endif  // EMA_SERVER_BASE_LISTEN_SOCKET_H_
