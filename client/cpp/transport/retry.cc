// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/retry.h"

#include <algorithm>

#include "ema/error_reason.h"

namespace ema::client_internal {
namespace {

// A server that is started again is back by then.
constexpr absl::Duration kQuietTime = absl::Seconds(2);

}  // namespace

bool IsRetryable(const absl::Status& status) {
  const ErrorReason reason = GetErrorReason(status);
  // A store that cannot be written stays so until a person has mended it, and a disk that has
  // failed mostly: the error says more than to wait.
  if (status.code() == absl::StatusCode::kUnavailable) {
    return reason != ErrorReason::kStoreReadOnly && reason != ErrorReason::kDiskFailed;
  }
  return reason == ErrorReason::kTooManyStreams || reason == ErrorReason::kTooManyPins ||
         reason == ErrorReason::kTooManyCalls || reason == ErrorReason::kTooManySessions;
}

absl::Duration Backoff::Next(const absl::Status& last_error) {
  if (!log_time_.has_value()) log_time_ = After(SteadyNow(), kQuietTime);
  const absl::Duration asked = GetRetryDelay(last_error);
  const double factor = std::uniform_real_distribution<double>(0.8, 1.2)(random_);
  const absl::Duration own = delay_ * factor;
  delay_ = std::min(delay_ * 1.6, longest_);
  return asked > absl::ZeroDuration() ? asked * factor : own;
}

void Backoff::Reset() {
  delay_ = first_;
  log_time_.reset();
}

bool Backoff::ShouldLog() {
  if (!log_time_.has_value() || SteadyNow() < *log_time_) return false;
  log_time_ = SteadyTime::max();
  return true;
}

}  // namespace ema::client_internal
