// SPDX-License-Identifier: Apache-2.0
//
// What all calls with one request do until it is there, and until a long reply has gone.
#ifndef EMA_SERVER_RPC_REQUEST_ARRIVAL_H_
#define EMA_SERVER_RPC_REQUEST_ARRIVAL_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "server/rpc/rpc_context.h"

namespace ema {

// Admits a call, and once more when its request has come, for meanwhile its token may have been
// taken away. Until then it has a place in a StreamAdmission, for what has come takes memory. Tells
// the observer how the call ends. Begin() and Complete() on the call's thread.
//
// A call ends in two steps: TellEnd() when it is decided how, and TellSent() when gRPC has sent the
// status. The observer is told at the first, unless the request could not be read: only the second
// shows whether the client had ended its stream without a request, or had left.
class RequestArrival final : public StreamCall {
 public:
  // `method`: a literal, as `rpc` it outlives this.
  RequestArrival(RpcContext* rpc, std::string_view method) : rpc_(rpc), method_(method) {}
  ~RequestArrival() { Leave(); }

  // If the call may begin, reads its request by `read`, which leads to Complete(); else `finish` is
  // given what to finish it with, as it is if the request takes too long; then on another thread,
  // and with a lock held that Begin() takes. `finish` keeps the call.
  void Begin(const grpc::ServerContext& context, const std::function<void()>& read,
             std::function<void(const absl::Status&)> finish);
  // A reply of so many bytes is about to be sent. A long one takes memory until the client has
  // taken it, and has a place as the request had: if it stays for too long, `cancel` is called, on
  // another thread and with a lock held; it must be good until this is destroyed, or TellSent()
  // called. RESOURCE_EXHAUSTED, TOO_MANY_STREAMS: there is none.
  absl::Status BeginReply(size_t bytes, std::function<void()> cancel);
  // The read has ended, `ok` as gRPC gives it. False: the call has been finished.
  bool Complete(bool ok);
  // Whether the call would be let in now: as RpcContext::Admit().
  absl::Status AdmitAgain();

  // Who calls. Constant between Complete() and AdmitAgain().
  const Caller& caller() const { return caller_; }

  // To be called by what finishes the call, with `status`, before gRPC is told.
  void TellEnd(const absl::Status& status);
  // To be called when gRPC has sent that, `ok` as it says.
  void TellSent(bool ok);

 private:
  void End(StreamEnd why) override;
  void Leave() {
    if (admission_ != nullptr) admission_->Leave(this);
  }
  absl::Status Enter(const grpc::ServerContext& context);
  void Tell(const absl::Status& status);

  RpcContext* const rpc_;
  const std::string_view method_;
  Caller caller_;
  StreamAdmission* admission_ = nullptr;
  // Set by whoever ends the wait; only they touch finish_ then.
  std::atomic<bool> has_ended_ = false;
  std::function<void(const absl::Status&)> finish_;
  std::function<void()> cancel_;  // Not null: the request is there, and the reply goes.
  bool has_failed_ = false;       // The read.
  bool is_told_ = false;
};

// What has arrived, which is empty then. INVALID_ARGUMENT, BAD_REQUEST: it is no Request.
template <typename Request>
absl::StatusOr<Request> ParseRequest(grpc::ByteBuffer& message) {
  Request request;
  if (grpc::GenericDeserialize<grpc::ProtoBufferReader, Request>(&message, &request).ok()) {
    return request;
  }
  return BadRequest(
      absl::StrCat("the request cannot be parsed as ", Request::descriptor()->full_name()));
}

}  // namespace ema

#endif  // EMA_SERVER_RPC_REQUEST_ARRIVAL_H_
