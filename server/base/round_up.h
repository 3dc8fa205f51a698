// SPDX-License-Identifier: Apache-2.0
//
// Alignment of sizes and offsets.
#ifndef EMA_SERVER_BASE_ROUND_UP_H_
#define EMA_SERVER_BASE_ROUND_UP_H_

#include <cstdint>

namespace ema {

// The smallest multiple that is not below `value`. 0 <= value, 0 < multiple.
constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace ema

#endif  // EMA_SERVER_BASE_ROUND_UP_H_
