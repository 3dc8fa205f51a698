// SPDX-License-Identifier: Apache-2.0
#include "server/core/chunk_fold.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <optional>

#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"

namespace ema {
namespace {

static_assert(MeanOfLastRule::kMaxCount - 1 == kMaxEarlierWeights);

// Whether `next` continues where `before` ends after `count` elements.
bool IsContiguousWith(const FoldTarget& before, const FoldTarget& next, int64_t count,
                      int64_t source_bytes) {
  const int64_t bytes = count * before.StoredBytes(source_bytes);
  const auto is_after = [bytes](const std::byte* at, const std::byte* to) {
    return at == nullptr ? to == nullptr : at + bytes == to;
  };
  return next.kind == before.kind && next.update_weight == before.update_weight &&
         is_after(before.next, next.next) && is_after(before.current, next.current);
}

}  // namespace

ChunkFold::ChunkFold(const NextSnapshot& next, DeviceStream& device_stream)
    : next_(next), device_stream_(device_stream) {
  const size_t track_count = next.plan().tracks.size();
  for (size_t t = 0; t < track_count; ++t) {
    if (!next.next(t).empty()) changing_tracks_.push_back(t);
  }
  // With kSkipTensor every non-finite tensor must be found, and the device reports only one of a
  // run; and the digest of frozen tensors is taken by tensor.
  folds_tensors_separately_ = next.model().non_finite == NonFinitePolicy::kSkipTensor ||
                              (next.run().has_frozen() && !next.plan().omits_frozen);
  targets_.reserve(changing_tracks_.size());
  run_targets_.reserve(changing_tracks_.size());
}

absl::StatusOr<ChunkFold::Result> ChunkFold::Fold(
    const RankLayout& layout, const Coverage::Range& range,
    absl::Span<const std::span<const std::byte>> pieces, bool with_checksum) {
  pieces_ = pieces;
  with_checksum_ = with_checksum;
  NextPiece();
  absl::Status status;
  layout.ForEachJoinedRange(range.offset, range.length_bytes,
                            [&](const RankLayout::ContiguousRange& contiguous) {
                              status = FoldRange(layout, contiguous);
                              return status.ok();
                            });
  EMA_RETURN_IF_ERROR(status);
  EMA_RETURN_IF_ERROR(EndRun());
  return result_;
}

void ChunkFold::NextPiece() {
  while (piece_.empty() && !pieces_.empty()) {
    piece_ = pieces_.front();
    pieces_.remove_prefix(1);
    if (with_checksum_) result_.crc32c = Crc32c(result_.crc32c, piece_);
  }
}

absl::Status ChunkFold::FoldRange(const RankLayout& layout,
                                  const RankLayout::ContiguousRange& contiguous) {
  const int64_t element_size = DtypeSize(contiguous.dtype);
  int64_t offset = contiguous.byte_offset;
  const int64_t end = offset + contiguous.element_count * element_size;
  int64_t shard = contiguous.shard_index;
  Place place = {contiguous.tensor_index, contiguous.tensor_element};
  while (true) {
    int64_t count =
        std::min<int64_t>(end - offset, static_cast<int64_t>(piece_.size())) / element_size;
    if (count > 0) {
      EMA_ASSIGN_OR_RETURN(count, FoldElements(place, contiguous.dtype, piece_.data(), count));
      piece_ = piece_.subspan(count * element_size);
    } else {
      // The element is cut by the end of a piece.
      std::array<std::byte, 8> gathered;
      for (int64_t filled = 0; filled < element_size;) {
        const int64_t n =
            std::min<int64_t>(element_size - filled, static_cast<int64_t>(piece_.size()));
        std::memcpy(gathered.data() + filled, piece_.data(), n);
        piece_ = piece_.subspan(n);
        filled += n;
        NextPiece();
      }
      EMA_ASSIGN_OR_RETURN(count, FoldElements(place, contiguous.dtype, gathered.data(), 1));
      EMA_RETURN_IF_ERROR(EndRun());  // Before `gathered` is destroyed.
    }
    NextPiece();
    offset += count * element_size;
    if (offset == end) return absl::OkStatus();
    place.element += count;
    if (offset < layout.shard_start(shard + 1)) continue;
    // Tensors that follow in a joined range are whole.
    while (offset >= layout.shard_start(shard + 1)) ++shard;
    place = {layout.shards()[shard].tensor_index,
             (offset - layout.shard_start(shard)) / element_size};
  }
}

absl::StatusOr<int64_t> ChunkFold::FoldElements(const Place& place, Dtype dtype,
                                                const std::byte* source, int64_t count) {
  targets_.clear();
  tracks_.clear();
  int64_t end_tensor = folds_tensors_separately_ ? place.tensor_index + 1 : INT64_MAX;
  for (const size_t t : changing_tracks_) {
    const Track& track = *next_.plan().tracks[t].track;
    end_tensor = std::min(end_tensor, track.neighbours_end(place.tensor_index));
  }
  for (const size_t t : changing_tracks_) {
    if (!next_.Changes(next_.plan().tracks[t], place.tensor_index)) continue;
    tracks_.push_back(t);
    count = std::min(count, AddTargets(t, place, end_tensor, dtype));
  }
  if (targets_.empty()) {
    const TensorSpec& spec = next_.model().manifest->tensor(place.tensor_index);
    count = std::min(count, spec.element_count() - place.element);
  }
  const int64_t offset = tracks_.empty() ? 0 : StoredOffset(tracks_.front(), place);
  if (!ContinuesRun(dtype, source, offset)) {
    EMA_RETURN_IF_ERROR(EndRun());
    targets_.swap(run_targets_);
    tracks_.swap(run_tracks_);
    run_offset_ = offset;
    run_ = {.source_dtype = dtype,
            .source = source,
            .source_id = place.tensor_index,
            .first_element = place.element};
  }
  run_.element_count += count;
  if (next_.run().is_frozen(place.tensor_index)) {
    AddToFrozenDigest(place, DtypeSize(dtype), source, count);
  }
  return count;
}

// A CRC32C without its inversions, and so linear: each piece is shifted to its position in the byte
// string of all tensors, and XORed, in any order. A CRC32C cannot tell positions apart that differ
// by 2^31 - 1 bytes; so tensors begin at multiples of a number without structure, and may overlap.
void ChunkFold::AddToFrozenDigest(const Place& place, int64_t element_size, const std::byte* source,
                                  int64_t count) {
  constexpr int64_t kTensorBytes = 0x5bd1e995;
  const TensorSpec& spec = next_.model().manifest->tensor(place.tensor_index);
  const int64_t bytes_behind = place.tensor_index * kTensorBytes +
                               (spec.element_count() - place.element - count) * element_size;
  const std::span<const std::byte> bytes(source, static_cast<size_t>(count * element_size));
  const uint32_t crc32c = ~Crc32c(~uint32_t{0}, bytes);
  result_.frozen_crc32c ^= Crc32cCombine(crc32c, 0, bytes_behind);
}

int64_t ChunkFold::StoredOffset(size_t t, const Place& place) const {
  const StorageLayout::Entry& entry =
      next_.plan().tracks[t].track->layout().entry(place.tensor_index);
  return entry.offset + place.element * DtypeSize(entry.dtype);
}

int64_t ChunkFold::AddTargets(size_t t, const Place& place, int64_t end_tensor,
                              Dtype source_dtype) {
  using Kind = FoldTarget::Kind;
  const int64_t tensor_index = place.tensor_index;
  const TrackPlan& plan = next_.plan().tracks[t];
  const Track& track = *plan.track;
  const StorageLayout::Entry& entry = track.layout().entry(tensor_index);
  const int64_t stored_size = DtypeSize(entry.dtype);
  const int64_t byte = StoredOffset(t, place);
  const int64_t block = track.FindBlock(byte);
  const int64_t in_block = byte - track.block_start(block);
  const StorageLayout::Entry& last = track.layout().entry(end_tensor - 1);
  int64_t bytes = std::min(track.block_start(block + 1), last.offset + last.length_bytes) - byte;
  const Schedule::Update& update = plan.updates[track.schedule_index(tensor_index)];
  const bool is_averaged = track.action(tensor_index) == TensorAction::kAverage;
  const bool is_float64 = entry.dtype == Dtype::kFloat64;
  FoldTarget target{.next = next_.next(t)[block]->data() + in_block};
  if (is_averaged) {
    target.kind = is_float64 ? Kind::kAssignFloat64 : Kind::kAssign;
  } else if (source_dtype != entry.dtype) {
    target.kind = Kind::kAssign;  // A copy that was rounded for the wire.
  }
  if (!next_.next_weights(t).empty()) {
    targets_.push_back(target);
    targets_.back().next = next_.next_weights(t)[block]->data() + in_block;
  }
  if (!is_averaged || NextSnapshot::IsAssigned(plan, tensor_index)) {
    targets_.push_back(target);
    return bytes / stored_size;
  }
  target.update_weight = update.update_weight;
  const absl::Span<const BlocksRef> earlier_weights = NextSnapshot::EarlierWeights(plan);
  if (!earlier_weights.empty()) {
    target.kind = is_float64 ? Kind::kMeanFloat64 : Kind::kMean;
    for (const BlocksRef& weights : earlier_weights) {
      target.current = (*weights)[block]->data() + in_block;
      targets_.push_back(target);
      target.next = nullptr;
    }
    return bytes / stored_size;
  }
  target.kind = is_float64 ? Kind::kAverageFloat64 : Kind::kAverage;
  if (update.from_zero) {
    target.current = next_.zeros()->data();
    bytes = std::min(bytes, next_.zeros()->size_bytes());
  } else {
    target.current = plan.base->blocks[block]->data() + in_block;
  }
  targets_.push_back(target);
  return bytes / stored_size;
}

bool ChunkFold::ContinuesRun(Dtype dtype, const std::byte* source, int64_t offset) const {
  // The device reports only one non-finite element of a run, and each tensor must be found.
  if (next_.model().non_finite == NonFinitePolicy::kSkipTensor) return false;
  const int64_t count = run_.element_count;
  const int64_t element_size = DtypeSize(dtype);
  if (count == 0 || dtype != run_.source_dtype || source != run_.source + count * element_size ||
      targets_.empty() || tracks_ != run_tracks_ || targets_.size() != run_targets_.size() ||
      offset != run_offset_ + count * targets_.front().StoredBytes(element_size)) {
    return false;
  }
  for (size_t i = 0; i < targets_.size(); ++i) {
    if (!IsContiguousWith(run_targets_[i], targets_[i], count, element_size)) return false;
  }
  return true;
}

absl::Status ChunkFold::EndRun() {
  if (run_.element_count == 0) return absl::OkStatus();
  run_.targets = run_targets_;
  EMA_ASSIGN_OR_RETURN(const std::optional<int64_t> non_finite, device_stream_.Fold(run_));
  if (non_finite.has_value()) {
    const NonFiniteElement found = next_.Locate({run_.source_id, run_.first_element + *non_finite});
    if (result_.non_finite.empty() || result_.non_finite.back().source_id != found.source_id) {
      result_.non_finite.push_back(found);
    }
  }
  run_.element_count = 0;
  return absl::OkStatus();
}

}  // namespace ema
