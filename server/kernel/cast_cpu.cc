// SPDX-License-Identifier: Apache-2.0
//
// float32 to float16 and bfloat16, many elements at a time; Highway compiles the first part of this
// file once for each family of processors, as in fold_cpu.cc.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "server/kernel/cast.h"
#include "server/kernel/fold.h"

// The same families as the ema kernel's. Those before AVX2 have no conversion to float16.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernel/cast_cpu.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ema {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Gives how many elements were cast: a multiple of the vector's; the rest is the caller's.
int64_t CastSimd([[maybe_unused]] const std::byte* from, [[maybe_unused]] Dtype to_dtype,
                 [[maybe_unused]] std::byte* to, [[maybe_unused]] int64_t element_count) {
#if HWY_NATIVE_FMA && HWY_HAVE_FLOAT64
  using FloatTag = hn::ScalableTag<float>;
  using BitsTag = hn::RebindToUnsigned<FloatTag>;
  using SignedTag = hn::RebindToSigned<FloatTag>;
  const FloatTag float_tag;
  const BitsTag bits_tag;
  const hn::Rebind<uint16_t, FloatTag> half_tag;
  const hn::Rebind<hwy::float16_t, FloatTag> float16_tag;
  constexpr int64_t kLanes = hn::MaxLanes(FloatTag());
  const hn::Repartition<uint8_t, FloatTag> from_bytes;
  const hn::Repartition<uint8_t, decltype(half_tag)> to_bytes;
  const auto* source = reinterpret_cast<const uint8_t*>(from);
  auto* target = reinterpret_cast<uint8_t*>(to);

  int64_t done = 0;
  for (; done + kLanes <= element_count; done += kLanes) {
    const auto bits = hn::BitCast(bits_tag, hn::LoadU(from_bytes, source + done * 4));
    if (to_dtype == Dtype::kFloat16) {
      const auto half = hn::DemoteTo(float16_tag, hn::BitCast(float_tag, bits));
      hn::StoreU(hn::BitCast(to_bytes, half), to_bytes, target + done * 2);
      continue;
    }
    const auto upper = hn::ShiftRight<16>(bits);
    const auto odd = hn::And(upper, hn::Set(bits_tag, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(bits_tag, 0x7fff))));
    const auto is_nan =
        hn::Gt(hn::BitCast(SignedTag(), hn::And(bits, hn::Set(bits_tag, 0x7fffffff))),
               hn::Set(SignedTag(), 0x7f800000));
    const auto quiet = hn::Or(upper, hn::Set(bits_tag, 0x40));
    const auto result = hn::IfThenElse(hn::RebindMask(bits_tag, is_nan), quiet, rounded);
    const auto narrow = hn::DemoteTo(half_tag, hn::BitCast(SignedTag(), result));
    hn::StoreU(hn::BitCast(to_bytes, narrow), to_bytes, target + done * 2);
  }
  return done;
#else
  return 0;
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace ema
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ema {
namespace {

HWY_EXPORT(CastSimd);

// As float32: what an average's first value is. `to` is aligned to 4.
using FoldFunction = std::optional<int64_t> (*)(const FoldOp&);
void ToFloat32(FoldFunction fold, Dtype from_dtype, const std::byte* from, std::byte* to,
               int64_t count) {
  FoldTarget target;
  target.kind = FoldTarget::Kind::kAssign;
  target.next = to;
  fold({from_dtype, from, count, {&target, 1}});
}

void NarrowScalar(const std::byte* from, Dtype to_dtype, std::byte* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, from + i * 4, sizeof(value));
    const uint16_t bits = to_dtype == Dtype::kFloat16 ? Float16Bits(value) : BFloat16Bits(value);
    std::memcpy(to + i * 2, &bits, sizeof(bits));
  }
}

void NarrowSimd(const std::byte* from, Dtype to_dtype, std::byte* to, int64_t count) {
  const int64_t done = HWY_DYNAMIC_DISPATCH(CastSimd)(from, to_dtype, to, count);
  NarrowScalar(from + done * 4, to_dtype, to + done * 2, count - done);
}

template <typename Narrow>
void Cast(FoldFunction fold, Narrow narrow, Dtype from_dtype, const std::byte* from, Dtype to_dtype,
          std::byte* to, int64_t element_count) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, element_count * DtypeSize(to_dtype));
    return;
  }
  if (from_dtype == Dtype::kFloat32) return narrow(from, to_dtype, to, element_count);
  constexpr int64_t kTileElements = 2048;
  alignas(64) std::array<std::byte, kTileElements * 4> tile;
  for (int64_t done = 0; done < element_count; done += kTileElements) {
    const int64_t n = std::min(kTileElements, element_count - done);
    ToFloat32(fold, from_dtype, from + done * DtypeSize(from_dtype), tile.data(), n);
    std::byte* const target = to + done * DtypeSize(to_dtype);
    if (to_dtype == Dtype::kFloat32) {
      std::memcpy(target, tile.data(), n * 4);
    } else {
      narrow(tile.data(), to_dtype, target, n);
    }
  }
}

template <typename Bits>
int64_t FindBits(const std::byte* elements, int64_t begin, int64_t element_count, Bits infinity) {
  const auto is_infinite = [&](int64_t i) -> Bits {
    constexpr Bits kWithoutSign = static_cast<Bits>(~Bits{0}) >> 1;
    return (LoadAs<Bits>(elements + i * sizeof(Bits)) & kWithoutSign) == infinity ? 1 : 0;
  };
  constexpr int64_t kTileElements = 1024;
  for (; begin < element_count; begin += kTileElements) {
    const int64_t end = std::min(begin + kTileElements, element_count);
    // Without a branch, so that the compiler makes vector code of it: 0.05 ms a MiB.
    Bits is_found = 0;
    for (int64_t i = begin; i < end; ++i) is_found |= is_infinite(i);
    if (is_found == 0) continue;
    while (is_infinite(begin) == 0) ++begin;
    return begin;
  }
  return element_count;
}

}  // namespace

bool CanOverflow(Dtype from_dtype, Dtype to_dtype) {
  if (from_dtype == to_dtype || !IsFloat(from_dtype) || from_dtype == Dtype::kFloat16) return false;
  if (to_dtype == Dtype::kFloat16) return true;
  return from_dtype == Dtype::kFloat64 ||
         (from_dtype == Dtype::kFloat32 && to_dtype == Dtype::kBFloat16);
}

int64_t FindInfinity(Dtype dtype, const std::byte* elements, int64_t begin, int64_t element_count) {
  switch (dtype) {
    case Dtype::kFloat16:
      return FindBits<uint16_t>(elements, begin, element_count, 0x7c00);
    case Dtype::kBFloat16:
      return FindBits<uint16_t>(elements, begin, element_count, 0x7f80);
    default:
      return FindBits<uint32_t>(elements, begin, element_count, 0x7f800000);
  }
}

double LargestValue(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
      return 0x1.ffcp15;
    case Dtype::kBFloat16:
      return 0x1.fep127;
    default:
      return std::numeric_limits<float>::max();
  }
}

double ValueAt(Dtype dtype, const std::byte* elements, int64_t i) {
  return LoadDouble(static_cast<SourceFormat>(dtype), elements + i * DtypeSize(dtype));
}

void CastOnCpu(Dtype from_dtype, const std::byte* from, Dtype to_dtype, std::byte* to,
               int64_t element_count) {
  Cast(&FoldOnCpu, &NarrowSimd, from_dtype, from, to_dtype, to, element_count);
}

void CastScalar(Dtype from_dtype, const std::byte* from, Dtype to_dtype, std::byte* to,
                int64_t element_count) {
  Cast(&FoldScalar, &NarrowScalar, from_dtype, from, to_dtype, to, element_count);
}

}  // namespace ema
#endif  // HWY_ONCE
