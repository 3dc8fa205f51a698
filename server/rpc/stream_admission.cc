// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/stream_admission.h"

#include "server/rpc/authorization.h"

namespace ema {

absl::Status RevokedError() {
  return MakeError(absl::StatusCode::kUnauthenticated, ErrorReason::kBadToken,
                   "the call's token is not known any more, or not for this");
}

bool StreamCall::MayGoOn(const Authenticator& authenticator) const {
  if (method_.empty()) return true;
  const absl::StatusOr<Access> access = Authorize(&authenticator, method_, authorization_);
  return access.ok() && (!model_.has_value() || access->Covers(*model_));
}

absl::Status RequestArrival::Begin(StreamAdmission* admission,
                                   std::function<void(const absl::Status&)> on_end) {
  on_end_ = std::move(on_end);
  SetWaiting(true);
  absl::Status status = admission->Enter(this);
  if (status.ok()) {
    admission_ = admission;
  } else {
    on_end_ = nullptr;
  }
  return status;
}

bool RequestArrival::Complete() {
  SetWaiting(false);
  Leave();
  if (has_ended_.exchange(true)) return false;
  on_end_ = nullptr;
  return true;
}

void RequestArrival::End(StreamEnd) {
  if (has_ended_.exchange(true)) return;
  absl::Status status =
      MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyStreams,
                "the call's request has taken too long to arrive, and others need its place");
  SetRetryDelay(status, absl::Seconds(1));
  const auto on_end = std::move(on_end_);
  on_end(status);
}

}  // namespace ema
