// SPDX-License-Identifier: Apache-2.0
//
// The per-element definition of the update, and the CPU kernel that does it many at a time.
#ifndef EMA_SERVER_DEVICE_EMA_KERNEL_H_
#define EMA_SERVER_DEVICE_EMA_KERNEL_H_

#include <cmath>
#include <cstdint>
#include <optional>

#include "server/device/device.h"

namespace ema {

// The definition of the update, which every kernel matches bit for bit: float32, subtraction
// rounded, then one real fused multiply-add.
inline float UpdatedAverage(float ema, float param, float update_weight) {
  return std::fma(update_weight, param - ema, ema);
}

// An average kept as two float32: their sum, which float64 holds. `high` is the sum rounded.
struct CompensatedAverage {
  float high = 0;
  float low = 0;
};

// Splits a float64. NaN and infinity, also by overflow, have a low part of 0.
inline CompensatedAverage Compensated(double value) {
  const float high = static_cast<float>(value);
  const float low = static_cast<float>(value - static_cast<double>(high));
  return {high, std::isfinite(low) ? low : 0.0f};
}

// The definition for compensated averages, in float64 throughout.
inline CompensatedAverage UpdatedAverage(CompensatedAverage ema, double param,
                                         double update_weight) {
  const double before = static_cast<double>(ema.high) + static_cast<double>(ema.low);
  return Compensated(std::fma(update_weight, param - before, before));
}

// Does `op` on host memory, in this thread, with the widest instructions the processor has. Returns
// the index of the first element that is not finite. The source may have any alignment.
std::optional<int64_t> FoldOnCpu(const FoldOp& op);

// The same, one element at a time by UpdatedAverage(): the reference for tests.
std::optional<int64_t> FoldScalar(const FoldOp& op);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_EMA_KERNEL_H_
