// SPDX-License-Identifier: Apache-2.0
//
// What a fold does to one element: the one definition, for the CPU and for a GPU, that every kernel
// matches bit for bit (but for the payload of a NaN). Compiled by C++ and CUDA compilers; includes
// nothing that only one of them can read.
#ifndef EMA_SERVER_KERNEL_FOLD_ELEMENT_H_
#define EMA_SERVER_KERNEL_FOLD_ELEMENT_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define EMA_HOST_DEVICE __host__ __device__
#define EMA_UNROLL _Pragma("unroll")
#define EMA_NO_UNROLL _Pragma("unroll 1")
#else
#define EMA_HOST_DEVICE
#define EMA_UNROLL
#define EMA_NO_UNROLL
#endif

namespace ema {

// What a fold does to one track.
enum class FoldKind : uint8_t {
  kAverage,  // next[i] = fma(w, float(source[i]) - current[i], current[i]), all float32, `w` the
             // update weight rounded to float32. Values that are more than 3.4e38 apart make the
             // average infinite; a track with dtype="float64" can hold them.
  kAssign,   // next[i] = float(source[i]): an average's first value; `current` is not read
  kCopy,     // next[i] = source[i], the source's dtype and bits
  kAverageFloat64,  // as kAverage, but all float64, `w` not rounded
  kAssignFloat64,   // next[i] = double(source[i])
  kMean,  // next[i] = the mean of float(source[i]) and earlier weights, all float32: see MeanOf()
  kMeanFloat64,  // the same, but all float64
};

// The earlier weights of a mean, at most.
inline constexpr int kMaxEarlierWeights = 15;

EMA_HOST_DEVICE constexpr bool IsAverage(FoldKind kind) {
  return kind == FoldKind::kAverage || kind == FoldKind::kAverageFloat64;
}
EMA_HOST_DEVICE constexpr bool IsMean(FoldKind kind) {
  return kind == FoldKind::kMean || kind == FoldKind::kMeanFloat64;
}
// Whether averages are stored as float64.
EMA_HOST_DEVICE constexpr bool IsFloat64(FoldKind kind) {
  return kind == FoldKind::kAverageFloat64 || kind == FoldKind::kAssignFloat64 ||
         kind == FoldKind::kMeanFloat64;
}
// Whether pushed values are rounded to float32: float64 values that are too large become infinite.
EMA_HOST_DEVICE constexpr bool IsFloat32(FoldKind kind) {
  return kind == FoldKind::kAverage || kind == FoldKind::kAssign || kind == FoldKind::kMean;
}

// How a pushed element is to be read. For floats the numbers are those of Dtype.
enum class SourceFormat : uint8_t {
  kNoFloat = 0,  // Only to be copied.
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kFloat64 = 4,
};

// A value of type T at any address.
template <typename T>
EMA_HOST_DEVICE inline T LoadAs(const std::byte* address) {
  T value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}

template <typename To, typename From>
EMA_HOST_DEVICE inline To BitsAs(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Converts IEEE 754 binary16, exactly.
EMA_HOST_DEVICE inline float Float16ToFloat(uint16_t half) {
  const uint32_t exponent = half >> 10 & 0x1f;
  const uint32_t fraction = half & 0x3ff;
  const uint32_t sign = uint32_t{half} >> 15 << 31;
  if (exponent == 0) {
    return BitsAs<float>(sign | BitsAs<uint32_t>(static_cast<float>(fraction) * 0x1p-24f));
  }
  const uint32_t float_exponent = exponent == 0x1f ? 0xff : exponent + (127 - 15);
  return BitsAs<float>(sign | float_exponent << 23 | fraction << 13);
}

// REQUIRES: format is a float's.
EMA_HOST_DEVICE inline float LoadFloat(SourceFormat format, const std::byte* address) {
  switch (format) {
    case SourceFormat::kFloat16:
      return Float16ToFloat(LoadAs<uint16_t>(address));
    case SourceFormat::kBFloat16:
      return BitsAs<float>(uint32_t{LoadAs<uint16_t>(address)} << 16);
    case SourceFormat::kFloat64:
      // To nearest, ties to even. NaN and infinity stay so, and a value that is too large becomes
      // infinite: a check of the result is a check of both.
      return static_cast<float>(LoadAs<double>(address));
    default:
      return LoadAs<float>(address);
  }
}

// The same, but not rounded.
EMA_HOST_DEVICE inline double LoadDouble(SourceFormat format, const std::byte* address) {
  return format == SourceFormat::kFloat64 ? LoadAs<double>(address)
                                          : double{LoadFloat(format, address)};
}

EMA_HOST_DEVICE inline bool IsFinite(float value) {
  return (BitsAs<uint32_t>(value) & 0x7f800000) != 0x7f800000;
}
EMA_HOST_DEVICE inline bool IsFinite(double value) {
  return (BitsAs<uint64_t>(value) & 0x7ff0000000000000) != 0x7ff0000000000000;
}

// The subtraction is rounded; then one real fused multiply-add.
EMA_HOST_DEVICE inline float UpdatedAverage(float ema, float param, float update_weight) {
  return std::fma(update_weight, param - ema, ema);
}
EMA_HOST_DEVICE inline double UpdatedAverage(double ema, double param, double update_weight) {
  return std::fma(update_weight, param - ema, ema);
}

// The mean of `count` weights in float64, which a float32 track rounds once. `differences`: the sum
// of weight - newest over the earlier weights, added up from the oldest on. The mean of equal
// weights is exactly these.
EMA_HOST_DEVICE inline double MeanOf(double newest, double differences, int count) {
  return newest + differences / count;
}

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_FOLD_ELEMENT_H_
