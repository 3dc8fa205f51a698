// SPDX-License-Identifier: Apache-2.0
//
// The body of the GPU's kernel where it cannot be run as a whole; what it computes is in
// tests/conformance.
#include "server/kernel/sum_table.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ema {
namespace {

// Zeros, of which only the pages that are touched take memory.
template <typename T>
class Sparse {
 public:
  explicit Sparse(int64_t count)
      : size_bytes_(static_cast<size_t>(count) * sizeof(T)),
        memory_(mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    EXPECT_NE(memory_, MAP_FAILED);
  }
  ~Sparse() { munmap(memory_, size_bytes_); }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  T* data() const { return static_cast<T*>(memory_); }

 private:
  const size_t size_bytes_;
  void* const memory_;
};

TEST(SumTableTest, ARunMayHaveMoreThanTwoToThe31Elements) {
  constexpr int64_t kCount = (int64_t{1} << 31) + 5 * kSumTileElements + 3;
  const Sparse<float> memory(kCount);
  float* const values = memory.data();
  const auto* const average = reinterpret_cast<const std::byte*>(values);
  const std::vector<DeviceSumRun> runs = {
      {.average = average, .element_count = 0},
      {.average = average,
       .raw = average,
       .element_count = kCount,
       .raw_format = SourceFormat::kFloat32},
      {.average = average, .element_count = 1, .first_tile = SumTileCount(kCount)}};
  const int64_t last_tile = SumTileCount(kCount) - 1;
  // A block for each tile: each is looked at by itself.
  const int64_t block_count = last_tile + 2;
  const Sparse<SquareSums> places(block_count * kSumThreads);
  SquareSums* const sums = places.data();
  const SumTable table{.runs = runs.data(),
                       .run_count = static_cast<int64_t>(runs.size()),
                       .tile_count = block_count,
                       .block_count = block_count,
                       .sums = sums};
  for (const int64_t tile : {(int64_t{1} << 31) / kSumTileElements, last_tile}) {
    const int64_t begin = tile * kSumTileElements;
    for (int64_t i = begin; i < std::min(begin + kSumTileElements, kCount); ++i) values[i] = 2;
    double total = 0;
    for (int thread = 0; thread < kSumThreads; ++thread) {
      SumOfThread(table, tile, thread);
      total += sums[tile * kSumThreads + thread].average;
      EXPECT_EQ(sums[tile * kSumThreads + thread].difference, 0);
    }
    EXPECT_EQ(total, tile == last_tile ? 4 * 3 : 4 * kSumTileElements);
  }
}

// What many launches add up to is in the same places.
TEST(SumTableTest, AThreadAddsToItsPlace) {
  const std::vector<float> values(kSumTileElements, 1);
  const DeviceSumRun run{.average = reinterpret_cast<const std::byte*>(values.data()),
                         .element_count = kSumTileElements};
  std::vector<SquareSums> sums(kSumThreads, {.average = 1, .difference = 5});
  SumOfThread(
      {.runs = &run, .run_count = 1, .tile_count = 1, .block_count = 1, .sums = sums.data()}, 0, 7);
  EXPECT_EQ(sums[7].average, 1 + kSumUnroll);
  EXPECT_EQ(sums[7].difference, 5);
  EXPECT_EQ(sums[8].average, 1);
}

}  // namespace
}  // namespace ema
