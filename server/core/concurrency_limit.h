// SPDX-License-Identifier: Apache-2.0
//
// Limits how many operations run at once.
#ifndef EMA_SERVER_CORE_CONCURRENCY_LIMIT_H_
#define EMA_SERVER_CORE_CONCURRENCY_LIMIT_H_

#include <atomic>
#include <cstdint>
#include <memory>

namespace ema {

// Gives out a limited number of permits. Thread-safe. Always held by shared_ptr: a permit keeps it.
class ConcurrencyLimit : public std::enable_shared_from_this<ConcurrencyLimit> {
 public:
  // In use until the last copy is dropped.
  using Permit = std::shared_ptr<void>;

  explicit ConcurrencyLimit(int64_t limit) : limit_(limit) {}

  // Null: all permits are in use.
  Permit Acquire() {
    if (used_.fetch_add(1, std::memory_order_relaxed) >= limit_) {
      used_.fetch_sub(1, std::memory_order_relaxed);
      return nullptr;
    }
    return {this, [self = shared_from_this()](ConcurrencyLimit* limit) {
              limit->used_.fetch_sub(1, std::memory_order_relaxed);
            }};
  }

  // May briefly include a permit that is being refused.
  int64_t used_count() const { return used_.load(std::memory_order_relaxed); }
  int64_t limit() const { return limit_; }

 private:
  const int64_t limit_;
  // Relaxed: a permit guards no data.
  std::atomic<int64_t> used_ = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_CONCURRENCY_LIMIT_H_
