// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/watch_call.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/rpc/convert.h"

namespace ema {
namespace {

constexpr char kWatch[] = "/ema.v1.EmaService/Watch";

}  // namespace

void WatchCall::Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue) {
  std::shared_ptr<WatchCall> call(new WatchCall(rpc, queue));
  // An idle watch has no other way to learn that its reader has left.
  call->context_.AsyncNotifyWhenDone(call->done_.Arm(call));
  void* const tag = call->accepted_.Arm(call);
  rpc->service.Request(kWatch, &call->context_, &call->stream_, queue, tag);
}

WatchCall::WatchCall(RpcContext* rpc, grpc::ServerCompletionQueue* queue)
    : rpc_(rpc), queue_(queue), arrival_(rpc, kWatch) {}

WatchCall::~WatchCall() { rpc_->watches.Leave(this); }

void WatchCall::OnAccepted(bool ok) {
  if (!ok) return done_.Disarm();  // Shutting down: gRPC does not give that tag back.
  in_flight_ = rpc_->calls.Enter();
  Listen(rpc_, queue_);
  arrival_.Begin(
      context_, [this] { stream_.Read(&message_, read_.Arm(shared_from_this())); },
      [self = shared_from_this()](const absl::Status& status) {
        absl::MutexLock lock(&self->mu_);
        self->FinishLocked(status);
      });
}

void WatchCall::OnRead(bool ok) {
  if (!arrival_.Complete(ok)) return;
  const LogCallerScope scope(&arrival_.caller().log);
  // Not kept: with unknown fields it takes tens of MiB.
  const auto request = CatchExceptions([this] { return ParseRequest<v1::WatchRequest>(message_); });
  const absl::Status status =
      CatchExceptions([&] { return request.ok() ? Start(*request) : request.status(); });
  {
    absl::MutexLock lock(&mu_);
    if (!status.ok()) FinishLocked(status);
    if (finishing_) return;  // Or the reader has left.
    const std::optional<Version> latest = model_->history().latest();
    if (request->has_after_version()) {
      last_version_ = request->after_version();
      last_incarnation_ = request->incarnation();
    } else if (latest.has_value()) {
      last_version_ = latest->number;
      last_incarnation_ = latest->incarnation;
    }
    // Tells the reader that it misses nothing from here on.
    writing_ = true;
    stream_.SendInitialMetadata(written_.Arm(shared_from_this()));
  }
  watcher_ = model_->watchers().Watch([this] { Advance(); });
}

absl::Status WatchCall::Start(const v1::WatchRequest& request) {
  EMA_RETURN_IF_ERROR(rpc_->CheckModel(kWatch, arrival_.caller(), request.model()));
  EMA_ASSIGN_OR_RETURN(model_, rpc_->store->Get(request.model()));
  if (request.after_version() < 0 || request.incarnation() < 0) {
    return BadRequest(absl::StrCat("after_version: ", request.after_version(), ", incarnation: ",
                                   request.incarnation(), " given, expected 0 or more"));
  }
  SetCaller(kWatch, arrival_.caller().authorization, request.model());
  return rpc_->watches.Enter(this, rpc_->authenticator);
}

void WatchCall::End(StreamEnd) {
  absl::MutexLock lock(&mu_);
  is_revoked_ = true;
  // A reader that takes nothing could not be told why, either: the stream is cut.
  if (writing_) return context_.TryCancel();
  FinishLocked(RevokedError());
}

void WatchCall::Advance() {
  absl::MutexLock lock(&mu_);
  if (writing_ || finishing_) return;
  const std::vector<VersionHistory::RecordEntry> next =
      model_->history().RecordsAfter(last_version_, last_incarnation_, 1);
  if (next.empty()) {
    if (absl::Status closed = model_->closed(); !closed.ok()) FinishLocked(closed);
    return;
  }
  const Version& record = next.front().record;
  v1::WatchResponse response;
  *response.mutable_version() = ToProto(record);
  // Across a restart versions may repeat, and nobody knows how many there were.
  if (last_incarnation_ == 0 || last_incarnation_ == record.incarnation) {
    response.set_skipped_count(record.number - last_version_ - 1);
  }
  last_version_ = record.number;
  last_incarnation_ = record.incarnation;
  writing_ = true;
  stream_.Write(response, written_.Arm(shared_from_this()));
}

void WatchCall::OnWritten(bool ok) {
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    // It may also have left while this was written.
    if (!ok || left_) return FinishLocked(absl::CancelledError("client cancelled the call"));
    if (is_revoked_) return FinishLocked(RevokedError());
  }
  Advance();
}

void WatchCall::OnDone(bool) {
  absl::MutexLock lock(&mu_);
  left_ = true;
  if (!writing_) FinishLocked(absl::CancelledError("client cancelled the call"));
}

void WatchCall::FinishLocked(const absl::Status& status) {
  if (finishing_) return;
  finishing_ = true;
  arrival_.TellEnd(status);
  stream_.Finish(ToGrpcStatus(status, context_), finished_.Arm(shared_from_this()));
}

void WatchCall::OnFinished(bool ok) {
  arrival_.TellSent(ok);
  if (watcher_ != 0) model_->watchers().Unwatch(watcher_);
}

}  // namespace ema
