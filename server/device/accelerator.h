// SPDX-License-Identifier: Apache-2.0
//
// The few operations from which accelerator_device.h builds a device with memory and queues of its
// own. CUDA implements them; so does, for tests, a CPU implementation that delays, reorders and
// fails.
#ifndef EMA_SERVER_DEVICE_ACCELERATOR_H_
#define EMA_SERVER_DEVICE_ACCELERATOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/device/block_pool.h"
#include "server/kernel/cast_run.h"
#include "server/kernel/fold_table.h"
#include "server/kernel/sum_table.h"

namespace ema {

// Thread-safe. Errors are INTERNAL, DEVICE, unless said otherwise. CUDA may report a failure of
// earlier work at any later call.
class Accelerator {
 public:
  // Asynchronous work, done in the order in which it was queued. Queues are not ordered with each
  // other. Host memory must be pinned, and stay untouched until the work is done. Not thread-safe.
  class Queue {
   public:
    // Waits until all work is done, or has failed.
    virtual ~Queue() = default;

    virtual absl::Status CopyToDevice(std::byte* device, const std::byte* host,
                                      int64_t size_bytes) = 0;
    // CopyToDevice() without waiting for work that was queued before; work that is queued later
    // waits for it.
    virtual absl::Status CopyAhead(std::byte* device, const std::byte* host,
                                   int64_t size_bytes) = 0;
    virtual absl::Status CopyToHost(std::byte* host, const std::byte* device,
                                    int64_t size_bytes) = 0;
    virtual absl::Status CopyOnDevice(std::byte* to, const std::byte* from, int64_t size_bytes) = 0;
    virtual absl::Status Zero(std::byte* device, int64_t size_bytes) = 0;
    virtual absl::Status Fold(const FoldTable& table) = 0;
    virtual absl::Status Sum(const SumTable& table) = 0;
    virtual absl::Status Cast(const CastRun& run) = 0;

    // Marks `slot`, below kSlots, as done when all work queued so far is done. Replaces the slot's
    // earlier mark.
    virtual absl::Status Mark(int slot) = 0;
    // Waits until the work before the slot's mark is done; returns at once if there was no mark.
    virtual absl::Status Wait(int slot) = 0;
    static constexpr int kSlots = 2;
  };

  virtual ~Accelerator() = default;

  // "cuda:0".
  virtual std::string name() const = 0;
  // Makes a queue. RESOURCE_EXHAUSTED, MEMORY_BUDGET: there is no memory for one.
  virtual absl::StatusOr<std::unique_ptr<Queue>> NewQueue() = 0;
  // Allocates device memory. RESOURCE_EXHAUSTED, MEMORY_BUDGET: there is none.
  virtual absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocateDevice(int64_t size_bytes) = 0;
  // Allocates pinned host memory, which kernels write at the same address. Errors as
  // AllocateDevice().
  virtual absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocatePinned(int64_t size_bytes) = 0;
  // Returns freed memory that is kept for reuse to the system. May wait for all work.
  virtual void Trim() = 0;
  // Memory of the device, in bytes.
  virtual int64_t total_memory_bytes() const = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_ACCELERATOR_H_
