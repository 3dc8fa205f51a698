// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/watch_call.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/rpc/convert_core.h"
#include "server/rpc/grpc_status.h"

namespace ema {
namespace {

constexpr char kWatch[] = "/ema.v1.EmaService/Watch";

}  // namespace

void WatchCall::Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue) {
  std::shared_ptr<WatchCall> call(new WatchCall(rpc, queue));
  // An idle watch has no other way to learn that its client has cancelled.
  call->context_.AsyncNotifyWhenDone(call->done_.Arm(call));
  void* const tag = call->accepted_.Arm(call);
  rpc->service.RequestWatch(&call->context_, &call->request_, &call->stream_, queue, queue, tag);
}

WatchCall::~WatchCall() { rpc_->watches.Leave(this); }

void WatchCall::OnAccepted(bool ok) {
  if (!ok) return done_.Disarm();  // The server is shutting down: gRPC does not return that tag.
  Listen(rpc_, queue_);
  const v1::WatchRequest request = std::exchange(request_, v1::WatchRequest());
  if (absl::Status status = CatchExceptions([&] { return Start(request); }); !status.ok()) {
    absl::MutexLock lock(&mu_);
    FinishLocked(status);
  }
}

absl::Status WatchCall::Start(const v1::WatchRequest& request) {
  EMA_ASSIGN_OR_RETURN(caller_, rpc_->admission.Admit(kWatch, context_, request.model()));
  if (rpc_->group != nullptr) EMA_RETURN_IF_ERROR(rpc_->group->CheckHome(request.model()));
  EMA_ASSIGN_OR_RETURN(model_, rpc_->store->Get(request.model()));
  if (request.after_version() < 0 || request.incarnation() < 0) {
    return BadRequest(absl::StrCat("after_version: ", request.after_version(), ", incarnation: ",
                                   request.incarnation(), " given, expected 0 or more"));
  }
  EMA_RETURN_IF_ERROR(
      rpc_->watches.Enter(this, caller_.authorization, caller_.log.peer, request.model()));
  {
    absl::MutexLock lock(&mu_);
    if (is_finishing_) return absl::OkStatus();  // End() was called a moment ago.
    if (request.has_after_version()) {
      last_version_ = request.after_version();
      last_incarnation_ = request.incarnation();
    } else if (const std::optional<Version> latest = model_->history().latest()) {
      last_version_ = latest->number;
      last_incarnation_ = latest->incarnation;
    }
    is_writing_ = true;  // The headers come first.
  }
  watcher_ = model_->watchers().Watch([this] { Advance(); });
  // Tells the reader that it misses nothing from here on.
  stream_.SendInitialMetadata(written_.Arm(shared_from_this()));
  return absl::OkStatus();
}

void WatchCall::End(StreamEnd why) {
  absl::MutexLock lock(&mu_);
  end_error_ = why == StreamEnd::kRevoked ? RevokedError() : FairShareError("watch");
  // A reader that accepts nothing would not receive a status either: the stream is cut.
  if (is_writing_) return context_.TryCancel();
  FinishLocked(end_error_);
}

void WatchCall::Advance() {
  absl::MutexLock lock(&mu_);
  if (is_writing_ || is_finishing_) return;
  const absl::Status status = CatchExceptions([this] {
    mu_.AssertHeld();
    return SendNextLocked();
  });
  if (!status.ok()) FinishLocked(status);
}

absl::Status WatchCall::SendNextLocked() {
  const std::vector<VersionHistory::RecordEntry> next =
      model_->history().RecordsAfter(last_version_, last_incarnation_, 1);
  if (next.empty()) return model_->CheckOpen();
  const Version& record = next.front().record;
  v1::WatchResponse response;
  *response.mutable_version() = ToProto(record);
  // Across a restart versions may repeat, and the number of skipped ones is unknown.
  if (last_incarnation_ == 0 || last_incarnation_ == record.incarnation) {
    response.set_skipped_count(record.number - last_version_ - 1);
  }
  last_version_ = record.number;
  last_incarnation_ = record.incarnation;
  is_writing_ = true;
  stream_.Write(response, written_.Arm(shared_from_this()));
  return absl::OkStatus();
}

void WatchCall::OnWritten(bool ok) {
  {
    absl::MutexLock lock(&mu_);
    is_writing_ = false;
    // It may also have been cancelled while this was written.
    if (!ok || is_cancelled_)
      return FinishLocked(absl::CancelledError("client cancelled the call"));
    if (!end_error_.ok()) return FinishLocked(end_error_);
  }
  Advance();
}

void WatchCall::OnDone(bool) {
  absl::MutexLock lock(&mu_);
  is_cancelled_ = true;
  if (!is_writing_) FinishLocked(absl::CancelledError("client cancelled the call"));
}

void WatchCall::FinishLocked(const absl::Status& status) {
  if (is_finishing_) return;
  is_finishing_ = true;
  rpc_->observer->OnRpcEnded("Watch", status);
  stream_.Finish(ToGrpcStatus(status, context_), finished_.Arm(shared_from_this()));
}

void WatchCall::OnFinished(bool) {
  if (watcher_ != 0) model_->watchers().Unwatch(watcher_);
}

}  // namespace ema
