// SPDX-License-Identifier: Apache-2.0
//
// Random cuts of tensors into boxes, for tests of layouts. The same seed gives the same cut in
// every process.
#ifndef EMA_TESTS_TESTUTIL_RANDOM_LAYOUT_H_
#define EMA_TESTS_TESTUTIL_RANDOM_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "ema/manifest.h"
#include "ema/shard.h"

namespace ema {

// 0 <= result < `limit`.
inline int64_t Below(std::mt19937& random, int64_t limit) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
}

inline bool OneIn(std::mt19937& random, int64_t n) { return Below(random, n) == 0; }

// Five boxes around a middle one, in dimensions `a` and `b`: a cut that no plane goes through.
// REQUIRES: both extents are 3 or more.
inline std::vector<Shard> CutAsPinwheel(std::mt19937& random, const Shard& box, size_t a,
                                        size_t b) {
  const int64_t a1 = 1 + Below(random, box.extents[a] - 2);
  const int64_t b1 = 1 + Below(random, box.extents[b] - 2);
  const int64_t a2 = a1 + 1 + Below(random, box.extents[a] - a1 - 1);
  const int64_t b2 = b1 + 1 + Below(random, box.extents[b] - b1 - 1);
  std::vector<Shard> pieces;
  const auto add = [&](int64_t a_begin, int64_t a_end, int64_t b_begin, int64_t b_end) {
    Shard piece = box;
    piece.offsets[a] += a_begin;
    piece.extents[a] = a_end - a_begin;
    piece.offsets[b] += b_begin;
    piece.extents[b] = b_end - b_begin;
    pieces.push_back(std::move(piece));
  };
  add(0, a2, 0, b1);
  add(a2, box.extents[a], 0, b2);
  add(a1, box.extents[a], b2, box.extents[b]);
  add(0, a1, b1, box.extents[b]);
  add(a1, a2, b1, b2);
  return pieces;
}

// At least `count` boxes, if the tensor has so many elements, that together hold each element once.
inline std::vector<Shard> CutTensor(std::mt19937& random, const Manifest& manifest,
                                    int64_t tensor_index, size_t count) {
  std::vector<Shard> boxes = {WholeTensor(manifest, tensor_index)};
  while (boxes.size() < count) {
    const auto largest = std::max_element(
        boxes.begin(), boxes.end(),
        [](const Shard& x, const Shard& y) { return x.element_count() < y.element_count(); });
    if (largest->element_count() <= 1) break;
    const Shard box = *largest;
    boxes.erase(largest);
    std::vector<size_t> divisible;
    std::vector<size_t> wide;
    for (size_t d = 0; d < box.extents.size(); ++d) {
      if (box.extents[d] >= 2) divisible.push_back(d);
      if (box.extents[d] >= 3) wide.push_back(d);
    }
    if (wide.size() >= 2 && OneIn(random, 3)) {
      std::shuffle(wide.begin(), wide.end(), random);
      for (Shard& piece : CutAsPinwheel(random, box, wide[0], wide[1])) {
        boxes.push_back(std::move(piece));
      }
      continue;
    }
    const size_t d = divisible[Below(random, static_cast<int64_t>(divisible.size()))];
    Shard low = box;
    Shard high = box;
    low.extents[d] = 1 + Below(random, box.extents[d] - 1);
    high.offsets[d] += low.extents[d];
    high.extents[d] -= low.extents[d];
    boxes.push_back(std::move(low));
    boxes.push_back(std::move(high));
  }
  return boxes;
}

// By rank: what each pushes of a random cut of all tensors, in random order. Together they hold
// each element once; a rank may hold nothing.
inline std::vector<std::vector<Shard>> CutForRanks(std::mt19937& random, const Manifest& manifest,
                                                   int64_t world_size, size_t boxes_per_tensor) {
  std::vector<std::vector<Shard>> ranks(world_size);
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    for (Shard& box : CutTensor(random, manifest, i, boxes_per_tensor)) {
      ranks[Below(random, world_size)].push_back(std::move(box));
    }
  }
  for (std::vector<Shard>& shards : ranks) std::shuffle(shards.begin(), shards.end(), random);
  return ranks;
}

// The elements of a box in the order in which they are pushed, as row-major indices in a tensor of
// `shape`.
inline std::vector<int64_t> ElementsOf(const Shard& box, const std::vector<int64_t>& shape) {
  std::vector<int64_t> elements = {0};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> longer;
    longer.reserve(elements.size() * box.extents[d]);
    for (const int64_t element : elements) {
      for (int64_t i = 0; i < box.extents[d]; ++i) {
        longer.push_back(element * shape[d] + box.offsets[d] + i);
      }
    }
    elements = std::move(longer);
  }
  return elements;
}

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_RANDOM_LAYOUT_H_
