// SPDX-License-Identifier: Apache-2.0
//
// Which part of a track a reader wants, and in which dtype.
#ifndef EMA_SELECTION_H_
#define EMA_SELECTION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ema/tensor_spec.h"

namespace ema {

// A box of one tensor. `offsets` and `extents` are as long as its shape.
struct TensorSlice {
  std::string tensor;  // A name or an alias.
  std::vector<int64_t> offsets;
  std::vector<int64_t> extents;

  friend bool operator==(const TensorSlice&, const TensorSlice&) = default;
};

// Mirrors ema.v1.Selection, which says what each field means. By default the whole track, in the
// dtypes in which it is kept.
struct Selection {
  std::vector<std::string> tensors;
  std::vector<TensorSlice> slices;
  std::optional<Dtype> dtype;
  OverflowPolicy overflow = OverflowPolicy::kError;  // For casts to `dtype`.

  bool selects_all() const { return tensors.empty() && slices.empty(); }
  // (A comparison with Selection() would make GCC 12 warn in builds with sanitizers.)
  bool is_default() const { return selects_all() && !dtype.has_value(); }

  friend bool operator==(const Selection&, const Selection&) = default;
};

}  // namespace ema

#endif  // EMA_SELECTION_H_
