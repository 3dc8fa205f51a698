// SPDX-License-Identifier: Apache-2.0
//
// The state that a client's calls share: the connection, opened on demand, and the retry policy.
#ifndef EMA_CLIENT_CPP_CLIENT_IMPL_H_
#define EMA_CLIENT_CPP_CLIENT_IMPL_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/dial.h"
#include "client/cpp/transport/fork_guard.h"
#include "client/cpp/transport/interrupt.h"
#include "client/cpp/transport/lanes.h"
#include "client/cpp/transport/token.h"
#include "ema/client.h"
#include "ema/internal/status_macros.h"
#include "grpc/health/v1/health.pb.h"
#include "server/base/steady_wait.h"

namespace ema {

namespace client_internal {

using Stub = v1::EmaService::Stub;

class PartitionMap;

// Return a request for `model`, or for one version of it.
template <typename Request>
Request MakeRequest(std::string_view model) {
  Request request;
  request.set_model(std::string(model));
  return request;
}
template <typename Request>
Request MakeRequest(std::string_view model, const VersionId& id) {
  Request request = MakeRequest<Request>(model);
  request.set_version(id.version);
  request.set_incarnation(id.incarnation);
  return request;
}

}  // namespace client_internal

// Thread-safe. Shared by a client and its runs.
class Client::Impl : public std::enable_shared_from_this<Client::Impl> {
 public:
  using Call = client_internal::Call;
  using Connection = client_internal::Connection;
  using Interrupt = client_internal::Interrupt;

  // `addresses`: at least one. Several addresses are servers of one group, and any of them can be
  // used.
  Impl(std::vector<client_internal::Address> addresses, const Options& options);

  const Options& options() const { return options_; }
  const client_internal::Token& token() const { return token_; }
  // `timeout` from now; zero: Options::timeout.
  SteadyTime Deadline(absl::Duration timeout) const {
    return After(SteadyNow(), timeout == absl::ZeroDuration() ? options_.timeout : timeout);
  }
  const client_internal::ForkGuard& fork_guard() const { return fork_guard_; }

  // Returns the client of the group's server at `address`, with this client's options. Returns this
  // client if `address` is its only address. INTERNAL: not HOST:PORT.
  absl::StatusOr<std::shared_ptr<Impl>> ClientOfMember(std::string_view address)
      ABSL_LOCKS_EXCLUDED(members_mu_);

  // The partitions of a model, as the last call of SetPartitions() has set them. Null: unknown, or
  // the model is on one server.
  std::shared_ptr<const client_internal::PartitionMap> FindPartitions(
      const std::string& model) const ABSL_LOCKS_EXCLUDED(members_mu_);
  void SetPartitions(const std::string& model,
                     std::shared_ptr<const client_internal::PartitionMap> partitions)
      ABSL_LOCKS_EXCLUDED(members_mu_);

  // Returns the open connection. If there is none, opens one, as Dial() does; if it has broken,
  // begins with the next address. Errors as Connection::Open().
  absl::StatusOr<std::shared_ptr<Connection>> Connect(SteadyTime deadline, Interrupt* interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Appends connections until there are `count`, or no more can be opened soon.
  void ConnectMore(int64_t count, Interrupt* interrupt,
                   std::vector<std::shared_ptr<Connection>>* connections) ABSL_LOCKS_EXCLUDED(mu_);
  // Closes the additional connections once they are unused.
  void DropMoreConnections() ABSL_LOCKS_EXCLUDED(mu_);
  // Options::max_connections, with 0 replaced by the default.
  int64_t max_connections() const;

  // A same-host lane to the server for one call; return it by ReturnLane() if the call succeeds.
  // Errors as FindLane(); use gRPC then.
  absl::StatusOr<std::unique_ptr<LanePipe>> TakeLane(SteadyTime deadline, Interrupt* interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // LanePool::OpenWithWindow(), if the server offers lanes to this host.
  absl::StatusOr<std::unique_ptr<LanePipe>> OpenWindowLane(const SharedMemory& window,
                                                           SteadyTime deadline,
                                                           Interrupt* interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // `max_idle` as for LanePool::Return().
  void ReturnLane(std::unique_ptr<LanePipe> lane,
                  int64_t max_idle = std::numeric_limits<int64_t>::max()) {
    lanes_.Return(std::move(lane), max_idle);
  }
  // OK if the server offers lanes to this host. Otherwise why there is none, or why it is not known
  // in time.
  absl::Status FindLane(SteadyTime deadline, Interrupt* interrupt) ABSL_LOCKS_EXCLUDED(mu_);

  // Makes one call without retries. Returns the result of `attempt`, a Status or StatusOr. Does not
  // follow NOT_HOME.
  template <typename Attempt>
  std::invoke_result_t<Attempt, Call&> Try(SteadyTime deadline, Interrupt* interrupt,
                                           Attempt attempt) {
    EMA_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection, Connect(deadline, interrupt));
    Call call(std::move(connection), deadline, interrupt);
    return attempt(call);
  }

  // Makes one call. If the server answers NOT_HOME, repeats it once, on the server that the answer
  // names. UNAVAILABLE, NOT_HOME: that one names a server other than itself, so one of the two has
  // old records.
  absl::Status TryAtHome(SteadyTime deadline, Interrupt* interrupt,
                         absl::FunctionRef<absl::Status(Call&)> attempt);
  // Repeats TryAtHome() while its error is transient and the deadline allows. Returns the last
  // transient error if time runs out.
  absl::Status Retry(SteadyTime deadline, Interrupt* interrupt,
                     absl::FunctionRef<absl::Status(Call&)> attempt);

  template <typename Request, typename Response>
  using UnaryMethod = std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (
      client_internal::Stub::*)(grpc::ClientContext*, const Request&, grpc::CompletionQueue*);
  // A unary call, with retries.
  template <typename Request, typename Response>
  absl::StatusOr<Response> UnaryWithRetries(UnaryMethod<Request, Response> prepare,
                                            const Request& request, SteadyTime deadline,
                                            Interrupt* interrupt) {
    Response response;
    EMA_RETURN_IF_ERROR(Retry(deadline, interrupt, [&](Call& call) -> absl::Status {
      EMA_ASSIGN_OR_RETURN(response, UnaryOn(call, prepare, request));
      return absl::OkStatus();
    }));
    return response;
  }
  // A unary call without retries.
  template <typename Request, typename Response>
  absl::StatusOr<Response> UnaryOnce(UnaryMethod<Request, Response> prepare, const Request& request,
                                     SteadyTime deadline, Interrupt* interrupt) {
    Response response;
    EMA_RETURN_IF_ERROR(TryAtHome(deadline, interrupt, [&](Call& call) -> absl::Status {
      EMA_ASSIGN_OR_RETURN(response, UnaryOn(call, prepare, request));
      return absl::OkStatus();
    }));
    return response;
  }
  // The same two for a call by the user, on the user's thread.
  template <typename Request, typename Response>
  absl::StatusOr<Response> UnaryWithRetries(UnaryMethod<Request, Response> prepare,
                                            const Request& request, absl::Duration timeout) {
    Interrupt interrupt(&options_.is_interrupted);
    return UnaryWithRetries(prepare, request, Deadline(timeout), &interrupt);
  }
  template <typename Request, typename Response>
  absl::StatusOr<Response> UnaryOnce(UnaryMethod<Request, Response> prepare, const Request& request,
                                     absl::Duration timeout) {
    Interrupt interrupt(&options_.is_interrupted);
    return UnaryOnce(prepare, request, Deadline(timeout), &interrupt);
  }
  // Makes a unary call on an existing Call.
  template <typename Request, typename Response>
  static absl::StatusOr<Response> UnaryOn(Call& call, UnaryMethod<Request, Response> prepare,
                                          const Request& request) {
    // Not gRPC's blocking form, which cannot poll the interrupt.
    grpc::CompletionQueue queue;
    return AwaitUnary((call.connection().stub().*prepare)(call.context(), request, &queue), &queue,
                      call);
  }
  // Starts the call that was prepared on `queue`, and waits for its end. Shuts the queue down.
  template <typename Response>
  static absl::StatusOr<Response> AwaitUnary(
      std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> reader,
      grpc::CompletionQueue* queue, Call& call) {
    reader->StartCall();
    Response response;
    grpc::Status status;
    reader->Finish(&response, &status, reader.get());
    call.Await(queue);
    queue->Shutdown();
    EMA_RETURN_IF_ERROR(call.Result(status));
    return response;
  }

 private:
  // Opens a connection, beginning with the last address used. After UNAVAILABLE it tries the next
  // address, each address at most once; any other error is returned at once.
  absl::StatusOr<std::shared_ptr<Connection>> Dial(SteadyTime deadline, Interrupt* interrupt);

  const client_internal::ForkGuard fork_guard_;
  const Options options_;
  const client_internal::Token token_;
  const std::vector<client_internal::Address> addresses_;

  absl::Mutex mu_;           // Not held while dialing.
  SteadyWait dialing_wait_;  // Woken when `is_dialing_` changes.
  bool is_dialing_ ABSL_GUARDED_BY(mu_) = false;
  // These two belong to the thread that has set `is_dialing_`. One dialer for each address.
  std::vector<client_internal::Dialer> dialers_;
  size_t next_dialer_ = 0;
  size_t connected_address_ ABSL_GUARDED_BY(mu_) = 0;
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<Connection>> more_connections_ ABSL_GUARDED_BY(mu_);
  // The connection over which the lanes were queried. A new one may lead to a restarted server,
  // which offers other lanes.
  std::weak_ptr<Connection> lanes_of_ ABSL_GUARDED_BY(mu_);
  SteadyTime no_lane_until_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();
  absl::Duration lane_pause_ ABSL_GUARDED_BY(mu_) = absl::Seconds(1);
  client_internal::LanePool lanes_;

  mutable absl::Mutex members_mu_;
  std::map<std::string, std::shared_ptr<Impl>> members_ ABSL_GUARDED_BY(members_mu_);
  // By the name of the model.
  std::map<std::string, std::shared_ptr<const client_internal::PartitionMap>> partitions_
      ABSL_GUARDED_BY(members_mu_);
};

}  // namespace ema

#endif  // EMA_CLIENT_CPP_CLIENT_IMPL_H_
