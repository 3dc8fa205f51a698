// SPDX-License-Identifier: Apache-2.0
//
// A GPU that weights are read from.
#ifndef EMA_CLIENT_CPP_GPU_GPU_H_
#define EMA_CLIENT_CPP_GPU_GPU_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/gpu/cuda_driver.h"
#include "client/cpp/transport/interrupt.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// One GPU of this process, with a stream of our own beside the trainer's ("the side stream"), on
// which weights are copied to pinned host memory. In the device's primary context, where PyTorch
// works, too.
//
// Thread-safe. An error that leaves the GPU useless to this process (CudaDriver::IsSticky()) stays:
// every later call gives it again. Others are those of one call. Nothing here takes memory of the
// GPU, or disturbs a stream that is being captured into a graph, by whatever thread; but Follow()
// and Lead() may not be given such a stream.
class Gpu {
 public:
  // What a copy that runs may need that nobody waits for any more. A GPU that takes longer hangs.
  static constexpr absl::Duration kIdleGrace = absl::Seconds(1);

  // INTERNAL, DEVICE: there is no driver, or no GPU of this index.
  static absl::StatusOr<std::unique_ptr<Gpu>> Open(int index);
  // Waits for what is queued on the side stream, at most kIdleGrace; what has not ended then keeps
  // stream, events and context until the process ends.
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Memory of the host that every GPU reaches. RESOURCE_EXHAUSTED.
  absl::StatusOr<std::byte*> AllocatePinned(int64_t size_bytes);
  void FreePinned(std::byte* memory);

  // What is queued on the side stream from now on begins after what `stream`, a CUstream, has now.
  absl::Status Follow(void* stream) ABSL_LOCKS_EXCLUDED(mu_);
  // What is queued on `stream` from now on begins after what the side stream has now.
  absl::Status Lead(void* stream) ABSL_LOCKS_EXCLUDED(mu_);

  struct Copy {
    std::byte* to;  // Pinned.
    std::span<const std::byte> from;
  };
  // Queues copies on the side stream, and mark `slot` behind them.
  absl::Status CopyToHost(absl::Span<const Copy> copies, int slot) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for the mark that was put last with this number. REQUIRES: there is one. CANCELLED:
  // `interrupt` has fired. DEADLINE_EXCEEDED, DEVICE.
  absl::Status Wait(int slot, SteadyTime deadline, Interrupt& interrupt) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until the side stream has nothing to do; of a GPU that has failed, it never has. False:
  // it has not ended by `deadline`.
  bool AwaitIdle(SteadyTime deadline);
  // The same; when `interrupt` fires, kIdleGrace is left, and after `deadline`, too.
  bool AwaitIdle(SteadyTime deadline, Interrupt& interrupt);

 private:
  class Current;

  Gpu(const CudaDriver* driver, int index) : driver_(driver), index_(index) {}
  absl::Status Create();
  // Asks until the answer is another than "not ready", which is given after all at `deadline`, and
  // when `interrupt` fires.
  static int Poll(absl::FunctionRef<int()> ask, SteadyTime deadline, Interrupt& interrupt);
  // OK, or the call's error, or the GPU's first that stays. INTERNAL, DEVICE; RESOURCE_EXHAUSTED,
  // MEMORY_BUDGET.
  absl::Status Check(int result, std::string_view what) ABSL_LOCKS_EXCLUDED(error_mu_);
  absl::Status NewEvent(unsigned flags, CUevent_st** event);

  const CudaDriver* const driver_;
  const int index_;
  // Set by Create().
  int device_ = 0;
  CUctx_st* context_ = nullptr;
  CUstream_st* stream_ = nullptr;

  absl::Mutex mu_ ABSL_ACQUIRED_BEFORE(error_mu_);       // Held across calls of the driver.
  CUevent_st* edge_ ABSL_GUARDED_BY(mu_) = nullptr;      // Of Follow() and Lead().
  std::vector<CUevent_st*> marks_ ABSL_GUARDED_BY(mu_);  // By slot.
  absl::Mutex error_mu_;
  absl::Status error_ ABSL_GUARDED_BY(error_mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GPU_GPU_H_
