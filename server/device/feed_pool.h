// SPDX-License-Identifier: Apache-2.0
//
// Queues of an accelerator with the memory by which they are fed, the memory of blocks, and whether
// the accelerator still works.
#ifndef EMA_SERVER_DEVICE_FEED_POOL_H_
#define EMA_SERVER_DEVICE_FEED_POOL_H_

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

// The first error breaks the device. Thread-safe.
class DeviceHealth {
 public:
  // Passes `status` on; an error that is no lack of memory breaks the device, and what broke it
  // first is returned.
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
  std::atomic<bool> is_broken_ = false;  // So that who asks at each fold waits for nobody.
  mutable absl::Mutex mu_;
  absl::Status first_ ABSL_GUARDED_BY(mu_);
};

// By which bytes come from the host and go there: two slabs, each in pinned memory and on the
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
  std::unique_ptr<Memory> host;  // Of all that.
  std::unique_ptr<Memory> device;
};

// A queue, and its ring once it has moved or folded anything. Made seldom, and used again by stream
// after stream: pinning memory takes milliseconds.
struct Feed {
  std::unique_ptr<Ring> ring;
  std::unique_ptr<Accelerator::Queue> queue;  // Destroyed, and so waited for, first.
};

// What blocks, streams and readers share with their device, which they may outlive. Thread-safe.
struct FeedPool {
  // By which blocks go to the host and are summed: one copies while the other casts.
  static constexpr int kReaderFeeds = 2;

  FeedPool(std::shared_ptr<Accelerator> the_accelerator, const AcceleratorOptions& the_options);

  absl::StatusOr<std::unique_ptr<Feed>> TakeFeed() ABSL_LOCKS_EXCLUDED(mu);
  // REQUIRES: nothing is queued.
  void GiveBack(std::unique_ptr<Feed> feed) ABSL_LOCKS_EXCLUDED(mu);
  // The feed's ring. If it has none it gets an idle one, or else one that is made now, also of
  // blocks' memory that is kept free.
  absl::StatusOr<Ring*> RingOf(Feed& feed) ABSL_LOCKS_EXCLUDED(mu);
  // Calls `work` with a feed, whose work it waits for. Waits until one of kReaderFeeds is free: few
  // of them keep the link busy, and the memory formula counts them.
  absl::Status DoWithFeed(absl::FunctionRef<absl::Status(Feed&)> work) ABSL_LOCKS_EXCLUDED(mu);
  // Frees the rings that nobody has.
  void FreeRings() ABSL_LOCKS_EXCLUDED(mu);

  const std::shared_ptr<Accelerator> accelerator;
  const AcceleratorOptions options;
  DeviceHealth health;
  BlockPool blocks;

  absl::Mutex mu;
  // Apart: who only copies or clears needs no ring, and takes none away.
  std::vector<std::unique_ptr<Accelerator::Queue>> idle_queues ABSL_GUARDED_BY(mu);
  std::vector<std::unique_ptr<Ring>> idle_rings ABSL_GUARDED_BY(mu);
  int reader_count ABSL_GUARDED_BY(mu) = 0;

 private:
  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocateDevice(int64_t size_bytes);
  absl::StatusOr<std::unique_ptr<Ring>> MakeRing();
};

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_FEED_POOL_H_
