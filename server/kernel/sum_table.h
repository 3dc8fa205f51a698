// SPDX-License-Identifier: Apache-2.0
//
// Many sums as one table in device memory, and what one thread of a kernel does with it, like
// fold_table.h. Each thread of the grid has a place of its own for its sums, and always the same
// elements: adding the places in their order gives the same bits every time, and no thread waits
// for another.
#ifndef EMA_SERVER_KERNEL_SUM_TABLE_H_
#define EMA_SERVER_KERNEL_SUM_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "server/kernel/fold_table.h"
#include "server/kernel/sum_element.h"

namespace ema {

inline constexpr int kSumThreads = 256;  // Of a block.
// Elements of a tile that one thread adds: as many loads are in flight at once.
inline constexpr int kSumUnroll = 8;
inline constexpr int64_t kSumTileElements = int64_t{kSumUnroll} * kSumThreads;

// SumRun in device memory.
struct DeviceSumRun {
  const std::byte* average = nullptr;  // Aligned to its elements, as is `raw`.
  const std::byte* raw = nullptr;
  int64_t element_count = 0;
  int64_t first_tile = 0;                            // Tiles of all runs before.
  SourceFormat raw_format = SourceFormat::kNoFloat;  // kNoFloat: there are no raw values.
  bool is_float64 = false;                           // The averages; else they are float32.
};

struct SumTable {
  const DeviceSumRun* runs = nullptr;
  int64_t run_count = 0;
  int64_t tile_count = 0;
  int64_t block_count = 0;
  SquareSums* sums = nullptr;  // block_count * kSumThreads of them, to which the threads add.
};

// Tiles of a run.
EMA_HOST_DEVICE inline int64_t SumTileCount(int64_t element_count) {
  return (element_count + kSumTileElements - 1) / kSumTileElements;
}

namespace sum_internal {

// The run to which a tile belongs. REQUIRES: 0 <= tile < table.tile_count.
EMA_HOST_DEVICE inline const DeviceSumRun& RunOfTile(const SumTable& table, int64_t tile) {
  // The last one that begins at the tile or before: runs without elements have no tile.
  int64_t low = 0;
  int64_t high = table.run_count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (table.runs[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return table.runs[low];
}

// Adds elements `first`, `first` + kSumThreads and so on of a tile: neighbouring threads read
// neighbouring elements at the same time. All are loaded before one is added; elements behind the
// run's end count as 0.
template <typename Average, SourceFormat kFormat>
EMA_HOST_DEVICE inline void AddOfTile(const DeviceSumRun& run, int64_t first, SquareSums& sums) {
  constexpr bool kHasRaw = kFormat != SourceFormat::kNoFloat;
  using Bits = typename fold_internal::BitsOf<kFormat>::Type;
  Average averages[kSumUnroll] = {};
  Bits raws[kSumUnroll] = {};
  EMA_UNROLL
  for (int j = 0; j < kSumUnroll; ++j) {
    const int64_t i = first + int64_t{j} * kSumThreads;
    if (i < run.element_count) {
      averages[j] = reinterpret_cast<const Average*>(run.average)[i];
      if (kHasRaw) raws[j] = reinterpret_cast<const Bits*>(run.raw)[i];
    }
  }
  EMA_UNROLL
  for (int j = 0; j < kSumUnroll; ++j) {
    if (kHasRaw) {
      AddElement(sums, averages[j],
                 LoadDouble(kFormat, reinterpret_cast<const std::byte*>(&raws[j])));
    } else {
      AddElement(sums, averages[j]);
    }
  }
}

template <typename Average>
EMA_HOST_DEVICE inline void AddOfAnyTile(const DeviceSumRun& run, int64_t first, SquareSums& sums) {
  switch (run.raw_format) {
    case SourceFormat::kNoFloat:
      AddOfTile<Average, SourceFormat::kNoFloat>(run, first, sums);
      break;
    case SourceFormat::kFloat32:
      AddOfTile<Average, SourceFormat::kFloat32>(run, first, sums);
      break;
    case SourceFormat::kFloat16:
      AddOfTile<Average, SourceFormat::kFloat16>(run, first, sums);
      break;
    case SourceFormat::kBFloat16:
      AddOfTile<Average, SourceFormat::kBFloat16>(run, first, sums);
      break;
    case SourceFormat::kFloat64:
      AddOfTile<Average, SourceFormat::kFloat64>(run, first, sums);
      break;
  }
}

}  // namespace sum_internal

// The share of thread `thread` of kSumThreads in block `block` of table.block_count.
EMA_HOST_DEVICE inline void SumOfThread(const SumTable& table, int64_t block, int thread) {
  SquareSums& place = table.sums[block * kSumThreads + thread];
  SquareSums sums = place;
  for (int64_t tile = block; tile < table.tile_count; tile += table.block_count) {
    // A copy, so that it is read only once.
    const DeviceSumRun run = sum_internal::RunOfTile(table, tile);
    const int64_t first = (tile - run.first_tile) * kSumTileElements + thread;
    if (run.is_float64) {
      sum_internal::AddOfAnyTile<double>(run, first, sums);
    } else {
      sum_internal::AddOfAnyTile<float>(run, first, sums);
    }
  }
  place = sums;
}

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_SUM_TABLE_H_
