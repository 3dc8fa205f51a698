// SPDX-License-Identifier: Apache-2.0
//
// Accepts connections for gRPC.
#ifndef EMA_SERVER_RPC_LISTENER_H_
#define EMA_SERVER_RPC_LISTENER_H_

#include <grpcpp/server_builder.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/base/listen_socket.h"
#include "server/base/log_event.h"
#include "server/base/observer.h"
#include "server/rpc/refused_connections.h"

namespace ema {

// A listening socket whose connections are handed to a gRPC server. gRPC's own listener stops
// accepting for ever after one moment without free file descriptors (CVE-2023-4785, in 1.51.1);
// this one gets over that, and closes what is more than it may have: before HTTP/2, which could say
// why, so the log and the observer are told instead.
class Listener {
 public:
  struct Limits {
    int64_t connections = 1024;
    // Of one network as NetworkOf() has it; loopback has no such limit.
    int64_t connections_per_peer = 64;
  };

  // Binds `address`: "host:port" with an IP address or a name, port 0 for any free one, or
  // "unix:/path", whose socket file is made, and removed by Stop(). Connections wait in the kernel
  // until Start(). INVALID_ARGUMENT: not of that form. ALREADY_EXISTS: somebody listens there.
  // NOT_FOUND: no such host.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const std::string& address,
                                                        const Limits& limits);
  ~Listener();

  bool is_unix() const { return !path_.empty(); }
  // 0: of a unix socket.
  int port() const { return port_; }

  // Starts a thread that accepts. REQUIRES: the acceptor's server has been started and outlives
  // Stop(), as `observer` does.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor,
             ServerObserver* observer, LogSink log);
  // Connections that are open. Thread-safe.
  int64_t connection_count() ABSL_LOCKS_EXCLUDED(mu_);
  // Stops accepting and closes the socket. Again: does nothing.
  void Stop();

 private:
  // A connection that has been handed over. gRPC does not tell when it closes it, but then the
  // descriptor is another file, or none.
  struct Connection {
    int fd = -1;
    ino_t inode = 0;
    std::string network;  // Of its peer; empty: of this host.
  };

  Listener(int fd, int stop_fd, int port, std::string path, const Limits& limits)
      : fd_(fd),
        stop_fd_(stop_fd),
        connections_to_accept_(fd),
        port_(port),
        path_(std::move(path)),
        limits_(limits) {}

  static absl::StatusOr<std::unique_ptr<Listener>> BindTcp(const std::string& address,
                                                           const Limits& limits);
  static absl::StatusOr<std::unique_ptr<Listener>> BindUnix(const std::string& path,
                                                            const Limits& limits);
  void Accept() ABSL_LOCKS_EXCLUDED(mu_);
  // False: there are too many.
  bool Admit(int fd) ABSL_LOCKS_EXCLUDED(mu_);
  // Counts it among those that are open; or why it may not be.
  std::optional<ServerObserver::Refusal> Keep(Connection connection) ABSL_LOCKS_EXCLUDED(mu_);
  void ForgetClosed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  int fd_;
  const int stop_fd_;                         // Readable: stop.
  ConnectionAcceptor connections_to_accept_;  // Only on the thread, as acceptor_.
  const int port_;
  const std::string path_;  // Of a unix socket.
  const Limits limits_;
  ServerObserver* observer_ = nullptr;  // Constant after Start(), as log_.
  LogSink log_;
  RefusedConnections refused_;
  absl::Mutex mu_;
  std::vector<Connection> connections_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_LISTENER_H_
