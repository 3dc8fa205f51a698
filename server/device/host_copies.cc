// SPDX-License-Identifier: Apache-2.0
#include "server/device/host_copies.h"

#include <algorithm>

#include "ema/internal/status_macros.h"

namespace ema {

absl::StatusOr<std::shared_ptr<const std::byte>> HostCopies::Get(const BlockRef& block,
                                                                 SourceFormat format) {
  std::shared_ptr<Copy> copy;
  {
    Entries dropped;  // Given back without the lock, and before Fill() asks for memory.
    absl::MutexLock lock(&mu_);
    const auto entry = FindLocked(block, format);
    if (entry != entries_.end()) {
      copy = entry->copy;
      entries_.splice(entries_.begin(), entries_, entry);
    } else {
      // On a failed device no copy can be made, so none is dropped to make room for one.
      EMA_RETURN_IF_ERROR(pool_->health.status());
      const int64_t size_bytes = SizeBytes(*block, format);
      if (!pinned_.HasFree(size_bytes)) {
        dropped = DropLocked(pinned_.used_bytes() + size_bytes - kept_bytes_);
      }
      copy = std::make_shared<Copy>();
      entries_.push_front({block, {block.get(), format}, copy, size_bytes});
      by_key_[entries_.front().key] = entries_.begin();
    }
  }
  absl::MutexLock lock(&copy->mu);
  if (copy->memory == nullptr) {
    if (absl::Status status = Fill(*block, format, *copy); !status.ok()) {
      Forget({block.get(), format}, *copy);
      return status;
    }
  }
  return std::shared_ptr<const std::byte>(copy, copy->memory->data());
}

bool HostCopies::Has(const BlockRef& block, SourceFormat format) {
  std::shared_ptr<Copy> copy;
  {
    absl::MutexLock lock(&mu_);
    const auto entry = FindLocked(block, format);
    if (entry == entries_.end()) return false;
    copy = entry->copy;
  }
  if (!copy->mu.TryLock()) return false;
  const bool is_made = copy->memory != nullptr;
  copy->mu.Unlock();
  return is_made;
}

HostCopies::Entries::iterator HostCopies::FindLocked(const BlockRef& block, SourceFormat format) {
  const auto it = by_key_.find(Key(block.get(), format));
  return it != by_key_.end() && !it->second->block.expired() ? it->second : entries_.end();
}

HostCopies::Entries HostCopies::DropLocked(int64_t needed_bytes) {
  Entries dropped;
  bool is_enough = false;
  for (auto it = entries_.end(); it != entries_.begin() && !is_enough;) {
    const auto entry = --it;
    const bool is_idle = entry->copy.use_count() == 1;
    if (!entry->block.expired() && (!is_idle || needed_bytes <= 0)) continue;
    if (is_idle && needed_bytes > 0) {
      needed_bytes -= entry->size_bytes;
      is_enough = needed_bytes <= 0;
    }
    ++it;
    by_key_.erase(entry->key);
    dropped.splice(dropped.end(), entries_, entry);
  }
  return dropped;
}

void HostCopies::Forget(const Key& key, const Copy& copy) {
  absl::MutexLock lock(&mu_);
  const auto it = by_key_.find(key);
  if (it == by_key_.end() || it->second->copy.get() != &copy) return;
  entries_.erase(it->second);
  by_key_.erase(it);
}

absl::Status HostCopies::Fill(const Block& block, SourceFormat format, Copy& copy) {
  EMA_RETURN_IF_ERROR(pool_->health.status());
  absl::StatusOr<std::shared_ptr<Block>> memory = pinned_.Allocate(SizeBytes(block, format));
  if (!memory.ok()) return pool_->health.Check(memory.status());
  std::byte* const host = (*memory)->data();
  const auto copy_to_host = [&](TransferQueue& transfer) -> absl::Status {
    if (format == SourceFormat::kNoFloat) {
      EMA_RETURN_IF_ERROR(transfer.queue->CopyToHost(host, block.data(), block.size_bytes()));
    } else {
      EMA_RETURN_IF_ERROR(QueueCast(block, format, host, transfer));
    }
    EMA_RETURN_IF_ERROR(transfer.queue->Mark(0));
    return transfer.queue->Wait(0);
  };
  EMA_RETURN_IF_ERROR(pool_->RunWithQueue(copy_to_host));
  copy.memory = *std::move(memory);
  return absl::OkStatus();
}

// Through the queue's ring. Each piece waits in the queue for the one before.
absl::Status HostCopies::QueueCast(const Block& block, SourceFormat format, std::byte* host,
                                   TransferQueue& transfer) {
  EMA_ASSIGN_OR_RETURN(const Ring* const ring, pool_->RingOf(transfer));
  std::byte* const narrow = ring->slabs[0].device;
  const int64_t piece_elements = pool_->options.slab_bytes / 2;
  const int64_t element_count = block.size_bytes() / 4;
  for (int64_t done = 0; done < element_count; done += piece_elements) {
    const int64_t count = std::min(piece_elements, element_count - done);
    EMA_RETURN_IF_ERROR(transfer.queue->Cast({format, block.data() + 4 * done, narrow, count}));
    EMA_RETURN_IF_ERROR(transfer.queue->CopyToHost(host + 2 * done, narrow, 2 * count));
  }
  return absl::OkStatus();
}

void HostCopies::Trim() {
  {
    Entries dropped;  // Given back without the lock.
    absl::MutexLock lock(&mu_);
    dropped = DropLocked(0);
    if (!entries_.empty()) return;
  }
  pinned_.Trim(0);
}

}  // namespace ema
