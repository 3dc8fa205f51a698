// SPDX-License-Identifier: Apache-2.0
#include "server/device/block_pool.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ema/internal/status_macros.h"

namespace ema {

// Thread-safe. Memory is allocated and freed without the lock held: both may take milliseconds.
struct BlockPool::State {
  struct FreeMemory {
    int64_t freed_order;
    std::unique_ptr<Memory> memory;
  };

  State(Allocator the_allocator, int64_t free_bytes_kept, int64_t total_bytes_kept)
      : allocator(std::move(the_allocator)),
        kept_free_bytes(free_bytes_kept),
        kept_total_bytes(total_bytes_kept) {}

  // Null if none of this size is kept. The one freed last: it may still be in a cache.
  std::unique_ptr<Memory> Take(int64_t size_bytes) ABSL_LOCKS_EXCLUDED(mu);
  // Keeps `memory`, or frees it if it alone is too large; frees what was kept longest to make room,
  // so that sizes that are not used any more do not fill the pool.
  void Give(std::unique_ptr<Memory> memory, int64_t size_bytes) ABSL_LOCKS_EXCLUDED(mu);
  // Frees what is kept beyond the limits.
  void Shrink() ABSL_LOCKS_EXCLUDED(mu);
  void Trim(int64_t most_bytes) ABSL_LOCKS_EXCLUDED(mu);

  std::unique_ptr<Memory> RemoveOldestLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  const Allocator allocator;
  const int64_t kept_free_bytes;
  const int64_t kept_total_bytes;
  std::atomic<int64_t> used_bytes = 0;  // Relaxed: nothing hangs on its moment.

  absl::Mutex mu;
  // By size; each in the order freed, and never empty.
  std::map<int64_t, std::deque<FreeMemory>> free_by_size ABSL_GUARDED_BY(mu);
  int64_t free_bytes ABSL_GUARDED_BY(mu) = 0;
  int64_t next_freed_order ABSL_GUARDED_BY(mu) = 0;
};

std::unique_ptr<BlockPool::Memory> BlockPool::State::Take(int64_t size_bytes) {
  absl::MutexLock lock(&mu);
  const auto it = free_by_size.find(size_bytes);
  if (it == free_by_size.end()) return nullptr;
  std::unique_ptr<Memory> memory = std::move(it->second.back().memory);
  it->second.pop_back();
  if (it->second.empty()) free_by_size.erase(it);
  free_bytes -= size_bytes;
  return memory;
}

void BlockPool::State::Give(std::unique_ptr<Memory> memory, int64_t size_bytes) {
  if (size_bytes > kept_free_bytes) return;
  {
    absl::MutexLock lock(&mu);
    free_by_size[size_bytes].push_back({next_freed_order++, std::move(memory)});
    free_bytes += size_bytes;
  }
  Shrink();
}

void BlockPool::State::Shrink() {
  std::vector<std::unique_ptr<Memory>> freed;  // Destroyed after the lock.
  absl::MutexLock lock(&mu);
  const int64_t beside_used = kept_total_bytes - used_bytes.load(std::memory_order_relaxed);
  const int64_t most_bytes =
      std::min(kept_free_bytes, std::max(beside_used, LeastKept(kept_total_bytes)));
  while (free_bytes > most_bytes) freed.push_back(RemoveOldestLocked());
}

std::unique_ptr<BlockPool::Memory> BlockPool::State::RemoveOldestLocked() {
  // Sizes are at most as many as large tensors of different sizes.
  auto oldest = free_by_size.begin();
  for (auto it = free_by_size.begin(); it != free_by_size.end(); ++it) {
    if (it->second.front().freed_order < oldest->second.front().freed_order) oldest = it;
  }
  std::unique_ptr<Memory> memory = std::move(oldest->second.front().memory);
  free_bytes -= oldest->first;
  oldest->second.pop_front();
  if (oldest->second.empty()) free_by_size.erase(oldest);
  return memory;
}

void BlockPool::State::Trim(int64_t most_bytes) {
  std::vector<std::unique_ptr<Memory>> freed;  // Destroyed after the lock.
  absl::MutexLock lock(&mu);
  const int64_t most_free_bytes = most_bytes - used_bytes.load(std::memory_order_relaxed);
  while (!free_by_size.empty() && free_bytes > most_free_bytes) {
    freed.push_back(RemoveOldestLocked());
  }
}

class BlockPool::PooledBlock : public Block {
 public:
  PooledBlock(std::unique_ptr<Memory> memory, int64_t size_bytes, std::weak_ptr<State> state)
      : Block(memory->data(), size_bytes), memory_(std::move(memory)), state_(std::move(state)) {}
  ~PooledBlock() override {
    if (const std::shared_ptr<State> state = state_.lock()) {
      state->used_bytes.fetch_sub(size_bytes(), std::memory_order_relaxed);
      state->Give(std::move(memory_), size_bytes());
    }
  }

 private:
  std::unique_ptr<Memory> memory_;
  const std::weak_ptr<State> state_;  // Empty once the pool is gone.
};

BlockPool::BlockPool(Allocator allocator, int64_t kept_free_bytes, int64_t kept_total_bytes)
    : state_(std::make_shared<State>(std::move(allocator), kept_free_bytes, kept_total_bytes)) {}

absl::StatusOr<std::shared_ptr<Block>> BlockPool::Allocate(int64_t size_bytes) {
  std::unique_ptr<Memory> memory = state_->Take(size_bytes);
  if (memory == nullptr) {
    absl::StatusOr<std::unique_ptr<Memory>> allocated = state_->allocator(size_bytes);
    if (!allocated.ok() && free_bytes() > 0) {
      Trim(0);
      allocated = state_->allocator(size_bytes);
    }
    EMA_ASSIGN_OR_RETURN(memory, std::move(allocated));
  }
  state_->used_bytes.fetch_add(size_bytes, std::memory_order_relaxed);
  state_->Shrink();
  return std::make_shared<PooledBlock>(std::move(memory), size_bytes, state_);
}

int64_t BlockPool::used_bytes() const { return state_->used_bytes.load(std::memory_order_relaxed); }

bool BlockPool::HasFree(int64_t size_bytes) const {
  absl::MutexLock lock(&state_->mu);
  return state_->free_by_size.contains(size_bytes);
}

int64_t BlockPool::free_bytes() const {
  absl::MutexLock lock(&state_->mu);
  return state_->free_bytes;
}

void BlockPool::Trim(int64_t most_bytes) { state_->Trim(most_bytes); }

}  // namespace ema
