// SPDX-License-Identifier: Apache-2.0
//
// Memory for pulled weights.
#ifndef EMA_INTERNAL_PULL_MEMORY_H_
#define EMA_INTERNAL_PULL_MEMORY_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace ema {

struct FreePullMemory {
  void operator()(void* memory) const { std::free(memory); }
};
using PullMemory = std::unique_ptr<std::byte[], FreePullMemory>;

// Returns uninitialized memory, aligned for SIMD loads; if it is large, in huge pages, since the
// faults of small pages would take longer than the copy. Null: there is not so much memory.
inline PullMemory AllocatePullMemory(int64_t size_bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  constexpr size_t kCacheLine = 64;
  const auto size = static_cast<size_t>(size_bytes);
  const bool is_large = size >= 8 * kHugePage;
  const size_t alignment = is_large ? kHugePage : kCacheLine;
  const size_t whole = (size / alignment + 1) * alignment;
  PullMemory memory(static_cast<std::byte*>(std::aligned_alloc(alignment, whole)));
  // Failure costs only speed.
  if (is_large && memory != nullptr) {
    madvise(memory.get(), size / kHugePage * kHugePage, MADV_HUGEPAGE);
  }
  return memory;
}

}  // namespace ema

#endif  // EMA_INTERNAL_PULL_MEMORY_H_
