// SPDX-License-Identifier: Apache-2.0
//
// Queues of an accelerator with the memory by which they are fed, and whether it still works.
#ifndef EMA_SERVER_DEVICE_FEED_POOL_H_
#define EMA_SERVER_DEVICE_FEED_POOL_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
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
    return first_;
  }
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return first_;
  }

 private:
  mutable absl::Mutex mu_;
  absl::Status first_ ABSL_GUARDED_BY(mu_);
};

// A queue with the memory by which it is fed. Made seldom, and used again by stream after stream:
// pinning memory takes milliseconds.
struct Feed {
  using Memory = BlockPool::Memory;
  using Queue = Accelerator::Queue;
  // Flags in device memory, which say which tracks differ. A model has at most 64.
  static constexpr int64_t kMaxFlags = 64;
  static constexpr int64_t kFlagBytes = kMaxFlags * static_cast<int64_t>(sizeof(uint32_t));
  struct Slab {
    std::unique_ptr<Memory> host;
    std::unique_ptr<Memory> device;
    std::optional<FoldBatch> batch;
  };
  std::array<Slab, Queue::kSlots> slabs;
  std::unique_ptr<Memory> host_flags;
  std::unique_ptr<Memory> device_flags;
  std::unique_ptr<Queue> queue;  // Destroyed, and so waited for, first.
};

// What streams and readers share with their device, which they may outlive. Thread-safe.
struct FeedPool {
  // By which blocks go to the host and are summed: one copies while the other casts.
  static constexpr int kReaderFeeds = 2;

  FeedPool(std::shared_ptr<Accelerator> the_accelerator, const AcceleratorOptions& the_options)
      : accelerator(std::move(the_accelerator)), options(the_options) {}

  absl::StatusOr<std::unique_ptr<Feed>> TakeFeed() ABSL_LOCKS_EXCLUDED(mu);
  // REQUIRES: nothing is queued.
  void GiveBack(std::unique_ptr<Feed> feed) ABSL_LOCKS_EXCLUDED(mu);
  // Calls `work` with a feed, whose work it waits for. Waits until one of kReaderFeeds is free: few
  // of them keep the link busy, and the memory formula counts them.
  absl::Status DoWithFeed(absl::FunctionRef<absl::Status(Feed&)> work) ABSL_LOCKS_EXCLUDED(mu);
  // Frees those that nobody has.
  void FreeFeeds() ABSL_LOCKS_EXCLUDED(mu);

  const std::shared_ptr<Accelerator> accelerator;
  const AcceleratorOptions options;
  DeviceHealth health;

  absl::Mutex mu;
  std::vector<std::unique_ptr<Feed>> idle_feeds ABSL_GUARDED_BY(mu);
  int reader_count ABSL_GUARDED_BY(mu) = 0;

 private:
  absl::StatusOr<std::unique_ptr<Feed>> MakeFeed() const;
};

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_FEED_POOL_H_
