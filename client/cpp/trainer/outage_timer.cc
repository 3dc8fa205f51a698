// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/outage_timer.h"

#include "ema/error_reason.h"

namespace ema::client_internal {

bool IsOutage(const absl::Status& error) {
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

bool IsRetryableStep(const absl::Status& error) {
  const ErrorReason reason = GetErrorReason(error);
  return IsOutage(error) || reason == ErrorReason::kStepAbandoned ||
         reason == ErrorReason::kSessionExpired;
}

bool MustReportToOtherRanks(const absl::Status& error) {
  return !IsRetryableStep(error) && !absl::IsAborted(error);
}

SteadyTime OutageTimer::deadline() const {
  return After(since_.value_or(SteadyNow()), max_outage_);
}

bool OutageTimer::ShouldRetry(const absl::Status& error) {
  if (has_stopped_waiting_ || !IsRetryableStep(error)) return false;
  if (!since_.has_value()) since_ = SteadyNow();
  return true;
}

void OutageTimer::EndOutage() {
  since_.reset();
  has_stopped_waiting_ = false;
}

}  // namespace ema::client_internal
