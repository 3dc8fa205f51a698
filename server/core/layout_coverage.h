// SPDX-License-Identifier: Apache-2.0
//
// Whether the layouts of all ranks together hold each element of a manifest once.
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

  // Adds rank `rank`'s shards. INVALID_ARGUMENT: LAYOUT_OVERLAP, an element is held already;
  // BAD_LAYOUT, a tensor is frozen here and not on another rank, or its shards are cut too
  // irregularly to be compared. The message names the tensor and both ranks, and nothing was added.
  absl::Status Add(int64_t rank, std::shared_ptr<const RankLayout> layout);

  // By tensor: frozen on all ranks that hold some of it.
  std::vector<bool> FrozenTensors() const;

  // OK if every element is held. INVALID_ARGUMENT, LAYOUT_HOLE: names the first tensor with a hole
  // and how many of its elements are in no shard.
  absl::Status CheckComplete() const;

 private:
  struct Tensor {
    int64_t covered_elements = 0;
    bool is_frozen = false;  // If it has boxes.
    // Each has less than half as many boxes as the one before: a box is put into a tree anew only
    // as often as their number doubles.
    std::vector<std::shared_ptr<const BoxTree>> trees;
  };

  absl::Status CheckDisjoint(int64_t rank, const RankLayout& layout) const;
  absl::Status CheckFrozen(int64_t rank, const RankLayout& layout) const;

  const Manifest* manifest_;
  std::vector<Tensor> tensors_;
  std::vector<std::shared_ptr<const RankLayout>> layouts_;  // In which the boxes lie.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_LAYOUT_COVERAGE_H_
