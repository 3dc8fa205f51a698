// SPDX-License-Identifier: Apache-2.0
//
// Pools what an accelerator's streams and readers share: queues, the slabs through which bytes
// pass, and block memory. Also the accelerator's health.
#ifndef EMA_SERVER_DEVICE_TRANSFER_QUEUE_POOL_H_
#define EMA_SERVER_DEVICE_TRANSFER_QUEUE_POOL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/device/accelerator.h"
#include "server/device/accelerator_device.h"
#include "server/device/block_pool.h"
#include "server/device/fold_batch.h"

namespace ema {

// Remembers the first error, which breaks the device for good. Thread-safe.
class DeviceHealth {
 public:
  // Returns `status`; but any error except a lack of memory breaks the device, and then returns the
  // error that broke it first.
  absl::Status Check(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    if (status.ok() || absl::IsResourceExhausted(status)) return status;
    absl::MutexLock lock(&mu_);
    if (first_.ok()) first_ = status;
    is_broken_.store(true, std::memory_order_release);
    return first_;
  }
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu_) {
    if (!is_broken_.load(std::memory_order_acquire)) return absl::OkStatus();
    absl::MutexLock lock(&mu_);
    return first_;
  }

 private:
  std::atomic<bool> is_broken_ = false;  // Lets the check at each fold skip the lock.
  mutable absl::Mutex mu_;
  absl::Status first_ ABSL_GUARDED_BY(mu_);
};

// The slabs through which bytes pass between host and device: two, each in pinned memory and on the
// device.
struct Ring {
  using Memory = BlockPool::Memory;
  static int64_t SizeBytes(int64_t slab_bytes) { return Accelerator::Queue::kSlots * slab_bytes; }

  struct Slab {
    std::byte* host;
    std::byte* device;
    FoldBatch batch;
  };
  std::vector<Slab> slabs;       // Queue::kSlots.
  std::unique_ptr<Memory> host;  // Of all slabs.
  std::unique_ptr<Memory> device;
};

// A queue, with a ring once it has moved or folded anything. Reused by stream after stream, since
// pinning memory takes milliseconds.
struct TransferQueue {
  std::unique_ptr<Ring> ring;
  std::unique_ptr<Accelerator::Queue> queue;  // Destroyed first, which waits for its work.
};

// Shared by the blocks, streams and readers of a device, which may outlive it. Thread-safe.
struct TransferQueuePool {
  // Queues that copy blocks to the host or sum them: one copies while the other casts.
  static constexpr int kReaderQueues = 2;

  TransferQueuePool(std::shared_ptr<Accelerator> the_accelerator,
                    const AcceleratorOptions& the_options);

  absl::StatusOr<std::unique_ptr<TransferQueue>> Acquire() ABSL_LOCKS_EXCLUDED(mu);
  // REQUIRES: nothing is queued.
  void Release(std::unique_ptr<TransferQueue> transfer) ABSL_LOCKS_EXCLUDED(mu);
  // The queue's ring. If it has none, gives it an idle one, else makes one, freeing kept blocks if
  // memory is short.
  absl::StatusOr<Ring*> RingOf(TransferQueue& transfer) ABSL_LOCKS_EXCLUDED(mu);
  // Calls `work`, which waits for the work that it queues, with a transfer queue. Waits until one
  // of kReaderQueues is free: few of them keep the link busy, and the memory formula counts them.
  absl::Status RunWithQueue(absl::FunctionRef<absl::Status(TransferQueue&)> work)
      ABSL_LOCKS_EXCLUDED(mu);
  // Frees the idle rings.
  void FreeRings() ABSL_LOCKS_EXCLUDED(mu);

  const std::shared_ptr<Accelerator> accelerator;
  const AcceleratorOptions options;
  DeviceHealth health;
  BlockPool blocks;

  absl::Mutex mu;
  // Separate, as a user that only copies or clears needs no ring.
  std::vector<std::unique_ptr<Accelerator::Queue>> idle_queues ABSL_GUARDED_BY(mu);
  std::vector<std::unique_ptr<Ring>> idle_rings ABSL_GUARDED_BY(mu);
  int reader_count ABSL_GUARDED_BY(mu) = 0;

 private:
  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocateDevice(int64_t size_bytes);
  absl::StatusOr<std::unique_ptr<Ring>> MakeRing();
};

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_TRANSFER_QUEUE_POOL_H_
