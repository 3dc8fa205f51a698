// SPDX-License-Identifier: Apache-2.0
#include "server/core/push_session.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"

namespace ema {
namespace {

constexpr int64_t kMaxChunkBytes = int64_t{4} << 20;

// Chunks that a rank may send in a step: its bytes in ones of 64 KiB, one for each of its shards,
// and a share of so many. Their records are in no budget; the shards' are.
int64_t MaxChunks(const RankLayout& layout, int64_t world_size) {
  constexpr int64_t kChunkBytes = int64_t{64} << 10;
  constexpr int64_t kMoreChunks = int64_t{1} << 18;
  constexpr int64_t kLeast = 64;
  return layout.total_bytes() / kChunkBytes + static_cast<int64_t>(layout.shards().size()) +
         std::max(kMoreChunks / world_size, kLeast);
}

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
         next.differs == before.differs && is_after(before.next, next.next) &&
         is_after(before.current, next.current) && is_after(before.next_low, next.next_low) &&
         is_after(before.current_low, next.current_low);
}

}  // namespace

// Folds one chunk: walks its pieces and the layout's stretches together. Tensors that are
// neighbours, there and in all tracks, are walked as one, and are one run to the device: small ones
// would cost more than their bytes.
class PushSession::ChunkFolder {
 public:
  struct Result {
    uint32_t crc32c = 0;                       // If it was asked for.
    std::vector<NonFiniteElement> non_finite;  // By tensor, the first of each.
  };

  ChunkFolder(const PushSession& session, DeviceStream& device_stream)
      : session_(session), device_stream_(device_stream) {
    for (size_t t = 0; t < session.memory_.next.size(); ++t) {
      if (!session.memory_.next[t].blocks.empty()) changing_tracks_.push_back(t);
    }
    // Each tensor that is not finite must be found, and of a run the device tells only one; and
    // what is done with frozen tensors differs.
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
    return count;
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
      if (session_.run_->is_frozen(tensor_index)) {
        target.differs = &session_.memory_.frozen_differs[t];
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

PushSession::PushSession(ModelView model, std::shared_ptr<const TrainerRun> run, SnapshotRef base,
                         StepPlan plan, ConcurrencyLimit::Permit permit)
    : model_(std::move(model)),
      run_(std::move(run)),
      plan_(std::move(plan)),
      frozen_changed_(plan_.frozen == FrozenTensors::kChanged),
      memory_{.end = {&freed_, [](absl::Notification* freed) { freed->Notify(); }},
              .base = std::move(base),
              .next = {},
              .zeros = nullptr},
      last_progress_(begin_),
      permit_(std::move(permit)) {
  ranks_.reserve(run_->world_size());
  for (int64_t rank = 0; rank < run_->world_size(); ++rank) {
    const RankLayout& layout = *run_->layout(rank);
    ranks_.emplace_back(PushedBytes(layout), MaxChunks(layout, run_->world_size()));
  }
}

NonFiniteElement PushSession::Locate(NonFiniteElement element) const {
  for (const TrackPlan& plan : plan_.tracks) {
    if (!Changes(plan, element.source_id)) continue;
    const StorageLayout& layout = plan.track->layout();
    while (true) {
      const StorageLayout::Entry& entry = layout.entry(element.source_id);
      const int64_t count = entry.length_bytes / DtypeSize(entry.dtype);
      if (element.element < count) return element;
      element.element -= count;
      ++element.source_id;
    }
  }
  return element;
}

absl::StatusOr<std::shared_ptr<PushSession>> PushSession::Create(
    ModelView model, std::shared_ptr<const TrainerRun> run, SnapshotRef base, StepPlan plan,
    ConcurrencyLimit::Permit permit) {
  std::shared_ptr<PushSession> session(new PushSession(
      std::move(model), std::move(run), std::move(base), std::move(plan), std::move(permit)));
  EMA_RETURN_IF_ERROR(session->Allocate());
  return session;
}

int64_t PushSession::PushedBytes(const RankLayout& layout) const {
  return plan_.frozen == FrozenTensors::kOmitted ? layout.live_bytes() : layout.total_bytes();
}

bool PushSession::Changes(const TrackPlan& plan, int64_t tensor_index) const {
  const TensorAction action = plan.track->action(tensor_index);
  if (action == TensorAction::kIgnore) return false;
  if (plan_.frozen == FrozenTensors::kOmitted && run_->is_frozen(tensor_index)) return false;
  const Schedule::Update& update = plan.updates[plan.track->schedule_index(tensor_index)];
  // By nothing the average stays, and where it is held; what is copied is the newest there is.
  return update.due && (update.update_weight != 0 || action == TensorAction::kCopy);
}

absl::StatusOr<int64_t> PushSession::OpenStream(const PushStart& start, PushCallback on_end) {
  std::vector<OpenedStream> fenced;
  int64_t stream = 0;
  {
    absl::MutexLock lock(&mu_);
    if (ended_.has_value()) return *ended_;
    RankState& rank = ranks_[start.rank];
    if (start.stream_group != 0 && start.stream_group < rank.stream_group) {
      return FencedByNewerStream(start.rank);
    }
    stream = ++last_stream_;
    if (start.stream_group == 0 || rank.first_stream == 0 ||
        rank.stream_group != start.stream_group) {
      const auto others =
          std::partition(streams_.begin(), streams_.end(),
                         [&start](const OpenedStream& other) { return other.rank != start.rank; });
      std::move(others, streams_.end(), std::back_inserter(fenced));
      streams_.erase(others, streams_.end());
      rank.first_stream = stream;
      rank.stream_group = start.stream_group;
      rank.stream_count = start.stream_count;
      rank.group_digest.reset();
      rank.unopened_streams = rank.uncommitted_streams = std::max<int64_t>(start.stream_count, 1);
    }
    if (rank.unopened_streams == 0 || start.stream_count != rank.stream_count) {
      return BadRequest(absl::StrCat("stream_count: ", start.stream_count, " given, but group ",
                                     start.stream_group, " of rank ", start.rank, " has ",
                                     rank.stream_count, ", and ", rank.unopened_streams,
                                     " of them are still to come"));
    }
    --rank.unopened_streams;
    streams_.push_back({start.rank, stream, std::move(on_end)});
  }
  for (const OpenedStream& older : fenced) older.on_end(FencedByNewerStream(start.rank));
  return stream;
}

void PushSession::CloseStream(int64_t rank, int64_t stream) {
  // Of an error the rank's commit tells.
  AwaitDevice(rank, stream).IgnoreError();
  PushCallback dropped;  // Destroyed without the lock: it may hold the last reference to its call.
  absl::MutexLock lock(&mu_);
  for (auto it = streams_.begin(); it != streams_.end(); ++it) {
    if (it->rank == rank && it->stream == stream) {
      dropped = std::move(it->on_end);
      streams_.erase(it);
      return;
    }
  }
}

absl::Status PushSession::CheckStreamLocked(int64_t rank, int64_t stream) const {
  if (ended_.has_value()) return *ended_;
  if (stream < ranks_[rank].first_stream) return FencedByNewerStream(rank);
  return absl::OkStatus();
}

absl::Status PushSession::FencedByNewerStream(int64_t rank) const {
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                   absl::StrCat("step ", plan_.step, ": a newer stream of rank ", rank,
                                " has taken over from this one"));
}

PushSession::Memory PushSession::TakeUnusedMemoryLocked() {
  if (!ended_.has_value() || work_count_ > 0) return {};
  for (auto& [stream, device_stream] : queued_) {
    memory_.writers.streams.push_back(std::move(device_stream));
  }
  queued_.clear();
  return std::exchange(memory_, {});
}

absl::Status PushSession::CheckRange(const RankLayout& layout, const ChunkHeader& header) const {
  if (header.data_bytes <= 0 || header.data_bytes > kMaxChunkBytes) {
    return BadChunk(absl::StrCat("chunk at offset ", header.offset, ": ", header.data_bytes,
                                 " bytes given, expected 1 to ", kMaxChunkBytes));
  }
  if (header.offset < 0 || header.offset > PushedBytes(layout) - header.data_bytes) {
    return BadChunk(absl::StrCat(
        "chunk at offset ", header.offset, " with ", header.data_bytes,
        " bytes is not inside the rank's ", PushedBytes(layout),
        plan_.frozen == FrozenTensors::kOmitted ? " bytes without its frozen tensors" : " bytes"));
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
    EMA_ASSIGN_OR_RETURN(claim, ranks_[rank].coverage.Claim(range, header.crc32c));
    if (claim == Coverage::ClaimResult::kClaimed) {
      BeginWorkLocked(rank);
      queued_.try_emplace({rank, stream}, device_stream);
    }
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
  const absl::StatusOr<ChunkFolder::Result> folded =
      ChunkFolder(*this, *device_stream).Fold(layout, range, pieces, !is_undamaged);

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
  last_progress_ = SteadyNow();
  return ended_.has_value() ? *ended_ : absl::OkStatus();
}

absl::StatusOr<bool> PushSession::CommitRank(int64_t rank, int64_t stream, uint32_t digest) {
  EMA_RETURN_IF_ERROR(AwaitDevice(rank, stream));
  EMA_ASSIGN_OR_RETURN(const bool is_complete, TakeCommit(rank, stream, digest));
  if (!is_complete) return false;
  // What streams have folded that this one has fenced counts, too. Nobody of the rank folds now.
  EMA_RETURN_IF_ERROR(AwaitDevice(rank, std::nullopt));
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(CheckStreamLocked(rank, stream));
  EMA_RETURN_IF_ERROR(CheckFiniteLocked(rank));
  RankState& state = ranks_[rank];
  if (state.digest.has_value()) return false;  // A retry: its stream now waits with the others.
  state.digest = digest;
  last_progress_ = SteadyNow();
  return ++committed_count_ == run_->world_size();
}

absl::StatusOr<bool> PushSession::TakeCommit(int64_t rank, int64_t stream, uint32_t digest) {
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(CheckStreamLocked(rank, stream));
  RankState& state = ranks_[rank];
  if (state.group_digest.value_or(digest) != digest) {
    return MakeError(
        absl::StatusCode::kDataLoss, ErrorReason::kDigestMismatch,
        absl::StrCat("step ", plan_.step, ", rank ", rank, ": the commit says digest ", digest,
                     ", that of another of its streams ", *state.group_digest));
  }
  state.group_digest = digest;
  if (--state.uncommitted_streams > 0) return false;
  if (!state.coverage.complete()) {
    const Coverage::Range missing = state.coverage.Missing(1).front();
    const RankLayout& layout = *run_->layout(rank);
    const int64_t tensor = layout.shards()[layout.FindShard(missing.offset)].tensor_index;
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kPushIncomplete,
        absl::StrCat("step ", plan_.step, ", rank ", rank, ": ", state.coverage.covered_bytes(),
                     " of ", state.coverage.total_bytes(),
                     " bytes have arrived; the first missing "
                     "is at offset ",
                     missing.offset, ", tensor \"", model_.manifest->tensor(tensor).name, "\""));
  }
  if (const uint32_t arrived = state.coverage.Digest(); arrived != digest) {
    return MakeError(
        absl::StatusCode::kDataLoss, ErrorReason::kDigestMismatch,
        absl::StrCat("step ", plan_.step, ", rank ", rank, ": the digest of its bytes is ", arrived,
                     ", the commit says ", digest));
  }
  return true;
}

bool PushSession::RankCommitted(int64_t rank) const {
  absl::MutexLock lock(&mu_);
  return ranks_[rank].digest.has_value();
}

std::vector<int64_t> PushSession::MissingRanks(int64_t limit) const {
  absl::MutexLock lock(&mu_);
  std::vector<int64_t> missing;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].digest.has_value()) continue;
    if (static_cast<int64_t>(missing.size()) == limit) break;
    missing.push_back(static_cast<int64_t>(rank));
  }
  return missing;
}

std::vector<Coverage::Range> PushSession::Missing(int64_t rank, int64_t limit) const {
  absl::MutexLock lock(&mu_);
  return ranks_[rank].coverage.Missing(limit);
}

std::vector<uint32_t> PushSession::Digests() const {
  absl::MutexLock lock(&mu_);
  std::vector<uint32_t> digests;
  digests.reserve(ranks_.size());
  for (const RankState& rank : ranks_) digests.push_back(rank.digest.value_or(0));
  return digests;
}

SteadyTime PushSession::last_progress() const {
  absl::MutexLock lock(&mu_);
  return last_progress_;
}

bool PushSession::End(const absl::StatusOr<PushResult>& result) {
  std::vector<OpenedStream> streams;
  {
    // Destroyed without the lock, but before anybody is told: their next step needs it, and the
    // place. (What folds still need the model awaits before it makes that step's session.)
    Memory unused;
    absl::MutexLock lock(&mu_);
    if (ended_.has_value()) return false;
    permit_.reset();
    ended_ = result.ok() ? MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                                     absl::StrCat("step ", plan_.step, " is committed already"))
                         : result.status();
    streams.swap(streams_);
    unused = TakeUnusedMemoryLocked();
  }
  model_.observer->OnStepEnded(
      {.model = model_.name,
       .step = plan_.step,
       .status = result.status(),
       .duration = absl::FromChrono(SteadyNow() - begin_),
       .skipped_tensor_count = result.ok() ? result->record.skipped_tensor_count : 0});
  for (const OpenedStream& stream : streams) stream.on_end(result);
  return true;
}

}  // namespace ema
