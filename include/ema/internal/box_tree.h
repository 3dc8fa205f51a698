// SPDX-License-Identifier: Apache-2.0
//
// A spatial index of boxes of one tensor.
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

// A text such as "[0:2, 16:32]".
std::string BoxText(const Shard& box);

// A k-d tree: planes divide the tensor, and a box is stored in each part that it reaches into. If
// few boxes cross a plane, as usual for shards of ranks, building takes n log n steps and a search
// log n. Boxes can be cut so that every plane crosses many; then Make() fails. Immutable; safe to
// read from any thread.
class BoxTree {
 public:
  struct Entry {
    const Shard* box = nullptr;  // Not empty; outlives the tree.
    int64_t owner = 0;
  };

  // Absent: the boxes are cut too irregularly. REQUIRES: all are of one tensor.
  static std::optional<BoxTree> Make(std::vector<Entry> entries);

  // INVALID_ARGUMENT, BAD_LAYOUT: the error for callers of Make().
  static absl::Status TooIrregular(const TensorSpec& tensor);

  size_t size() const { return size_; }
  // The owner of one of its boxes. REQUIRES: size() > 0.
  int64_t owner() const { return entries_.front().owner; }
  // The entries given to Make(), in another order.
  std::vector<Entry> Entries() const;
  // Two entries that share an element. Absent: there are none.
  std::optional<std::pair<Entry, Entry>> FindPair() const;
  // An entry that shares an element with `box`; null: none does. Subtracts the cost from `steps`:
  // if it falls below zero, the search was cut short, and null means nothing. REQUIRES: `box` is
  // not empty.
  const Entry* Find(const Shard& box, int64_t& steps) const;

 private:
  struct Node {
    // Separates boxes that begin below `cut` from those that end above it; -1: a leaf.
    int dimension = -1;
    int64_t cut = 0;
    // Indices of the child nodes; for a leaf the range of its entries.
    int32_t low = 0;
    int32_t high = 0;
  };

  explicit BoxTree(size_t size) : size_(size) {}
  // Appends the subtree of `entries`. False: `steps` was too small.
  bool Append(std::vector<Entry> entries, int64_t& steps);

  size_t size_;
  std::vector<Node> nodes_;
  std::vector<Entry> entries_;  // Grouped by leaf.
};

}  // namespace ema

#endif  // EMA_INTERNAL_BOX_TREE_H_
