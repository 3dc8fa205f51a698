// SPDX-License-Identifier: Apache-2.0
//
// The few operations that a device with memory and queues of its own is made of. The device itself
// (accelerator_device.h) is all in terms of these: CUDA implements them, and in the tests one on
// the CPU that delays, reorders and fails.
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

// Thread-safe. Errors are INTERNAL, DEVICE, unless said otherwise. CUDA reports what has gone wrong
// in earlier work at any later call.
class Accelerator {
 public:
  // Work that is done in its order, while whoever queued it goes on. Work of different queues is
  // done in any order. Host memory is pinned, and untouched until the work is done. Not
  // thread-safe.
  class Queue {
   public:
    // Waits until all work is done, or has failed.
    virtual ~Queue() = default;

    virtual absl::Status CopyToDevice(std::byte* device, const std::byte* host,
                                      int64_t size_bytes) = 0;
    // The same beside what has been queued before, in any order with that; what is queued from now
    // on comes after it.
    virtual absl::Status CopyAhead(std::byte* device, const std::byte* host,
                                   int64_t size_bytes) = 0;
    virtual absl::Status CopyToHost(std::byte* host, const std::byte* device,
                                    int64_t size_bytes) = 0;
    virtual absl::Status CopyOnDevice(std::byte* to, const std::byte* from, int64_t size_bytes) = 0;
    virtual absl::Status Zero(std::byte* device, int64_t size_bytes) = 0;
    virtual absl::Status Fold(const FoldTable& table) = 0;
    virtual absl::Status Sum(const SumTable& table) = 0;
    virtual absl::Status Cast(const CastRun& run) = 0;

    // Marks `slot`, of kSlots, as done when all that has been queued so far is. Replaces its mark
    // of before.
    virtual absl::Status Mark(int slot) = 0;
    // Waits until the work before the slot's mark is done; returns at once if there was no mark.
    virtual absl::Status Wait(int slot) = 0;
    static constexpr int kSlots = 2;
  };

  virtual ~Accelerator() = default;

  // "cuda:0".
  virtual std::string name() const = 0;
  // RESOURCE_EXHAUSTED, MEMORY_BUDGET: there is no memory for one.
  virtual absl::StatusOr<std::unique_ptr<Queue>> NewQueue() = 0;
  // RESOURCE_EXHAUSTED, MEMORY_BUDGET: there is none.
  virtual absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocateDevice(int64_t size_bytes) = 0;
  // Pinned host memory, which kernels write at the same address. Likewise.
  virtual absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocatePinned(int64_t size_bytes) = 0;
  // Gives memory that was freed, and kept for whoever asks next, back to the system. May wait for
  // all work.
  virtual void Trim() = 0;
  // Of the device, in bytes.
  virtual int64_t total_memory_bytes() const = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_ACCELERATOR_H_
