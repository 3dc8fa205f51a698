// SPDX-License-Identifier: Apache-2.0
//
// When to try again.
#ifndef EMA_CLIENT_CPP_TRANSPORT_RETRY_H_
#define EMA_CLIENT_CPP_TRANSPORT_RETRY_H_

#include <optional>
#include <random>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// True: the same call may succeed later without anybody doing anything.
bool IsRetryable(const absl::Status& status);

// How long to wait before the next try: what the server asked for, else `first` growing to
// `longest`, each 20 % more or less so that ranks do not come in step.
class Backoff {
 public:
  explicit Backoff(absl::Duration first = absl::Milliseconds(25),
                   absl::Duration longest = absl::Seconds(1))
      : first_(first), longest_(longest), random_(std::random_device()()), delay_(first) {}

  absl::Duration Next(const absl::Status& last_error);
  // After progress.
  void Reset();
  // True once, two seconds after the first Next(): it is time to say that somebody waits.
  bool ShouldLog();

 private:
  const absl::Duration first_;
  const absl::Duration longest_;
  std::minstd_rand random_;
  absl::Duration delay_;
  std::optional<SteadyTime> tell_time_;  // Absent before the first Next().
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_RETRY_H_
