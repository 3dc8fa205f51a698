// SPDX-License-Identifier: Apache-2.0
//
// A connection with gRPC on it, and the calls that use it.
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

// A channel over a socket that we have opened. It does not reconnect: when it has died, its owner
// makes another. gRPC's own channels cannot be told to let go of a slice that the kernel does not
// take, nor to leave a peer's congestion control alone; a socket of ours can. Over TLS it is one of
// gRPC's own, since this version of gRPC takes sockets only without. A call whose bytes the kernel
// does not take then ends when TCP gives the peer up, 20 s later; so weights are copied there.
// Thread-safe.
class Connection {
 public:
  // `tls`: for a dialer whose address says so. `token`: of all its calls. Errors as Dialer::Dial(),
  // and INVALID_ARGUMENT, BAD_REQUEST: a file of `tls` cannot be read. If a TLS handshake fails,
  // the first call says why.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(Dialer& dialer, const Client::Tls& tls,
                                                          const Token& token, SteadyTime deadline,
                                                          Interrupt* interrupt);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const std::string& address() const { return address_; }
  // False: it is gRPC's, as over TLS. Break() then cannot make gRPC let go of slices.
  bool owns_socket() const { return fd_ >= 0; }
  v1::EmaService::Stub& stub() { return stub_; }
  grpc::GenericStub& generic_stub() { return generic_stub_; }
  grpc::health::v1::Health::Stub& health_stub() { return health_stub_; }

  // False: broken, or closed by the peer.
  bool alive() const ABSL_LOCKS_EXCLUDED(mu_);

  // Ends all its calls, and gives up what gRPC has still to send. Slices are dropped once a thread
  // polls gRPC. Not to be called with a lock held that a slice's destroy callback takes.
  void Break() ABSL_LOCKS_EXCLUDED(mu_);
  bool broken() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class Call;

  Connection(std::string address, const Token& token, int fd,
             std::shared_ptr<grpc::Channel> channel);

  // The running calls, so that Break() can end them. Once a call, not once a message.
  void Add(std::shared_ptr<grpc::ClientContext> context) ABSL_LOCKS_EXCLUDED(mu_);
  void Remove(const grpc::ClientContext* context) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string address_;
  const Token token_;
  // A duplicate of the socket's descriptor: the number stays ours when gRPC has closed its own. -1:
  // the socket is gRPC's.
  const int fd_;
  const std::shared_ptr<grpc::Channel> channel_;
  v1::EmaService::Stub stub_;
  grpc::GenericStub generic_stub_;
  grpc::health::v1::Health::Stub health_stub_;

  mutable absl::Mutex mu_;
  bool broken_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::shared_ptr<grpc::ClientContext>> contexts_ ABSL_GUARDED_BY(mu_);
};

// One call: its context, which the connection and `interrupt` can cancel while this object lives.
// For one thread, but for Cancel().
class Call {
 public:
  Call(std::shared_ptr<Connection> connection, SteadyTime deadline, Interrupt* interrupt);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Connection& connection() { return *connection_; }
  grpc::ClientContext* context() { return context_.get(); }
  // Its operations end soon. From any thread.
  void Cancel();

  // What has come of an operation on a completion queue.
  enum class Event { kOk, kFailed, kTimeout };
  // Waits until `give_up` for the next event of `queue`, on which this call has an operation. The
  // interrupt cancels the call, so an event follows soon. kFailed also if the queue has been shut
  // down.
  Event Await(grpc::CompletionQueue* queue, SteadyTime give_up = SteadyTime::max());

  // How the call ended, with the ErrorDetail of its trailer. UNAVAILABLE without a reason: the
  // connection broke; it is marked so. REQUIRES: gRPC has given `status`.
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
