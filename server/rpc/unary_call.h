// SPDX-License-Identifier: Apache-2.0
//
// A call with one request and one response.
#ifndef EMA_SERVER_RPC_UNARY_CALL_H_
#define EMA_SERVER_RPC_UNARY_CALL_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "grpc/health/v1/health.pb.h"
#include "server/rpc/call.h"
#include "server/rpc/convert.h"

namespace ema {

// The model that a request is about, for which its caller must be allowed; absent: it is about
// none. A request that has no field of that name does not compile until it has a line here.
template <typename Request>
std::optional<std::string_view> ModelOf(const Request& request) requires requires {
  request.model();
}
{ return request.model(); }
inline std::optional<std::string_view> ModelOf(const v1::ListModelsRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const v1::GetLaneRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const v1::GetServerInfoRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const v1::SetLogLevelRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const v1::DrainRequest&) { return {}; }
inline std::optional<std::string_view> ModelOf(const grpc::health::v1::HealthCheckRequest&) {
  return {};
}

// Its request is read once the caller may make the call, and takes one of the places for those that
// arrive.
template <typename Request, typename Response>
class UnaryCall final : public std::enable_shared_from_this<UnaryCall<Request, Response>> {
 public:
  using Handler = std::function<absl::StatusOr<Response>(const Request&, const Access&)>;
  // Runs a handler that may block somewhere else than on the queue's thread; null: here.
  using Executor = std::function<void(std::function<void()>)>;
  // Which one a request needs.
  using ChooseExecutor = std::function<Executor(const Request&)>;

  // Asks `source` for the next call of `method`, a literal, which is one of its.
  static void Listen(RpcContext* rpc, CallSource* source, std::string_view method,
                     grpc::ServerCompletionQueue* queue, const Handler& handler,
                     const ChooseExecutor& choose_executor) {
    std::shared_ptr<UnaryCall> call(
        new UnaryCall(rpc, source, method, queue, handler, choose_executor));
    void* const tag = call->accepted_.Arm(call);
    source->Request(method, &call->context_, &call->stream_, queue, tag);
  }

 private:
  UnaryCall(RpcContext* rpc, CallSource* source, std::string_view method,
            grpc::ServerCompletionQueue* queue, Handler handler, ChooseExecutor choose_executor)
      : rpc_(rpc),
        source_(source),
        method_(method),
        queue_(queue),
        handler_(std::move(handler)),
        choose_executor_(std::move(choose_executor)) {}

  void OnAccepted(bool ok) {
    if (!ok) return;  // Shutting down.
    in_flight_ = rpc_->calls.Enter();
    Listen(rpc_, source_, method_, queue_, handler_, choose_executor_);
    absl::StatusOr<Caller> caller = rpc_->Admit(method_, context_);
    if (!caller.ok()) return Finish(caller.status());
    caller_ = *std::move(caller);
    // Nobody must be able to keep probes out by filling the places of the others.
    StreamAdmission& places = RoleFor(method_) == Role::kNobody ? rpc_->probes : rpc_->requests;
    const absl::Status status = arrival_.Begin(
        &places,
        [self = this->shared_from_this()](const absl::Status& late) { self->Finish(late); });
    if (!status.ok()) return Finish(status);
    stream_.Read(&request_, read_.Arm(this->shared_from_this()));
  }
  void OnRead(bool ok) {
    if (!arrival_.Complete()) return;
    if (!ok) return Finish(BadMessage(absl::StrCat("no ", Request::descriptor()->name())));
    const absl::Status status = rpc_->CheckModel(method_, caller_, ModelOf(request_));
    if (!status.ok()) return Finish(status);
    const Executor executor = choose_executor_(request_);
    auto answer = [self = this->shared_from_this(), is_deferred = executor != nullptr] {
      self->Answer(is_deferred);
    };
    executor != nullptr ? executor(std::move(answer)) : answer();
  }
  void Answer(bool is_deferred) {
    const LogCallerScope scope(&caller_.log);
    // A call that has waited for its executor may have nobody left who waits for it.
    const absl::StatusOr<Response> response =
        is_deferred && context_.deadline() < std::chrono::system_clock::now()
            ? absl::DeadlineExceededError("the deadline was over before the call's turn came")
            : handler_(request_, caller_.access);
    if (RoleFor(method_) == Role::kAdmin) LogOperation(response.status());
    if (!response.ok()) return Finish(response.status());
    rpc_->observer->OnRpcEnded(ShortName(method_), absl::OkStatus());
    stream_.WriteAndFinish(*response, grpc::WriteOptions(), grpc::Status::OK,
                           finished_.Arm(this->shared_from_this()));
  }
  // What an operator does is on record at every level of the log.
  void LogOperation(const absl::Status& status) {
    LogEvent event{.level = LogLevel::kInfo, .name = "operator call", .is_record = true};
    event.fields = {{"rpc", ShortName(method_)}, {"status", status}};
    if (const auto model = ModelOf(request_)) event.fields.emplace_back("model", *model);
    if (rpc_->log) rpc_->log(event);
  }
  void Finish(const absl::Status& error) {
    rpc_->observer->OnRpcEnded(ShortName(method_), error);
    stream_.Finish(ToGrpcStatus(error, context_), finished_.Arm(this->shared_from_this()));
  }
  void OnFinished(bool) {}

  RpcContext* const rpc_;
  CallSource* const source_;
  const std::string_view method_;
  grpc::ServerCompletionQueue* const queue_;
  std::shared_ptr<void> in_flight_;
  const Handler handler_;
  const ChooseExecutor choose_executor_;
  grpc::ServerContext context_;
  Request request_;
  Caller caller_;  // Constant once admitted.
  RequestArrival arrival_;
  grpc::ServerAsyncReaderWriter<Response, Request> stream_{&context_};
  MemberTag<UnaryCall> accepted_{&UnaryCall::OnAccepted};
  MemberTag<UnaryCall> read_{&UnaryCall::OnRead};
  MemberTag<UnaryCall> finished_{&UnaryCall::OnFinished};
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_UNARY_CALL_H_
