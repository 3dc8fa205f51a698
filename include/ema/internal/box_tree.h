// SPDX-License-Identifier: Apache-2.0
//
// Boxes of one tensor, found by where they lie.
#ifndef EMA_INTERNAL_BOX_TREE_H_
#define EMA_INTERNAL_BOX_TREE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ema/shard.h"
#include "ema/tensor_spec.h"

namespace ema {

// Such as "[0:2, 16:32]".
std::string BoxText(const Shard& box);

// A k-d tree: planes divide the tensor, and a box is in each part that it reaches into. Where few
// boxes cross a plane, as with those that ranks cut tensors into, it is made in n log n steps and
// searched in log n. Boxes can be made so that every plane crosses many; then it gives up.
// Immutable; safe to read from any thread.
class BoxTree {
 public:
  struct Entry {
    const Shard* box = nullptr;  // Not empty; outlives the tree.
    int64_t owner = 0;
  };

  // Absent: they are cut too irregularly. REQUIRES: all are of one tensor.
  static std::optional<BoxTree> Make(std::vector<Entry> entries);

  // INVALID_ARGUMENT, BAD_LAYOUT: the same, to be told.
  static absl::Status TooIrregular(const TensorSpec& tensor);

  size_t size() const { return size_; }
  // Of one of its boxes. REQUIRES: it has some.
  int64_t owner() const { return entries_.front().owner; }
  // What it was made of, in another order.
  std::vector<Entry> Entries() const;
  // Two that share an element. Absent: no two do.
  std::optional<std::pair<Entry, Entry>> FindPair() const;
  // One that shares an element with `box`; null: none does. Takes what it costs from `steps`: below
  // zero there were not enough, and null says nothing. REQUIRES: `box` is not empty.
  const Entry* Find(const Shard& box, int64_t& steps) const;

 private:
  struct Node {
    // Divides by offsets below `cut` and ends above it; -1: a leaf.
    int dimension = -1;
    int64_t cut = 0;
    // Nodes; of a leaf the range of its entries.
    int32_t low = 0;
    int32_t high = 0;
  };

  explicit BoxTree(size_t size) : size_(size) {}
  // Appends the node of `entries`, and what is below it. False: `steps` have not been enough.
  bool Append(std::vector<Entry> entries, int64_t& steps);

  size_t size_;
  std::vector<Node> nodes_;
  std::vector<Entry> entries_;  // By leaf.
};

}  // namespace ema

#endif  // EMA_INTERNAL_BOX_TREE_H_
