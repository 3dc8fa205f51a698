// SPDX-License-Identifier: Apache-2.0
//
// Times and waits that do not mind that somebody sets the system's clock.
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

// How long ago it was, and how long it is until then; negative: the other way round.
inline absl::Duration Since(SteadyTime time) { return absl::FromChrono(SteadyNow() - time); }
inline absl::Duration Until(SteadyTime time) { return absl::FromChrono(time - SteadyNow()); }

// Waits by the steady clock. Those of our Abseil end by the system's: if that is set back by an
// hour meanwhile, they last an hour longer. Thread-safe.
class SteadyWait {
 public:
  // To be called after each change of what somebody may wait for.
  void WakeAll() { changed_.notify_all(); }

  // Waits until `is_so`, which is asked with `mu` held, or `deadline`; `mu` is free meanwhile.
  // False: it is not so by then.
  template <typename Predicate>
  bool AwaitUntil(absl::Mutex& mu, SteadyTime deadline, Predicate is_so)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    Lockable lockable{mu};
    return changed_.wait_until(lockable, deadline, is_so);
  }

 private:
  // As the standard library calls its parts.
  struct Lockable {
    absl::Mutex& mu;
    void lock() ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) { mu.Lock(); }
    void unlock() ABSL_UNLOCK_FUNCTION(mu) { mu.Unlock(); }
  };

  std::condition_variable_any changed_;
};

}  // namespace ema

#endif  // EMA_SERVER_BASE_STEADY_WAIT_H_
