// SPDX-License-Identifier: Apache-2.0
//
// Keeps freed blocks for reuse.
#ifndef EMA_SERVER_DEVICE_BLOCK_POOL_H_
#define EMA_SERVER_DEVICE_BLOCK_POOL_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>

#include "absl/status/statusor.h"
#include "server/device/device.h"

namespace ema {

// Allocates blocks, takes their memory back when the last reference is dropped, and keeps some of
// it, by exact size. Thread-safe. A block may outlive the pool; its memory is then freed.
class BlockPool {
 public:
  // Owns the memory of one block; frees it when destroyed.
  class Memory {
   public:
    virtual ~Memory() = default;
    virtual std::byte* data() = 0;
  };
  using Allocator = std::function<absl::StatusOr<std::unique_ptr<Memory>>(int64_t size_bytes)>;

  // Keeps up to `kept_free_bytes` of freed blocks, and fewer if they and the used blocks would
  // exceed `kept_total_bytes`. LeastKept(kept_total_bytes) may be kept in any case: otherwise, at
  // that limit, every new block would cost an allocation.
  BlockPool(Allocator allocator, int64_t kept_free_bytes,
            int64_t kept_total_bytes = std::numeric_limits<int64_t>::max());

  static constexpr int64_t LeastKept(int64_t kept_total_bytes) { return kept_total_bytes / 16; }

  // Returns a kept block of this size, or new memory. If the allocator fails, frees the kept blocks
  // and tries once more. RESOURCE_EXHAUSTED: from the allocator.
  absl::StatusOr<std::shared_ptr<Block>> Allocate(int64_t size_bytes);

  // Whether a free block of this size is kept.
  bool HasFree(int64_t size_bytes) const;
  // Bytes of the kept free blocks.
  int64_t free_bytes() const;
  // Bytes of the blocks in use.
  int64_t used_bytes() const;
  // Frees kept blocks, oldest first, until they and the used blocks take at most `most_bytes`.
  void Trim(int64_t most_bytes);

 private:
  class PooledBlock;
  struct State;  // Shared with the blocks in use.
  std::shared_ptr<State> state_;
};

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_BLOCK_POOL_H_
