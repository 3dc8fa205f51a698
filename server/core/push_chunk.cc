// SPDX-License-Identifier: Apache-2.0
//
// The part of PushSession that takes chunks: claims their ranges, and folds them.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/core/push_session.h"

namespace ema {
namespace {

constexpr int64_t kMaxChunkBytes = int64_t{4} << 20;

absl::Status BadChunk(std::string message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadChunk, message);
}

// True: `next` goes on where `before` ends after so many elements.
bool GoesOn(const FoldTarget& before, const FoldTarget& next, int64_t count, int64_t source_bytes) {
  const int64_t bytes = count * before.StoredBytes(source_bytes);
  const auto is_after = [bytes](const std::byte* at, const std::byte* to) {
    return at == nullptr ? to == nullptr : at + bytes == to;
  };
  return next.kind == before.kind && next.update_weight == before.update_weight &&
         is_after(before.next, next.next) && is_after(before.current, next.current) &&
         is_after(before.next_low, next.next_low) && is_after(before.current_low, next.current_low);
}

}  // namespace

// Folds one chunk: walks its pieces and the layout's stretches together. Tensors that are
// neighbours, there and in all tracks, are walked as one, and are one run to the device: small ones
// would cost more than their bytes.
class PushSession::ChunkFolder {
 public:
  struct Result {
    uint32_t crc32c = 0;                       // If it was asked for.
    uint32_t frozen_crc32c = 0;                // To be XORed to the rank's.
    std::vector<NonFiniteElement> non_finite;  // By tensor, the first of each.
  };

  ChunkFolder(const PushSession& session, DeviceStream& device_stream)
      : session_(session), device_stream_(device_stream) {
    for (size_t t = 0; t < session.memory_.next.size(); ++t) {
      if (!session.memory_.next[t].blocks.empty()) changing_tracks_.push_back(t);
    }
    // With kSkipTensor every non-finite tensor must be found, and the device reports only one of a
    // run; and the digest of frozen tensors is taken by tensor.
    is_each_alone_ =
        session.model_.non_finite == NonFinitePolicy::kSkipTensor || session.run_->has_frozen();
    targets_.reserve(changing_tracks_.size());
    run_targets_.reserve(changing_tracks_.size());
  }

  absl::StatusOr<Result> Fold(const RankLayout& layout, const Coverage::Range& range,
                              absl::Span<const std::span<const std::byte>> pieces,
                              bool with_checksum) {
    pieces_ = pieces;
    with_checksum_ = with_checksum;
    NextPiece();
    absl::Status status;
    layout.ForEachJoinedStretch(range.offset, range.length_bytes,
                                [&](const RankLayout::Stretch& stretch) {
                                  status = FoldStretch(layout, stretch);
                                  return status.ok();
                                });
    EMA_RETURN_IF_ERROR(status);
    EMA_RETURN_IF_ERROR(EndRun());
    return result_;
  }

 private:
  // An element of a tensor.
  struct Place {
    int64_t tensor_index = 0;
    int64_t element = 0;
  };

  // Moves on to the next piece that is not empty. The checksum is taken here, so that the fold
  // finds the bytes in the cache.
  void NextPiece() {
    while (piece_.empty() && !pieces_.empty()) {
      piece_ = pieces_.front();
      pieces_.remove_prefix(1);
      if (with_checksum_) result_.crc32c = Crc32c(result_.crc32c, piece_);
    }
  }

  absl::Status FoldStretch(const RankLayout& layout, const RankLayout::Stretch& stretch) {
    const int64_t element_size = DtypeSize(stretch.dtype);
    int64_t offset = stretch.byte_offset;
    const int64_t end = offset + stretch.element_count * element_size;
    int64_t shard = stretch.shard_index;
    Place place = {stretch.tensor_index, stretch.tensor_element};
    while (true) {
      int64_t count =
          std::min<int64_t>(end - offset, static_cast<int64_t>(piece_.size())) / element_size;
      if (count > 0) {
        EMA_ASSIGN_OR_RETURN(count, FoldElements(place, stretch.dtype, piece_.data(), count));
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
        EMA_ASSIGN_OR_RETURN(count, FoldElements(place, stretch.dtype, gathered.data(), 1));
        EMA_RETURN_IF_ERROR(EndRun());  // While `gathered` is there.
      }
      NextPiece();
      offset += count * element_size;
      if (offset == end) return absl::OkStatus();
      place.element += count;
      if (offset < layout.shard_start(shard + 1)) continue;
      // Behind the tensor's end there are only whole ones.
      while (offset >= layout.shard_start(shard + 1)) ++shard;
      place = {layout.shards()[shard].tensor_index,
               (offset - layout.shard_start(shard)) / element_size};
    }
  }

  // Adds up to `count` elements, which may go on behind the tensor's end, to the run; returns how
  // many.
  absl::StatusOr<int64_t> FoldElements(const Place& place, Dtype dtype, const std::byte* source,
                                       int64_t count) {
    targets_.clear();
    tracks_.clear();
    int64_t end_tensor = is_each_alone_ ? place.tensor_index + 1 : INT64_MAX;
    for (const size_t t : changing_tracks_) {
      const Track& track = *session_.plan_.tracks[t].track;
      end_tensor = std::min(end_tensor, track.neighbours_end(place.tensor_index));
    }
    for (const size_t t : changing_tracks_) {
      if (!session_.Changes(session_.plan_.tracks[t], place.tensor_index)) continue;
      tracks_.push_back(t);
      count = std::min(count, SetTarget(t, place, end_tensor, dtype, targets_.emplace_back()));
    }
    if (targets_.empty()) {
      const TensorSpec& spec = session_.model_.manifest->tensor(place.tensor_index);
      count = std::min(count, spec.element_count() - place.element);
    }
    const int64_t offset = tracks_.empty() ? 0 : StoredOffset(tracks_.front(), place);
    if (!GoesOnWith(dtype, source, offset)) {
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
    if (session_.run_->is_frozen(place.tensor_index)) {
      AddToFrozenDigest(place, {source, static_cast<size_t>(count * DtypeSize(dtype))});
    }
    return count;
  }

  // Adds the bytes of the elements from `place` on to the digest of all frozen bytes. That is a
  // CRC32C without its inversions, and so linear: each piece is shifted to its position in an
  // imaginary byte string of all tensors, and XORed, in any order. In that string an element has 8
  // bytes, whatever its dtype.
  void AddToFrozenDigest(const Place& place, std::span<const std::byte> bytes) {
    constexpr int64_t kElementBytes = 8;
    constexpr int64_t kTensorBytes = int64_t{1} << 40;
    const TensorSpec& spec = session_.model_.manifest->tensor(place.tensor_index);
    const int64_t bytes_behind = place.tensor_index * kTensorBytes - std::ssize(bytes) +
                                 (spec.element_count() - place.element) * kElementBytes;
    const uint32_t crc32c = ~Crc32c(~uint32_t{0}, bytes);
    result_.frozen_crc32c ^= Crc32cCombine(crc32c, 0, bytes_behind);
  }

  // Of an element, in the bytes of track `t`.
  int64_t StoredOffset(size_t t, const Place& place) const {
    const StorageLayout::Entry& entry =
        session_.plan_.tracks[t].track->layout().entry(place.tensor_index);
    return entry.offset + place.element * DtypeSize(entry.dtype);
  }

  // True: `targets_`, for what is at `source`, go on where `run_` ends, and not in memory alone.
  // `offset`: of the first in its track.
  bool GoesOnWith(Dtype dtype, const std::byte* source, int64_t offset) const {
    // Of a run the device tells only one that is not finite, and each tensor must be found.
    if (session_.model_.non_finite == NonFinitePolicy::kSkipTensor) return false;
    const int64_t count = run_.element_count;
    const int64_t element_size = DtypeSize(dtype);
    if (count == 0 || dtype != run_.source_dtype || source != run_.source + count * element_size ||
        targets_.empty() || tracks_ != run_tracks_ ||
        offset != run_offset_ + count * targets_.front().StoredBytes(element_size)) {
      return false;
    }
    for (size_t i = 0; i < targets_.size(); ++i) {
      if (!GoesOn(run_targets_[i], targets_[i], count, element_size)) return false;
    }
    return true;
  }

  absl::Status EndRun() {
    if (run_.element_count == 0) return absl::OkStatus();
    run_.targets = run_targets_;
    EMA_ASSIGN_OR_RETURN(const std::optional<int64_t> non_finite, device_stream_.Fold(run_));
    if (non_finite.has_value()) {
      const NonFiniteElement found =
          session_.Locate({run_.source_id, run_.first_element + *non_finite});
      if (result_.non_finite.empty() || result_.non_finite.back().source_id != found.source_id) {
        result_.non_finite.push_back(found);
      }
    }
    run_.element_count = 0;
    return absl::OkStatus();
  }

  // Points `target` at an element of track `t`; returns how many elements follow there, of tensors
  // before `end_tensor`.
  int64_t SetTarget(size_t t, const Place& place, int64_t end_tensor, Dtype source_dtype,
                    FoldTarget& target) const {
    const int64_t tensor_index = place.tensor_index;
    const TrackPlan& plan = session_.plan_.tracks[t];
    const Track& track = *plan.track;
    const TrackBlocks& next = session_.memory_.next[t];
    const StorageLayout::Entry& entry = track.layout().entry(tensor_index);
    const int64_t stored_size = DtypeSize(entry.dtype);
    const int64_t byte = StoredOffset(t, place);
    const int64_t block = track.FindBlock(byte);
    const int64_t in_block = byte - track.block_start(block);
    const StorageLayout::Entry& last = track.layout().entry(end_tensor - 1);
    int64_t bytes = std::min(track.block_start(block + 1), last.offset + last.length_bytes) - byte;
    const Schedule::Update& update = plan.updates[track.schedule_index(tensor_index)];
    target = {.update_weight = update.update_weight, .next = next.blocks[block]->data() + in_block};
    if (track.action(tensor_index) == TensorAction::kAverage) {
      using Kind = FoldTarget::Kind;
      const bool is_compensated = track.config().compensated;
      const double weight = update.update_weight;
      const bool is_assigned = is_compensated ? weight == 1 : static_cast<float>(weight) == 1;
      if (is_compensated) target.next_low = next.low_blocks[block]->data() + in_block;
      if (is_assigned) {
        target.kind = is_compensated ? Kind::kAssignCompensated : Kind::kAssign;
      } else {
        target.kind = is_compensated ? Kind::kAverageCompensated : Kind::kAverage;
        if (update.from_zero) {
          target.current = session_.memory_.zeros->data();
          bytes = std::min(bytes, session_.memory_.zeros->size_bytes());
        } else {
          target.current = plan.base->blocks[block]->data() + in_block;
        }
        if (is_compensated) {
          target.current_low =
              update.from_zero ? target.current : plan.base->low_blocks[block]->data() + in_block;
        }
      }
    } else if (source_dtype != entry.dtype) {
      target.kind = FoldTarget::Kind::kAssign;  // It was rounded for the wire.
    }
    return bytes / stored_size;
  }

  const PushSession& session_;
  DeviceStream& device_stream_;
  std::vector<size_t> changing_tracks_;
  bool is_each_alone_ = false;  // Tensors are not walked as one.
  // Of the elements at hand, one per track that they change.
  std::vector<FoldTarget> targets_;
  std::vector<size_t> tracks_;
  FoldOp run_;              // Not folded yet.
  int64_t run_offset_ = 0;  // Of its first element, in the bytes of its first track.
  std::vector<FoldTarget> run_targets_;
  std::vector<size_t> run_tracks_;
  absl::Span<const std::span<const std::byte>> pieces_;  // Not begun.
  std::span<const std::byte> piece_;                     // What is left of the one at hand.
  bool with_checksum_ = true;
  Result result_;
};

absl::Status PushSession::CheckRange(const RankLayout& layout, const ChunkHeader& header) const {
  if (header.data_bytes <= 0 || header.data_bytes > kMaxChunkBytes) {
    return BadChunk(absl::StrCat("chunk at offset ", header.offset, ": ", header.data_bytes,
                                 " bytes given, expected 1 to ", kMaxChunkBytes));
  }
  if (header.offset < 0 || header.offset > PushedBytes(layout) - header.data_bytes) {
    return BadChunk(
        absl::StrCat("chunk at offset ", header.offset, " with ", header.data_bytes,
                     " bytes is not inside the rank's ", PushedBytes(layout),
                     plan_.omits_frozen ? " bytes without its frozen tensors" : " bytes"));
  }
  for (const int64_t end : {header.offset, header.offset + header.data_bytes}) {
    if (!layout.IsElementBoundary(end)) {
      const int64_t tensor = layout.shards()[layout.FindShard(end)].tensor_index;
      return BadChunk(absl::StrCat("chunk at offset ", header.offset, " with ", header.data_bytes,
                                   " bytes cuts an element of tensor \"",
                                   model_.manifest->tensor(tensor).name, "\""));
    }
  }
  return absl::OkStatus();
}

absl::Status PushSession::AddChunk(int64_t rank, int64_t stream, const ChunkHeader& header,
                                   absl::Span<const std::span<const std::byte>> pieces,
                                   const std::shared_ptr<DeviceStream>& device_stream) {
  const RankLayout& layout = *run_->layout(rank);
  EMA_RETURN_IF_ERROR(CheckRange(layout, header));
  const Coverage::Range range{header.offset, header.data_bytes};
  const auto corrupt = [&](uint32_t crc32c) {
    return MakeError(
        absl::StatusCode::kDataLoss, ErrorReason::kChunkCorrupt,
        absl::StrCat("chunk at offset ", header.offset, " of rank ", rank, ", step ", plan_.step,
                     ": its CRC32C is ", crc32c, ", expected ", header.crc32c));
  };

  const auto checksum = [&pieces] {
    uint32_t crc32c = 0;
    for (const std::span<const std::byte> piece : pieces) crc32c = Crc32c(crc32c, piece);
    return crc32c;
  };
  Coverage::ClaimResult claim;
  {
    absl::MutexLock lock(&mu_);
    EMA_RETURN_IF_ERROR(CheckStreamLocked(rank, stream));
    queued_.try_emplace({rank, stream}, device_stream);
    EMA_ASSIGN_OR_RETURN(claim, ranks_[rank].coverage.Claim(range, header.crc32c));
    if (claim == Coverage::ClaimResult::kClaimed) BeginWorkLocked(rank);
  }
  if (claim == Coverage::ClaimResult::kDuplicate) {
    if (header.is_undamaged) return absl::OkStatus();
    const uint32_t crc32c = checksum();
    return crc32c == header.crc32c ? absl::OkStatus() : corrupt(crc32c);
  }

  bool is_undamaged = header.is_undamaged;
  if (!is_undamaged && !model_.device->is_host()) {
    // What has been queued cannot be taken back.
    if (const uint32_t crc32c = checksum(); crc32c != header.crc32c) {
      Memory unused;
      absl::MutexLock lock(&mu_);
      unused = EndWorkLocked(rank);
      ranks_[rank].coverage.Release(range);
      return corrupt(crc32c);
    }
    is_undamaged = true;
  }
  // An exception must not leave the range claimed, nor the work begun.
  const absl::StatusOr<ChunkFolder::Result> folded = CatchExceptions([&] {
    return ChunkFolder(*this, *device_stream).Fold(layout, range, pieces, !is_undamaged);
  });

  Memory unused;
  absl::MutexLock lock(&mu_);
  unused = EndWorkLocked(rank);
  Coverage& coverage = ranks_[rank].coverage;
  const bool is_damaged = folded.ok() && !is_undamaged && folded->crc32c != header.crc32c;
  if (!folded.ok() || is_damaged) {
    coverage.Release(range);
    return is_damaged ? corrupt(folded->crc32c) : folded.status();
  }
  if (absl::Status status = TakeNonFiniteLocked(rank, folded->non_finite); !status.ok()) {
    coverage.Release(range);
    return status;
  }
  coverage.Cover(range, header.crc32c);
  ranks_[rank].frozen_crc32c ^= folded->frozen_crc32c;
  last_progress_ = SteadyNow();
  return ended_.has_value() ? *ended_ : absl::OkStatus();
}

}  // namespace ema
