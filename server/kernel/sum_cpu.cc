// SPDX-License-Identifier: Apache-2.0
//
// Sums of squares in float64, many elements at a time; Highway compiles the first part of this file
// once for each family of processors, as in fold_cpu.cc.
#include <algorithm>
#include <array>

#include "server/kernel/fold.h"
#include "server/kernel/sum.h"

// The same families as the ema kernel's.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernel/sum_cpu.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ema {
namespace HWY_NAMESPACE {

#if HWY_HAVE_FLOAT64
namespace hn = hwy::HWY_NAMESPACE;

using DoubleTag = hn::ScalableTag<double>;
using DoubleVec = hn::Vec<DoubleTag>;
constexpr int64_t kLanes = hn::MaxLanes(DoubleTag());
// Sums that grow side by side: an addition takes four cycles, and two begin in each.
constexpr int kChains = 4;

HWY_INLINE DoubleVec LoadDoubles(const float* from) {
  return hn::PromoteTo(DoubleTag(), hn::LoadU(hn::Rebind<float, DoubleTag>(), from));
}
HWY_INLINE DoubleVec LoadDoubles(const double* from) { return hn::LoadU(DoubleTag(), from); }

// Adds the chains up, in their order.
HWY_INLINE double Total(const DoubleVec (&chains)[kChains]) {
  const DoubleTag tag;
  DoubleVec sum = chains[0];
  for (int c = 1; c < kChains; ++c) sum = hn::Add(sum, chains[c]);
  return hn::GetLane(hn::SumOfLanes(tag, sum));
}

template <bool kHasRaw, typename Average, typename Raw>
int64_t AddVectors(const Average* average, const Raw* raw, int64_t element_count,
                   SquareSums& sums) {
  const DoubleTag tag;
  DoubleVec averages[kChains];
  DoubleVec differences[kChains];
  for (int c = 0; c < kChains; ++c) averages[c] = differences[c] = hn::Zero(tag);
  int64_t done = 0;
  for (; done + kChains * kLanes <= element_count; done += kChains * kLanes) {
    for (int c = 0; c < kChains; ++c) {
      const int64_t i = done + c * kLanes;
      const DoubleVec value = LoadDoubles(average + i);
      averages[c] = hn::MulAdd(value, value, averages[c]);
      if constexpr (kHasRaw) {
        const DoubleVec difference = hn::Sub(LoadDoubles(raw + i), value);
        differences[c] = hn::MulAdd(difference, difference, differences[c]);
      }
    }
  }
  AddSums(sums, {Total(averages), Total(differences)});
  return done;
}

// Give how many elements were added; the rest, fewer than a few vectors', is the caller's.
int64_t AddFloats(const float* average, const float* raw, int64_t element_count, SquareSums& sums) {
  return raw != nullptr ? AddVectors<true>(average, raw, element_count, sums)
                        : AddVectors<false>(average, raw, element_count, sums);
}
int64_t AddFloatsOfDoubles(const float* average, const double* raw, int64_t element_count,
                           SquareSums& sums) {
  return AddVectors<true>(average, raw, element_count, sums);
}
int64_t AddDoubles(const double* average, const double* raw, int64_t element_count,
                   SquareSums& sums) {
  return raw != nullptr ? AddVectors<true>(average, raw, element_count, sums)
                        : AddVectors<false>(average, raw, element_count, sums);
}
#else   // 32-bit NEON.
int64_t AddFloats(const float*, const float*, int64_t, SquareSums&) { return 0; }
int64_t AddFloatsOfDoubles(const float*, const double*, int64_t, SquareSums&) { return 0; }
int64_t AddDoubles(const double*, const double*, int64_t, SquareSums&) { return 0; }
#endif  // HWY_HAVE_FLOAT64

}  // namespace HWY_NAMESPACE
}  // namespace ema
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ema {
namespace {

HWY_EXPORT(AddFloats);
HWY_EXPORT(AddFloatsOfDoubles);
HWY_EXPORT(AddDoubles);

int64_t AddMany(const float* average, const float* raw, int64_t element_count, SquareSums& sums) {
  return HWY_DYNAMIC_DISPATCH(AddFloats)(average, raw, element_count, sums);
}
int64_t AddMany(const float* average, const double* raw, int64_t element_count, SquareSums& sums) {
  return HWY_DYNAMIC_DISPATCH(AddFloatsOfDoubles)(average, raw, element_count, sums);
}
int64_t AddMany(const double* average, const double* raw, int64_t element_count, SquareSums& sums) {
  return HWY_DYNAMIC_DISPATCH(AddDoubles)(average, raw, element_count, sums);
}

template <typename Average, typename Raw>
void Add(const Average* average, const Raw* raw, int64_t element_count, SquareSums& sums) {
  for (int64_t i = AddMany(average, raw, element_count, sums); i < element_count; ++i) {
    raw != nullptr ? AddElement(sums, average[i], raw[i]) : AddElement(sums, average[i]);
  }
}

template <typename Average>
SquareSums SumOfRun(const SumRun& run) {
  const auto* const average = reinterpret_cast<const Average*>(run.average);
  SquareSums sums;
  if (run.raw == nullptr || run.raw_dtype == run.average_dtype) {
    Add(average, reinterpret_cast<const Average*>(run.raw), run.element_count, sums);
    return sums;
  }
  if (run.raw_dtype == Dtype::kFloat64) {
    Add(average, reinterpret_cast<const double*>(run.raw), run.element_count, sums);
    return sums;
  }
  // Few enough that FoldOnCpu() does not store them past the caches.
  constexpr int64_t kTileElements = 1024;
  alignas(64) std::array<Average, kTileElements> tile;
  const FoldTarget as_average = {
      .kind = run.average_dtype == Dtype::kFloat64 ? FoldKind::kAssignFloat64 : FoldKind::kAssign,
      .next = reinterpret_cast<std::byte*>(tile.data())};
  for (int64_t done = 0; done < run.element_count; done += kTileElements) {
    const int64_t count = std::min(kTileElements, run.element_count - done);
    FoldOnCpu({run.raw_dtype, run.raw + done * DtypeSize(run.raw_dtype), count, {&as_average, 1}});
    Add(average + done, tile.data(), count, sums);
  }
  return sums;
}

}  // namespace

SquareSums SumSquaresOnCpu(std::span<const SumRun> runs) {
  SquareSums sums;
  for (const SumRun& run : runs) {
    AddSums(sums,
            run.average_dtype == Dtype::kFloat64 ? SumOfRun<double>(run) : SumOfRun<float>(run));
  }
  return sums;
}

}  // namespace ema
#endif  // HWY_ONCE
