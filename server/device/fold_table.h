// SPDX-License-Identifier: Apache-2.0
//
// Many folds as one table in device memory, and what one thread of a kernel does with it. A grid of
// blocks walks the table: block b does tile b, or that and every `gridDim`-th after it; its threads
// share the tile. The same function runs on the CPU, where tests walk the whole grid.
#ifndef EMA_SERVER_DEVICE_FOLD_TABLE_H_
#define EMA_SERVER_DEVICE_FOLD_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "server/device/fold_element.h"

namespace ema {

inline constexpr int kFoldThreads = 256;  // Of a block.
// Elements that a thread does at once, with loads and stores of 16 bytes of float32.
inline constexpr int64_t kFoldVector = 4;
// Of a tile, so that a small tensor keeps all threads busy and a large one needs few blocks.
inline constexpr int64_t kFoldTileElements = kFoldVector * 2 * kFoldThreads;

// FoldTarget in device memory.
struct DeviceFoldTarget {
  const std::byte* current = nullptr;
  std::byte* next = nullptr;
  const std::byte* current_low = nullptr;
  std::byte* next_low = nullptr;
  uint32_t* differs = nullptr;  // Set to 1; may be null. As FoldTarget::differs.
  double update_weight = 1;
  FoldKind kind = FoldKind::kCopy;
};

// FoldOp in device memory.
struct FoldRun {
  const std::byte* source = nullptr;
  int64_t element_count = 0;
  int64_t first_tile = 0;  // Tiles of all runs before.
  int32_t first_target = 0;
  int32_t target_count = 0;
  SourceFormat format = SourceFormat::kFloat32;
  uint8_t element_bytes = 4;
  // Vectors begin so many elements before the first: that of what is stored where the run begins
  // in a vector of memory. 0 to kFoldVector - 1.
  uint8_t phase = 0;
  // Every vector of the source, and of each target, is aligned to its size (at most 16 bytes).
  bool is_aligned = false;
};

struct FoldTable {
  const FoldRun* runs = nullptr;
  const DeviceFoldTarget* targets = nullptr;
  int64_t run_count = 0;
  int64_t tile_count = 0;
  // By run: set to 1 if an element is not; may be null. May be pinned host memory: nothing is
  // written there in a step that goes well.
  uint32_t* non_finite = nullptr;
};

// Tiles of a run.
EMA_HOST_DEVICE inline int64_t FoldTileCount(int64_t element_count, int64_t phase) {
  return element_count == 0 ? 0
                            : (element_count + phase + kFoldTileElements - 1) / kFoldTileElements;
}

namespace fold_internal {

// kFoldVector neighbours, moved by one or two instructions.
template <typename T>
struct alignas(sizeof(T) * kFoldVector > 16 ? 16 : sizeof(T) * kFoldVector) Lanes {
  T lane[kFoldVector];
};

template <typename T>
EMA_HOST_DEVICE inline Lanes<T> LoadLanes(const std::byte* address) {
  return *reinterpret_cast<const Lanes<T>*>(address);
}
template <typename T>
EMA_HOST_DEVICE inline void StoreLanes(const Lanes<T>& lanes, std::byte* address) {
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

// A pushed float, as float32 and not rounded.
struct Param {
  float rounded;
  double exact;
};

template <typename Bits>
EMA_HOST_DEVICE inline Param ParamOf(SourceFormat format, Bits bits) {
  const std::byte* const address = reinterpret_cast<const std::byte*>(&bits);
  return {LoadFloat(format, address), LoadDouble(format, address)};
}

// As FoldTarget::differs: in other bits than those of the sign of 0.
EMA_HOST_DEVICE inline bool Differs(float a, float b) {
  return BitsAs<uint32_t>(a) != BitsAs<uint32_t>(b) && !(a == 0 && b == 0);
}

// What becomes of one average; true if assigning would have given another.
EMA_HOST_DEVICE inline bool FoldPlain(const DeviceFoldTarget& target, const Param& param,
                                      float& average) {
  if (target.kind == FoldKind::kAssign) {
    average = param.rounded;
    return false;
  }
  average = UpdatedAverage(average, param.rounded, static_cast<float>(target.update_weight));
  return Differs(average, param.rounded);
}
EMA_HOST_DEVICE inline bool FoldCompensated(const DeviceFoldTarget& target, const Param& param,
                                            float& high, float& low) {
  const CompensatedAverage assigned = Compensated(param.exact);
  CompensatedAverage next = assigned;
  if (target.kind == FoldKind::kAverageCompensated) {
    next = UpdatedAverage(CompensatedAverage{high, low}, param.exact, target.update_weight);
  }
  high = next.high;
  low = next.low;
  return Differs(next.high, assigned.high) || Differs(next.low, assigned.low);
}

EMA_HOST_DEVICE inline bool IsCompensated(FoldKind kind) {
  return kind == FoldKind::kAverageCompensated || kind == FoldKind::kAssignCompensated;
}
EMA_HOST_DEVICE inline bool IsAverage(FoldKind kind) {
  return kind == FoldKind::kAverage || kind == FoldKind::kAverageCompensated;
}

// All threads that write it write the same.
EMA_HOST_DEVICE inline void Note(uint32_t* flag) {
  if (flag != nullptr) *flag = 1;
}
EMA_HOST_DEVICE inline void NoteNonFinite(const FoldTable& table, const FoldRun& run) {
  if (table.non_finite != nullptr) table.non_finite[&run - table.runs] = 1;
}

// kFoldVector elements from `i` on, aligned: in registers throughout.
template <typename T>
EMA_HOST_DEVICE inline void CopyVector(const FoldTable& table, const FoldRun& run, int64_t i) {
  const int64_t offset = i * static_cast<int64_t>(sizeof(T));
  const Lanes<T> lanes = LoadLanes<T>(run.source + offset);
  for (int t = 0; t < run.target_count; ++t) {
    StoreLanes(lanes, table.targets[run.first_target + t].next + offset);
  }
}
template <SourceFormat kFormat>
EMA_HOST_DEVICE inline void FoldVector(const FoldTable& table, const FoldRun& run, int64_t i) {
  using Bits = typename BitsOf<kFormat>::Type;
  const int64_t source_offset = i * static_cast<int64_t>(sizeof(Bits));
  const int64_t offset = i * static_cast<int64_t>(sizeof(float));
  const Lanes<Bits> pushed = LoadLanes<Bits>(run.source + source_offset);
  Param params[kFoldVector];
  bool is_finite = true;
  EMA_UNROLL
  for (int j = 0; j < kFoldVector; ++j) {
    params[j] = ParamOf(kFormat, pushed.lane[j]);
    is_finite = is_finite && IsFinite(params[j].rounded);
  }
  if (!is_finite) NoteNonFinite(table, run);
  for (int t = 0; t < run.target_count; ++t) {
    const DeviceFoldTarget& target = table.targets[run.first_target + t];
    if (target.kind == FoldKind::kCopy) {
      StoreLanes(pushed, target.next + source_offset);
      continue;
    }
    Lanes<float> average = {};
    if (IsAverage(target.kind)) average = LoadLanes<float>(target.current + offset);
    bool differs = false;
    if (!IsCompensated(target.kind)) {
      EMA_UNROLL
      for (int j = 0; j < kFoldVector; ++j) {
        differs |= FoldPlain(target, params[j], average.lane[j]);
      }
    } else {
      Lanes<float> low = {};
      if (IsAverage(target.kind)) low = LoadLanes<float>(target.current_low + offset);
      EMA_UNROLL
      for (int j = 0; j < kFoldVector; ++j) {
        differs |= FoldCompensated(target, params[j], average.lane[j], low.lane[j]);
      }
      StoreLanes(low, target.next_low + offset);
    }
    StoreLanes(average, target.next + offset);
    if (differs) Note(target.differs);
  }
}

// One element of any alignment.
EMA_HOST_DEVICE inline void FoldElement(const FoldTable& table, const FoldRun& run, int64_t i) {
  const std::byte* const source = run.source + i * run.element_bytes;
  const int64_t offset = i * static_cast<int64_t>(sizeof(float));
  Param param = {};
  if (run.format != SourceFormat::kNoFloat) {
    param = {LoadFloat(run.format, source), LoadDouble(run.format, source)};
    if (!IsFinite(param.rounded)) NoteNonFinite(table, run);
  }
  for (int t = 0; t < run.target_count; ++t) {
    const DeviceFoldTarget& target = table.targets[run.first_target + t];
    if (target.kind == FoldKind::kCopy) {
      std::byte* const next = target.next + i * run.element_bytes;
      for (int b = 0; b < run.element_bytes; ++b) next[b] = source[b];
      continue;
    }
    float average = IsAverage(target.kind) ? LoadAs<float>(target.current + offset) : 0;
    bool differs = false;
    if (!IsCompensated(target.kind)) {
      differs = FoldPlain(target, param, average);
    } else {
      float low = IsAverage(target.kind) ? LoadAs<float>(target.current_low + offset) : 0;
      differs = FoldCompensated(target, param, average, low);
      std::memcpy(target.next_low + offset, &low, sizeof(low));
    }
    std::memcpy(target.next + offset, &average, sizeof(average));
    if (differs) Note(target.differs);
  }
}

// kFoldVector elements of a run from `i` on, which may begin before its first and end after its
// last.
EMA_HOST_DEVICE inline void FoldAt(const FoldTable& table, const FoldRun& run, int64_t i) {
  if (!run.is_aligned || i < 0 || i + kFoldVector > run.element_count) {
    for (int64_t j = i < 0 ? 0 : i; j < i + kFoldVector && j < run.element_count; ++j) {
      FoldElement(table, run, j);
    }
    return;
  }
  switch (run.format) {
    case SourceFormat::kFloat32:
      return FoldVector<SourceFormat::kFloat32>(table, run, i);
    case SourceFormat::kFloat16:
      return FoldVector<SourceFormat::kFloat16>(table, run, i);
    case SourceFormat::kBFloat16:
      return FoldVector<SourceFormat::kBFloat16>(table, run, i);
    case SourceFormat::kFloat64:
      return FoldVector<SourceFormat::kFloat64>(table, run, i);
    case SourceFormat::kNoFloat:
      break;
  }
  switch (run.element_bytes) {
    case 1:
      return CopyVector<uint8_t>(table, run, i);
    case 2:
      return CopyVector<uint16_t>(table, run, i);
    case 4:
      return CopyVector<uint32_t>(table, run, i);
    default:
      return CopyVector<uint64_t>(table, run, i);
  }
}

// The run that has a tile, of a table of folds or sums. REQUIRES: 0 <= tile < table.tile_count.
template <typename Table>
EMA_HOST_DEVICE inline const auto& RunOfTile(const Table& table, int64_t tile) {
  // The last one that begins at the tile or before: runs without elements have no tile.
  int64_t low = 0;
  int64_t high = table.run_count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (table.runs[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return table.runs[low];
}

}  // namespace fold_internal

// What thread `thread` of kFoldThreads does of a tile. REQUIRES: 0 <= tile < table.tile_count.
EMA_HOST_DEVICE inline void FoldTile(const FoldTable& table, int64_t tile, int thread) {
  const FoldRun& run = fold_internal::RunOfTile(table, tile);
  const int64_t begin = (tile - run.first_tile) * kFoldTileElements - run.phase;
  for (int64_t i = thread * kFoldVector; i < kFoldTileElements; i += kFoldThreads * kFoldVector) {
    fold_internal::FoldAt(table, run, begin + i);
  }
}

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_FOLD_TABLE_H_
