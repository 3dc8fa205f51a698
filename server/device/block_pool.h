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

// Hands out blocks; takes them back when their last reference goes, and keeps some of them, by
// exact size. Thread-safe. A block may outlive the pool; its memory is then freed for good.
class BlockPool {
 public:
  // Owns memory of one block; frees it when destroyed.
  class Memory {
   public:
    virtual ~Memory() = default;
    virtual std::byte* data() = 0;
  };
  using Allocator = std::function<absl::StatusOr<std::unique_ptr<Memory>>(int64_t size_bytes)>;

  // Keeps up to `kept_free_bytes` of blocks that came back, and fewer where they and the blocks
  // that are out would be more than `kept_total_bytes`; but LeastKept() of that always, or each
  // block that is taken and given back then would cost an allocation.
  BlockPool(Allocator allocator, int64_t kept_free_bytes,
            int64_t kept_total_bytes = std::numeric_limits<int64_t>::max());

  static constexpr int64_t LeastKept(int64_t kept_total_bytes) { return kept_total_bytes / 16; }

  // A kept block of this size, or new memory. When the allocator has none, frees what is kept and
  // asks once more. RESOURCE_EXHAUSTED: from the allocator.
  absl::StatusOr<std::shared_ptr<Block>> Allocate(int64_t size_bytes);

  // True: a block of this size is kept free now.
  bool HasFree(int64_t size_bytes) const;
  // Bytes kept free now.
  int64_t free_bytes() const;
  // Bytes of the blocks that are out.
  int64_t used_bytes() const;
  // Frees what was kept longest, until that and the blocks that are out are `most_bytes` at most.
  void Trim(int64_t most_bytes);

 private:
  class PooledBlock;
  struct State;  // Shared with the blocks that are out.
  std::shared_ptr<State> state_;
};

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_BLOCK_POOL_H_
