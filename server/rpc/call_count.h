// SPDX-License-Identifier: Apache-2.0
//
// A number of calls that can be waited for.
#ifndef EMA_SERVER_RPC_CALL_COUNT_H_
#define EMA_SERVER_RPC_CALL_COUNT_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/steady_wait.h"

namespace ema {

// Counts calls until they end. Thread-safe.
class CallCount {
 public:
  // Counts a call until the last copy of the result is dropped. This outlives the result.
  std::shared_ptr<const void> Add() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    ++count_;
    return std::shared_ptr<const void>(nullptr, [this](const void*) {
      absl::MutexLock lock_at_end(&mu_);
      --count_;
      decreased_.WakeAll();
    });
  }

  // Returns when no call is counted, or at `deadline`.
  void AwaitNone(SteadyTime deadline) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return count_ == 0; };
    decreased_.AwaitUntil(mu_, deadline, none);
  }

 private:
  absl::Mutex mu_;
  int64_t count_ ABSL_GUARDED_BY(mu_) = 0;
  SteadyWait decreased_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_CALL_COUNT_H_
