// SPDX-License-Identifier: Apache-2.0
//
// Decides whether and when to retry.
#ifndef EMA_CLIENT_CPP_TRANSPORT_RETRY_H_
#define EMA_CLIENT_CPP_TRANSPORT_RETRY_H_

#include <optional>
#include <random>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// True if the same call may succeed later without outside help.
bool IsRetryable(const absl::Status& status);

// Computes the delay before the next try: the server's retry delay, or else one that grows from
// `first` to `longest`; each varied by up to 20 % so that ranks do not retry at the same moments.
class Backoff {
 public:
  explicit Backoff(absl::Duration first = absl::Milliseconds(25),
                   absl::Duration longest = absl::Seconds(1))
      : first_(first), longest_(longest), random_(std::random_device()()), delay_(first) {}

  absl::Duration Next(const absl::Status& last_error);
  // Starts again with `first`. To be called after progress.
  void Reset();
  // True once, at the first call from two seconds after the first Next(): the wait should be
  // reported.
  bool ShouldLog();

 private:
  const absl::Duration first_;
  const absl::Duration longest_;
  std::minstd_rand random_;
  absl::Duration delay_;
  std::optional<SteadyTime> log_time_;  // Absent before the first Next().
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_RETRY_H_
