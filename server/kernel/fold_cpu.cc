// SPDX-License-Identifier: Apache-2.0
//
// next = fma(w, p - e, e), many elements at a time, in float32 or float64; and means. Highway
// compiles the first part of this file once for each family of processors and picks one at run
// time. Families without a fused multiply-add get the scalar definition: a product that is rounded
// before the addition gives other bits.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>

#include "server/kernel/fold.h"

// x86 before AVX2 has no fused multiply-add. SVE and RVV have vectors of a size unknown here.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "server/kernel/fold_cpu.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ema {
namespace HWY_NAMESPACE {

// 32-bit NEON has no float64, and flushes subnormals to zero.
#if HWY_NATIVE_FMA && HWY_HAVE_FLOAT64
namespace hn = hwy::HWY_NAMESPACE;

// Elements done for every target before the next ones are read. The source of a tile, at most 128
// KiB, stays in the second-level cache. Shorter tiles would stay in the first, but each target
// restarts its memory streams with each tile: 2048 elements are 10 % slower with four targets.
constexpr int64_t kTileElements = 16384;
// Elements of one step of the loops: as float32 they fill one 64-byte cache line. Lines stored past
// the caches must be stored as a whole.
constexpr int64_t kLineElements = 16;
constexpr int64_t kLineBytes = 64;
// Ops of at least this many elements store past the caches, which saves reading the old lines of
// `next`. Over 400 MB of float32 that is 1.0 times as fast as plain stores in ops of 2 KiB, 1.2
// times in ops of 8 KiB, 1.26 times in ops of 64 KiB; in ops of 1 KiB it is 0.7 times.
constexpr int64_t kStreamElements = 2048;

using Kind = FoldTarget::Kind;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;
using HalfTag = hn::Half<FloatTag>;
using DoubleTag = hn::ScalableTag<double>;
using DoubleVec = hn::Vec<DoubleTag>;
constexpr int64_t kLanes = hn::MaxLanes(FloatTag());
static_assert(kLineElements % kLanes == 0);

// A vector at any address: bytes need no alignment.
template <class Tag>
HWY_INLINE hn::Vec<Tag> LoadBytes(Tag tag, const std::byte* address) {
  const hn::Repartition<uint8_t, Tag> bytes;
  return hn::BitCast(tag, hn::LoadU(bytes, reinterpret_cast<const uint8_t*>(address)));
}

// kLanes elements as float64.
struct Doubles {
  DoubleVec lower;
  DoubleVec upper;
};

HWY_INLINE Doubles Widened(FloatVec value) {
  return {hn::PromoteTo(DoubleTag(), hn::LowerHalf(HalfTag(), value)),
          hn::PromoteTo(DoubleTag(), hn::UpperHalf(HalfTag(), value))};
}

// To nearest, ties to even.
HWY_INLINE FloatVec Rounded(const Doubles& value) {
  return hn::Combine(FloatTag(), hn::DemoteTo(HalfTag(), value.upper),
                     hn::DemoteTo(HalfTag(), value.lower));
}

HWY_INLINE Doubles Updated(const Doubles& ema, const Doubles& param, DoubleVec weight) {
  return {hn::MulAdd(weight, hn::Sub(param.lower, ema.lower), ema.lower),
          hn::MulAdd(weight, hn::Sub(param.upper, ema.upper), ema.upper)};
}

// Load() gives kLanes elements as float32.
struct Float32Source {
  static constexpr int64_t kElementBytes = 4;
  static HWY_INLINE FloatVec Load(const std::byte* address) {
    return LoadBytes(FloatTag(), address);
  }
};

struct Float16Source {
  static constexpr int64_t kElementBytes = 2;
  static HWY_INLINE FloatVec Load(const std::byte* address) {
    return hn::PromoteTo(FloatTag(), LoadBytes(hn::Rebind<hwy::float16_t, FloatTag>(), address));
  }
};

struct BFloat16Source {
  static constexpr int64_t kElementBytes = 2;
  static HWY_INLINE FloatVec Load(const std::byte* address) {
    return hn::PromoteTo(FloatTag(), LoadBytes(hn::Rebind<hwy::bfloat16_t, FloatTag>(), address));
  }
};

struct Float64Source {
  static constexpr int64_t kElementBytes = 8;
  static HWY_INLINE Doubles LoadDoubles(const std::byte* address) {
    return {LoadBytes(DoubleTag(), address),
            LoadBytes(DoubleTag(), address + kLanes / 2 * kElementBytes)};
  }
  static HWY_INLINE FloatVec Load(const std::byte* address) {
    return Rounded(LoadDoubles(address));
  }
};

template <class Source>
HWY_INLINE Doubles LoadDoubles(const std::byte* address) {
  if constexpr (std::is_same_v<Source, Float64Source>) {
    return Source::LoadDoubles(address);
  } else {
    return Widened(Source::Load(address));
  }
}

// Remembers whether a value was not finite: the value minus itself is 0, or else NaN. Two
// instructions per vector, hidden behind the memory.
class FiniteCheck {
 public:
  HWY_INLINE FiniteCheck() : differences_(hn::Zero(FloatTag())) {}
  HWY_INLINE void Add(FloatVec value) {
    differences_ = hn::Or(differences_, hn::Sub(value, value));
  }
  HWY_INLINE void Add(const Doubles& value) {
    const DoubleVec difference =
        hn::Or(hn::Sub(value.lower, value.lower), hn::Sub(value.upper, value.upper));
    differences_ = hn::Or(differences_, hn::BitCast(FloatTag(), difference));
  }
  HWY_INLINE bool all_finite() const {
    const hn::RebindToUnsigned<FloatTag> tag;
    return hn::AllTrue(tag, hn::Eq(hn::BitCast(tag, differences_), hn::Zero(tag)));
  }

 private:
  FloatVec differences_;
};

template <Kind kKind>
using StoredAs = std::conditional_t<IsFloat64(kKind), double, float>;

// Where the averages of some elements are and go to.
template <Kind kKind>
struct Places {
  const StoredAs<kKind>* current;  // Null: it is not read.
  StoredAs<kKind>* next;

  // No arithmetic on null pointers.
  HWY_INLINE Places At(int64_t i) const {
    return {IsAverage(kKind) ? current + i : nullptr, next + i};
  }
};

template <bool kStream, class Vec, typename T>
HWY_INLINE void Store(Vec value, T* address) {
  if constexpr (kStream) {
    hn::Stream(value, hn::DFromV<Vec>(), address);
  } else {
    hn::StoreU(value, hn::DFromV<Vec>(), address);
  }
}

template <class Source, Kind kKind, bool kStream>
HWY_INLINE void FoldVector(const std::byte* source, const Places<kKind>& places,
                           double update_weight, FiniteCheck& check) {
  if constexpr (IsFloat64(kKind)) {
    const DoubleTag tag;
    Doubles value = LoadDoubles<Source>(source);
    check.Add(value);
    if constexpr (IsAverage(kKind)) {
      value = Updated({hn::LoadU(tag, places.current), hn::LoadU(tag, places.current + kLanes / 2)},
                      value, hn::Set(tag, update_weight));
    }
    Store<kStream>(value.lower, places.next);
    Store<kStream>(value.upper, places.next + kLanes / 2);
  } else {
    const FloatTag tag;
    FloatVec value = Source::Load(source);
    check.Add(value);
    if constexpr (IsAverage(kKind)) {
      const FloatVec ema = hn::LoadU(tag, places.current);
      value = hn::MulAdd(hn::Set(tag, static_cast<float>(update_weight)), hn::Sub(value, ema), ema);
    }
    Store<kStream>(value, places.next);
  }
}

// Sixteen elements. REQUIRES: if kStream, what is stored is aligned to lines.
template <class Source, Kind kKind, bool kStream>
HWY_INLINE void FoldLine(const std::byte* source, const Places<kKind>& places, double update_weight,
                         FiniteCheck& check) {
  for (int64_t i = 0; i < kLineElements; i += kLanes) {
    FoldVector<Source, kKind, kStream>(source + i * Source::kElementBytes, places.At(i),
                                       update_weight, check);
  }
}

// Fewer than sixteen elements, by way of padded copies.
template <class Source, Kind kKind>
HWY_INLINE void FoldPartOfLine(const std::byte* source, int64_t count, const Places<kKind>& places,
                               double update_weight, FiniteCheck& check) {
  std::byte padded_source[kLineElements * Source::kElementBytes] = {};
  StoredAs<kKind> current[kLineElements] = {};
  StoredAs<kKind> next[kLineElements];
  const size_t stored_bytes = static_cast<size_t>(count) * sizeof(next[0]);
  std::memcpy(padded_source, source, count * Source::kElementBytes);
  if constexpr (IsAverage(kKind)) std::memcpy(current, places.current, stored_bytes);
  FoldLine<Source, kKind, false>(padded_source, {current, next}, update_weight, check);
  std::memcpy(places.next, next, stored_bytes);
}

template <class Source, Kind kKind, bool kStream>
void FoldRun(const std::byte* source, int64_t count, const Places<kKind>& places,
             double update_weight, FiniteCheck& check) {
  const Places<kKind> in_registers = places;
  FiniteCheck check_in_register = check;
  int64_t i = 0;
  for (; i + kLineElements <= count; i += kLineElements) {
    FoldLine<Source, kKind, kStream>(source + i * Source::kElementBytes, in_registers.At(i),
                                     update_weight, check_in_register);
  }
  if (i < count) {
    FoldPartOfLine<Source, kKind>(source + i * Source::kElementBytes, count - i, in_registers.At(i),
                                  update_weight, check_in_register);
  }
  check = check_in_register;
}

// The earlier weights of a mean, the oldest first, and where the mean goes to.
template <Kind kKind>
struct MeanPlaces {
  const StoredAs<kKind>* earlier[kMaxEarlierWeights];
  int earlier_count = 0;
  StoredAs<kKind>* next = nullptr;
};

// The mean of kLanes elements; `i`: the first, in `places`.
template <class Source, Kind kKind>
HWY_INLINE void MeanVector(const std::byte* source, const MeanPlaces<kKind>& places, int64_t i,
                           FiniteCheck& check) {
  const DoubleTag tag;
  Doubles newest = {hn::Zero(tag), hn::Zero(tag)};
  if constexpr (IsFloat64(kKind)) {
    newest = LoadDoubles<Source>(source);
    check.Add(newest);
  } else {
    const FloatVec value = Source::Load(source);
    check.Add(value);
    newest = Widened(value);
  }
  Doubles differences = {hn::Zero(tag), hn::Zero(tag)};
  for (int j = 0; j < places.earlier_count; ++j) {
    const StoredAs<kKind>* const address = places.earlier[j] + i;
    Doubles weight = {hn::Zero(tag), hn::Zero(tag)};
    if constexpr (IsFloat64(kKind)) {
      weight = {hn::LoadU(tag, address), hn::LoadU(tag, address + kLanes / 2)};
    } else {
      weight = Widened(hn::LoadU(FloatTag(), address));
    }
    differences = {hn::Add(differences.lower, hn::Sub(weight.lower, newest.lower)),
                   hn::Add(differences.upper, hn::Sub(weight.upper, newest.upper))};
  }
  const DoubleVec count = hn::Set(tag, places.earlier_count + 1.0);
  const Doubles mean = {hn::Add(newest.lower, hn::Div(differences.lower, count)),
                        hn::Add(newest.upper, hn::Div(differences.upper, count))};
  if constexpr (IsFloat64(kKind)) {
    Store<false>(mean.lower, places.next + i);
    Store<false>(mean.upper, places.next + i + kLanes / 2);
  } else {
    Store<false>(Rounded(mean), places.next + i);
  }
}

// As the source's dtype, not rounded.
template <class Source>
void CheckRun(const std::byte* source, int64_t count, FiniteCheck& check) {
  const auto add = [&check](const std::byte* elements) {
    if constexpr (std::is_same_v<Source, Float64Source>) {
      check.Add(Source::LoadDoubles(elements));
    } else {
      check.Add(Source::Load(elements));
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) add(source + i * Source::kElementBytes);
  if (i == count) return;
  std::byte padded_source[kLanes * Source::kElementBytes] = {};
  std::memcpy(padded_source, source + i * Source::kElementBytes,
              (count - i) * Source::kElementBytes);
  add(padded_source);
}

bool IsAlignedToLine(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kLineBytes == 0;
}

// A part of an op.
struct Tile {
  const std::byte* source;
  int64_t begin;  // Index of the first element in the op.
  int64_t count;
  bool stream;
};

template <class Source, Kind kKind>
void FoldTile(const FoldTarget& target, const Tile& tile, FiniteCheck& check) {
  const Places<kKind> all = {reinterpret_cast<const StoredAs<kKind>*>(target.current),
                             reinterpret_cast<StoredAs<kKind>*>(target.next)};
  const Places<kKind> places = all.At(tile.begin);
  // In place the old lines have been read anyway.
  const bool stream = tile.stream && target.next != target.current && IsAlignedToLine(places.next);
  if (stream) {
    FoldRun<Source, kKind, true>(tile.source, tile.count, places, target.update_weight, check);
  } else {
    FoldRun<Source, kKind, false>(tile.source, tile.count, places, target.update_weight, check);
  }
}

template <class Source, Kind kKind>
void MeanTile(std::span<const FoldTarget> targets, const Tile& tile, FiniteCheck& check) {
  MeanPlaces<kKind> places;
  places.next = reinterpret_cast<StoredAs<kKind>*>(targets.front().next) + tile.begin;
  for (const FoldTarget& target : targets) {
    places.earlier[places.earlier_count++] =
        reinterpret_cast<const StoredAs<kKind>*>(target.current) + tile.begin;
  }
  int64_t i = 0;
  for (; i + kLanes <= tile.count; i += kLanes) {
    MeanVector<Source, kKind>(tile.source + i * Source::kElementBytes, places, i, check);
  }
  if (i == tile.count) return;
  // The rest, by way of padded copies.
  std::byte source[kLanes * Source::kElementBytes] = {};
  StoredAs<kKind> earlier[kMaxEarlierWeights][kLanes] = {};
  StoredAs<kKind> next[kLanes];
  MeanPlaces<kKind> padded;
  padded.next = next;
  const size_t count = static_cast<size_t>(tile.count - i);
  std::memcpy(source, tile.source + i * Source::kElementBytes, count * Source::kElementBytes);
  for (int j = 0; j < places.earlier_count; ++j) {
    std::memcpy(earlier[j], places.earlier[j] + i, count * sizeof(next[0]));
    padded.earlier[padded.earlier_count++] = earlier[j];
  }
  MeanVector<Source, kKind>(source, padded, 0, check);
  std::memcpy(places.next + i, next, count * sizeof(next[0]));
}

void CopyTile(const FoldTarget& target, const Tile& tile, int64_t element_bytes) {
  const int64_t size_bytes = tile.count * element_bytes;
  std::byte* next = target.next + tile.begin * element_bytes;
  const hn::ScalableTag<uint8_t> tag;
  int64_t i = 0;
  if (tile.stream && IsAlignedToLine(next)) {
    for (; i + kLineBytes <= size_bytes; i += kLineBytes) {
      for (int64_t j = i; j < i + kLineBytes; j += static_cast<int64_t>(hn::MaxLanes(tag))) {
        hn::Stream(LoadBytes(tag, tile.source + j), tag, reinterpret_cast<uint8_t*>(next) + j);
      }
    }
  }
  if (i < size_bytes) std::memcpy(next + i, tile.source + i, size_bytes - i);
}

// Does a tile for all targets. False if an element was not finite.
template <class Source>
bool FoldTileOfFloats(const FoldOp& op, const Tile& tile) {
  FiniteCheck check;
  bool is_checked = false;
  for (size_t t = 0; t < op.targets.size(); ++t) {
    const FoldTarget& target = op.targets[t];
    if (target.is_earlier_weight()) continue;
    is_checked |= target.kind != Kind::kCopy;
    switch (target.kind) {
      case Kind::kAverage:
        FoldTile<Source, Kind::kAverage>(target, tile, check);
        break;
      case Kind::kAssign:
        FoldTile<Source, Kind::kAssign>(target, tile, check);
        break;
      case Kind::kAverageFloat64:
        FoldTile<Source, Kind::kAverageFloat64>(target, tile, check);
        break;
      case Kind::kAssignFloat64:
        FoldTile<Source, Kind::kAssignFloat64>(target, tile, check);
        break;
      case Kind::kMean:
        MeanTile<Source, Kind::kMean>(TargetsOfMean(op.targets.subspan(t)), tile, check);
        break;
      case Kind::kMeanFloat64:
        MeanTile<Source, Kind::kMeanFloat64>(TargetsOfMean(op.targets.subspan(t)), tile, check);
        break;
      case Kind::kCopy:
        CopyTile(target, tile, Source::kElementBytes);
        break;
    }
  }
  if (!is_checked) CheckRun<Source>(tile.source, tile.count, check);
  return check.all_finite();
}

bool FoldTileOfAny(const FoldOp& op, const Tile& tile) {
  switch (op.source_dtype) {
    case Dtype::kFloat32:
      return FoldTileOfFloats<Float32Source>(op, tile);
    case Dtype::kFloat16:
      return FoldTileOfFloats<Float16Source>(op, tile);
    case Dtype::kBFloat16:
      return FoldTileOfFloats<BFloat16Source>(op, tile);
    case Dtype::kFloat64:
      return FoldTileOfFloats<Float64Source>(op, tile);
    default:
      for (const FoldTarget& target : op.targets) {
        CopyTile(target, tile, DtypeSize(op.source_dtype));
      }
      return true;
  }
}

// Elements up to the first that the first target stores at the start of a line. The other targets
// mostly have the same alignment.
int64_t ElementsBeforeLine(const FoldOp& op) {
  const FoldTarget& target = op.targets.front();
  return -reinterpret_cast<uintptr_t>(target.next) % kLineBytes /
         target.StoredBytes(DtypeSize(op.source_dtype));
}

std::optional<int64_t> FoldSimd(const FoldOp& op) {
  const int64_t source_bytes = DtypeSize(op.source_dtype);
  const bool stream = op.element_count >= kStreamElements && !op.targets.empty();
  std::optional<int64_t> first_non_finite;
  int64_t count = stream ? ElementsBeforeLine(op) : 0;
  for (int64_t begin = 0; begin < op.element_count; begin += count, count = 0) {
    if (count == 0) count = std::min(kTileElements, op.element_count - begin);
    const Tile tile = {op.source + begin * source_bytes, begin, count, stream};
    if (!FoldTileOfAny(op, tile) && !first_non_finite.has_value()) {
      first_non_finite =
          begin + FindNonFinite(op.source_dtype, tile.source, tile.count, op.rounds_to_float32())
                      .value_or(0);
    }
  }
  // What follows in this thread, such as the release of a lock, is not seen before the results.
  if (stream) hwy::FlushStream();
  return first_non_finite;
}

#else   // No vectors of exact results.
std::optional<int64_t> FoldSimd(const FoldOp& op) { return FoldScalar(op); }
#endif  // HWY_NATIVE_FMA && HWY_HAVE_FLOAT64

}  // namespace HWY_NAMESPACE
}  // namespace ema
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ema {
namespace {

HWY_EXPORT(FoldSimd);

SourceFormat FormatOf(Dtype dtype) { return static_cast<SourceFormat>(dtype); }

// `param`: the `i`-th element, in the dtype of the target's averages. `targets`: the target, and
// those after it.
template <typename Stored>
void FoldFloat(Stored param, int64_t i, std::span<const FoldTarget> targets) {
  const FoldTarget& target = targets.front();
  const int64_t offset = i * int64_t{sizeof(Stored)};
  if (IsMean(target.kind)) {
    double differences = 0;
    targets = TargetsOfMean(targets);
    for (const FoldTarget& earlier : targets) {
      differences += double{LoadAs<Stored>(earlier.current + offset)} - double{param};
    }
    param = static_cast<Stored>(MeanOf(param, differences, static_cast<int>(targets.size()) + 1));
  } else if (IsAverage(target.kind)) {
    param = UpdatedAverage(LoadAs<Stored>(target.current + offset), param,
                           static_cast<Stored>(target.update_weight));
  }
  std::memcpy(target.next + offset, &param, sizeof(param));
}

// What the `i`-th element, at `source`, does to the first of `targets`.
void FoldElement(Dtype dtype, const std::byte* source, int64_t i,
                 std::span<const FoldTarget> targets) {
  const FoldTarget& target = targets.front();
  if (target.is_earlier_weight()) return;
  if (target.kind == FoldTarget::Kind::kCopy) {
    const int64_t size = DtypeSize(dtype);
    std::memcpy(target.next + i * size, source, size);
  } else if (IsFloat64(target.kind)) {
    FoldFloat(LoadDouble(FormatOf(dtype), source), i, targets);
  } else {
    FoldFloat(LoadFloat(FormatOf(dtype), source), i, targets);
  }
}

}  // namespace

std::optional<int64_t> FoldOnCpu(const FoldOp& op) { return HWY_DYNAMIC_DISPATCH(FoldSimd)(op); }

std::optional<int64_t> FoldScalar(const FoldOp& op) {
  const int64_t source_bytes = DtypeSize(op.source_dtype);
  for (int64_t i = 0; i < op.element_count; ++i) {
    for (size_t t = 0; t < op.targets.size(); ++t) {
      FoldElement(op.source_dtype, op.source + i * source_bytes, i, op.targets.subspan(t));
    }
  }
  if (!IsFloat(op.source_dtype)) return std::nullopt;
  return FindNonFinite(op.source_dtype, op.source, op.element_count, op.rounds_to_float32());
}

std::optional<int64_t> FindNonFinite(Dtype dtype, const std::byte* source, int64_t element_count,
                                     bool as_float32) {
  const int64_t source_bytes = DtypeSize(dtype);
  for (int64_t i = 0; i < element_count; ++i, source += source_bytes) {
    const bool is_finite = as_float32 ? IsFinite(LoadFloat(FormatOf(dtype), source))
                                      : IsFinite(LoadDouble(FormatOf(dtype), source));
    if (!is_finite) return i;
  }
  return std::nullopt;
}

}  // namespace ema
#endif  // HWY_ONCE
