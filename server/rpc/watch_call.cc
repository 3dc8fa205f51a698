// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/watch_call.h"

#include <optional>
#include <utility>
#include <vector>

#include "ema/internal/status_macros.h"
#include "server/rpc/convert.h"

namespace ema {

void WatchCall::Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue) {
  std::shared_ptr<WatchCall> call(new WatchCall(rpc, queue));
  // An idle watch has no other way to learn that its reader has left.
  call->context_.AsyncNotifyWhenDone(call->done_.Arm(call));
  void* const tag = call->accepted_.Arm(call);
  rpc->service.RequestWatch(&call->context_, &call->request_, &call->writer_, queue, queue, tag);
}

void WatchCall::OnAccepted(bool ok) {
  if (!ok) return done_.Disarm();  // Shutting down: gRPC does not give that tag back.
  in_flight_ = rpc_->calls.Enter();
  Listen(rpc_, queue_);
  absl::StatusOr<std::shared_ptr<Model>> model = FindModel();
  if (absl::Status status = model.ok() ? TakePlace() : model.status(); !status.ok()) {
    absl::MutexLock lock(&mu_);
    return FinishLocked(status);
  }
  model_ = *std::move(model);
  if (request_.after_version() < 0 || request_.incarnation() < 0) {
    absl::MutexLock lock(&mu_);
    return FinishLocked(MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kBadRequest,
        absl::StrCat("after_version: ", request_.after_version(),
                     ", incarnation: ", request_.incarnation(), " given, expected 0 or more")));
  }
  {
    absl::MutexLock lock(&mu_);
    const std::optional<VersionRecord> latest = model_->latest();
    if (request_.has_after_version()) {
      last_version_ = request_.after_version();
      last_incarnation_ = request_.incarnation();
    } else if (latest.has_value()) {
      last_version_ = latest->version;
      last_incarnation_ = latest->incarnation;
    }
    // Tells the reader that it misses nothing from here on.
    writing_ = true;
    writer_.SendInitialMetadata(written_.Arm(shared_from_this()));
  }
  watcher_ = model_->Watch([this] { Advance(); });
}

absl::StatusOr<std::shared_ptr<Model>> WatchCall::FindModel() const {
  EMA_RETURN_IF_ERROR(rpc_->Admit("Watch", context_, request_.model()).status());
  return rpc_->store->Get(request_.model());
}

absl::Status WatchCall::TakePlace() {
  place_ = rpc_->watches->Take();
  if (place_ != nullptr) return absl::OkStatus();
  absl::Status status =
      MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyStreams,
                absl::StrCat("the server has ", rpc_->watches->limit(),
                             " watches open, as many as it may have"));
  // They last.
  SetRetryDelay(status, absl::Seconds(1));
  return status;
}

void WatchCall::Advance() {
  absl::MutexLock lock(&mu_);
  if (writing_ || finishing_) return;
  const std::vector<Model::RecordEntry> next =
      model_->RecordsAfter(last_version_, last_incarnation_, 1);
  if (next.empty()) {
    if (absl::Status closed = model_->closed(); !closed.ok()) FinishLocked(closed);
    return;
  }
  const VersionRecord& record = next.front().record;
  v1::WatchResponse response;
  *response.mutable_version() = ToProto(record);
  // Across a restart versions may repeat, and nobody knows how many there were.
  if (last_incarnation_ == 0 || last_incarnation_ == record.incarnation) {
    response.set_skipped_count(record.version - last_version_ - 1);
  }
  last_version_ = record.version;
  last_incarnation_ = record.incarnation;
  writing_ = true;
  writer_.Write(response, written_.Arm(shared_from_this()));
}

void WatchCall::OnWritten(bool ok) {
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    // It may also have left while this was written.
    if (!ok || left_) return FinishLocked(absl::CancelledError("the reader has left"));
  }
  Advance();
}

void WatchCall::OnDone(bool) {
  absl::MutexLock lock(&mu_);
  left_ = true;
  if (!writing_) FinishLocked(absl::CancelledError("the reader has left"));
}

void WatchCall::FinishLocked(const absl::Status& status) {
  if (finishing_) return;
  finishing_ = true;
  rpc_->observer->OnRpcEnded("Watch", status);
  writer_.Finish(ToGrpcStatus(status, context_), finished_.Arm(shared_from_this()));
}

void WatchCall::OnFinished(bool) {
  if (watcher_ != 0) model_->Unwatch(watcher_);
}

}  // namespace ema
