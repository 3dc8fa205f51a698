// SPDX-License-Identifier: Apache-2.0
//
// When the weights of a push may change.
#ifndef EMA_CLIENT_CPP_PUSH_WEIGHTS_GATE_H_
#define EMA_CLIENT_CPP_PUSH_WEIGHTS_GATE_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// Stands between the threads that send the weights, gRPC, which holds slices of them, and the
// trainer, who wants to change them. Once released they are never read again. Thread-safe. gRPC
// drops slices inside any of its functions, so none may be called with a lock held under which
// these functions are called.
class WeightsGate {
 public:
  // --- The sending threads. At first, they want to read. ---
  //
  // WantToRead() and HaveRead() bracket all that a push reads: between the two, TryRelease() waits
  // also while nothing is being read. BeginRead() and EndRead() bracket one read in between, and
  // several threads may be inside at once.

  // Says that the weights will be read (again). False: they have been released.
  bool WantToRead() ABSL_LOCKS_EXCLUDED(mu_);
  // Says that what has still to leave is in slices.
  void HaveRead() ABSL_LOCKS_EXCLUDED(mu_);
  // Around each read. False: they have been released, do not read.
  bool BeginRead() ABSL_LOCKS_EXCLUDED(mu_);
  void EndRead() ABSL_LOCKS_EXCLUDED(mu_);
  // One more slice goes to gRPC, with DropSlice(gate) as its destroy callback.
  void AddSlice() ABSL_LOCKS_EXCLUDED(mu_);
  static void DropSlice(void* gate);
  bool HasSlices() const ABSL_LOCKS_EXCLUDED(mu_);

  // --- The trainer. ---

  // Waits until everything has left, and releases. False: it took longer; nothing is released.
  bool TryRelease(absl::Duration max_wait) ABSL_LOCKS_EXCLUDED(mu_);
  // Releases: no read begins from now on. One that is under way goes on, and gRPC may hold slices.
  void ForceRelease() ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until nothing is being read and gRPC holds no slice. REQUIRES: released.
  void AwaitUnread() ABSL_LOCKS_EXCLUDED(mu_);
  // When the last slice was dropped, or the last byte read, whichever was later; SteadyTime::max():
  // not yet.
  SteadyTime left_time() const ABSL_LOCKS_EXCLUDED(mu_);
  // Slices that gRPC has dropped so far.
  int64_t left_slice_count() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  bool HasLeftLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return !is_wanted_ && IsUnreadLocked();
  }
  bool IsUnreadLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return reader_count_ == 0 && slice_count_ == 0;
  }

  mutable absl::Mutex mu_;
  SteadyWait wait_;  // Woken when something is over that somebody may wait for.
  bool is_wanted_ ABSL_GUARDED_BY(mu_) = true;
  int64_t reader_count_ ABSL_GUARDED_BY(mu_) = 0;
  bool is_released_ ABSL_GUARDED_BY(mu_) = false;
  int64_t slice_count_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t left_slice_count_ ABSL_GUARDED_BY(mu_) = 0;
  SteadyTime last_use_ ABSL_GUARDED_BY(mu_) = SteadyNow();
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_WEIGHTS_GATE_H_
