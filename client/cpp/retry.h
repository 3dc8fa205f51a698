// SPDX-License-Identifier: Apache-2.0
//
// When to try again.
#ifndef EMA_CLIENT_CPP_RETRY_H_
#define EMA_CLIENT_CPP_RETRY_H_

#include <random>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ema::client_internal {

// True: the same call may succeed later without anybody doing anything.
bool IsRetryable(const absl::Status& status);

// How long to wait before the next try: what the server asked for, else 25 ms growing to 1 s, each
// 20 % more or less so that ranks do not come in step.
class Backoff {
 public:
  Backoff() : random_(std::random_device()()) {}

  absl::Duration Next(const absl::Status& last_error);
  // After progress.
  void Reset() { delay_ = kFirst; }

 private:
  static constexpr absl::Duration kFirst = absl::Milliseconds(25);
  static constexpr absl::Duration kLongest = absl::Seconds(1);

  std::minstd_rand random_;
  absl::Duration delay_ = kFirst;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_RETRY_H_
