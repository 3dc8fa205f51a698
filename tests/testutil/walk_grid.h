// SPDX-License-Identifier: Apache-2.0
//
// A kernel's grid on the CPU.
#ifndef EMA_TESTS_TESTUTIL_WALK_GRID_H_
#define EMA_TESTS_TESTUTIL_WALK_GRID_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace ema {

// Calls `thread_of_block` for every thread of every block: as on a GPU, blocks in any order, and
// the threads of each, too.
template <typename Random, typename Do>
void WalkGrid(int64_t block_count, int thread_count, Random& random, const Do& thread_of_block) {
  std::vector<int64_t> blocks(static_cast<size_t>(block_count));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), random);
  std::vector<int> threads(static_cast<size_t>(thread_count));
  std::iota(threads.begin(), threads.end(), 0);
  std::shuffle(threads.begin(), threads.end(), random);
  for (const int64_t block : blocks) {
    for (const int thread : threads) thread_of_block(block, thread);
  }
}

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_WALK_GRID_H_
