// SPDX-License-Identifier: Apache-2.0
#include "server/core/push_session.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/core/chunk_fold.h"

namespace ema {
namespace {

constexpr int64_t kMaxChunkBytes = int64_t{4} << 20;

absl::Status BadChunk(std::string message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadChunk, message);
}

// The bytes of the rank's shards that a track stores, so that memory is reserved for them.
int64_t StoredBytes(const RankLayout& layout, const StepPlan& plan) {
  int64_t bytes = 0;
  for (size_t i = 0; i < layout.shards().size(); ++i) {
    const int64_t tensor = layout.shards()[i].tensor_index;
    if (std::any_of(plan.tracks.begin(), plan.tracks.end(), [tensor](const TrackPlan& track) {
          return track.track->action(tensor) != TensorAction::kIgnore;
        })) {
      bytes += layout.shard_start(static_cast<int64_t>(i) + 1) -
               layout.shard_start(static_cast<int64_t>(i));
    }
  }
  return bytes;
}

// Chunks that a rank may send in a step: one for each 64 KiB of its stored bytes, one for each of
// its shards, and its share of 2^18. No budget counts the records of chunks, but the memory of
// stored bytes and of shards is reserved; ignored tensors may be of any size.
int64_t MaxChunks(const RankLayout& layout, const StepPlan& plan, int64_t world_size) {
  constexpr int64_t kChunkBytes = int64_t{64} << 10;
  constexpr int64_t kMoreChunks = int64_t{1} << 18;
  constexpr int64_t kLeast = 64;
  return StoredBytes(layout, plan) / kChunkBytes + static_cast<int64_t>(layout.shards().size()) +
         std::max(kMoreChunks / world_size, kLeast);
}

}  // namespace

PushSession::PushSession(ModelView model, std::shared_ptr<const TrainerRun> run, StepPlan plan,
                         ConcurrencyLimit::Permit permit)
    : model_(std::move(model)),
      run_(std::move(run)),
      plan_(std::move(plan)),
      memory_(std::shared_ptr<void>(&freed_, [this](void*) { freed_.Notify(); })),
      last_progress_(begin_),
      permit_(std::move(permit)) {
  // Ranks without shards of a partition do not push to it. But if no rank has any, as the tensors
  // have no elements, rank 0 does.
  bool has_shards = false;
  for (int64_t rank = 0; rank < run_->world_size(); ++rank) {
    has_shards |= !run_->layout(rank)->shards().empty();
  }
  ranks_.reserve(run_->world_size());
  for (int64_t rank = 0; rank < run_->world_size(); ++rank) {
    const RankLayout& layout = *run_->layout(rank);
    ranks_.emplace_back(PushedBytes(layout), MaxChunks(layout, plan_, run_->world_size()));
    if (model_.is_partition && layout.shards().empty() && (has_shards || rank != 0)) {
      ranks_.back().digest = 0;
      ++committed_count_;
    }
  }
}

absl::StatusOr<std::shared_ptr<PushSession>> PushSession::Create(
    ModelView model, std::shared_ptr<const TrainerRun> run, SnapshotRef base, StepPlan plan,
    ConcurrencyLimit::Permit permit) {
  std::shared_ptr<PushSession> session(
      new PushSession(std::move(model), std::move(run), std::move(plan), std::move(permit)));
  EMA_ASSIGN_OR_RETURN(
      session->memory_.next,
      NextSnapshot::Create(session->model_, *session->run_, session->plan_, std::move(base)));
  return session;
}

int64_t PushSession::PushedBytes(const RankLayout& layout) const {
  return plan_.omits_frozen ? layout.trained_bytes() : layout.total_bytes();
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
                                     " of them have not been opened yet"));
    }
    --rank.unopened_streams;
    streams_.push_back({start.rank, stream, std::move(on_end)});
  }
  for (const OpenedStream& older : fenced) older.on_end(FencedByNewerStream(start.rank));
  return stream;
}

void PushSession::AwaitStream(int64_t rank, int64_t stream) {
  // CommitRank() returns the error.
  AwaitDevice(rank, stream).IgnoreError();
}

void PushSession::CloseStream(int64_t rank, int64_t stream) {
  AwaitStream(rank, stream);
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
                                " has replaced this one"));
}

PushSession::Memory::~Memory() {
  for (const std::shared_ptr<DeviceStream>& stream : writers) {
    stream->Synchronize().status().IgnoreError();
  }
}

PushSession::Memory PushSession::TakeUnusedMemoryLocked() {
  if (!ended_.has_value() || work_count_ > 0) return {};
  for (auto& [stream, device_stream] : queued_) {
    memory_.writers.push_back(std::move(device_stream));
  }
  queued_.clear();
  return std::exchange(memory_, {});
}

void PushSession::BeginWorkLocked(int64_t rank) {
  ++work_count_;
  ++ranks_[rank].work_count;
}

PushSession::Memory PushSession::EndWorkLocked(int64_t rank) {
  --work_count_;
  --ranks_[rank].work_count;
  return TakeUnusedMemoryLocked();
}

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
    if (header.skips_checksum) return absl::OkStatus();
    const uint32_t crc32c = checksum();
    return crc32c == header.crc32c ? absl::OkStatus() : corrupt(crc32c);
  }

  bool skips_checksum = header.skips_checksum;
  if (!skips_checksum && !model_.device->is_host()) {
    // What has been queued cannot be taken back.
    if (const uint32_t crc32c = checksum(); crc32c != header.crc32c) {
      Memory unused;
      absl::MutexLock lock(&mu_);
      unused = EndWorkLocked(rank);
      ranks_[rank].coverage.Release(range);
      return corrupt(crc32c);
    }
    skips_checksum = true;
  }
  // An exception must not leave the range claimed, nor the work begun.
  const absl::StatusOr<ChunkFold::Result> folded = CatchExceptions([&] {
    return ChunkFold(*memory_.next, *device_stream).Fold(layout, range, pieces, !skips_checksum);
  });

  Memory unused;
  absl::MutexLock lock(&mu_);
  unused = EndWorkLocked(rank);
  Coverage& coverage = ranks_[rank].coverage;
  const bool is_damaged = folded.ok() && !skips_checksum && folded->crc32c != header.crc32c;
  if (!folded.ok() || is_damaged) {
    coverage.Release(range);
    return is_damaged ? corrupt(folded->crc32c) : folded.status();
  }
  if (absl::Status status = ApplyNonFinitePolicyLocked(rank, folded->non_finite); !status.ok()) {
    coverage.Release(range);
    return status;
  }
  coverage.Cover(range, header.crc32c);
  ranks_[rank].frozen_crc32c ^= folded->frozen_crc32c;
  last_progress_ = SteadyNow();
  return ended_.has_value() ? *ended_ : absl::OkStatus();
}

absl::Status PushSession::AwaitDevice(int64_t rank, std::optional<int64_t> stream) {
  std::vector<std::shared_ptr<DeviceStream>> awaited;
  {
    absl::MutexLock lock(&mu_);
    RankState& state = ranks_[rank];
    const auto is_idle = [&state]() { return state.work_count == 0; };
    if (!stream.has_value()) mu_.Await(absl::Condition(&is_idle));
    for (auto it = queued_.lower_bound({rank, stream.value_or(0)});
         it != queued_.end() && it->first.first == rank;) {
      if (stream.value_or(it->first.second) != it->first.second) break;
      awaited.push_back(std::move(it->second));
      it = queued_.erase(it);
    }
    if (awaited.empty()) return state.device_status;
    BeginWorkLocked(rank);
  }
  absl::Status status;
  std::vector<NonFiniteElement> non_finite;
  for (const std::shared_ptr<DeviceStream>& device_stream : awaited) {
    const auto told = CatchExceptions([&] { return device_stream->Synchronize(); });
    status.Update(told.status());
    if (told.ok()) non_finite.insert(non_finite.end(), told->begin(), told->end());
  }
  Memory unused;
  absl::MutexLock lock(&mu_);
  RankState& state = ranks_[rank];
  for (const NonFiniteElement& told : non_finite) {
    const auto [tensor, element] = memory_.next->Locate(told);
    int64_t& first = state.non_finite.try_emplace(tensor, element).first->second;
    first = std::min(first, element);
  }
  unused = EndWorkLocked(rank);  // Last: if the step has ended, this removes memory_.
  state.device_status.Update(status);
  return state.device_status;
}

absl::StatusOr<bool> PushSession::CommitRank(int64_t rank, int64_t stream, uint32_t digest) {
  EMA_RETURN_IF_ERROR(AwaitDevice(rank, stream));
  EMA_ASSIGN_OR_RETURN(const bool is_complete, CheckCommit(rank, stream, digest));
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

absl::StatusOr<bool> PushSession::CheckCommit(int64_t rank, int64_t stream, uint32_t digest) {
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(CheckStreamLocked(rank, stream));
  RankState& state = ranks_[rank];
  if (state.group_digest.value_or(digest) != digest) {
    return MakeError(
        absl::StatusCode::kDataLoss, ErrorReason::kDigestMismatch,
        absl::StrCat("step ", plan_.step, ", rank ", rank, ": the digest of its commit is ", digest,
                     ", but that of another of its streams is ", *state.group_digest));
  }
  state.group_digest = digest;
  if (--state.uncommitted_streams > 0) return false;
  if (!state.coverage.is_complete()) {
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

absl::Status PushSession::ApplyNonFinitePolicyLocked(int64_t rank,
                                                     absl::Span<const NonFiniteElement> elements) {
  if (elements.empty() || model_.non_finite == NonFinitePolicy::kAllow) return absl::OkStatus();
  // A tensor can be skipped where it has a value that it may keep.
  const bool has_base = std::all_of(
      plan_.tracks.begin(), plan_.tracks.end(),
      [](const TrackPlan& plan) { return plan.base != nullptr || !IsDue(plan.updates); });
  if (model_.non_finite == NonFinitePolicy::kReject || !has_base) {
    const NonFiniteElement& first = elements.front();
    const TensorSpec& tensor = model_.manifest->tensor(first.source_id);
    return MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite,
        absl::StrCat(
            "step ", plan_.step, ": tensor \"", tensor.name, "\" holds NaN or infinity",
            tensor.dtype == Dtype::kFloat64 ? ", or more than a float32 can," : "", " at element ",
            first.element, ", pushed by rank ", rank, "; the step is dropped",
            // Such as an attention mask: no later step is any better.
            tensor.is_buffer
                ? absl::StrCat("; if the buffer is meant to hold them, create the model "
                               "again with tracks that ignore it, such as tensor_rules={\"",
                               tensor.name, "\": \"ignore\"}, and do not push it")
                : std::string()));
  }
  for (const NonFiniteElement& element : elements) skipped_tensors_.insert(element.source_id);
  return absl::OkStatus();
}

absl::Status PushSession::CheckFiniteLocked(int64_t rank) {
  absl::btree_map<int64_t, int64_t> found = ranks_[rank].non_finite;
  std::vector<NonFiniteElement> elements;
  // In the order in which a device that reports at once finds them, so that both name the same.
  for (const Shard& shard : run_->layout(rank)->shards()) {
    if (found.empty()) break;
    const auto it = found.find(shard.tensor_index);
    if (it == found.end()) continue;
    elements.push_back({it->first, it->second});
    found.erase(it);
  }
  return ApplyNonFinitePolicyLocked(rank, elements);
}

bool PushSession::HasRankCommitted(int64_t rank) const {
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

int64_t PushSession::covered_bytes() const {
  absl::MutexLock lock(&mu_);
  int64_t bytes = 0;
  for (const RankState& rank : ranks_) bytes += rank.coverage.covered_bytes();
  return bytes;
}

absl::StatusOr<PushSession::FinishedSnapshot> PushSession::TakeSnapshot() {
  absl::btree_set<int64_t> skipped;
  uint32_t frozen_crc32c = 0;
  {
    absl::MutexLock lock(&mu_);
    if (ended_.has_value()) return FinishedSnapshot();
    ++work_count_;  // So that an End() meanwhile does not free the memory.
    skipped = skipped_tensors_;
    for (const RankState& rank : ranks_) frozen_crc32c ^= rank.frozen_crc32c;
  }
  const absl::Cleanup end_work = [this] {
    Memory unused;  // Destroyed without the lock.
    absl::MutexLock lock(&mu_);
    --work_count_;
    unused = TakeUnusedMemoryLocked();
  };
  // All ranks have committed: no chunk is folded any more.
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<Snapshot> snapshot,
                       memory_.next->Finish(skipped, frozen_crc32c));
  return FinishedSnapshot{memory_.freed, std::move(snapshot)};
}

bool PushSession::End(const absl::StatusOr<PushResult>& result) {
  std::vector<OpenedStream> streams;
  {
    // Destroyed without the lock, but before the ranks get their replies: their next step needs the
    // memory and the permit. (Folds may still use some: the model waits for them before that step.)
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
