// SPDX-License-Identifier: Apache-2.0
#include "server/device/fold_batch.h"

#include <algorithm>
#include <cstring>

#include "server/device/ema_kernel.h"

namespace ema {
namespace {

constexpr int64_t kTableAlignment = 64;

SourceFormat FormatOf(Dtype dtype) {
  return IsFloat(dtype) ? static_cast<SourceFormat>(dtype) : SourceFormat::kNoFloat;
}
static_assert(static_cast<int>(SourceFormat::kFloat32) == static_cast<int>(Dtype::kFloat32));
static_assert(static_cast<int>(SourceFormat::kFloat16) == static_cast<int>(Dtype::kFloat16));
static_assert(static_cast<int>(SourceFormat::kBFloat16) == static_cast<int>(Dtype::kBFloat16));
static_assert(static_cast<int>(SourceFormat::kFloat64) == static_cast<int>(Dtype::kFloat64));

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t VectorAlignment(int64_t element_bytes) {
  return std::min<int64_t>(16, kFoldVector * element_bytes);
}

int64_t StoredBytes(const FoldTarget& target, int64_t element_bytes) {
  return target.kind == FoldKind::kCopy ? element_bytes : int64_t{sizeof(float)};
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

int64_t FoldBatch::TableBytes(size_t run_count, size_t target_count) const {
  return kTableAlignment + static_cast<int64_t>(run_count * (sizeof(FoldRun) + sizeof(uint32_t)) +
                                                target_count * sizeof(DeviceFoldTarget));
}

int64_t FoldBatch::Add(const FoldOp& op, int64_t first, const DiffersOf& differs_of) {
  const int64_t element_bytes = DtypeSize(op.source_dtype);
  int64_t phase = 0;
  if (!op.targets.empty()) {
    const FoldTarget& target = op.targets.front();
    const int64_t stored = StoredBytes(target, element_bytes);
    phase = (AddressOf(target.next) / stored + first) % kFoldVector;
  }
  const int64_t alignment = VectorAlignment(element_bytes);
  const int64_t source = RoundUp(used_bytes_, alignment) + phase * element_bytes;
  const int64_t room =
      capacity_bytes_ - source - TableBytes(runs_.size() + 1, targets_.size() + op.targets.size());
  const int64_t count = std::min(room / element_bytes, op.element_count - first);
  if (count <= 0) return 0;
  std::memcpy(host_ + source, op.source + first * element_bytes,
              static_cast<size_t>(count * element_bytes));
  FoldRun run{.source = device_ + source,
              .element_count = count,
              .first_tile = tile_count_,
              .first_target = static_cast<int32_t>(targets_.size()),
              .target_count = static_cast<int32_t>(op.targets.size()),
              .format = FormatOf(op.source_dtype),
              .element_bytes = static_cast<uint8_t>(element_bytes),
              .phase = static_cast<uint8_t>(phase),
              .is_aligned = true};
  for (const FoldTarget& target : op.targets) {
    const int64_t stored = StoredBytes(target, element_bytes);
    const auto from_first = [&](auto* data) {
      return data == nullptr ? data : data + first * stored;
    };
    const DeviceFoldTarget moved{
        .current = from_first(target.current),
        .next = from_first(target.next),
        .current_low = from_first(target.current_low),
        .next_low = from_first(target.next_low),
        .differs = target.differs != nullptr ? differs_of(target.differs) : nullptr,
        .update_weight = target.update_weight,
        .kind = target.kind};
    for (const std::byte* const data :
         {moved.current, static_cast<const std::byte*>(moved.next), moved.current_low,
          static_cast<const std::byte*>(moved.next_low)}) {
      run.is_aligned = run.is_aligned && IsAligned(data, phase, stored);
    }
    targets_.push_back(moved);
  }
  runs_.push_back(run);
  sources_.push_back({op.source_dtype, op.source_id, op.first_element + first});
  tile_count_ += FoldTileCount(count, phase);
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
  const int64_t runs = append(runs_);
  const int64_t targets = append(targets_);
  non_finite_ = reinterpret_cast<uint32_t*>(host_ + used_bytes_);
  std::fill_n(non_finite_, runs_.size(), 0);
  return {.runs = reinterpret_cast<const FoldRun*>(device_ + runs),
          .targets = reinterpret_cast<const DeviceFoldTarget*>(device_ + targets),
          .run_count = static_cast<int64_t>(runs_.size()),
          .tile_count = tile_count_,
          .non_finite = non_finite_};
}

void FoldBatch::ForEachNonFinite(absl::FunctionRef<void(const NonFiniteElement&)> take) const {
  for (size_t i = 0; i < runs_.size(); ++i) {
    if (non_finite_[i] == 0) continue;
    // The kernel does not say where; the source is still there.
    const FoldOp op = {.source_dtype = sources_[i].dtype,
                       .source = host_ + (runs_[i].source - device_),
                       .element_count = runs_[i].element_count};
    if (const std::optional<int64_t> index = FoldOnCpu(op)) {
      take({sources_[i].source_id, sources_[i].first_element + *index});
    }
  }
}

void FoldBatch::Clear() {
  used_bytes_ = 0;
  tile_count_ = 0;
  runs_.clear();
  sources_.clear();
  targets_.clear();
}

}  // namespace ema
