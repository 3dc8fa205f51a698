// SPDX-License-Identifier: Apache-2.0
//
// A connection that carries gRPC, and the calls on it.
#ifndef EMA_CLIENT_CPP_TRANSPORT_CONNECTION_H_
#define EMA_CLIENT_CPP_TRANSPORT_CONNECTION_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/transport/dial.h"
#include "client/cpp/transport/interrupt.h"
#include "client/cpp/transport/token.h"
#include "ema/client.h"
#include "ema/v1/ema_service.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// A gRPC channel over a socket that this class opens. It does not reconnect: its owner replaces it
// when it has died. If gRPC opened the socket, it could not be made to drop slices that the kernel
// does not accept, and the socket would not keep a congestion control setting. Over TLS gRPC must
// open it, since this version of gRPC accepts sockets only without TLS. A call whose bytes the
// kernel does not accept then ends only when TCP times out, after 20 s, so weights are copied
// there. Thread-safe.
class Connection {
 public:
  // `tls`: used if the dialer's address says so. `token`: sent with all calls. Errors as
  // Dialer::Dial(), and INVALID_ARGUMENT, BAD_REQUEST: a file of `tls` cannot be read;
  // UNAVAILABLE: the client's certificate has expired. If a TLS handshake fails, the first
  // call returns the error.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(Dialer& dialer, const Client::Tls& tls,
                                                          const Token& token, SteadyTime deadline,
                                                          Interrupt* interrupt);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const std::string& address() const { return address_; }
  // False: gRPC owns it, as over TLS. Break() then cannot make gRPC drop slices.
  bool owns_socket() const { return fd_ >= 0; }
  v1::EmaService::Stub& stub() { return stub_; }
  grpc::GenericStub& generic_stub() { return generic_stub_; }
  grpc::health::v1::Health::Stub& health_stub() { return health_stub_; }

  // False: the connection is broken, or closed by the peer.
  bool is_alive() const ABSL_LOCKS_EXCLUDED(mu_);

  // Ends all its calls, and discards the bytes that gRPC has not sent. Slices are dropped once a
  // thread polls gRPC. Not to be called with a lock held that a slice's destroy callback acquires.
  void Break() ABSL_LOCKS_EXCLUDED(mu_);
  bool is_broken() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class Call;

  Connection(std::string address, const Token& token, int fd,
             std::shared_ptr<grpc::Channel> channel, std::string likely_tls_problem = "");

  // Register running calls, so that Break() can end them. Once for each call, not for each message.
  void Add(std::shared_ptr<grpc::ClientContext> context) ABSL_LOCKS_EXCLUDED(mu_);
  void Remove(const grpc::ClientContext* context) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string address_;
  const Token token_;
  // A duplicate of the socket's descriptor, which stays valid when gRPC has closed its own. -1:
  // gRPC owns the socket.
  const int fd_;
  // The likely cause if the server closes the connection during the TLS handshake, for the error.
  // Empty: without TLS.
  const std::string likely_tls_problem_;
  const std::shared_ptr<grpc::Channel> channel_;
  v1::EmaService::Stub stub_;
  grpc::GenericStub generic_stub_;
  grpc::health::v1::Health::Stub health_stub_;

  mutable absl::Mutex mu_;
  bool is_broken_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::shared_ptr<grpc::ClientContext>> contexts_ ABSL_GUARDED_BY(mu_);
};

// One call: its context, which the connection and `interrupt` can cancel while this object lives.
// For one thread, except Cancel().
class Call {
 public:
  Call(std::shared_ptr<Connection> connection, SteadyTime deadline, Interrupt* interrupt);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Connection& connection() { return *connection_; }
  grpc::ClientContext* context() { return context_.get(); }
  // Makes the operations of the call end soon. From any thread.
  void Cancel();

  // The outcome of an operation on a completion queue.
  enum class Event { kOk, kFailed, kTimeout };
  // Waits until `wait_end` for the next event of `queue`, on which this call has an operation. The
  // interrupt cancels the call, so that an event follows soon. Also kFailed if the queue has been
  // shut down.
  Event Await(grpc::CompletionQueue* queue, SteadyTime wait_end = SteadyTime::max());

  // Returns how the call ended, with the ErrorDetail of its trailer. If gRPC reports UNAVAILABLE
  // without a detail, the connection is marked as broken. REQUIRES: gRPC has returned `status`.
  absl::Status Result(const grpc::Status& status);

 private:
  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<grpc::ClientContext> context_;
  const SteadyTime deadline_;
  Interrupt* const interrupt_;
  void NoteCancelled();
  std::atomic<SteadyTime> cancelled_at_ = SteadyTime::max();
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_CONNECTION_H_
