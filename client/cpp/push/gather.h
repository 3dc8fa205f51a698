// SPDX-License-Identifier: Apache-2.0
//
// Gathers weights that are not in row-major order, such as those of torch's channels_last.
#ifndef EMA_CLIENT_CPP_PUSH_GATHER_H_
#define EMA_CLIENT_CPP_PUSH_GATHER_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace ema::client_internal {

// A box of elements: its size and the distance between neighbours, in elements, by dimension.
// `first` points to the element at index 0.
struct StridedBox {
  const std::byte* first;
  int64_t element_bytes;  // 1, 2, 4 or 8.
  absl::Span<const int64_t> extents;
  absl::Span<const int64_t> strides;  // One for each extent.
};

// Copies `count` elements to `to`, contiguously, from the `begin`th on in row-major order.
// REQUIRES: the box has that many.
void Gather(const StridedBox& box, int64_t begin, int64_t count, std::byte* to);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_GATHER_H_
