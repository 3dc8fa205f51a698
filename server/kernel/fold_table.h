// SPDX-License-Identifier: Apache-2.0
//
// Many folds as one table in device memory, and what one thread of a kernel does with it. A grid of
// blocks walks the table: block b does the tiles b, b + gridDim, b + 2 gridDim and so on; its
// threads share the tile. The same function runs on the CPU, where tests walk the whole grid.
//
// A GPU reaches its full memory bandwidth if enough loads are in flight at any time. So a block
// finds all that it needs in one record, and a thread issues all loads that it can before it uses
// any of their results.
#ifndef EMA_SERVER_KERNEL_FOLD_TABLE_H_
#define EMA_SERVER_KERNEL_FOLD_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "server/kernel/fold_element.h"

namespace ema {

// Threads of a block. Few, so that a small tensor, which has tiles of its own, gives a thread as
// many vectors as a large one.
inline constexpr int kFoldThreads = 128;
// Elements of a vector: as float32, one load and one store of 16 bytes.
inline constexpr int kFoldVector = 4;
// Vectors of a tile that a thread folds at once, a block's width apart.
inline constexpr int kFoldVectors = 2;
inline constexpr int kFoldStride = kFoldThreads * kFoldVector;
// Small enough that a small tensor keeps most threads busy, large enough that a large one needs few
// blocks.
inline constexpr int64_t kFoldTileElements = int64_t{kFoldVectors} * kFoldStride;

// FoldTarget in device memory. What each fold reads comes first.
struct alignas(16) DeviceFoldTarget {
  const std::byte* current = nullptr;
  std::byte* next = nullptr;
  double update_weight = 1;
  FoldKind kind = FoldKind::kCopy;
  // Only for a mean: the number, and the first index in FoldTable::targets, of the targets of all
  // earlier weights except the oldest. Only their `current` is read.
  uint8_t more_weights = 0;
  int32_t first_weight = 0;
};
static_assert(sizeof(DeviceFoldTarget) == 32, "two loads");

// Neighbouring elements of one op, or of several that are neighbours themselves: lanes [begin, end)
// of kFoldTileElements. Lane 0 is where vectors begin, which may be before the first element.
struct alignas(16) FoldTile {
  const std::byte* source = nullptr;  // Of lane 0.
  int64_t target_offset = 0;          // Of lane 0: elements behind the targets' addresses.
  int32_t first_target = 0;
  // Index in FoldTable::non_finite. Runs of elements that are neighbours share one.
  int32_t note = 0;
  uint16_t begin = 0;
  uint16_t end = 0;
  uint8_t target_count = 0;
  SourceFormat format = SourceFormat::kFloat32;
  uint8_t element_bytes = 4;
  // Every vector of the source, and of each target, is aligned to its size (at most 16 bytes).
  bool is_aligned = false;
};
static_assert(sizeof(FoldTile) == 32, "two loads");

struct FoldTable {
  const FoldTile* tiles = nullptr;
  const DeviceFoldTarget* targets = nullptr;
  int64_t tile_count = 0;
  // By run: set to 1 if one of its elements is not finite. May be null. May be pinned host memory:
  // nothing is written to it if all elements are finite.
  uint32_t* non_finite = nullptr;
};

// Tiles of a run of adjacent elements whose first one is in lane `phase`.
inline int64_t FoldTileCount(int64_t element_count, int phase) {
  return element_count == 0 ? 0
                            : (element_count + phase + kFoldTileElements - 1) / kFoldTileElements;
}

// Calls `take` with each of these tiles. Lane 0 of the first is that of `first`, whose `begin` is
// the phase; `end` is not read.
template <typename Take>
void ForEachFoldTile(const FoldTile& first, int64_t element_count, const Take& take) {
  const int64_t tile_count = FoldTileCount(element_count, first.begin);
  for (int64_t i = 0; i < tile_count; ++i) {
    const int64_t lane = i * kFoldTileElements;
    const int64_t left = first.begin + element_count - lane;
    FoldTile tile = first;
    tile.source += lane * first.element_bytes;
    tile.target_offset += lane;
    tile.begin = i == 0 ? first.begin : 0;
    tile.end = static_cast<uint16_t>(left < kFoldTileElements ? left : kFoldTileElements);
    take(tile);
  }
}

namespace fold_internal {

// kFoldVector adjacent elements, moved by one or two instructions.
template <typename T>
struct alignas(sizeof(T) * kFoldVector > 16 ? 16 : sizeof(T) * kFoldVector) Lanes {
  T lane[kFoldVector];
};

// Tells the compiler that an address read from a table is in global memory.
EMA_HOST_DEVICE inline void AssumeGlobal([[maybe_unused]] const std::byte* address) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(address));
#endif
}
template <typename T>
EMA_HOST_DEVICE inline Lanes<T> LoadLanes(const std::byte* address) {
  AssumeGlobal(address);
  return *reinterpret_cast<const Lanes<T>*>(address);
}
template <typename T>
EMA_HOST_DEVICE inline void StoreLanes(const Lanes<T>& lanes, std::byte* address) {
  AssumeGlobal(address);
  *reinterpret_cast<Lanes<T>*>(address) = lanes;
}

// The integer that an element is loaded as.
template <SourceFormat kFormat>
struct BitsOf {
  using Type = uint32_t;
};
template <>
struct BitsOf<SourceFormat::kFloat16> {
  using Type = uint16_t;
};
template <>
struct BitsOf<SourceFormat::kBFloat16> {
  using Type = uint16_t;
};
template <>
struct BitsOf<SourceFormat::kFloat64> {
  using Type = uint64_t;
};

// As a float or a double.
template <typename Float, typename Bits>
EMA_HOST_DEVICE inline Float ValueOf(SourceFormat format, const Bits& bits) {
  const auto* const address = reinterpret_cast<const std::byte*>(&bits);
  if constexpr (sizeof(Float) == sizeof(float)) {
    return LoadFloat(format, address);
  } else {
    return LoadDouble(format, address);
  }
}

EMA_HOST_DEVICE inline void NoteNonFinite(const FoldTable& table, const FoldTile& tile) {
  if (table.non_finite != nullptr) table.non_finite[tile.note] = 1;
}

// Hides the lanes from the compiler. Otherwise it would move conversions that only some rounds of a
// loop need out of the loop, and wait for the loads there. Works on whole words, because extracting
// lanes of 16 bits would also wait for the loads.
template <typename T>
EMA_HOST_DEVICE inline void Hide([[maybe_unused]] Lanes<T>& lanes) {
#ifdef __CUDA_ARCH__
  constexpr int kWords = sizeof(Lanes<T>) / sizeof(uint64_t);
  uint64_t words[kWords];
  memcpy(words, &lanes, sizeof(lanes));
  EMA_UNROLL
  for (int i = 0; i < kWords; ++i) asm volatile("" : "+l"(words[i]));
  memcpy(&lanes, words, sizeof(lanes));
#endif
}

// Vectors a block's width apart, loaded and stored as one; `data` is where the first is.
template <typename T, int kVectors>
struct Vectors {
  static constexpr int kElements = kVectors * kFoldVector;

  EMA_HOST_DEVICE T& operator[](int i) { return vectors[i / kFoldVector].lane[i % kFoldVector]; }
  EMA_HOST_DEVICE const T& operator[](int i) const {
    return vectors[i / kFoldVector].lane[i % kFoldVector];
  }
  EMA_HOST_DEVICE void Load(const std::byte* data) {
    EMA_UNROLL
    for (int v = 0; v < kVectors; ++v) vectors[v] = LoadLanes<T>(data + v * kStrideBytes);
  }
  EMA_HOST_DEVICE void Store(std::byte* data) const {
    EMA_UNROLL
    for (int v = 0; v < kVectors; ++v) StoreLanes(vectors[v], data + v * kStrideBytes);
  }

  static constexpr int64_t kStrideBytes = kFoldStride * static_cast<int64_t>(sizeof(T));
  Lanes<T> vectors[kVectors];
};

// Other formats than float64 are exact as float32.
template <SourceFormat kFormat, typename Bits>
EMA_HOST_DEVICE inline bool IsFiniteSource(const Bits& bits, bool rounds_to_float32) {
  if constexpr (kFormat == SourceFormat::kFloat64) {
    if (!rounds_to_float32) return IsFinite(ValueOf<double>(kFormat, bits));
  }
  return IsFinite(ValueOf<float>(kFormat, bits));
}

template <FoldKind kKind>
using StoredAs = std::conditional_t<IsFloat64(kKind), double, float>;

// Folds whole, aligned vectors into one target, from element `first` on. Reads only what this kind
// needs of the target, as loads of averages wait for that; and all of it before the first store,
// after which the compiler would read it again.
template <FoldKind kKind, SourceFormat kFormat, typename Pushed>
EMA_HOST_DEVICE inline void FoldInto(const DeviceFoldTarget& target, int64_t first,
                                     const Pushed& pushed) {
  using Stored = StoredAs<kKind>;
  const int64_t offset = first * static_cast<int64_t>(sizeof(Stored));
  std::byte* const next = target.next + offset;
  const auto update_weight = static_cast<Stored>(target.update_weight);
  Vectors<Stored, Pushed::kElements / kFoldVector> average;
  if constexpr (IsAverage(kKind)) average.Load(target.current + offset);
  EMA_UNROLL
  for (int i = 0; i < Pushed::kElements; ++i) {
    const auto param = ValueOf<Stored>(kFormat, pushed[i]);
    if constexpr (IsAverage(kKind)) {
      average[i] = UpdatedAverage(average[i], param, update_weight);
    } else {
      average[i] = param;
    }
  }
  average.Store(next);
}

// The same for a mean: vector by vector, with one earlier weight after the other, as more of them
// would need more registers than all other kinds.
template <FoldKind kKind, SourceFormat kFormat, typename Bits, int kVectors>
EMA_HOST_DEVICE inline void MeanInto(const FoldTable& table, const DeviceFoldTarget& target,
                                     int64_t first, const Vectors<Bits, kVectors>& pushed) {
  using Stored = StoredAs<kKind>;
  const DeviceFoldTarget* const more = table.targets + target.first_weight;
  std::byte* const next = target.next;
  const std::byte* const oldest = target.current;
  const int more_weights = target.more_weights;
  EMA_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    const int64_t offset =
        (first + int64_t{v} * kFoldStride) * static_cast<int64_t>(sizeof(Stored));
    double differences[kFoldVector] = {};
    EMA_NO_UNROLL
    for (int j = 0; j <= more_weights; ++j) {
      const std::byte* const earlier = j == 0 ? oldest : more[j - 1].current;
      const Lanes<Stored> weights = LoadLanes<Stored>(earlier + offset);
      EMA_UNROLL
      for (int i = 0; i < kFoldVector; ++i) {
        const auto param = ValueOf<Stored>(kFormat, pushed.vectors[v].lane[i]);
        differences[i] += double{weights.lane[i]} - double{param};
      }
    }
    Lanes<Stored> mean;
    EMA_UNROLL
    for (int i = 0; i < kFoldVector; ++i) {
      const auto param = ValueOf<Stored>(kFormat, pushed.vectors[v].lane[i]);
      mean.lane[i] = static_cast<Stored>(MeanOf(param, differences[i], more_weights + 2));
    }
    StoreLanes(mean, next + offset);
  }
}

// Copies whole, aligned vectors from lane `lane` on; in registers throughout.
template <typename T, int kVectors>
EMA_HOST_DEVICE inline void CopyVectors(const FoldTable& table, const FoldTile& tile, int lane) {
  constexpr int64_t kBytes = sizeof(T);
  Vectors<T, kVectors> pushed;
  pushed.Load(tile.source + lane * kBytes);
  EMA_NO_UNROLL
  for (int t = 0; t < tile.target_count; ++t) {
    pushed.Store(table.targets[tile.first_target + t].next + (tile.target_offset + lane) * kBytes);
  }
}
template <SourceFormat kFormat, int kVectors>
EMA_HOST_DEVICE inline void FoldVectors(const FoldTable& table, const FoldTile& tile, int lane) {
  using Bits = typename BitsOf<kFormat>::Type;
  constexpr int64_t kBytes = sizeof(Bits);
  const int64_t first = tile.target_offset + lane;
  Vectors<Bits, kVectors> pushed;
  pushed.Load(tile.source + lane * kBytes);
  bool rounds_to_float32 = false;
  for (int t = 0; t < tile.target_count; ++t) {
    const DeviceFoldTarget& target = table.targets[tile.first_target + t];
    rounds_to_float32 |= IsFloat32(target.kind);
    EMA_UNROLL
    for (int v = 0; v < kVectors; ++v) Hide(pushed.vectors[v]);
    switch (target.kind) {
      case FoldKind::kAverage:
        FoldInto<FoldKind::kAverage, kFormat>(target, first, pushed);
        break;
      case FoldKind::kAssign:
        FoldInto<FoldKind::kAssign, kFormat>(target, first, pushed);
        break;
      case FoldKind::kCopy:
        pushed.Store(target.next + first * kBytes);
        break;
      case FoldKind::kAverageFloat64:
        FoldInto<FoldKind::kAverageFloat64, kFormat>(target, first, pushed);
        break;
      case FoldKind::kAssignFloat64:
        FoldInto<FoldKind::kAssignFloat64, kFormat>(target, first, pushed);
        break;
      case FoldKind::kMean:
        MeanInto<FoldKind::kMean, kFormat>(table, target, first, pushed);
        break;
      case FoldKind::kMeanFloat64:
        MeanInto<FoldKind::kMeanFloat64, kFormat>(table, target, first, pushed);
        break;
    }
  }
  // Last, as it waits for the pushed values, which the loads of averages need not.
  bool is_finite = true;
  EMA_UNROLL
  for (int i = 0; i < pushed.kElements; ++i) {
    is_finite &= IsFiniteSource<kFormat>(pushed[i], rounds_to_float32);
  }
  if (!is_finite) NoteNonFinite(table, tile);
}

// Updates element `i` of one target, of any alignment.
template <typename Stored>
EMA_HOST_DEVICE inline void FoldInto(const FoldTable& table, const DeviceFoldTarget& target,
                                     int64_t i, Stored param) {
  const int64_t offset = i * static_cast<int64_t>(sizeof(Stored));
  if (IsMean(target.kind)) {
    double differences = double{LoadAs<Stored>(target.current + offset)} - double{param};
    EMA_NO_UNROLL
    for (int j = 0; j < target.more_weights; ++j) {
      const std::byte* const earlier = table.targets[target.first_weight + j].current;
      differences += double{LoadAs<Stored>(earlier + offset)} - double{param};
    }
    param = static_cast<Stored>(MeanOf(param, differences, target.more_weights + 2));
  } else if (IsAverage(target.kind)) {
    param = UpdatedAverage(LoadAs<Stored>(target.current + offset), param,
                           static_cast<Stored>(target.update_weight));
  }
  std::memcpy(target.next + offset, &param, sizeof(param));
}

// One element of any alignment.
EMA_HOST_DEVICE inline void FoldElement(const FoldTable& table, const FoldTile& tile, int lane) {
  const std::byte* const source = tile.source + int64_t{lane} * tile.element_bytes;
  const int64_t i = tile.target_offset + lane;
  float rounded = 0;
  double exact = 0;
  if (tile.format != SourceFormat::kNoFloat) {
    rounded = LoadFloat(tile.format, source);
    exact = LoadDouble(tile.format, source);
  }
  bool is_finite = IsFinite(exact);
  for (int t = 0; t < tile.target_count; ++t) {
    const DeviceFoldTarget& target = table.targets[tile.first_target + t];
    if (target.kind == FoldKind::kCopy) {
      std::byte* const next = target.next + i * tile.element_bytes;
      EMA_NO_UNROLL
      for (int b = 0; b < tile.element_bytes; ++b) next[b] = source[b];
    } else if (IsFloat64(target.kind)) {
      FoldInto(table, target, i, exact);
    } else {
      is_finite &= IsFinite(rounded);
      FoldInto(table, target, i, rounded);
    }
  }
  if (!is_finite) NoteNonFinite(table, tile);
}

// REQUIRES: the tile is aligned and has all of these lanes.
template <int kVectors>
EMA_HOST_DEVICE inline void FoldWhole(const FoldTable& table, const FoldTile& tile, int lane) {
  switch (tile.format) {
    case SourceFormat::kFloat32:
      return FoldVectors<SourceFormat::kFloat32, kVectors>(table, tile, lane);
    case SourceFormat::kFloat16:
      return FoldVectors<SourceFormat::kFloat16, kVectors>(table, tile, lane);
    case SourceFormat::kBFloat16:
      return FoldVectors<SourceFormat::kBFloat16, kVectors>(table, tile, lane);
    case SourceFormat::kFloat64:
      return FoldVectors<SourceFormat::kFloat64, kVectors>(table, tile, lane);
    case SourceFormat::kNoFloat:
      break;
  }
  switch (tile.element_bytes) {
    case 1:
      return CopyVectors<uint8_t, kVectors>(table, tile, lane);
    case 2:
      return CopyVectors<uint16_t, kVectors>(table, tile, lane);
    case 4:
      return CopyVectors<uint32_t, kVectors>(table, tile, lane);
    default:
      return CopyVectors<uint64_t, kVectors>(table, tile, lane);
  }
}

}  // namespace fold_internal

// The share of thread `thread` of kFoldThreads in tile `index`. REQUIRES: 0 <= index <
// table.tile_count.
EMA_HOST_DEVICE inline void FoldOfThread(const FoldTable& table, int64_t index, int thread) {
  const FoldTile tile = table.tiles[index];
  const auto is_whole = [&tile](int lane, int vectors) {
    return tile.is_aligned && lane >= tile.begin &&
           lane + (vectors - 1) * kFoldStride + kFoldVector <= tile.end;
  };
  int lane = thread * kFoldVector;
  if (is_whole(lane, kFoldVectors)) {
    fold_internal::FoldWhole<kFoldVectors>(table, tile, lane);
    return;
  }
  EMA_NO_UNROLL
  for (; lane < tile.end; lane += kFoldStride) {
    if (is_whole(lane, 1)) {
      fold_internal::FoldWhole<1>(table, tile, lane);
      continue;
    }
    const int end = lane + kFoldVector < tile.end ? lane + kFoldVector : tile.end;
    EMA_NO_UNROLL
    for (int i = lane < tile.begin ? tile.begin : lane; i < end; ++i) {
      fold_internal::FoldElement(table, tile, i);
    }
  }
}

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_FOLD_TABLE_H_
