// SPDX-License-Identifier: Apache-2.0
//
// Manifests and shards to test layouts with.
#ifndef EMA_TESTS_INCLUDE_SHARD_TESTING_H_
#define EMA_TESTS_INCLUDE_SHARD_TESTING_H_

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/manifest.h"
#include "ema/shard.h"

namespace ema {

using Random = std::mt19937_64;

inline int64_t Below(Random& random, int64_t limit) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
}

inline Manifest Make(std::vector<TensorSpec> tensors) {
  return *Manifest::Create(std::move(tensors));
}

inline Manifest RandomManifest(Random& random) {
  std::vector<TensorSpec> tensors(1 + Below(random, 12));
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i] = {absl::StrCat("t", i), static_cast<Dtype>(1 + Below(random, 10)), {}};
    const int64_t rank = Below(random, 5);
    for (int64_t d = 0; d < rank; ++d) {
      tensors[i].shape.push_back(Below(random, 15) == 0 ? 0 : 1 + Below(random, 6));
    }
  }
  return Make(std::move(tensors));
}

// Cuts `shard` in two along random dimensions, again and again.
inline void CutAtRandom(Random& random, Shard shard, std::vector<Shard>& pieces) {
  const bool is_cut = !shard.offsets.empty() && shard.element_count() > 0 && Below(random, 4) != 0;
  if (!is_cut) {
    pieces.push_back(std::move(shard));
    return;
  }
  const size_t d = Below(random, static_cast<int64_t>(shard.offsets.size()));
  const int64_t at = Below(random, shard.extents[d] + 1);  // Either part may be empty.
  Shard rest = shard;
  shard.extents[d] = at;
  rest.offsets[d] += at;
  rest.extents[d] -= at;
  if (Below(random, 2) == 0) std::swap(shard, rest);
  CutAtRandom(random, std::move(shard), pieces);
  CutAtRandom(random, std::move(rest), pieces);
}

// One element after the other: where it lies in the rank's bytes and in its tensor.
struct Element {
  int64_t tensor_index = 0;
  int64_t byte_offset = 0;
  int64_t tensor_element = 0;
  friend bool operator==(const Element&, const Element&) = default;
};

// The model that ForEachRange is measured by: N-d indices counted up one by one.
inline std::vector<Element> NaiveElements(const Manifest& manifest,
                                          const std::vector<Shard>& shards) {
  std::vector<Element> elements;
  int64_t byte_offset = 0;
  for (const Shard& shard : shards) {
    const TensorSpec& spec = manifest.tensor(shard.tensor_index);
    std::vector<int64_t> index(spec.shape.size(), 0);
    for (int64_t i = 0; i < shard.element_count(); ++i) {
      int64_t flat = 0;
      for (size_t d = 0; d < index.size(); ++d) {
        flat = flat * spec.shape[d] + shard.offsets[d] + index[d];
      }
      elements.push_back({shard.tensor_index, byte_offset, flat});
      byte_offset += DtypeSize(spec.dtype);
      for (size_t d = index.size(); d-- > 0;) {
        if (++index[d] < shard.extents[d]) break;
        index[d] = 0;
      }
    }
  }
  return elements;
}

// Of a cube with edges of `size`: bars in all three directions, between each other, so that each
// plane crosses many. They share no element.
inline std::vector<Shard> Bars(int64_t size) {
  std::vector<Shard> bars;
  for (int64_t i = 0; i + 1 < size; i += 2) {
    for (int64_t j = 0; j + 1 < size; j += 2) {
      bars.push_back({0, {0, i, j + 1}, {size, 1, 1}});
      bars.push_back({0, {i + 1, 0, j}, {1, size, 1}});
      bars.push_back({0, {i, j + 1, 0}, {1, 1, size}});
    }
  }
  return bars;
}

}  // namespace ema

#endif  // EMA_TESTS_INCLUDE_SHARD_TESTING_H_
