// SPDX-License-Identifier: Apache-2.0
//
// A call with one request and one response.
#ifndef EMA_SERVER_RPC_UNARY_CALL_H_
#define EMA_SERVER_RPC_UNARY_CALL_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "ema/shard.h"
#include "grpc/health/v1/health.pb.h"
#include "server/core/model_config.h"
#include "server/rpc/request_arrival.h"
#include "server/rpc/rpc_context.h"

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

// One that opens a run is as long as its layout.
template <typename Request>
inline constexpr bool kMayBeLong = requires(const Request& request) {
  request.layout();
};

// INVALID_ARGUMENT: `request` is larger than one that waits for its turn may be.
template <typename Request>
absl::Status CheckMayWait(const Request& request) {
  constexpr size_t kMaxBytes = size_t{64} << 10;
  if constexpr (requires { request.tracks_size(); }) {
    if (request.tracks_size() > kMaxTracks) {
      return BadRequest(
          absl::StrCat("tracks: ", request.tracks_size(), " given, expected at most ", kMaxTracks));
    }
  }
  if constexpr (kMayBeLong<Request>) {
    return RankLayout::CheckCount(request.layout().shards_size());
  } else {
    if (const size_t bytes = request.ByteSizeLong(); bytes > kMaxBytes) {
      return BadRequest(absl::StrCat("a ", Request::descriptor()->name(), " of ", bytes,
                                     " bytes, expected at most ", kMaxBytes));
    }
  }
  return absl::OkStatus();
}

// Where a request's handler runs.
struct Turn {
  Worker* worker = nullptr;          // On its thread, and may block there. Null: on the queue's.
  std::shared_ptr<const void> held;  // With a worker: until the handler has run, or will not.
};

// A call with one request and one reply. The request is read only after the caller has been
// admitted, and has one of the places for arriving requests meanwhile (see RequestArrival). The
// call may then wait for a worker; when its turn comes, its caller is admitted once more.
template <typename Request, typename Response>
class UnaryCall final : public std::enable_shared_from_this<UnaryCall<Request, Response>> {
 public:
  using Handler = std::function<absl::StatusOr<Response>(const Request&, const Access&)>;
  using ChooseTurn = std::function<Turn(const Request&)>;

  // Asks `source` for the next call of `method`, a literal, which is one of its.
  static void Listen(RpcContext* rpc, GenericService* source, std::string_view method,
                     grpc::ServerCompletionQueue* queue, const Handler& handler,
                     const ChooseTurn& choose_turn) {
    std::shared_ptr<UnaryCall> call(
        new UnaryCall(rpc, source, method, queue, handler, choose_turn));
    // A call that waits for its turn has no other way to learn that its caller has left.
    call->context_.AsyncNotifyWhenDone(call->done_.Arm(call));
    void* const tag = call->accepted_.Arm(call);
    source->Request(method, &call->context_, &call->stream_, queue, tag);
  }

 private:
  UnaryCall(RpcContext* rpc, GenericService* source, std::string_view method,
            grpc::ServerCompletionQueue* queue, Handler handler, ChooseTurn choose_turn)
      : rpc_(rpc),
        source_(source),
        method_(method),
        queue_(queue),
        handler_(std::move(handler)),
        choose_turn_(std::move(choose_turn)),
        arrival_(rpc, method) {}

  void OnAccepted(bool ok) {
    if (!ok) return done_.Disarm();  // Shutting down: gRPC does not give that tag back.
    in_flight_ = rpc_->calls.Enter();
    Listen(rpc_, source_, method_, queue_, handler_, choose_turn_);
    arrival_.Begin(
        context_, [this] { stream_.Read(&message_, read_.Arm(this->shared_from_this())); },
        [self = this->shared_from_this()](const absl::Status& status) { self->Finish(status); });
  }
  void OnRead(bool ok) {
    if (!arrival_.Complete(ok)) return;
    if (absl::Status status = CatchExceptions([this] { return Start(); }); !status.ok()) {
      Finish(status);
    }
  }
  absl::Status Start() {
    EMA_ASSIGN_OR_RETURN(request_, ParseRequest<Request>(message_));
    EMA_RETURN_IF_ERROR(CheckModel());
    Turn turn = choose_turn_(request_);
    if (turn.worker == nullptr) {
      Answer(absl::OkStatus());
      return absl::OkStatus();
    }
    EMA_RETURN_IF_ERROR(CheckMayWait(request_));
    // Of unknown fields a message takes five times their bytes.
    if constexpr (!kMayBeLong<Request>) request_.DiscardUnknownFields();
    EMA_RETURN_IF_ERROR(Pack());
    return turn.worker->Run([self = this->shared_from_this(), held = std::move(turn.held)] {
      self->Answer(CatchExceptions([&self] { return self->TakeTurn(); }));
    });
  }
  // While it waits, a long request takes its bytes: with all its fields it takes ten times as many.
  absl::Status Pack() {
    if constexpr (kMayBeLong<Request>) {
      packed_ = request_.SerializeAsString();
      EMA_ASSIGN_OR_RETURN(
          packed_memory_,
          rpc_->waiting.Reserve(absl::StrCat("a waiting ", std::string(ShortName(method_))),
                                static_cast<int64_t>(packed_.size())));
      request_ = Request();
    }
    return absl::OkStatus();
  }
  void Unpack() {
    if constexpr (kMayBeLong<Request>) {
      request_.ParseFromString(std::exchange(packed_, std::string()));
      packed_memory_ = nullptr;
    }
  }
  absl::Status CheckModel() {
    return rpc_->CheckModel(method_, arrival_.caller(), ModelOf(request_));
  }
  // Whether a call that has waited may still begin.
  absl::Status TakeTurn() {
    Unpack();
    if (has_left_.load(std::memory_order_relaxed)) {
      return absl::CancelledError("client cancelled while the call was queued");
    }
    if (context_.deadline() < std::chrono::system_clock::now()) {
      return absl::DeadlineExceededError("deadline exceeded while the call was queued");
    }
    EMA_RETURN_IF_ERROR(arrival_.AdmitAgain());
    return CheckModel();
  }
  void Answer(const absl::Status& may_begin) {
    const LogCallerScope scope(&arrival_.caller().log);
    const auto handle = [&]() -> absl::StatusOr<Response> {
      EMA_RETURN_IF_ERROR(may_begin);
      return handler_(request_, arrival_.caller().access);
    };
    const absl::StatusOr<Response> response = CatchExceptions(handle);
    if (RoleFor(method_) == Role::kAdmin) LogOperation(response.status());
    request_ = Request();  // The client may take its time with the reply.
    if (!response.ok()) return Finish(response.status());
    const absl::Status status =
        arrival_.BeginReply(response->ByteSizeLong(), [this] { context_.TryCancel(); });
    // Who may have changed something is told of it all the same.
    if (!status.ok() && RoleFor(method_) == Role::kEvaluator) return Finish(status);
    arrival_.TellEnd(absl::OkStatus());
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
    arrival_.TellEnd(error);
    stream_.Finish(ToGrpcStatus(error, context_), finished_.Arm(this->shared_from_this()));
  }
  void OnFinished(bool ok) { arrival_.TellSent(ok); }
  void OnDone(bool) {
    if (context_.IsCancelled()) has_left_.store(true, std::memory_order_relaxed);
  }

  RpcContext* const rpc_;
  GenericService* const source_;
  const std::string_view method_;
  grpc::ServerCompletionQueue* const queue_;
  std::shared_ptr<void> in_flight_;
  const Handler handler_;
  const ChooseTurn choose_turn_;
  grpc::ServerContext context_;
  grpc::ByteBuffer message_;  // As it arrives. gRPC does not tell a bad one from none.
  Request request_;
  std::string packed_;  // The same, while the call waits.
  std::unique_ptr<MemoryBudget::Reservation> packed_memory_;
  RequestArrival arrival_;
  grpc::ServerAsyncReaderWriter<Response, grpc::ByteBuffer> stream_{&context_};
  MemberTag<UnaryCall> accepted_{&UnaryCall::OnAccepted};
  MemberTag<UnaryCall> read_{&UnaryCall::OnRead};
  MemberTag<UnaryCall> finished_{&UnaryCall::OnFinished};
  MemberTag<UnaryCall> done_{&UnaryCall::OnDone};
  std::atomic<bool> has_left_ = false;  // The caller. Relaxed: it may leave a moment later.
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_UNARY_CALL_H_
