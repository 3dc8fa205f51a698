// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/request_arrival.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// As much as a call takes anyway.
constexpr size_t kMaxFreeReplyBytes = size_t{16} << 10;

}  // namespace

void RequestArrival::Begin(const grpc::ServerContext& context, const std::function<void()>& read,
                           std::function<void(const absl::Status&)> finish) {
  finish_ = std::move(finish);
  const absl::Status status = Enter(context);
  if (status.ok()) return read();
  std::exchange(finish_, nullptr)(status);
}

absl::Status RequestArrival::Enter(const grpc::ServerContext& context) {
  EMA_ASSIGN_OR_RETURN(caller_, rpc_->Admit(method_, context));
  // Nobody must be able to keep probes out by filling the places of the others.
  StreamAdmission* const places =
      RoleFor(method_) == Role::kNobody ? &rpc_->probes : &rpc_->requests;
  SetWaiting(true);
  EMA_RETURN_IF_ERROR(places->Enter(this, rpc_->authenticator));
  admission_ = places;
  return absl::OkStatus();
}

absl::Status RequestArrival::BeginReply(size_t bytes, std::function<void()> cancel) {
  if (bytes <= kMaxFreeReplyBytes) return absl::OkStatus();
  cancel_ = std::move(cancel);
  SetWaiting(true);
  // It has had that place until a moment ago, unless it has waited for its turn.
  return admission_->Enter(this);
}

bool RequestArrival::Complete(bool ok) {
  SetWaiting(false);
  Leave();
  if (has_ended_.exchange(true)) return false;
  const auto finish = std::exchange(finish_, nullptr);
  has_failed_ = !ok;
  const absl::Status status =
      ok ? AdmitAgain() : BadRequest("client closed the stream before sending its request");
  if (!status.ok()) finish(status);
  return status.ok();
}

absl::Status RequestArrival::AdmitAgain() {
  EMA_ASSIGN_OR_RETURN(caller_, rpc_->Admit(method_, caller_.authorization, caller_.log.peer));
  return absl::OkStatus();
}

void RequestArrival::End(StreamEnd) {
  if (cancel_ != nullptr) return cancel_();
  if (has_ended_.exchange(true)) return;
  std::exchange(finish_, nullptr)(
      MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyStreams,
                "the call's request has taken too long to arrive, and others need its place",
                absl::Seconds(1)));
}

void RequestArrival::TellEnd(const absl::Status& status) {
  // Whether the client has ended the stream, or has left, shows when it is told.
  if (has_failed_) return;
  is_told_ = true;
  Tell(status);
}

void RequestArrival::TellSent(bool ok) {
  Leave();
  if (is_told_) return;
  Tell(ok ? BadRequest("client closed the stream before sending its request")
          : absl::CancelledError("client cancelled before its request arrived"));
}

void RequestArrival::Tell(const absl::Status& status) {
  RoleFor(method_) == Role::kNobody ? rpc_->observer->OnProbeEnded(ShortName(method_), status)
                                    : rpc_->observer->OnRpcEnded(ShortName(method_), status);
}

}  // namespace ema
