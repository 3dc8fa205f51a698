// SPDX-License-Identifier: Apache-2.0
//
// Accepts connections for gRPC.
#ifndef EMA_SERVER_RPC_LISTENER_H_
#define EMA_SERVER_RPC_LISTENER_H_

#include <grpcpp/server_builder.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "server/base/listen_socket.h"
#include "server/base/log_event.h"
#include "server/base/observer.h"
#include "server/rpc/open_connections.h"
#include "server/rpc/refused_connections.h"

namespace ema {

// A listening socket whose connections are handed to a gRPC server. gRPC's own listener stops
// accepting for ever after one moment without free file descriptors (CVE-2023-4785, in 1.51.1);
// this one gets over that, and closes what is more than it may have: before HTTP/2, which could say
// why, so the log and the observer are told instead.
class Listener {
 public:
  // Binds `address`: "host:port" with an IP address or a name, port 0 for any free one, or
  // "unix:/path", whose socket file is made, for the process's own user, and removed by Stop().
  // Connections wait in the kernel until Start(). INVALID_ARGUMENT: not of that form.
  // ALREADY_EXISTS: somebody listens there, or the path is that of a file other than a socket,
  // which stays.
  // NOT_FOUND: no such host. `connections`, which says how many more there may be, outlives it.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const std::string& address,
                                                        OpenConnections* connections);
  ~Listener();

  bool is_unix() const { return !path_.empty(); }
  // 0: of a unix socket.
  int port() const { return port_; }

  // Starts a thread that accepts. REQUIRES: the acceptor's server has been started and outlives
  // Stop(), as `observer` does.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor,
             ServerObserver* observer, LogSink log);
  // Stops accepting and closes the socket. Again: does nothing.
  void Stop();

 private:
  Listener(int fd, int stop_fd, int port, std::string path, OpenConnections* connections)
      : fd_(fd),
        stop_fd_(stop_fd),
        connections_to_accept_(fd, kReservedFiles),
        port_(port),
        path_(std::move(path)),
        connections_(connections) {}

  static absl::StatusOr<std::unique_ptr<Listener>> BindTcp(const std::string& address,
                                                           OpenConnections* connections);
  static absl::StatusOr<std::unique_ptr<Listener>> BindUnix(const std::string& path,
                                                            OpenConnections* connections);
  void Accept();
  // False: there are too many.
  bool Admit(int fd);

  int fd_;
  const int stop_fd_;                         // Readable: stop.
  ConnectionAcceptor connections_to_accept_;  // Only on the thread, as acceptor_.
  const int port_;
  const std::string path_;  // Of a unix socket.
  OpenConnections* const connections_;
  ServerObserver* observer_ = nullptr;  // Constant after Start(), as log_.
  LogSink log_;
  RefusedConnections refused_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_LISTENER_H_
