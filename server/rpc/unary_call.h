// SPDX-License-Identifier: Apache-2.0
//
// A call with one request and one response.
#ifndef EMA_SERVER_RPC_UNARY_CALL_H_
#define EMA_SERVER_RPC_UNARY_CALL_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "absl/status/statusor.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/rpc/authorization.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/grpc_status.h"
#include "server/rpc/rpc_context.h"

namespace ema {

// The model that a request concerns, which the caller's token must cover. A request without a field
// of that name does not compile until it has a line here.
template <typename Request>
std::optional<std::string_view> ModelOf(const Request& request) requires requires {
  request.model();
}
{ return request.model(); }
template <typename Request>
std::optional<std::string_view> ModelOf(const Request& request) requires requires {
  request.from();
}
{ return request.from().model(); }
inline std::optional<std::string_view> ModelOf(const v1::ListModelsRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const v1::GetLaneRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const v1::GetServerInfoRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const v1::GetGroupRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const v1::DescribeMemberRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const v1::SetLogLevelRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const v1::DrainRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const grpc::health::v1::HealthCheckRequest&) {
  return {};
}

// Where a handler runs.
struct WorkerChoice {
  Worker* worker = nullptr;  // On its thread, where it may block. Null: on the queue's.
  // Kept until the handler has run, or will not run.
  std::shared_ptr<const void> held = nullptr;
};

// Makes every call of a method run on `worker`.
inline auto On(Worker* worker) {
  return [worker](const auto&) { return WorkerChoice{.worker = worker}; };
}

// gRPC delivers the call with its request read and parsed. The call is admitted, perhaps waits for
// a worker and is admitted again, and is answered. It keeps itself alive while gRPC or a worker can
// still call it.
template <typename Request, typename Response>
class UnaryCall final : public std::enable_shared_from_this<UnaryCall<Request, Response>> {
 public:
  struct Method {
    std::string_view name;  // A literal, such as "/ema.v1.EmaService/GetModel".
    // Asks gRPC for the next call.
    std::function<void(grpc::ServerContext*, Request*, grpc::ServerAsyncResponseWriter<Response>*,
                       grpc::ServerCompletionQueue*, void* tag)>
        request_next;
    std::function<absl::StatusOr<Response>(const Request&, const Access&)> handle;
    std::function<WorkerChoice(const Request&)> choose_worker;
    // If set, runs on the queue's thread in place of both, and answers later: it calls `reply`
    // once, from any thread, before the queue is shut down.
    std::function<void(const Request&, const Access&,
                       std::function<void(const absl::StatusOr<Response>&)> reply)>
        hold;
  };

  // Waits for the next call on `queue`, and again whenever one arrives.
  static void Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue,
                     std::shared_ptr<const Method> method) {
    std::shared_ptr<UnaryCall> call(new UnaryCall(rpc, queue, std::move(method)));
    // A call that waits for its turn has no other way to learn that its client has cancelled.
    call->context_.AsyncNotifyWhenDone(call->done_.Arm(call));
    void* const tag = call->accepted_.Arm(call);
    call->method_->request_next(&call->context_, &call->request_, &call->responder_, queue, tag);
  }

 private:
  UnaryCall(RpcContext* rpc, grpc::ServerCompletionQueue* queue,
            std::shared_ptr<const Method> method)
      : rpc_(rpc), queue_(queue), method_(std::move(method)) {}

  void OnAccepted(bool ok) {
    if (!ok) return done_.Disarm();  // The server is shutting down: gRPC does not return that tag.
    Listen(rpc_, queue_, method_);
    if (absl::Status status = CatchExceptions([this] { return Start(); }); !status.ok()) {
      Finish(status);
    }
  }
  void OnDone(bool) {
    if (context_.IsCancelled()) is_cancelled_.store(true, std::memory_order_relaxed);
  }
  void OnFinished(bool) {}

  absl::Status Start() {
    EMA_ASSIGN_OR_RETURN(caller_,
                         rpc_->admission.Admit(method_->name, context_, ModelOf(request_)));
    if (method_->hold) {
      method_->hold(request_, caller_.access,
                    [self = this->shared_from_this()](const absl::StatusOr<Response>& reply) {
                      self->Finish(reply);
                    });
      return absl::OkStatus();
    }
    WorkerChoice choice = method_->choose_worker(request_);
    if (choice.worker == nullptr) {
      Finish(Handle());
      return absl::OkStatus();
    }
    return choice.worker->Run(
        [self = this->shared_from_this(), held = std::move(choice.held)] {
          self->Finish(CatchExceptions([&self] { return self->RunQueued(); }));
        },
        static_cast<int64_t>(request_.SpaceUsedLong()));
  }
  absl::StatusOr<Response> RunQueued() {
    if (is_cancelled_.load(std::memory_order_relaxed)) {
      return absl::CancelledError("client cancelled while the call was queued");
    }
    if (context_.deadline() < std::chrono::system_clock::now()) {
      return absl::DeadlineExceededError("deadline exceeded while the call was queued");
    }
    EMA_ASSIGN_OR_RETURN(caller_,
                         rpc_->admission.Admit(method_->name, context_, ModelOf(request_)));
    return Handle();
  }
  absl::StatusOr<Response> Handle() {
    const LogCallerScope scope(&caller_.log);
    absl::StatusOr<Response> response =
        CatchExceptions([this] { return method_->handle(request_, caller_.access); });
    if (RoleFor(method_->name) == Role::kAdmin) LogOperation(response.status());
    return response;
  }
  // Operators' calls are on record at every level of the log.
  void LogOperation(const absl::Status& status) {
    LogEvent event{.level = LogLevel::kInfo, .name = "operator call", .is_record = true};
    event.fields = {{"rpc", ShortName(method_->name)}, {"status", status}};
    if (const auto model = ModelOf(request_)) event.fields.emplace_back("model", *model);
    if (rpc_->log) rpc_->log(event);
  }
  void Finish(const absl::StatusOr<Response>& response) {
    request_ = Request();  // The client may be slow to accept the response.
    const bool is_probe = RoleFor(method_->name) == Role::kAnonymous;
    const std::string_view name = ShortName(method_->name);
    is_probe ? rpc_->observer->OnProbeEnded(name, response.status())
             : rpc_->observer->OnRpcEnded(name, response.status());
    void* const tag = finished_.Arm(this->shared_from_this());
    if (response.ok()) return responder_.Finish(*response, grpc::Status::OK, tag);
    responder_.FinishWithError(ToGrpcStatus(response.status(), context_), tag);
  }

  RpcContext* const rpc_;
  const std::shared_ptr<const void> live_ =
      rpc_->live_calls.Add();  // Declared first, so destroyed last.
  grpc::ServerCompletionQueue* const queue_;
  const std::shared_ptr<const Method> method_;
  grpc::ServerContext context_;
  Request request_;
  grpc::ServerAsyncResponseWriter<Response> responder_{&context_};
  Caller caller_;  // Set on the queue's thread, and again on the worker's.
  MemberTag<UnaryCall> accepted_{&UnaryCall::OnAccepted};
  MemberTag<UnaryCall> finished_{&UnaryCall::OnFinished};
  MemberTag<UnaryCall> done_{&UnaryCall::OnDone};
  std::atomic<bool> is_cancelled_ = false;  // By the client. Relaxed: it may cancel a moment later.
};

// Answers the calls of one method: `request_next` is the generated function that asks `service` for
// the next call, such as &RpcContext::EmaService::RequestGetModel.
template <typename Service, typename Base, typename Request, typename Response>
void ListenUnary(
    RpcContext* rpc, grpc::ServerCompletionQueue* queue, Service* service, std::string_view name,
    void (Base::*request_next)(grpc::ServerContext*, Request*,
                               grpc::ServerAsyncResponseWriter<Response>*, grpc::CompletionQueue*,
                               grpc::ServerCompletionQueue*, void*),
    std::type_identity_t<decltype(UnaryCall<Request, Response>::Method::handle)> handle,
    std::type_identity_t<decltype(UnaryCall<Request, Response>::Method::choose_worker)>
        choose_worker = [](const Request&) { return WorkerChoice(); }) {
  using Call = UnaryCall<Request, Response>;
  auto next = [=](auto* context, auto* request, auto* responder, auto* on, void* tag) {
    (service->*request_next)(context, request, responder, on, on, tag);
  };
  Call::Listen(
      rpc, queue,
      std::make_shared<const typename Call::Method>(typename Call::Method{
          name, std::move(next), std::move(handle), std::move(choose_worker), /*hold=*/nullptr}));
}

// The same for a method whose calls are answered later, by `hold`.
template <typename Service, typename Base, typename Request, typename Response>
void ListenHeld(RpcContext* rpc, grpc::ServerCompletionQueue* queue, Service* service,
                std::string_view name,
                void (Base::*request_next)(grpc::ServerContext*, Request*,
                                           grpc::ServerAsyncResponseWriter<Response>*,
                                           grpc::CompletionQueue*, grpc::ServerCompletionQueue*,
                                           void*),
                std::type_identity_t<decltype(UnaryCall<Request, Response>::Method::hold)> hold) {
  using Call = UnaryCall<Request, Response>;
  auto next = [=](auto* context, auto* request, auto* responder, auto* on, void* tag) {
    (service->*request_next)(context, request, responder, on, on, tag);
  };
  Call::Listen(rpc, queue,
               std::make_shared<const typename Call::Method>(
                   typename Call::Method{name, std::move(next), /*handle=*/nullptr,
                                         /*choose_worker=*/nullptr, std::move(hold)}));
}

}  // namespace ema

#endif  // EMA_SERVER_RPC_UNARY_CALL_H_
