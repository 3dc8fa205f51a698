// SPDX-License-Identifier: Apache-2.0
//
// Times and waits that are independent of changes to the system clock.
#ifndef EMA_SERVER_BASE_STEADY_WAIT_H_
#define EMA_SERVER_BASE_STEADY_WAIT_H_

#include <chrono>
#include <condition_variable>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ema {

using SteadyTime = std::chrono::steady_clock::time_point;

inline SteadyTime SteadyNow() { return std::chrono::steady_clock::now(); }
// No later than SteadyTime::max(). REQUIRES: `time` is not before the clock's zero.
inline SteadyTime After(SteadyTime time, absl::Duration duration) {
  const std::chrono::nanoseconds span = absl::ToChronoNanoseconds(duration);
  return span < SteadyTime::max() - time ? time + span : SteadyTime::max();
}

// The time since `time`, negative if it is in the future; and the time until it, negative if it is
// in the past.
inline absl::Duration Since(SteadyTime time) { return absl::FromChrono(SteadyNow() - time); }
inline absl::Duration Until(SteadyTime time) { return absl::FromChrono(time - SteadyNow()); }

// A condition variable with deadlines by the steady clock. Our version of Abseil waits by the
// system clock: if that is set back by an hour, a wait lasts an hour longer. Thread-safe.
class SteadyWait {
 public:
  // Must be called after each change of a condition that may be waited for.
  void WakeAll() { changed_.notify_all(); }

  // Waits until `predicate`, which is evaluated with `mu` held, is true. Returns false if it is
  // still false at `deadline`. `mu` is released while waiting.
  template <typename Predicate>
  bool AwaitUntil(absl::Mutex& mu, SteadyTime deadline, Predicate predicate)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    Lockable lockable{mu};
    return changed_.wait_until(lockable, deadline, predicate);
  }

 private:
  // With the names that std::condition_variable_any needs.
  struct Lockable {
    absl::Mutex& mu;
    void lock() ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) { mu.Lock(); }
    void unlock() ABSL_UNLOCK_FUNCTION(mu) { mu.Unlock(); }
  };

  std::condition_variable_any changed_;
};

}  // namespace ema

#endif  // EMA_SERVER_BASE_STEADY_WAIT_H_
