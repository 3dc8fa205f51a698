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
#include "server/base/log_throttle.h"
#include "server/base/observer.h"
#include "server/base/rpc_limits.h"
#include "server/rpc/open_connections.h"

namespace ema {

// A listening socket whose connections are handed to a gRPC server. gRPC's own listener stops
// accepting forever after one moment without free file descriptors (CVE-2023-4785, in 1.51.1);
// this one recovers. It closes excess connections before HTTP/2, which could give the reason, so
// the log and the observer get it instead.
class Listener {
 public:
  // Binds `address`: "host:port" with an IP address or a name, port 0 for any free one, or
  // "unix:/path", whose socket file is made, for the process's own user, and removed by Stop().
  // Connections wait in the kernel until Start(). INVALID_ARGUMENT: not of that form.
  // ALREADY_EXISTS: another server listens there, or the path is that of a file other than a
  // socket, which stays. NOT_FOUND: no such host.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const std::string& address);
  ~Listener();

  bool is_unix() const { return !path_.empty(); }
  // 0 for a unix socket.
  int port() const { return port_; }

  // Starts a thread that accepts as many connections as `connections` allows. REQUIRES: the
  // acceptor's server has been started. It, `connections` and `observer` outlive Stop().
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor,
             const RpcLimits& limits, OpenConnections* connections, ServerObserver* observer,
             LogSink log);
  // Stops accepting and closes the socket. Calling it again does nothing.
  void Stop();

 private:
  Listener(int fd, int stop_fd, int port, std::string path)
      : fd_(fd),
        stop_fd_(stop_fd),
        connection_acceptor_(fd, kReservedFiles),
        port_(port),
        path_(std::move(path)) {}

  static absl::StatusOr<std::unique_ptr<Listener>> BindTcp(const std::string& address);
  static absl::StatusOr<std::unique_ptr<Listener>> BindUnix(const std::string& path);
  void Accept();

  int fd_;
  const int stop_fd_;                       // Readable: stop.
  ConnectionAcceptor connection_acceptor_;  // Used only by the thread, like grpc_acceptor_.
  const int port_;
  const std::string path_;  // The unix socket's; empty: TCP.
  // Constant after Start(), like the next three.
  RpcLimits limits_;
  OpenConnections* connections_ = nullptr;
  ServerObserver* observer_ = nullptr;
  LogSink log_;
  LogThrottle refusals_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> grpc_acceptor_;
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_LISTENER_H_
