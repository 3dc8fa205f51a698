// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_RPC_CALLS_IN_FLIGHT_H_
#define EMA_SERVER_RPC_CALLS_IN_FLIGHT_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/steady_wait.h"

namespace ema {

// Counts the calls that are under way. Thread-safe.
class CallsInFlight {
 public:
  // One call, for as long as the result is held.
  std::shared_ptr<void> Enter() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    ++count_;
    return std::shared_ptr<void>(nullptr, [this](void*) {
      absl::MutexLock leave(&mu_);
      --count_;
      wait_.WakeAll();
    });
  }
  // Waits until there is none, at most until `deadline`.
  void AwaitNone(SteadyTime deadline) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return count_ == 0; };
    wait_.AwaitUntil(mu_, deadline, none);
  }

 private:
  absl::Mutex mu_;
  int64_t count_ ABSL_GUARDED_BY(mu_) = 0;
  SteadyWait wait_;  // Woken when it changes.
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_CALLS_IN_FLIGHT_H_
