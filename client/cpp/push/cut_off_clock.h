// SPDX-License-Identifier: Apache-2.0
//
// For how long a push has had no stream to its server.
#ifndef EMA_CLIENT_CPP_PUSH_CUT_OFF_CLOCK_H_
#define EMA_CLIENT_CPP_PUSH_CUT_OFF_CLOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// Measures how long a push has been cut off: it has no stream, and the server has not asked it to
// wait. A push is cut off from its start until its first stream. Time during a Pause does not
// count.
//
// Thread-safe.
class CutOffClock {
 public:
  // The push has a stream, or the server has answered; or it has lost the stream. Repeated losses
  // count from the first one.
  void SetCutOff(bool is_cut_off) ABSL_LOCKS_EXCLUDED(mu_);
  // Zero: it is not cut off, or the clock is paused.
  absl::Duration cut_off_time() const ABSL_LOCKS_EXCLUDED(mu_);

  // While it lives, the push does something that needs no stream. Only the push's thread makes
  // pauses, one at a time, and calls SetCutOff() outside them.
  class Pause {
   public:
    explicit Pause(CutOffClock& clock);
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    CutOffClock& clock_;
    const SteadyTime start_ = SteadyNow();
    SteadyTime since_;
  };

 private:
  mutable absl::Mutex mu_;
  SteadyTime since_ ABSL_GUARDED_BY(mu_) = SteadyNow();  // max(): it is not cut off.
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_CUT_OFF_CLOCK_H_
