// SPDX-License-Identifier: Apache-2.0
//
// Controls when the weights of a push may change.
#ifndef EMA_CLIENT_CPP_PUSH_WEIGHTS_GATE_H_
#define EMA_CLIENT_CPP_PUSH_WEIGHTS_GATE_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// Synchronizes the threads that send the weights, gRPC, which holds slices of them, and the
// trainer, which wants to change them. Released weights are never read again. Thread-safe. gRPC may
// drop slices inside any of its functions, so never call gRPC with a lock held that is also held
// during calls of this class.
class WeightsGate {
 public:
  // --- For the sending threads. Initially the weights are wanted. ---
  //
  // BeginReading() and FinishReading() bracket all reads of a push: between the two, TryRelease()
  // waits even while nothing is being read. BeginRead() and EndRead() bracket one read; several
  // threads may be reading at once.

  // Announces that the weights will be read (again). False: they have been released.
  bool BeginReading() ABSL_LOCKS_EXCLUDED(mu_);
  // Announces that nothing more will be read: all unsent bytes are in slices or being copied, or
  // the push has ended.
  void FinishReading() ABSL_LOCKS_EXCLUDED(mu_);
  // False: the weights have been released; do not read them.
  bool BeginRead() ABSL_LOCKS_EXCLUDED(mu_);
  void EndRead() ABSL_LOCKS_EXCLUDED(mu_);
  // Counts a slice that is passed to gRPC with DropSlice(gate) as its destroy callback.
  void AddSlice() ABSL_LOCKS_EXCLUDED(mu_);
  static void DropSlice(void* gate);
  bool HasSlices() const ABSL_LOCKS_EXCLUDED(mu_);

  // --- For the trainer. ---

  // Waits until all bytes have left, and releases. False: `max_wait` is over; nothing is released.
  bool TryRelease(absl::Duration max_wait) ABSL_LOCKS_EXCLUDED(mu_);
  // Releases: no read starts from now on. A running read continues, and gRPC may hold slices.
  void ForceRelease() ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until nothing is being read and gRPC holds no slice. REQUIRES: released.
  void AwaitNoReader() ABSL_LOCKS_EXCLUDED(mu_);
  // When the last slice was dropped or the last byte read, whichever was later; SteadyTime::max():
  // not yet.
  SteadyTime left_time() const ABSL_LOCKS_EXCLUDED(mu_);
  // Number of slices that gRPC has dropped so far.
  int64_t left_slice_count() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  bool HasLeftLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return !is_reading_ && HasNoReaderLocked();
  }
  bool HasNoReaderLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return reader_count_ == 0 && slice_count_ == 0;
  }

  mutable absl::Mutex mu_;
  SteadyWait wait_;  // Woken when a read, a slice or is_reading_ ends.
  bool is_reading_ ABSL_GUARDED_BY(mu_) = true;
  int64_t reader_count_ ABSL_GUARDED_BY(mu_) = 0;
  bool is_released_ ABSL_GUARDED_BY(mu_) = false;
  int64_t slice_count_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t left_slice_count_ ABSL_GUARDED_BY(mu_) = 0;
  SteadyTime last_use_ ABSL_GUARDED_BY(mu_) = SteadyNow();
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_WEIGHTS_GATE_H_
