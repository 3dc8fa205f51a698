// SPDX-License-Identifier: Apache-2.0
//
// What a cast does to one element: the one definition, for the CPU and for a GPU, like
// fold_element.h.
#ifndef EMA_SERVER_KERNEL_CAST_ELEMENT_H_
#define EMA_SERVER_KERNEL_CAST_ELEMENT_H_

#include <cstdint>

#include "server/kernel/fold_element.h"

namespace ema {

// The definition of the cast to bfloat16: to nearest, ties to even; NaN stays NaN, quiet, with its
// sign.
EMA_HOST_DEVICE inline uint16_t BFloat16Bits(float value) {
  const uint32_t bits = BitsAs<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The same for float16. Subnormal results are kept; values that are too large become infinity.
EMA_HOST_DEVICE inline uint16_t Float16Bits(float value) {
  const uint32_t bits = BitsAs<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    return static_cast<uint16_t>(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  }
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // Rounds to 2^16 or more.
  if (magnitude < 0x38800000) {
    // Subnormal: a count of 2^-24, which float32's own addition rounds to the last bit of 0.5.
    const float counted = BitsAs<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (BitsAs<uint32_t>(counted) & 0x7ff));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13);
}

// REQUIRES: `format` is kFloat16 or kBFloat16.
EMA_HOST_DEVICE inline uint16_t NarrowBits(SourceFormat format, float value) {
  return format == SourceFormat::kFloat16 ? Float16Bits(value) : BFloat16Bits(value);
}

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_CAST_ELEMENT_H_
