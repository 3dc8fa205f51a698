// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/retry.h"

#include <algorithm>

#include "ema/error_reason.h"

namespace ema::client_internal {

bool IsRetryable(const absl::Status& status) {
  const ErrorReason reason = GetErrorReason(status);
  // A store that a failed fsync has latched stays so until somebody restarts the server.
  if (status.code() == absl::StatusCode::kUnavailable) {
    return reason != ErrorReason::kStoreReadOnly;
  }
  return reason == ErrorReason::kTooManyStreams || reason == ErrorReason::kTooManyPins ||
         reason == ErrorReason::kTooManyCalls || reason == ErrorReason::kTooManySessions;
}

absl::Duration Backoff::Next(const absl::Status& last_error) {
  const absl::Duration asked = GetRetryDelay(last_error);
  const double factor = std::uniform_real_distribution<double>(0.8, 1.2)(random_);
  const absl::Duration own = delay_ * factor;
  delay_ = std::min(delay_ * 1.6, longest_);
  return asked > absl::ZeroDuration() ? asked * factor : own;
}

}  // namespace ema::client_internal
