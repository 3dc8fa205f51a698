// SPDX-License-Identifier: Apache-2.0
#include "server/device/feed_pool.h"

#include "absl/cleanup/cleanup.h"
#include "ema/internal/status_macros.h"

namespace ema {

absl::StatusOr<std::unique_ptr<Feed>> FeedPool::TakeFeed() {
  EMA_RETURN_IF_ERROR(health.status());
  {
    absl::MutexLock lock(&mu);
    if (!idle_feeds.empty()) {
      std::unique_ptr<Feed> feed = std::move(idle_feeds.back());
      idle_feeds.pop_back();
      return feed;
    }
  }
  absl::StatusOr<std::unique_ptr<Feed>> feed = MakeFeed();
  if (!feed.ok()) return health.Check(feed.status());
  return feed;
}

absl::StatusOr<std::unique_ptr<Feed>> FeedPool::MakeFeed() const {
  auto feed = std::make_unique<Feed>();
  for (Feed::Slab& slab : feed->slabs) {
    EMA_ASSIGN_OR_RETURN(slab.host, accelerator->AllocatePinned(options.slab_bytes));
    EMA_ASSIGN_OR_RETURN(slab.device, accelerator->AllocateDevice(options.slab_bytes));
    slab.batch.emplace(slab.host->data(), slab.device->data(), options.slab_bytes);
  }
  EMA_ASSIGN_OR_RETURN(feed->host_flags, accelerator->AllocatePinned(Feed::kFlagBytes));
  EMA_ASSIGN_OR_RETURN(feed->device_flags, accelerator->AllocateDevice(Feed::kFlagBytes));
  EMA_ASSIGN_OR_RETURN(feed->queue, accelerator->NewQueue());
  EMA_RETURN_IF_ERROR(feed->queue->Zero(feed->device_flags->data(), Feed::kFlagBytes));
  return feed;
}

void FeedPool::GiveBack(std::unique_ptr<Feed> feed) {
  absl::MutexLock lock(&mu);
  idle_feeds.push_back(std::move(feed));
}

absl::Status FeedPool::DoWithFeed(absl::FunctionRef<absl::Status(Feed&)> work) {
  {
    absl::MutexLock lock(&mu);
    const auto is_free = [this]()
                             ABSL_SHARED_LOCKS_REQUIRED(mu) { return reader_count < kReaderFeeds; };
    mu.Await(absl::Condition(&is_free));
    ++reader_count;
  }
  const absl::Cleanup let_go = [this] {
    absl::MutexLock lock(&mu);
    --reader_count;
  };
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<Feed> feed, TakeFeed());
  EMA_RETURN_IF_ERROR(health.Check(work(*feed)));
  GiveBack(std::move(feed));
  return absl::OkStatus();
}

void FeedPool::FreeFeeds() {
  std::vector<std::unique_ptr<Feed>> freed;  // Destroyed after the lock.
  absl::MutexLock lock(&mu);
  freed.swap(idle_feeds);
}

}  // namespace ema
