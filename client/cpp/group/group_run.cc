// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/group/group_run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/group/check_incarnation.h"
#include "client/cpp/group/for_each_part.h"
#include "client/cpp/group/group_push.h"
#include "client/cpp/transport/retry.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

constexpr size_t kMaxMissingRanks = 16;  // A server lists as many.
constexpr absl::Duration kFindRoundTimeout = absl::Milliseconds(500);

// The part of Client::RunOptions::max_staging_bytes for one server: in proportion to its bytes, but
// at least eight chunks, which is enough for a push to make progress.
int64_t StagingBytes(const Client::RunOptions& options, int64_t chunk_bytes,
                     const RankLayout& layout, const std::vector<size_t>& places) {
  constexpr int64_t kMinChunks = 8;
  int64_t part_bytes = 0;
  for (const size_t place : places) {
    const auto i = static_cast<int64_t>(place);
    part_bytes += layout.shard_start(i + 1) - layout.shard_start(i);
  }
  const double share = static_cast<double>(part_bytes) /
                       static_cast<double>(std::max<int64_t>(layout.total_bytes(), 1));
  // Weights that are rounded for the wire are given in float32.
  const int64_t slot_bytes =
      layout.wire_dtype() == WireDtype::kAsPushed ? chunk_bytes : 2 * chunk_bytes;
  return std::max(
      static_cast<int64_t>(share * static_cast<double>(options.max_staging_bytes)) + slot_bytes,
      kMinChunks * slot_bytes);
}

bool HasElements(const Manifest& manifest) {
  const absl::Span<const TensorSpec> tensors = manifest.tensors();
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const TensorSpec& tensor) { return tensor.element_count() > 0; });
}

absl::Status Degraded(const PartitionMap& map, size_t partition) {
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                   absl::StrCat("model \"", map.model().name, "\": server \"",
                                map.partitions()[partition].member, "\", which has partition ",
                                partition, ", does not run"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<GroupRun>> GroupRun::OpenNewest(std::shared_ptr<Client::Impl> client,
                                                               v1::Model model,
                                                               const Client::RunOptions& options,
                                                               SteadyTime deadline,
                                                               Interrupt* interrupt) {
  Backoff backoff;
  while (true) {
    EMA_ASSIGN_OR_RETURN(PartitionMap map, PartitionMap::Create(model));
    const int64_t incarnation = map.incarnation();
    absl::StatusOr<std::shared_ptr<GroupRun>> run =
        Open(client, std::move(map), options, deadline, interrupt);
    if (run.ok()) return run;
    // The model may have returned to a checkpoint meanwhile, perhaps because of `resume`.
    const bool has_ended = GetGroupHint(run.status()).incarnation > incarnation;
    // A server that has just started is not among those that run yet.
    if (!has_ended && !IsRetryable(run.status())) return run;
    const absl::Duration delay = backoff.Next(run.status());
    if (After(SteadyNow(), delay) >= deadline) {
      if (!has_ended) return run;
      // Not FENCED: the asked server does not know the new incarnation yet.
      return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                       std::string(run.status().message()));
    }
    if (!interrupt->Sleep(delay)) return absl::CancelledError("interrupted");
    EMA_ASSIGN_OR_RETURN(
        model, client->UnaryWithRetries(&Stub::PrepareAsyncGetModel,
                                        MakeRequest<v1::GetModelRequest>(model.name()), deadline,
                                        interrupt));
  }
}

absl::StatusOr<std::shared_ptr<GroupRun>> GroupRun::Open(std::shared_ptr<Client::Impl> client,
                                                         PartitionMap map,
                                                         Client::RunOptions options,
                                                         SteadyTime deadline,
                                                         Interrupt* interrupt) {
  const Manifest& manifest = map.model().manifest;
  std::vector<Shard> shards;
  if (options.shards.has_value()) {
    shards = *std::move(options.shards);
    options.shards.reset();
  } else {
    for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
      shards.push_back(WholeTensor(manifest, i));
    }
  }
  EMA_ASSIGN_OR_RETURN(RankLayout layout,
                       RankLayout::Create(manifest, std::move(shards), options.frozen_shard_count,
                                          options.wire_dtype));
  std::vector<PartitionMap::RankPart> shards_by_part = map.Split(layout);
  std::shared_ptr<GroupRun> run(
      new GroupRun(std::move(client), std::move(map), std::move(layout), options));
  EMA_RETURN_IF_ERROR(run->OpenPart(0, std::move(shards_by_part[0]), options, deadline, interrupt));
  EMA_RETURN_IF_ERROR(
      ForEachPart(run->parts_.size() - 1, interrupt, [&](size_t i, Interrupt* inner) {
        return run->OpenPart(i + 1, std::move(shards_by_part[i + 1]), options, deadline, inner);
      }));
  run->OrderParts(options.world_size);
  return run;
}

GroupRun::GroupRun(std::shared_ptr<Client::Impl> client, PartitionMap map, RankLayout layout,
                   const Client::RunOptions& options)
    : client_(std::move(client)),
      map_(std::move(map)),
      layout_(std::move(layout)),
      rank_(options.rank),
      round_(std::make_shared<NewestRound>(map_.incarnation())),
      parts_(map_.partitions().size()) {}

absl::Status GroupRun::OpenPart(size_t partition, PartitionMap::RankPart shards,
                                Client::RunOptions options, SteadyTime deadline,
                                Interrupt* interrupt) {
  const PartitionMap::Partition& place = map_.partitions()[partition];
  if (place.address.empty()) return Degraded(map_, partition);
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<Client::Impl> member,
                       client_->ClientOfMember(place.address));
  ModelInfo info;  // Only the fields that a run needs.
  info.name = model();
  info.manifest = place.manifest;
  options.max_staging_bytes =
      StagingBytes(options, client_->options().chunk_bytes, layout_, shards.places);
  options.shards = std::move(shards.shards);
  options.frozen_shard_count = shards.frozen_shard_count;
  options.rejoins = false;  // In another incarnation all parts are opened again.
  const RunCore::Group group = {.round = round_,
                                .home = partition == 0 ? nullptr : parts_.front().run};
  Part& part = parts_[partition];
  part.places = std::move(shards.places);
  EMA_ASSIGN_OR_RETURN(part.run, RunCore::Create(std::move(member), std::move(info),
                                                 std::move(options), &group, deadline, interrupt));
  return part.run->Join(deadline, interrupt).status();
}

int64_t FirstPart(int64_t rank, int64_t world_size, int64_t count) {
  return rank * count / std::max<int64_t>(world_size, 1);
}

void GroupRun::OrderParts(int64_t world_size) {
  const auto count = static_cast<int64_t>(parts_.size());
  const int64_t first = FirstPart(rank_, world_size, count);
  for (int64_t i = 0; i < count; ++i) {
    Part& part = parts_[(first + i) % count];
    const bool is_of_rank0 = rank_ == 0 && !HasElements(part.run->manifest());
    if (!part.places.empty() || is_of_rank0) {
      pushing_parts_.push_back({part.run.get(), part.places});
    }
  }
  if (pushing_parts_.empty()) pushing_parts_.push_back({parts_.front().run.get(), {}});
}

RunPlan GroupRun::plan() const {
  RunPlan plan = home().plan();
  plan.may_omit_frozen = may_omit_frozen();
  return plan;
}

bool GroupRun::may_omit_frozen() const {
  // A server without frozen tensors has no use for them, and does not say that they may be omitted.
  bool may_omit = false;
  for (const PushingPart& part : pushing_parts_) {
    if (part.run->layout().frozen_shards().empty()) continue;
    if (!part.run->may_omit_frozen()) return false;
    may_omit = true;
  }
  return may_omit;
}

absl::Status GroupRun::ForOthers(Interrupt* interrupt,
                                 absl::FunctionRef<absl::Status(RunCore&, Interrupt*)> work) {
  return ForEachPart(parts_.size() - 1, interrupt,
                     [&](size_t i, Interrupt* inner) { return work(*parts_[i + 1].run, inner); });
}

absl::Status GroupRun::WaitReady(SteadyTime deadline, Interrupt* interrupt) {
  // Each call of AwaitRanks() begins with short pauses, so one that waits for ranks is a long one.
  constexpr absl::Duration kIncompleteInterval = absl::Seconds(10);
  absl::Duration interval = kIncarnationCheckInterval;
  while (true) {
    const SteadyTime check_time = std::min(deadline, After(SteadyNow(), interval));
    absl::Status ready = AwaitRanks(check_time, interrupt);
    const bool is_waiting = absl::IsDeadlineExceeded(ready) || IsRetryable(ready);
    if (!is_waiting || check_time == deadline) return ready;
    // The home is there if it knows which ranks are missing.
    if (GetErrorReason(ready) == ErrorReason::kRunIncomplete) {
      interval = kIncompleteInterval;
      continue;
    }
    interval = kIncarnationCheckInterval;
    EMA_RETURN_IF_ERROR(CheckIncarnation(*client_, model(), map_.incarnation(), interrupt));
  }
}

absl::Status GroupRun::AwaitRanks(SteadyTime deadline, Interrupt* interrupt) {
  EMA_RETURN_IF_ERROR(home().WaitReady(deadline, interrupt));
  const auto is_ready = [this](const Part& part) { return part.run->IsReady(run_epoch()); };
  if (std::all_of(parts_.begin(), parts_.end(), is_ready)) return absl::OkStatus();
  return ForOthers(
      interrupt, [&](RunCore& part, Interrupt* inner) { return part.WaitReady(deadline, inner); });
}

absl::Status GroupRun::RefreshPlan(SteadyTime deadline, Interrupt* interrupt) {
  EMA_RETURN_IF_ERROR(home().RefreshPlan(deadline, interrupt));
  return ForOthers(interrupt, [&](RunCore& part, Interrupt* inner) {
    return part.RefreshPlan(deadline, inner);
  });
}

absl::StatusOr<PushProgress> GroupRun::QueryPush(int64_t step, bool abandon_if_unfinished,
                                                 SteadyTime deadline, Interrupt* interrupt,
                                                 bool retry, std::string_view skip_reason) {
  absl::StatusOr<PushProgress> at_home =
      abandon_if_unfinished
          ? home().DropStep(step, FindRound(step, deadline, interrupt), deadline, interrupt, retry,
                            skip_reason)
          : home().QueryPush(step, /*abandon_if_unfinished=*/false, deadline, interrupt, retry);
  EMA_ASSIGN_OR_RETURN(PushProgress progress, std::move(at_home));
  // It is that of the bytes at the home.
  if (parts_.size() > 1) progress.digest.reset();
  const bool is_wanted =
      !abandon_if_unfinished && progress.state != PushProgress::State::kCommitted;
  if (!is_wanted) return progress;
  progress.missing.clear();
  progress.rank_committed = true;
  for (const PushingPart& part : pushing_parts_) {
    EMA_RETURN_IF_ERROR(AddProgress(part, step, deadline, interrupt, &progress));
  }
  return progress;
}

int64_t GroupRun::FindRound(int64_t step, SteadyTime deadline, Interrupt* interrupt) {
  NewestRound newest(round_->incarnation());
  // A server that does not answer is no reason not to abandon the step.
  ForOthers(interrupt, [&](RunCore& part, Interrupt* inner) {
    const absl::StatusOr<int64_t> round =
        part.FindRound(step, std::min(deadline, After(SteadyNow(), kFindRoundTimeout)), inner);
    if (round.ok()) newest.Note(*round);
    return absl::OkStatus();
  }).IgnoreError();
  return newest.get();
}

absl::Status GroupRun::AddProgress(const PushingPart& part, int64_t step, SteadyTime deadline,
                                   Interrupt* interrupt, PushProgress* progress) const {
  EMA_ASSIGN_OR_RETURN(const PushProgress there,
                       part.run->QueryPush(step, /*abandon_if_unfinished=*/false, deadline,
                                           interrupt, /*retry=*/false));
  if (there.state == PushProgress::State::kCommitted) return absl::OkStatus();
  if (there.state == PushProgress::State::kOpen) progress->state = PushProgress::State::kOpen;
  progress->rank_committed &= there.rank_committed;
  for (const int64_t rank : there.missing_ranks) {
    std::vector<int64_t>& ranks = progress->missing_ranks;
    if (ranks.size() < kMaxMissingRanks &&
        std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
      ranks.push_back(rank);
    }
  }
  const RankLayout& part_layout = part.run->layout();
  for (const PushProgress::Range& range : there.missing) {
    const int64_t end = std::min(range.offset + range.length_bytes, part_layout.total_bytes());
    for (int64_t offset = range.offset; offset < end;) {
      const int64_t shard = part_layout.FindShard(offset);
      const int64_t length = std::min(end, part_layout.shard_start(shard + 1)) - offset;
      const auto place = static_cast<int64_t>(part.places[shard]);
      progress->missing.push_back(
          {layout_.shard_start(place) + offset - part_layout.shard_start(shard), length});
      offset += length;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<RunningPush>> GroupRun::MakePush(PushArguments arguments) {
  return GroupPush::Create(shared_from_this(), std::move(arguments));
}

}  // namespace ema::client_internal
