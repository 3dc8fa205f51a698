// SPDX-License-Identifier: Apache-2.0
//
// What all calls on our completion queues share: tags, admission, stall checks, one-response calls.
#ifndef EMA_SERVER_RPC_CALL_H_
#define EMA_SERVER_RPC_CALL_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "ema/v1/ema_service.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/base/observer.h"
#include "server/base/place_limit.h"
#include "server/core/checkpoints.h"
#include "server/core/model_store.h"
#include "server/rpc/authorization.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/grpc_status.h"
#include "server/rpc/rate_limit.h"

namespace ema {

// The calls with one request and one response, on completion queues.
template <typename Base>
using AsyncUnary =
    v1::EmaService::WithAsyncMethod_CreateModel<v1::EmaService::WithAsyncMethod_UpdateModel<
        v1::EmaService::WithAsyncMethod_GetModel<v1::EmaService::WithAsyncMethod_ListModels<
            v1::EmaService::WithAsyncMethod_DeleteModel<v1::EmaService::WithAsyncMethod_OpenRun<
                v1::EmaService::WithAsyncMethod_QueryPush<v1::EmaService::WithAsyncMethod_GetLane<
                    v1::EmaService::WithAsyncMethod_ListVersions<
                        v1::EmaService::WithAsyncMethod_GetStatistics<
                            v1::EmaService::WithAsyncMethod_Synthesize<Base>>>>>>>>>>>;
// Those of checkpoints, labels and the files beside them, likewise.
template <typename Base>
using AsyncCheckpoints = v1::EmaService::WithAsyncMethod_CreateCheckpoint<
    v1::EmaService::WithAsyncMethod_GetCheckpoint<v1::EmaService::WithAsyncMethod_ListCheckpoints<
        v1::EmaService::WithAsyncMethod_DeleteCheckpoint<
            v1::EmaService::WithAsyncMethod_RestoreCheckpoint<
                v1::EmaService::WithAsyncMethod_SetLabel<
                    v1::EmaService::WithAsyncMethod_ReportMetric<
                        v1::EmaService::WithAsyncMethod_AttachFile<
                            v1::EmaService::WithAsyncMethod_GetAttachedFile<Base>>>>>>>>>;
// Those about the server itself.
template <typename Base>
using AsyncOperator = v1::EmaService::WithAsyncMethod_GetServerInfo<
    v1::EmaService::WithAsyncMethod_SetLogLevel<v1::EmaService::WithAsyncMethod_Drain<Base>>>;
// The service with every method on completion queues; the data plane takes and gives raw bytes.
using AsyncService = v1::EmaService::WithRawMethod_Push<
    v1::EmaService::WithRawMethod_Pull<v1::EmaService::WithAsyncMethod_Watch<
        AsyncUnary<AsyncCheckpoints<AsyncOperator<v1::EmaService::Service>>>>>>;

// A tag that calls a member function, and keeps its call alive while the operation is under way.
template <typename Call>
class MemberTag final : public CompletionTag {
 public:
  explicit MemberTag(void (Call::*handler)(bool)) : handler_(handler) {}
  // To be passed to gRPC as the tag. REQUIRES: not armed.
  void* Arm(std::shared_ptr<Call> call) {
    call_ = std::move(call);
    return static_cast<CompletionTag*>(this);
  }
  // For a tag that gRPC will never give back.
  void Disarm() { call_.reset(); }
  void Complete(bool ok) override {
    const std::shared_ptr<Call> call = std::move(call_);
    ((*call).*handler_)(ok);
  }

 private:
  void (Call::*const handler_)(bool);
  std::shared_ptr<Call> call_;
};

// A call that may wait for its peer. Its completions are on one thread; EndStalled() is called
// from another.
class StreamCall {
 public:
  // How long the call has waited for its peer; zero: it does not.
  std::chrono::steady_clock::duration WaitingTime(std::chrono::steady_clock::time_point now) const {
    const int64_t since = waiting_since_.load(std::memory_order_relaxed);
    return since == 0 ? std::chrono::steady_clock::duration::zero()
                      : now - std::chrono::steady_clock::time_point(
                                  std::chrono::steady_clock::duration(since));
  }
  // Ends the call because its peer does nothing. From any thread.
  virtual void EndStalled() = 0;

 protected:
  ~StreamCall() = default;
  // The call begins here, and works. On the call's thread, as all that follows.
  void BeginTiming() {
    marked_time_ = std::chrono::steady_clock::now();
    waited_ = worked_ = std::chrono::steady_clock::duration::zero();
  }
  void SetWaiting(bool waiting) {
    const std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now();
    (waiting ? worked_ : waited_) += now - marked_time_;
    marked_time_ = now;
    waiting_since_.store(waiting ? now.time_since_epoch().count() : 0, std::memory_order_relaxed);
  }
  // Of the whole call, up to the last SetWaiting().
  std::chrono::steady_clock::duration waited() const { return waited_; }
  std::chrono::steady_clock::duration worked() const { return worked_; }
  // When the last SetWaiting() was.
  std::chrono::steady_clock::time_point marked_time() const { return marked_time_; }

 private:
  // Ticks of the steady clock; 0: not waiting. Relaxed: a stall may be seen one check later.
  std::atomic<int64_t> waiting_since_ = 0;
  std::chrono::steady_clock::time_point marked_time_;
  std::chrono::steady_clock::duration waited_ = {};
  std::chrono::steady_clock::duration worked_ = {};
};

// Admits data streams up to a limit, and ends those that stall. When all places are taken, a new
// stream gets that of the one whose peer has done nothing for longest, if that is a tenth of the
// time-out: stalled peers do not keep others out for all of it. One stream at a time loses its
// place so, with a pause of a fortieth: where the path is slow and no message arrives in that time,
// streams would else take each other's places for ever. Thread-safe.
class StreamAdmission {
 public:
  StreamAdmission(std::string kind, int64_t limit, std::chrono::nanoseconds stall_timeout)
      : kind_(std::move(kind)), limit_(limit), stall_timeout_(stall_timeout) {}

  // RESOURCE_EXHAUSTED, TOO_MANY_STREAMS. OK: `call` is checked for stalls until Leave().
  absl::Status Enter(StreamCall* call) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (static_cast<int64_t>(calls_.size()) >= limit_ && !EndLongestStalled()) {
      absl::Status status =
          MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyStreams,
                    absl::StrCat("the server has ", limit_, " ", kind_,
                                 " streams open, as many as it may have"));
      SetRetryDelay(status, absl::Milliseconds(50));
      return status;
    }
    calls_.insert(call);
    return absl::OkStatus();
  }
  // Again, or without Enter(): does nothing.
  void Leave(StreamCall* call) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    calls_.erase(call);
  }
  int64_t open_count() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return static_cast<int64_t>(calls_.size());
  }
  int64_t limit() const { return limit_; }
  // Ends those that have stalled for the whole time-out.
  void CheckStalled(std::chrono::steady_clock::time_point now) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    for (StreamCall* const call : calls_) {
      if (call->WaitingTime(now) > stall_timeout_) call->EndStalled();
    }
  }

 private:
  // False: none has stalled.
  bool EndLongestStalled() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto now = std::chrono::steady_clock::now();
    const auto longest = std::max_element(
        calls_.begin(), calls_.end(),
        [now](const auto* a, const auto* b) { return a->WaitingTime(now) < b->WaitingTime(now); });
    if (longest == calls_.end() || (*longest)->WaitingTime(now) < stall_timeout_ / 10 ||
        now < next_end_time_) {
      return false;
    }
    next_end_time_ = now + stall_timeout_ / 40;
    (*longest)->EndStalled();
    calls_.erase(longest);
    return true;
  }

  const std::string kind_;
  const int64_t limit_;
  const std::chrono::nanoseconds stall_timeout_;
  mutable absl::Mutex mu_;
  absl::flat_hash_set<StreamCall*> calls_ ABSL_GUARDED_BY(mu_);
  std::chrono::steady_clock::time_point next_end_time_ ABSL_GUARDED_BY(mu_);
};

// Counts the calls that are under way. Thread-safe.
class CallsInFlight {
 public:
  // One call, for as long as the result is held.
  std::shared_ptr<void> Enter() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    ++count_;
    return std::shared_ptr<void>(nullptr, [this](void*) {
      absl::MutexLock leave(&mu_);
      --count_;
    });
  }
  // Waits until there is none, at most until `deadline`.
  void AwaitNone(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return count_ == 0; };
    mu_.AwaitWithDeadline(absl::Condition(&none), deadline);
  }

 private:
  absl::Mutex mu_;
  int64_t count_ ABSL_GUARDED_BY(mu_) = 0;
};

// What calls need of their server; outlives them.
struct RpcContext {
  // What the caller may do, if the call may begin. RESOURCE_EXHAUSTED, TOO_MANY_CALLS; UNAVAILABLE,
  // DRAINING; and as Authorize().
  absl::StatusOr<Access> Admit(std::string_view method, const grpc::ServerContext& context,
                               std::optional<std::string_view> model) {
    // Probes must get through whatever else an address does.
    if (RoleFor(method) != Role::kNobody) {
      absl::Status status = rate.Take(context.peer(), std::chrono::steady_clock::now());
      if (!status.ok()) return status;
    }
    return Admit(method, AuthorizationOf(context), model);
  }
  // The same for a call that came some other way, with that token. It counts for no rate.
  absl::StatusOr<Access> Admit(std::string_view method, std::string_view authorization,
                               std::optional<std::string_view> model) const {
    absl::StatusOr<Access> access = Authorize(authenticator, method, authorization, model);
    if (access.ok() && refuses_work.load(std::memory_order_relaxed) && BeginsWork(method)) {
      return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDraining,
                       "the server is shutting down");
    }
    return access;
  }

  AsyncService service;
  grpc::health::v1::Health::AsyncService health;
  std::shared_ptr<ModelStore> store;
  StreamAdmission pushes;
  StreamAdmission pulls;
  const std::shared_ptr<PlaceLimit> watches;
  RateLimit rate;
  std::atomic<bool> refuses_work = false;  // Relaxed: a call may just have got in.
  CallsInFlight calls;
  Checkpoints* checkpoints = nullptr;            // Outlives this. Never null in a server.
  const Authenticator* authenticator = nullptr;  // Outlives this. Null: all callers may do all.
  ServerObserver* observer = nullptr;            // Outlives this. Never null.
  // Runs a function on the thread that reads what pulls need of the disk: a chunk each, in turn.
  std::function<void(std::function<void()>)> disk_reader;
};

// A call with one request and one response.
template <typename Request, typename Response>
class UnaryCall final : public std::enable_shared_from_this<UnaryCall<Request, Response>> {
 public:
  using Writer = grpc::ServerAsyncResponseWriter<Response>;
  // Asks gRPC for the next call of this method.
  using Accept = std::function<void(grpc::ServerContext*, Request*, Writer*,
                                    grpc::ServerCompletionQueue*, void* tag)>;
  using Handler = std::function<absl::StatusOr<Response>(const Request&, const Access&)>;
  // Runs a handler that may block somewhere else than on the queue's thread; null: here.
  using Executor = std::function<void(std::function<void()>)>;
  // Which one a request needs.
  using ChooseExecutor = std::function<Executor(const Request&)>;

  // `name`: the method's, a literal.
  static void Listen(RpcContext* rpc, const char* name, grpc::ServerCompletionQueue* queue,
                     const Accept& accept, const Handler& handler,
                     const ChooseExecutor& choose_executor) {
    std::shared_ptr<UnaryCall> call(
        new UnaryCall(rpc, name, queue, accept, handler, choose_executor));
    void* const tag = call->accepted_.Arm(call);
    accept(&call->context_, &call->request_, &call->writer_, queue, tag);
  }

 private:
  UnaryCall(RpcContext* rpc, const char* name, grpc::ServerCompletionQueue* queue, Accept accept,
            Handler handler, ChooseExecutor choose_executor)
      : rpc_(rpc),
        name_(name),
        queue_(queue),
        accept_(std::move(accept)),
        handler_(std::move(handler)),
        choose_executor_(std::move(choose_executor)) {}

  void OnAccepted(bool ok) {
    if (!ok) return;  // Shutting down.
    in_flight_ = rpc_->calls.Enter();
    Listen(rpc_, name_, queue_, accept_, handler_, choose_executor_);
    access_ = Admit();
    if (!access_.ok()) return Finish(access_.status());
    const Executor executor = choose_executor_(request_);
    auto answer = [self = this->shared_from_this(), is_deferred = executor != nullptr] {
      self->Answer(is_deferred);
    };
    executor != nullptr ? executor(std::move(answer)) : answer();
  }
  absl::StatusOr<Access> Admit() const {
    std::optional<std::string_view> model;
    if constexpr (requires { request_.model(); }) model = request_.model();
    return rpc_->Admit(name_, context_, model);
  }
  void Answer(bool is_deferred) {
    // A call that has waited for its executor may have nobody left who waits for it.
    const absl::StatusOr<Response> response =
        is_deferred && context_.deadline() < std::chrono::system_clock::now()
            ? absl::DeadlineExceededError("the deadline was over before the call's turn came")
            : handler_(request_, *access_);
    if (!response.ok()) return Finish(response.status());
    rpc_->observer->OnRpcEnded(name_, absl::OkStatus());
    writer_.Finish(*response, grpc::Status::OK, finished_.Arm(this->shared_from_this()));
  }
  void Finish(const absl::Status& error) {
    rpc_->observer->OnRpcEnded(name_, error);
    writer_.FinishWithError(ToGrpcStatus(error, context_), finished_.Arm(this->shared_from_this()));
  }
  void OnFinished(bool) {}

  RpcContext* const rpc_;
  const char* const name_;
  grpc::ServerCompletionQueue* const queue_;
  std::shared_ptr<void> in_flight_;
  const Accept accept_;
  const Handler handler_;
  const ChooseExecutor choose_executor_;
  grpc::ServerContext context_;
  Request request_;
  absl::StatusOr<Access> access_;
  Writer writer_{&context_};
  MemberTag<UnaryCall> accepted_{&UnaryCall::OnAccepted};
  MemberTag<UnaryCall> finished_{&UnaryCall::OnFinished};
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_CALL_H_
