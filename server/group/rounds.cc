// SPDX-License-Identifier: Apache-2.0
#include "server/group/rounds.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/version.h"

namespace ema::group {
namespace {

std::string JoinRanks(const std::vector<int64_t>& ranks) {
  constexpr size_t kNamedRanks = 16;
  const auto end = ranks.begin() + static_cast<std::ptrdiff_t>(std::min(ranks.size(), kNamedRanks));
  return absl::StrJoin(ranks.begin(), end, ", ");
}

}  // namespace

Rounds::Rounds(Options options, SteadyTime now)
    : options_(std::move(options)),
      start_(now),
      partitions_(options_.members.size()),
      version_(options_.base_version),
      next_tracks_revision_(options_.tracks_revision),
      registry_reached_(now) {
  state_.incarnation = options_.incarnation;
  state_.tracks_revision = options_.tracks_revision;
}

std::string Rounds::NameOf(size_t partition) const {
  return absl::StrCat("partition ", partition, " (", options_.members[partition].name, ")");
}

absl::Status Rounds::CheckJoined() const {
  for (size_t i = 0; i < partitions_.size(); ++i) {
    if (partitions_[i].has_joined) continue;
    const std::string& loading = partitions_[i].loading;
    return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                     absl::StrCat("partition ", i, " on member \"", options_.members[i].name, "\" ",
                                  loading.empty() ? "has not joined" : loading),
                     absl::Seconds(1));
  }
  return absl::OkStatus();
}

bool Rounds::HasPartition(const PartitionId& id) const {
  const auto partition = static_cast<size_t>(id.partition);
  return id.incarnation == options_.incarnation && partition < partitions_.size() &&
         id.boot == options_.members[partition].boot;
}

std::optional<Rounds::Problem> Rounds::FindProblem(SteadyTime now) const {
  const absl::Duration longest_silence = 5 * kSyncInterval;
  if (const absl::Status joined = CheckJoined(); !joined.ok()) {
    return Problem{std::string(joined.message()), absl::FromChrono(now - start_)};
  }
  for (size_t i = 0; i < partitions_.size(); ++i) {
    const absl::Duration silence = absl::FromChrono(now - partitions_[i].last_message);
    if (silence < longest_silence) continue;
    return Problem{absl::StrCat("partition ", i, " on member \"", options_.members[i].name,
                                "\" has sent nothing for ",
                                absl::FormatDuration(absl::Trunc(silence, absl::Seconds(1)))),
                   silence};
  }
  return FindRegistryProblem(now);
}

std::optional<Rounds::Problem> Rounds::FindRegistryProblem(SteadyTime now) const {
  const absl::Duration age = absl::FromChrono(now - registry_reached_);
  if (age <= options_.max_registry_outage) return std::nullopt;
  return Problem{
      absl::StrCat("the home, ", NameOf(0), ", has not reached the registry for ",
                   absl::FormatDuration(age), " (limit ",
                   absl::FormatDuration(options_.max_registry_outage), ", --max-registry-outage)"),
      age - options_.max_registry_outage};
}

std::optional<Rounds::Slowest> Rounds::FindSlowest() const {
  if (!last_progress_.has_value()) return std::nullopt;
  const Partition* slowest = nullptr;
  for (const Partition& partition : partitions_) {
    if (partition.prepared.has_value()) continue;
    if (slowest == nullptr || partition.received_bytes < slowest->received_bytes) {
      slowest = &partition;
    }
  }
  if (slowest == nullptr) return std::nullopt;
  std::string activity = absl::StrCat("has received ", slowest->received_bytes, " bytes");
  if (!slowest->missing_ranks.empty()) {
    absl::StrAppend(&activity, " and waits for ranks ", JoinRanks(slowest->missing_ranks));
  }
  return Slowest{static_cast<size_t>(slowest - partitions_.data()), std::move(activity)};
}

Rounds::Result Rounds::Receive(const PartitionId& from, std::string_view loading, SteadyTime now) {
  if (!HasPartition(from)) return {Answer::kFenced};
  const auto partition = static_cast<size_t>(from.partition);
  partitions_[partition].last_message = now;
  if (partitions_[partition].has_joined) return {};
  partitions_[partition].loading = loading;
  if (!loading.empty()) return {};
  partitions_[partition].has_joined = true;
  if (++joined_count_ < partitions_.size()) return {};
  state_.tracks_revision = next_tracks_revision_;
  BeginNextRound();
  return {Answer::kState, true};
}

Rounds::Result Rounds::OnSync(const Sync& sync, SteadyTime now) {
  const Result result = Receive(sync.from, sync.loading, now);
  if (result.answer == Answer::kFenced || sync.round != state_.round) return result;
  Partition& partition = partitions_[static_cast<size_t>(sync.from.partition)];
  partition.missing_ranks = sync.missing_ranks;
  NotePush(sync.step);
  if (sync.received_bytes > partition.received_bytes) {
    partition.received_bytes = sync.received_bytes;
    last_progress_ = now;
  }
  return result;
}

Rounds::Result Rounds::OnVote(const Vote& vote, SteadyTime now, absl::Time commit_time) {
  const Result result = Receive(vote.from, /*loading=*/"", now);
  if (result.answer == Answer::kFenced || vote.round != state_.round || vote.round == 0) {
    return result;
  }
  const auto partition = static_cast<size_t>(vote.from.partition);
  if (!vote.step.ok()) {
    // A rank may have begun a later step in this round. That one is pushed again in the next round.
    EndWithout(vote.refused_step,
               WithPrefix(vote.step.status(), absl::StrCat(NameOf(partition), ": ")));
    return {Answer::kState, true};
  }
  NotePush(vote.step->step);
  std::optional<PreparedStep>& prepared = partitions_[partition].prepared;
  if (prepared.has_value()) return {Answer::kHold};
  prepared = *vote.step;
  last_progress_ = now;
  if (const absl::Status status = CheckAgreement(partition); !status.ok()) {
    // All ranks of a partition have left the earlier step, so only the later one can be committed.
    int64_t earliest_step = prepared->step;
    for (const Partition& other : partitions_) {
      if (other.prepared.has_value()) earliest_step = std::min(earliest_step, other.prepared->step);
    }
    EndWithout(earliest_step, status);
    return {Answer::kState, true};
  }
  if (++prepared_count_ < partitions_.size()) return {Answer::kHold};
  if (const std::optional<Problem> problem = FindRegistryProblem(now)) {
    Abort(state_.round, /*step=*/0, absl::UnavailableError(problem->text));
  } else {
    Commit(commit_time);
  }
  return {Answer::kState, true};
}

absl::Status Rounds::CheckAgreement(size_t partition) const {
  const PreparedStep& step = *partitions_[partition].prepared;
  if (step.run_epoch != state_.run_epoch) {
    return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                     absl::StrCat(NameOf(partition), ": step ", step.step, " is of run epoch ",
                                  step.run_epoch, ", but epoch ", state_.run_epoch, " is open"));
  }
  for (size_t i = 0; i < partitions_.size(); ++i) {
    if (i == partition || !partitions_[i].prepared.has_value()) continue;
    const PreparedStep& other = *partitions_[i].prepared;  // All others agree with it.
    if (step.step != other.step) {
      return MakeError(absl::StatusCode::kAborted, ErrorReason::kStepAbandoned,
                       absl::StrCat(NameOf(partition), " has step ", step.step, ", but ", NameOf(i),
                                    " has step ", other.step));
    }
    if (step.plan_digest != other.plan_digest) {
      return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kPlanMismatch,
                       absl::StrCat("step ", step.step, ": the plan of ", NameOf(partition),
                                    " differs from that of ", NameOf(i)));
    }
    break;
  }
  return absl::OkStatus();
}

void Rounds::Commit(absl::Time commit_time) {
  PreparedStep all = *partitions_[0].prepared;
  for (size_t i = 1; i < partitions_.size(); ++i) {
    PreparedStep& part = *partitions_[i].prepared;
    all.skipped_tensor_count += part.skipped_tensor_count;
    for (std::string& name : part.skipped_tensors) {
      if (all.skipped_tensors.size() == Version::kMaxNamedTensors) break;
      all.skipped_tensors.push_back(std::move(name));
    }
  }
  state_.last_commit = GroupCommit{state_.round, ++version_, std::move(all), commit_time};
  state_.tracks_revision = next_tracks_revision_;
  BeginNextRound();
}

bool Rounds::Abort(int64_t round, int64_t step, const absl::Status& why) {
  if (round != state_.round || round == 0) return false;
  EndWithout(step != 0 ? step : step_, why);
  return true;
}

void Rounds::EndWithout(int64_t failed_step, const absl::Status& why) {
  state_.last_abort = GroupAbort{state_.round, why};
  const int64_t failed = state_.failed_step.has_value() ? state_.failed_step->step : 0;
  if (failed_step > failed && !absl::IsUnavailable(why)) {
    state_.failed_step = FailedStep{failed_step, why};
  }
  BeginNextRound();
}

bool Rounds::Expire(SteadyTime now) {
  constexpr size_t kNamedPartitions = 4;
  if (!rejects_pushes_until_.empty() && now >= *rejects_pushes_until_.begin()) {
    rejects_pushes_until_.erase(rejects_pushes_until_.begin(),
                                rejects_pushes_until_.upper_bound(now));
    return PermitPushes();
  }
  if (!last_progress_.has_value()) return false;
  const absl::Duration idle = absl::FromChrono(now - *last_progress_);
  if (idle < options_.session_timeout) return false;
  std::vector<std::string> waiting;
  for (size_t i = 0; i < partitions_.size() && waiting.size() < kNamedPartitions; ++i) {
    if (partitions_[i].prepared.has_value()) continue;
    const std::vector<int64_t>& ranks = partitions_[i].missing_ranks;
    waiting.push_back(ranks.empty() ? NameOf(i)
                                    : absl::StrCat(NameOf(i), " without ranks ", JoinRanks(ranks)));
  }
  return Abort(
      state_.round, /*step=*/0,
      MakeError(absl::StatusCode::kAborted, ErrorReason::kSessionExpired,
                absl::StrCat("no push progress for ", absl::FormatDuration(idle), " (limit ",
                             absl::FormatDuration(options_.session_timeout),
                             ", --session-timeout); incomplete: ", absl::StrJoin(waiting, "; "))));
}

bool Rounds::OpenRun(int64_t run_epoch, std::string_view launch_id) {
  const absl::Status why =
      MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                absl::StrCat("run epoch ", run_epoch, " has replaced epoch ", state_.run_epoch));
  state_.run_epoch = run_epoch;
  state_.launch_id = launch_id;
  const bool has_ended = AbortForTracks(why);
  state_.failed_step.reset();  // It is of the run that was open.
  return has_ended;
}

bool Rounds::RejectPushes(const absl::Status& why, SteadyTime until) {
  const bool rejected_pushes = !rejects_pushes_until_.empty();
  rejects_pushes_until_.insert(until);
  return !rejected_pushes && Abort(state_.round, /*step=*/0, why);
}

bool Rounds::AcceptPushes(SteadyTime until) {
  const auto found = rejects_pushes_until_.find(until);
  if (found == rejects_pushes_until_.end()) return false;
  rejects_pushes_until_.erase(found);
  return PermitPushes();
}

bool Rounds::PermitPushes() {
  return rejects_pushes_until_.empty() &&
         Abort(state_.round, /*step=*/0,
               absl::UnavailableError("pushes were rejected; now they are accepted again"));
}

bool Rounds::SetTracksRevision(int64_t revision, bool is_urgent) {
  next_tracks_revision_ = revision;
  return is_urgent &&
         AbortForTracks(MakeError(absl::StatusCode::kAborted, ErrorReason::kStepAbandoned,
                                  "the model's settings have changed"));
}

bool Rounds::AbortForTracks(const absl::Status& why) {
  if (state_.round == 0) return false;  // They come into force when all partitions have joined.
  state_.tracks_revision = next_tracks_revision_;
  return Abort(state_.round, /*step=*/0, why);
}

void Rounds::BeginNextRound() {
  for (Partition& partition : partitions_) {
    partition.prepared.reset();
    partition.received_bytes = 0;
    partition.missing_ranks.clear();
  }
  prepared_count_ = 0;
  step_ = 0;
  last_progress_.reset();
  ++state_.round;
  state_.rejects_pushes = !rejects_pushes_until_.empty();
}

}  // namespace ema::group
