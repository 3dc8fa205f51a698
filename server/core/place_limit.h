// SPDX-License-Identifier: Apache-2.0
//
// How many of something there may be at once.
#ifndef EMA_SERVER_CORE_PLACE_LIMIT_H_
#define EMA_SERVER_CORE_PLACE_LIMIT_H_

#include <atomic>
#include <cstdint>
#include <memory>

namespace ema {

// So many places, which are taken and given back. Thread-safe. Always held by shared_ptr: a place
// keeps it.
class PlaceLimit : public std::enable_shared_from_this<PlaceLimit> {
 public:
  // Whoever holds it has the place.
  using Place = std::shared_ptr<void>;

  explicit PlaceLimit(int64_t limit) : limit_(limit) {}

  // Null: all are taken.
  Place Take() {
    if (taken_.fetch_add(1, std::memory_order_relaxed) >= limit_) {
      taken_.fetch_sub(1, std::memory_order_relaxed);
      return nullptr;
    }
    return {this, [self = shared_from_this()](PlaceLimit* limit) {
              limit->taken_.fetch_sub(1, std::memory_order_relaxed);
            }};
  }

  // May count, for a moment, one that is just being refused.
  int64_t taken_count() const { return taken_.load(std::memory_order_relaxed); }
  int64_t limit() const { return limit_; }

 private:
  const int64_t limit_;
  // Relaxed: a place guards no data.
  std::atomic<int64_t> taken_ = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_PLACE_LIMIT_H_
