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

namespace ema {

// A listening TCP socket whose connections are handed to a gRPC server. gRPC's own listener stops
// accepting for ever after one moment without free file descriptors (CVE-2023-4785, in 1.51.1);
// this one keeps a spare descriptor to refuse with.
class Listener {
 public:
  // Binds `address`, "host:port" with an IP address or a name, port 0 for any free one. Connections
  // wait in the kernel until Start(). INVALID_ARGUMENT: not of that form. ALREADY_EXISTS: the port
  // is in use. NOT_FOUND: no such host.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const std::string& address);
  ~Listener();

  int port() const { return port_; }

  // Starts a thread that accepts. REQUIRES: the acceptor's server has been started and outlives
  // Stop().
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor);
  // Stops accepting and closes the socket. Again: does nothing.
  void Stop();

 private:
  Listener(int fd, int stop_fd, int spare_fd, int port)
      : fd_(fd), stop_fd_(stop_fd), spare_fd_(spare_fd), port_(port) {}
  void Accept();

  int fd_;
  const int stop_fd_;  // Readable: stop.
  int spare_fd_;       // Only on the thread.
  const int port_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_LISTENER_H_
