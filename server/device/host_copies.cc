// SPDX-License-Identifier: Apache-2.0
#include "server/device/host_copies.h"

#include <algorithm>

#include "ema/internal/status_macros.h"

namespace ema {

absl::StatusOr<std::shared_ptr<const std::byte>> HostCopies::Get(const BlockRef& block,
                                                                 SourceFormat format) {
  std::shared_ptr<Copy> copy;
  std::list<Entry> dropped;  // Freed without the lock.
  {
    absl::MutexLock lock(&mu_);
    int64_t idle_bytes = 0;
    for (auto it = entries_.begin(); it != entries_.end();) {
      const auto entry = it++;
      if (entry->format == format && !entry->block.owner_before(block) &&
          !block.owner_before(entry->block)) {
        copy = entry->copy;
        entries_.splice(entries_.begin(), entries_, entry);
        continue;
      }
      // Its block has gone, or it has been idle for long.
      const bool is_idle = entry->copy.use_count() == 1;
      if (is_idle) idle_bytes += entry->size_bytes;
      if (entry->block.expired() || (is_idle && idle_bytes > kept_bytes_)) {
        dropped.splice(dropped.end(), entries_, entry);
      }
    }
    if (copy == nullptr) {
      copy = std::make_shared<Copy>();
      entries_.push_front({block, format, copy, SizeBytes(*block, format)});
    }
  }
  absl::MutexLock lock(&copy->mu);
  if (copy->memory == nullptr) EMA_RETURN_IF_ERROR(Fill(*block, format, *copy));
  return std::shared_ptr<const std::byte>(copy, copy->memory->data());
}

absl::Status HostCopies::Fill(const Block& block, SourceFormat format, Copy& copy) {
  EMA_RETURN_IF_ERROR(feeds_->health.status());
  absl::StatusOr<std::shared_ptr<Block>> memory = pinned_.Allocate(SizeBytes(block, format));
  if (!memory.ok()) return feeds_->health.Check(memory.status());
  std::byte* const host = (*memory)->data();
  const auto copy_to_host = [&](Feed& feed) -> absl::Status {
    if (format == SourceFormat::kNoFloat) {
      EMA_RETURN_IF_ERROR(feed.queue->CopyToHost(host, block.data(), block.size_bytes()));
    } else {
      EMA_RETURN_IF_ERROR(QueueCast(block, format, host, feed));
    }
    EMA_RETURN_IF_ERROR(feed.queue->Mark(0));
    return feed.queue->Wait(0);
  };
  EMA_RETURN_IF_ERROR(feeds_->DoWithFeed(copy_to_host));
  copy.memory = *std::move(memory);
  return absl::OkStatus();
}

// By way of the feed's ring. Each piece waits in the queue for the one before.
absl::Status HostCopies::QueueCast(const Block& block, SourceFormat format, std::byte* host,
                                   Feed& feed) {
  EMA_ASSIGN_OR_RETURN(const Ring* const ring, feeds_->RingOf(feed));
  std::byte* const narrow = ring->slabs[0].device;
  const int64_t piece_elements = feeds_->options.slab_bytes / 2;
  const int64_t element_count = block.size_bytes() / 4;
  for (int64_t done = 0; done < element_count; done += piece_elements) {
    const int64_t count = std::min(piece_elements, element_count - done);
    EMA_RETURN_IF_ERROR(feed.queue->Cast({format, block.data() + 4 * done, narrow, count}));
    EMA_RETURN_IF_ERROR(feed.queue->CopyToHost(host + 2 * done, narrow, 2 * count));
  }
  return absl::OkStatus();
}

void HostCopies::Clear() {
  {
    std::list<Entry> dropped;  // Freed without the lock.
    absl::MutexLock lock(&mu_);
    for (auto it = entries_.begin(); it != entries_.end();) {
      const auto entry = it++;
      if (entry->copy.use_count() == 1) dropped.splice(dropped.end(), entries_, entry);
    }
  }
  pinned_.Trim();
}

}  // namespace ema
