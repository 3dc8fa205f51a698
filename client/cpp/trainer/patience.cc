// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/patience.h"

#include "ema/error_reason.h"

namespace ema::client_internal {

bool IsAway(const absl::Status& error) {
  switch (GetErrorReason(error)) {
    // What a push ends with that has found the server restarted.
    case ErrorReason::kFenced:
    case ErrorReason::kModelNotFound:
    case ErrorReason::kRunIncomplete:
      return true;
    case ErrorReason::kDevice:  // A GPU of ours.
      return false;
    default:
      return absl::IsUnavailable(error) || absl::IsDeadlineExceeded(error);
  }
}

bool IsWorthWaiting(const absl::Status& error) {
  const ErrorReason reason = GetErrorReason(error);
  return IsAway(error) || reason == ErrorReason::kStepAbandoned ||
         reason == ErrorReason::kSessionExpired;
}

bool IsFinal(const absl::Status& error) {
  return !IsWorthWaiting(error) && !absl::IsAborted(error);
}

SteadyTime Patience::until() const { return After(since_.value_or(SteadyNow()), max_outage_); }

bool Patience::LastsAfter(const absl::Status& error) {
  if (is_over_ || !IsWorthWaiting(error)) return false;
  if (!since_.has_value()) since_ = SteadyNow();
  return true;
}

void Patience::EndOutage() {
  since_.reset();
  is_over_ = false;
}

}  // namespace ema::client_internal
