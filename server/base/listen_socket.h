// SPDX-License-Identifier: Apache-2.0
//
// Listening sockets.
#ifndef EMA_SERVER_BASE_LISTEN_SOCKET_H_
#define EMA_SERVER_BASE_LISTEN_SOCKET_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace ema {

struct ListenSocket {
  int fd = -1;  // Owned by the caller; non-blocking, close-on-exec.
  int port = 0;
  std::string text;  // Address and port as in a URL.
};

// Listens on "host:port", with an IP address ("[...]" around IPv6) or a name; port 0: any free one.
// `option` is the flag that error messages name. INVALID_ARGUMENT: malformed address.
// ALREADY_EXISTS: the port is in use. NOT_FOUND: unknown host. INTERNAL: another system error.
absl::StatusOr<ListenSocket> ListenTcp(const std::string& address, std::string_view option);

// Listens on the socket file `path`, which is made for the process's own user; a file that a killed
// server has left there is replaced. Returns the descriptor: the caller's, non-blocking,
// close-on-exec. The caller removes the file before it closes the descriptor: afterwards the file
// may be that of the next server. `address` is what error messages name. INVALID_ARGUMENT: not an
// absolute path, or too long. ALREADY_EXISTS: another server listens there, or the path is that of
// a file other than a socket, which stays. INTERNAL: another system error.
absl::StatusOr<int> ListenUnix(const std::string& path, const std::string& address);

// Creates an eventfd, which is readable once 8 bytes have been written to it. The caller closes it.
absl::StatusOr<int> NewEvent();

// File descriptors reserved for checkpoints and the HTTP server: client connections get the others.
inline constexpr int64_t kReservedFiles = 64;

// Accepts connections, also when the process has no file descriptor left: it then closes a spare
// one to accept and close connections that would otherwise stay in the backlog. For one thread.
class ConnectionAcceptor {
 public:
  enum class Outcome {
    kAccepted,
    kNone,       // No connection was waiting, or its peer has disconnected.
    kRefused,    // Closed, since only reserved descriptors are left.
    kExhausted,  // The system has no resources: wait briefly; the socket stays readable.
  };
  struct Accepted {
    Outcome outcome = Outcome::kNone;
    int fd = -1;       // If kAccepted; owned by the caller.
    std::string peer;  // As PeerText(), if kRefused.
  };

  // `listen_fd` stays owned by the caller. The last `reserved_files` descriptors of the process,
  // but at most a quarter of all, are not used for connections.
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
