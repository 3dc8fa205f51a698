// SPDX-License-Identifier: Apache-2.0
//
// What one thread of a kernel does for a cast.
#ifndef EMA_SERVER_KERNEL_CAST_RUN_H_
#define EMA_SERVER_KERNEL_CAST_RUN_H_

#include <cstddef>
#include <cstdint>

#include "server/kernel/cast_element.h"
#include "server/kernel/fold_table.h"

namespace ema {

inline constexpr int kCastThreads = 256;  // Of a block.
// Adjacent elements that a thread casts at once.
inline constexpr int64_t kCastVector = kFoldVector;

// to[i] = NarrowBits(format, from[i]), in device memory; the ranges do not overlap.
struct CastRun {
  SourceFormat format = SourceFormat::kBFloat16;
  const std::byte* from = nullptr;  // float32s, aligned to 16 bytes.
  std::byte* to = nullptr;          // Aligned to 8 bytes.
  int64_t element_count = 0;        // 0 or more.
};

// The share of thread `thread` of all `thread_count` of the grid.
EMA_HOST_DEVICE inline void CastOfThread(const CastRun& run, int64_t thread, int64_t thread_count) {
  constexpr int64_t kFromBytes = sizeof(float);
  constexpr int64_t kToBytes = sizeof(uint16_t);
  int64_t i = thread * kCastVector;
  for (; i + kCastVector <= run.element_count; i += thread_count * kCastVector) {
    const auto from = fold_internal::LoadLanes<float>(run.from + i * kFromBytes);
    fold_internal::Lanes<uint16_t> to;
    EMA_UNROLL
    for (int j = 0; j < kCastVector; ++j) to.lane[j] = NarrowBits(run.format, from.lane[j]);
    fold_internal::StoreLanes(to, run.to + i * kToBytes);
  }
  // One thread casts the last few.
  for (; i < run.element_count; ++i) {
    const uint16_t bits = NarrowBits(run.format, LoadAs<float>(run.from + i * kFromBytes));
    std::memcpy(run.to + i * kToBytes, &bits, sizeof(bits));
  }
}

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_CAST_RUN_H_
