// SPDX-License-Identifier: Apache-2.0
#include "server/core/push_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// Chunks that a rank may send in a step: its bytes in ones of 64 KiB, one for each of its shards,
// and a share of so many. Their records are in no budget; the shards' are.
int64_t MaxChunks(const RankLayout& layout, int64_t world_size) {
  constexpr int64_t kChunkBytes = int64_t{64} << 10;
  constexpr int64_t kMoreChunks = int64_t{1} << 18;
  constexpr int64_t kLeast = 64;
  return layout.total_bytes() / kChunkBytes + static_cast<int64_t>(layout.shards().size()) +
         std::max(kMoreChunks / world_size, kLeast);
}

}  // namespace

PushSession::PushSession(ModelView model, std::shared_ptr<const TrainerRun> run, SnapshotRef base,
                         StepPlan plan, ConcurrencyLimit::Permit permit)
    : model_(std::move(model)),
      run_(std::move(run)),
      plan_(std::move(plan)),
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
  return plan_.omits_frozen ? layout.live_bytes() : layout.total_bytes();
}

bool PushSession::Changes(const TrackPlan& plan, int64_t tensor_index) const {
  const TensorAction action = plan.track->action(tensor_index);
  if (action == TensorAction::kIgnore) return false;
  if (plan_.omits_frozen && run_->is_frozen(tensor_index)) return false;
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

void PushSession::AwaitStream(int64_t rank, int64_t stream) {
  // Of an error the rank's commit tells.
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
