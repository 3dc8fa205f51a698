// SPDX-License-Identifier: Apache-2.0
//
// Checks that the layouts of all ranks together hold each element of a manifest once.
#ifndef EMA_SERVER_CORE_LAYOUT_COVERAGE_H_
#define EMA_SERVER_CORE_LAYOUT_COVERAGE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "ema/manifest.h"
#include "ema/shard.h"
#include "include/ema/internal/box_tree.h"

namespace ema {

// Counts which elements of a manifest the joined layouts hold. Copies are cheap.
class LayoutCoverage {
 public:
  explicit LayoutCoverage(const Manifest* manifest);

  // Adds the shards of `rank`. INVALID_ARGUMENT: LAYOUT_OVERLAP, an element is held already;
  // BAD_LAYOUT, a tensor is frozen here but not on another rank, or its shards are cut too
  // irregularly to be compared. The message names the tensor, and both ranks if two conflict. On an
  // error nothing is added.
  absl::Status Add(int64_t rank, std::shared_ptr<const RankLayout> layout);

  // By tensor: frozen on all ranks that hold some of it.
  std::vector<bool> FrozenTensors() const;

  // OK if every element is held. INVALID_ARGUMENT, LAYOUT_HOLE: names the first tensor with a hole
  // and how many of its elements are in no shard.
  absl::Status CheckComplete() const;

 private:
  struct Tensor {
    int64_t covered_elements = 0;
    bool is_frozen = false;  // Meaningful if it has boxes.
    // Each has less than half as many boxes as the one before, so a box is put into a new tree only
    // when the number of boxes doubles.
    std::vector<std::shared_ptr<const BoxTree>> trees;
  };

  absl::Status CheckDisjoint(int64_t rank, const RankLayout& layout) const;
  absl::Status CheckFrozen(int64_t rank, const RankLayout& layout) const;

  const Manifest* manifest_;
  std::vector<Tensor> tensors_;
  std::vector<std::shared_ptr<const RankLayout>> layouts_;  // Own the boxes.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_LAYOUT_COVERAGE_H_
