// SPDX-License-Identifier: Apache-2.0
//
// Reads weights from a GPU.
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

// One GPU of this process, with a stream of its own beside the trainer's ("the side stream"), on
// which weights are copied to pinned host memory. Works in the device's primary context, as PyTorch
// does.
//
// Thread-safe. An error that makes the GPU useless to this process (CudaDriver::IsSticky()) is
// permanent: every later call returns it. Other errors belong to one call. This class uses no GPU
// memory, and does not disturb a stream that is being captured into a graph by any thread; but
// WaitFor() and MakeWait() must not be given such a stream.
class Gpu {
 public:
  // How long a running copy may take after its waiter has stopped waiting. A GPU that takes longer
  // counts as hung.
  static constexpr absl::Duration kIdleGrace = absl::Seconds(1);

  // INTERNAL, DEVICE: there is no driver, or no GPU with this index.
  static absl::StatusOr<std::unique_ptr<Gpu>> Open(int index);
  // Waits for the queued work of the side stream, at most kIdleGrace. If it has not ended then,
  // stream, events and context stay until the process ends.
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Host memory that every GPU can access. RESOURCE_EXHAUSTED.
  absl::StatusOr<std::byte*> AllocatePinned(int64_t size_bytes);
  void FreePinned(std::byte* memory);
  // Makes existing pages pinned memory that every GPU can access, until UnregisterPinned(). If the
  // GPU stays usable after an error, the system does not allow it, as in confidential computing.
  absl::Status RegisterPinned(std::byte* memory, int64_t size_bytes);
  void UnregisterPinned(std::byte* memory);

  // Makes later work of the side stream wait for the work that is queued on `stream`, a CUstream,
  // now.
  absl::Status WaitFor(void* stream) ABSL_LOCKS_EXCLUDED(mu_);
  // Makes later work of `stream` wait for the work that is queued on the side stream now.
  absl::Status MakeWait(void* stream) ABSL_LOCKS_EXCLUDED(mu_);

  struct Copy {
    std::byte* to;  // Pinned.
    std::span<const std::byte> from;
  };
  // Queues copies on the side stream, followed by an event for `slot`.
  absl::Status CopyToHost(absl::Span<const Copy> copies, int slot) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for the last event of `slot`. REQUIRES: there is one. CANCELLED: `interrupt` has fired.
  // DEADLINE_EXCEEDED, DEVICE.
  absl::Status Wait(int slot, SteadyTime deadline, Interrupt& interrupt) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until the side stream has no running work; the stream of a failed GPU counts as idle.
  // False: it is not idle by `deadline`.
  bool AwaitIdle(SteadyTime deadline);
  // The same, but after `deadline`, or when `interrupt` fires, waits for kIdleGrace more.
  bool AwaitIdle(SteadyTime deadline, Interrupt& interrupt);

 private:
  class Current;

  Gpu(const CudaDriver* driver, int index) : driver_(driver), index_(index) {}
  absl::Status Create();
  // Calls `ask` until it returns something other than "not ready", or `deadline` has passed, or
  // `interrupt` fires. Returns the last result.
  static int Poll(absl::FunctionRef<int()> ask, SteadyTime deadline, Interrupt& interrupt);
  // Converts the result of a call to the driver: OK, the call's error, or the GPU's first permanent
  // error. INTERNAL, DEVICE; RESOURCE_EXHAUSTED, MEMORY_BUDGET.
  absl::Status Check(int result, std::string_view what) ABSL_LOCKS_EXCLUDED(error_mu_);
  absl::Status NewEvent(unsigned flags, CUevent_st** event);

  const CudaDriver* const driver_;
  const int index_;
  // Set by Create().
  int device_ = 0;
  CUctx_st* context_ = nullptr;
  CUstream_st* stream_ = nullptr;

  absl::Mutex mu_ ABSL_ACQUIRED_BEFORE(error_mu_);          // Held across calls of the driver.
  CUevent_st* order_event_ ABSL_GUARDED_BY(mu_) = nullptr;  // For WaitFor() and MakeWait().
  std::vector<CUevent_st*> marks_ ABSL_GUARDED_BY(mu_);  // The end of the last copy into each slot.
  absl::Mutex error_mu_;
  absl::Status error_ ABSL_GUARDED_BY(error_mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GPU_GPU_H_
