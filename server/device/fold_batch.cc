// SPDX-License-Identifier: Apache-2.0
#include "server/device/fold_batch.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "server/kernel/fold.h"

namespace ema {
namespace {

constexpr int64_t kTableAlignment = 64;

int64_t RoundUp(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

SourceFormat FormatOf(Dtype dtype) {
  return IsFloat(dtype) ? static_cast<SourceFormat>(dtype) : SourceFormat::kNoFloat;
}
static_assert(static_cast<int>(SourceFormat::kFloat32) == static_cast<int>(Dtype::kFloat32));
static_assert(static_cast<int>(SourceFormat::kFloat16) == static_cast<int>(Dtype::kFloat16));
static_assert(static_cast<int>(SourceFormat::kBFloat16) == static_cast<int>(Dtype::kBFloat16));
static_assert(static_cast<int>(SourceFormat::kFloat64) == static_cast<int>(Dtype::kFloat64));

int64_t VectorAlignment(int64_t element_bytes) {
  return std::min<int64_t>(16, kFoldVector * element_bytes);
}

int64_t AddressOf(const std::byte* data) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
}

// True: vectors that begin `phase` elements before `data` are aligned.
bool IsAligned(const std::byte* data, int64_t phase, int64_t element_bytes) {
  return data == nullptr ||
         (AddressOf(data) - phase * element_bytes) % VectorAlignment(element_bytes) == 0;
}

}  // namespace

int64_t FoldBatch::TableBytes(int64_t target_count, int64_t tile_count) const {
  const auto bytes_with = [](const auto& items, int64_t more) {
    return (static_cast<int64_t>(items.size()) + more) *
           static_cast<int64_t>(sizeof(items.front()));
  };
  return kTableAlignment + bytes_with(tiles_, tile_count) + bytes_with(targets_, target_count) +
         (note_count() + 1) * static_cast<int64_t>(sizeof(uint32_t));
}

// Many small tensors are neighbours in each track: all of them share the targets of the first.
std::optional<int64_t> FoldBatch::FindInShared(const FoldOp& op, int64_t first) const {
  const int64_t element_bytes = DtypeSize(op.source_dtype);
  if (shared_.element_bytes != element_bytes || shared_.targets.size() != op.targets.size()) {
    return std::nullopt;
  }
  std::optional<int64_t> shift;
  for (size_t i = 0; i < op.targets.size(); ++i) {
    const FoldTarget& is = op.targets[i];
    const FoldTarget& was = shared_.targets[i];
    if (is.kind != was.kind || is.update_weight != was.update_weight) {
      return std::nullopt;
    }
    const int64_t stored = is.StoredBytes(element_bytes);
    const int64_t bytes = AddressOf(is.next) + first * stored - AddressOf(was.next);
    if (!shift.has_value()) shift = bytes / stored;
    const auto is_shifted = [&](const std::byte* from, const std::byte* to) {
      return from == nullptr ? to == nullptr
                             : AddressOf(to) + first * stored - AddressOf(from) == *shift * stored;
    };
    if (!is_shifted(was.next, is.next) || !is_shifted(was.current, is.current)) {
      return std::nullopt;
    }
  }
  return shift.value_or(0);
}

void FoldBatch::AddTargets(const FoldOp& op, int64_t first, int phase) {
  const int64_t element_bytes = DtypeSize(op.source_dtype);
  shared_ = {.element_bytes = element_bytes,
             .first_target = static_cast<int32_t>(targets_.size()),
             .is_aligned = true,
             .targets = std::move(shared_.targets)};
  shared_.targets.assign(op.targets.begin(), op.targets.end());
  for (FoldTarget& target : shared_.targets) {
    const int64_t stored = target.StoredBytes(element_bytes);
    const auto move = [&](auto*& data) {
      if (data != nullptr) data += first * stored;
      shared_.is_aligned = shared_.is_aligned && IsAligned(data, phase, stored);
    };
    move(target.current);
    move(target.next);
    if (target.is_earlier_weight()) continue;
    targets_.push_back({.current = target.current,
                        .next = target.next,
                        .update_weight = target.update_weight,
                        .kind = target.kind});
  }
  // Behind those that the tiles count.
  size_t last = static_cast<size_t>(shared_.first_target) - 1;
  for (const FoldTarget& target : shared_.targets) {
    if (!target.is_earlier_weight()) {
      ++last;
      continue;
    }
    if (targets_[last].more_weights++ == 0) {
      targets_[last].first_weight = static_cast<int32_t>(targets_.size());
    }
    targets_.push_back({.current = target.current});
  }
}

int64_t FoldBatch::Add(const FoldOp& op, int64_t first, int64_t limit_bytes) {
  const int64_t element_bytes = DtypeSize(op.source_dtype);
  const auto target_count = static_cast<int64_t>(op.targets.size());
  std::optional<int64_t> shift = FindInShared(op, first);
  // Small tensors that are neighbours in what is stored are one run to the kernel, which is as fast
  // then as with a large one.
  const bool goes_on =
      shift.has_value() && tiles_.back().format == FormatOf(op.source_dtype) &&
      (op.targets.empty() || tiles_.back().target_offset + tiles_.back().end == *shift);
  // Else vectors begin where they do in the memory of what is stored.
  int phase = 0;
  if (!op.targets.empty()) {
    const FoldTarget& target = op.targets.front();
    const int64_t stored = target.StoredBytes(element_bytes);
    phase = static_cast<int>((AddressOf(target.next) / stored + first) % kFoldVector);
  }
  const int64_t lane_0 = RoundUp(used_bytes_, VectorAlignment(element_bytes));
  const int64_t source = goes_on ? used_bytes_ : lane_0 + phase * element_bytes;
  const auto room_beside = [&](int64_t tile_count) {
    return (std::min(limit_bytes, capacity_bytes_) - source -
            TableBytes(target_count, tile_count)) /
           element_bytes;
  };
  int64_t count = std::min(room_beside(0), op.element_count - first);
  if (count <= 0) return 0;
  count = std::min(count, room_beside(FoldTileCount(count, phase)));
  if (count <= 0) return 0;
  std::memcpy(host_ + source, op.source + first * element_bytes,
              static_cast<size_t>(count * element_bytes));
  FoldTile tile;
  int64_t tiled = count;
  if (goes_on) {
    tile = tiles_.back();
    tiles_.pop_back();
    tiled += tile.end - tile.begin;
  } else {
    if (!shift.has_value()) {
      AddTargets(op, first, phase);
      shift = 0;
    }
    tile = {.source = device_ + lane_0,
            .target_offset = *shift - phase,
            .first_target = shared_.first_target,
            .note = static_cast<int32_t>(note_count()),
            .begin = static_cast<uint16_t>(phase),
            .target_count = static_cast<uint8_t>(
                std::count_if(op.targets.begin(), op.targets.end(),
                              [](const auto& target) { return !target.is_earlier_weight(); })),
            .format = FormatOf(op.source_dtype),
            .element_bytes = static_cast<uint8_t>(element_bytes),
            .is_aligned = shared_.is_aligned};
  }
  runs_.push_back({tile.note, op.source_dtype, op.rounds_to_float32(), host_ + source, count,
                   op.source_id, op.first_element + first});
  ForEachFoldTile(tile, tiled, [this](const FoldTile& of) { tiles_.push_back(of); });
  used_bytes_ = source + count * element_bytes;
  return count;
}

FoldTable FoldBatch::Finish() {
  const auto append = [this](const auto& items) {
    const int64_t offset = used_bytes_;
    const size_t bytes = items.size() * sizeof(items[0]);
    if (bytes > 0) std::memcpy(host_ + offset, items.data(), bytes);
    used_bytes_ += static_cast<int64_t>(bytes);
    return offset;
  };
  used_bytes_ = RoundUp(used_bytes_, kTableAlignment);
  const int64_t tiles = append(tiles_);
  const int64_t targets = append(targets_);
  non_finite_ = reinterpret_cast<uint32_t*>(host_ + used_bytes_);
  std::fill_n(non_finite_, note_count(), 0);
  return {.tiles = reinterpret_cast<const FoldTile*>(device_ + tiles),
          .targets = reinterpret_cast<const DeviceFoldTarget*>(device_ + targets),
          .tile_count = static_cast<int64_t>(tiles_.size()),
          .non_finite = non_finite_};
}

void FoldBatch::ForEachNonFinite(absl::FunctionRef<void(const NonFiniteElement&)> take) const {
  for (const Run& run : runs_) {
    if (non_finite_[run.note] == 0) continue;
    // The kernel does not say where; the source is still there.
    if (const std::optional<int64_t> index =
            FindNonFinite(run.dtype, run.source, run.element_count, run.rounds_to_float32)) {
      take({run.source_id, run.first_element + *index});
    }
  }
}

void FoldBatch::Clear() {
  used_bytes_ = 0;
  runs_.clear();
  tiles_.clear();
  targets_.clear();
  shared_.element_bytes = 0;
}

}  // namespace ema
