// SPDX-License-Identifier: Apache-2.0
//
// Finds boxes of tensors that share elements.
#ifndef EMA_INTERNAL_BOX_OVERLAP_H_
#define EMA_INTERNAL_BOX_OVERLAP_H_

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "ema/manifest.h"
#include "ema/shard.h"

namespace ema {

// A text such as "[0:2, 16:32]".
std::string BoxText(const Shard& box);

// A box, and the number of its holder.
struct HeldBox {
  const Shard* shard = nullptr;  // Not empty, and inside its tensor.
  int64_t holder = 0;
  // Used by CheckDisjoint(): the range of the box in the dimension that it examines.
  int64_t begin = 0;
  int64_t end = 0;
};

// OK if no two of the boxes share an element. Reorders them. INVALID_ARGUMENT: LAYOUT_OVERLAP; or
// BAD_LAYOUT, a tensor has thousands of boxes that interleave so much that the search would take
// too long. The message names the tensor, and the two boxes with their holders, for example "rank
// 3" if `holder_noun` is "rank".
absl::Status CheckDisjoint(const Manifest& manifest, std::span<HeldBox> boxes,
                           const std::string& holder_noun);

}  // namespace ema

#endif  // EMA_INTERNAL_BOX_OVERLAP_H_
