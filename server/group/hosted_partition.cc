// SPDX-License-Identifier: Apache-2.0
#include "server/group/hosted_partition.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "server/core/model_overview.h"
#include "server/group/convert_messages.h"

namespace ema::group {
namespace {

constexpr absl::Duration kRetryDelay = absl::Milliseconds(20);
constexpr absl::Duration kCallTimeout = absl::Seconds(3);
// Longer than a stopping server waits for the save, and then takes to leave. When it is back, it
// begins a new incarnation, so the end of this time matters only if it does not stop after all.
constexpr absl::Duration kMaxStopTime = absl::Minutes(20);
constexpr int64_t kNamedRanks = 16;  // As many as SyncRequest.missing_ranks has.

int64_t BaseVersion(const HostedPartition::Options& options) {
  return options.base.has_value() ? options.base->version : 0;
}

Rounds::Options RoundsOptions(const HostedPartition::Options& options) {
  Rounds::Options rounds{.incarnation = options.id.incarnation,
                         .base_version = BaseVersion(options),
                         .session_timeout = options.session_timeout,
                         .max_registry_outage = options.max_registry_outage};
  for (const Partition& partition : options.partitions) {
    rounds.members.push_back({.name = partition.member, .boot = partition.boot});
  }
  return rounds;
}

}  // namespace

HostedPartition::HostedPartition(Options options)
    : options_(std::move(options)),
      participant_(options_.id, BaseVersion(options_)),
      loading_(options_.base.has_value() ? "is loading" : "") {
  if (is_home()) rounds_.emplace(RoundsOptions(options_), start_);
  state_.incarnation = options_.id.incarnation;
}

std::shared_ptr<Model> HostedPartition::model() const {
  absl::MutexLock lock(&mu_);
  return model_.lock();
}

void HostedPartition::Start(const std::shared_ptr<Model>& model) {
  {
    absl::MutexLock lock(&mu_);
    model_ = model;
  }
  Post(&HostedPartition::Tick);
}

void HostedPartition::Activate() {
  absl::MutexLock lock(&mu_);
  if (std::exchange(is_active_, true)) return;
  loading_.clear();
  RequestSyncLocked();
}

bool HostedPartition::is_active() const {
  absl::MutexLock lock(&mu_);
  return is_active_;
}

void HostedPartition::SetLoadError(const absl::Status& error) {
  absl::MutexLock lock(&mu_);
  if (!is_active_)
    loading_ = absl::StrCat("is loading; the last attempt failed: ", error.message());
}

absl::Status HostedPartition::CheckHasBase() const {
  absl::MutexLock lock(&mu_);
  if (loading_.empty()) return absl::OkStatus();
  const std::string& member = options_.partitions[options_.id.partition].member;
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                   absl::StrCat(Name(), " on member \"", member, "\" ", loading_),
                   absl::Seconds(1));
}

absl::Status HostedPartition::CheckLoaded() const {
  absl::MutexLock lock(&mu_);
  if (!options_.base.has_value() || !rounds_.has_value()) return absl::OkStatus();
  return WithPrefix(rounds_->CheckJoined(), absl::StrCat("model \"", options_.model, "\": "));
}

v1::GroupModelProgress HostedPartition::DescribeProgress() const {
  v1::GroupModelProgress progress;
  if (const std::shared_ptr<Model> model = this->model()) {
    const ModelOverview overview = OverviewOf(*model);
    progress.set_version(overview.version.version);
    progress.set_step(overview.step);
    progress.set_durable_step(overview.durable_step);
    if (overview.durable_commit_time.has_value()) {
      progress.set_checkpoint_age_seconds(
          absl::ToDoubleSeconds(absl::Now() - *overview.durable_commit_time));
    }
  }
  absl::MutexLock lock(&mu_);
  const GroupState& state = rounds_->state();
  progress.set_round(state.round);
  progress.set_run_epoch(state.run_epoch);
  progress.set_rejects_pushes(state.rejects_pushes);
  if (const std::optional<Rounds::Slowest> slowest = rounds_->FindSlowest()) {
    progress.set_slowest_partition(static_cast<int64_t>(slowest->partition));
    progress.set_slowest_member(options_.partitions[slowest->partition].member);
    progress.set_slowest_activity(slowest->activity);
  }
  if (const std::optional<Rounds::Problem> problem = rounds_->FindProblem(SteadyNow())) {
    progress.set_problem(problem->text);
    progress.set_problem_seconds(absl::ToDoubleSeconds(problem->age));
  }
  return progress;
}

std::optional<absl::Duration> HostedPartition::time_without_round() const {
  absl::MutexLock lock(&mu_);
  return state_.round == 0 ? std::optional(Since(start_)) : std::nullopt;
}

absl::Duration HostedPartition::commit_wait() const {
  absl::MutexLock lock(&mu_);
  return commit_wait_;
}

void HostedPartition::Stop() {
  absl::MutexLock lock(&mu_);
  is_stopped_ = true;
  AnswerHeldLocked(FencedErrorLocked("the partition has been dropped"));
}

void HostedPartition::Post(void (HostedPartition::*function)()) {
  options_.peers->Post([self = weak_from_this(), function] {
    if (const std::shared_ptr<HostedPartition> locked = self.lock()) ((*locked).*function)();
  });
}

void HostedPartition::Tick() {
  {
    absl::MutexLock lock(&mu_);
    if (is_stopped_) return;
    if (rounds_.has_value()) {
      rounds_->NoteRegistryReached(options_.member->last_contact());
      if (rounds_->Expire(SteadyNow())) EndRoundLocked();
    }
    SendVoteLocked();
  }
  SendSync();
  options_.peers->PostAfter(kSyncInterval, [self = weak_from_this()] {
    if (const std::shared_ptr<HostedPartition> locked = self.lock()) locked->Tick();
  });
}

// --- Messages to the home ---

Sync HostedPartition::Progress() const {
  Sync sync{.from = options_.id};
  const std::shared_ptr<Model> model = this->model();
  if (model == nullptr) return sync;
  const std::shared_ptr<const PushSession> session = model->Describe().session;
  if (session == nullptr) return sync;
  sync.round = session->plan().round;
  sync.step = session->plan().step;
  sync.received_bytes = session->covered_bytes();
  sync.missing_ranks = session->MissingRanks(kNamedRanks);
  return sync;
}

void HostedPartition::RequestSyncLocked() {
  if (is_stopped_ || std::exchange(is_sync_requested_, true)) return;
  Post(&HostedPartition::SendSync);
}

void HostedPartition::SendSync() {
  Sync sync = Progress();
  absl::MutexLock lock(&mu_);
  is_sync_requested_ = false;
  if (is_stopped_) return;
  sync.loading = loading_;
  // Before the record is ACTIVE, the home may not have its partition yet.
  if (!is_active_ && loading_.empty()) return;
  if (rounds_.has_value()) {
    if (rounds_->OnSync(sync, SteadyNow()).round_ended) EndRoundLocked();
    return;
  }
  if (is_sync_running_) return;
  const std::optional<std::string> home = AddressLocked(0);
  if (!home.has_value()) return;
  is_sync_running_ = true;
  options_.peers->Sync(*home, ToProto(options_.model, sync), kCallTimeout,
                       [self = shared_from_this()](const absl::StatusOr<v1::GroupState>& state) {
                         self->OnSyncEnded(state);
                       });
}

void HostedPartition::OnSyncEnded(const absl::StatusOr<v1::GroupState>& state) {
  absl::MutexLock lock(&mu_);
  is_sync_running_ = false;
  // After an error Tick() sends another one.
  if (state.ok()) ApplyStateLocked(FromProto(*state));
}

void HostedPartition::SendVoteLocked() {
  const Vote* const vote = participant_.to_send();
  if (is_stopped_ || vote == nullptr) return;
  if (rounds_.has_value()) return HandleVoteLocked(Vote(*vote), /*reply=*/nullptr);
  const int64_t round = vote->round;
  const std::optional<std::string> home = AddressLocked(0);
  if (sent_vote_round_ == round || !home.has_value()) return;
  sent_vote_round_ = round;
  options_.peers->Vote(
      *home, ToProto(options_.model, *vote), kVoteInterval,
      [self = shared_from_this(), round](const absl::StatusOr<v1::GroupState>& state) {
        self->OnVoteEnded(round, state);
      });
}

void HostedPartition::OnVoteEnded(int64_t round, const absl::StatusOr<v1::GroupState>& state) {
  absl::MutexLock lock(&mu_);
  if (sent_vote_round_ == round) sent_vote_round_ = 0;
  if (state.ok()) return ApplyStateLocked(FromProto(*state));
  // After other errors Tick() sends it again.
  if (absl::IsDeadlineExceeded(state.status())) SendVoteLocked();
}

// --- Messages from the partitions ---

void HostedPartition::NoteHomePinnedVersions() {
  const std::shared_ptr<Model> model = this->model();
  if (!is_home() || model == nullptr) return;
  std::vector<int64_t> versions = model->history().PinnedVersions();
  absl::MutexLock lock(&mu_);
  rounds_->SetHomePinnedVersions(std::move(versions));
}

void HostedPartition::OnVote(const Vote& vote, Reply reply) {
  NoteHomePinnedVersions();  // This message may end the round with a commit.
  absl::MutexLock lock(&mu_);
  if (is_stopped_ || !rounds_.has_value()) return reply(FencedErrorLocked("this is not the home"));
  HandleVoteLocked(vote, std::move(reply));
}

void HostedPartition::HandleVoteLocked(const Vote& vote, Reply reply) {
  const auto answer = [this](Reply to, absl::StatusOr<GroupState> with) {
    if (to) options_.peers->Post([to = std::move(to), with = std::move(with)] { to(with); });
  };
  // As precise as in a message, so that it is the same in all partitions.
  const absl::Time commit_time = absl::FromUnixMicros(absl::ToUnixMicros(absl::Now()));
  const Rounds::Result result = rounds_->OnVote(vote, SteadyNow(), commit_time);
  switch (result.answer) {
    case Rounds::Answer::kFenced:
      answer(std::move(reply),
             FencedErrorLocked("the sender is not the process of that partition"));
      break;
    case Rounds::Answer::kState:
      // The call that ends the round is answered with the others, so that its sender does not get
      // the state a second time.
      if (reply && result.round_ended) std::swap(held_[vote.from.partition], reply);
      answer(std::move(reply), rounds_->state());
      break;
    case Rounds::Answer::kHold:
      if (!is_holding_) {
        answer(std::move(reply), StoppingError(0));
      } else if (reply) {
        std::swap(held_[vote.from.partition], reply);
        answer(std::move(reply), rounds_->state());
      }
      break;
  }
  if (result.round_ended) EndRoundLocked();
}

absl::StatusOr<GroupState> HostedPartition::OnSync(const Sync& sync) {
  absl::MutexLock lock(&mu_);
  if (is_stopped_ || !rounds_.has_value()) return FencedErrorLocked("this is not the home");
  const Rounds::Result result = rounds_->OnSync(sync, SteadyNow());
  if (result.answer == Rounds::Answer::kFenced) {
    return FencedErrorLocked("the sender is not the process of that partition");
  }
  if (result.round_ended) EndRoundLocked();
  return rounds_->state();
}

void HostedPartition::AnswerHeldLocked(const absl::StatusOr<GroupState>& answer) {
  for (auto& [partition, reply] : std::exchange(held_, {})) {
    options_.peers->Post([reply = std::move(reply), answer] { reply(answer); });
  }
}

absl::Status HostedPartition::RejectPushesForStop(const PartitionId& stopping) {
  {
    absl::MutexLock lock(&mu_);
    if (is_stopped_ || !rounds_.has_value()) return FencedErrorLocked("this is not the home");
    if (!rounds_->HasPartition(stopping)) {
      return FencedErrorLocked("the sender is not the process of that partition");
    }
    if (rounds_->RejectPushes(StoppingError(stopping.partition),
                              After(SteadyNow(), kMaxStopTime))) {
      EndRoundLocked();
    }
  }
  options_.peers->AwaitPosted();
  return absl::OkStatus();
}

absl::Status HostedPartition::RejectPushesForMove() {
  {
    absl::MutexLock lock(&mu_);
    if (is_stopped_ || !rounds_.has_value()) return FencedErrorLocked("this is not the home");
    if (rounds_->RejectPushes(BusyError("its tensors move to other servers"), SteadyTime::max())) {
      EndRoundLocked();
    }
  }
  options_.peers->AwaitPosted();
  return absl::OkStatus();
}

void HostedPartition::AcceptPushesAfterMove() {
  absl::MutexLock lock(&mu_);
  if (!is_stopped_ && rounds_.has_value() && rounds_->AcceptPushes(SteadyTime::max())) {
    EndRoundLocked();
  }
}

void HostedPartition::ReleaseHeldCalls() {
  std::map<int64_t, Reply> held;
  GroupState state;
  {
    absl::MutexLock lock(&mu_);
    if (!std::exchange(is_holding_, false) || !rounds_.has_value()) return;
    held.swap(held_);
    if (rounds_->RejectPushes(StoppingError(0), SteadyTime::max())) EndRoundLocked();
    state = rounds_->state();
  }
  for (const auto& [partition, reply] : held) reply(state);
}

// --- Ends of rounds ---

void HostedPartition::SetTracksRevision(int64_t revision, bool is_urgent) {
  absl::MutexLock lock(&mu_);
  if (rounds_.has_value() && rounds_->SetTracksRevision(revision, is_urgent)) EndRoundLocked();
}

void HostedPartition::EndRoundLocked() {
  const GroupState& state = rounds_->state();
  v1::PublishStateRequest request;
  request.set_model(options_.model);
  *request.mutable_state() = ToProto(state);
  for (size_t i = 1; i < options_.partitions.size(); ++i) {
    const std::optional<std::string> address = AddressLocked(i);
    // If it is lost, the next Sync returns the state.
    if (!held_.contains(static_cast<int64_t>(i)) && address.has_value()) {
      options_.peers->PublishState(*address, request, kCallTimeout, [](const auto&) {});
    }
  }
  AnswerHeldLocked(state);
  ApplyStateLocked(state);
}

void HostedPartition::OnState(const GroupState& state) {
  absl::MutexLock lock(&mu_);
  ApplyStateLocked(state);
}

void HostedPartition::ApplyStateLocked(const GroupState& state) {
  if (is_stopped_ || state.incarnation < options_.id.incarnation) return;
  const int64_t round = participant_.round();
  const Participant::Action action = participant_.OnState(state);
  const bool has_new_tracks = state.tracks_revision > state_.tracks_revision;
  if (state.incarnation == state_.incarnation && state.round >= state_.round) state_ = state;
  if (action.kind == Participant::Action::Kind::kPublish) commit_wait_ += Since(prepare_time_);
  if (action.kind != Participant::Action::Kind::kNothing) {
    options_.peers->Post(
        [self = shared_from_this(), action, round, state] { self->Execute(action, round, state); });
  }
  if (has_new_tracks) Post(&HostedPartition::ApplyTracks);
}

void HostedPartition::ApplyTracks() {
  if (const std::shared_ptr<Model> model = this->model()) model->ApplyTracksInForce();
}

void HostedPartition::Execute(const Participant::Action& action, int64_t round,
                              const GroupState& state) {
  const std::shared_ptr<Model> model = this->model();
  // A model that is closed has dropped its step.
  if (model == nullptr || !model->CheckOpen().ok()) return;
  switch (action.kind) {
    case Participant::Action::Kind::kNothing:
    case Participant::Action::Kind::kReadRegistry:  // The watch of the registry reports the record.
      return;
    case Participant::Action::Kind::kPublish: {
      const group::PreparedStep& step = state.last_commit->step;
      if (model->PublishPrepared(round, {.commit_time = state.last_commit->commit_time,
                                         .skipped_tensor_count = step.skipped_tensor_count,
                                         .skipped_tensors = step.skipped_tensors,
                                         .home_pinned_versions = state.home_pinned_versions})) {
        return;
      }
      break;
    }
    case Participant::Action::Kind::kDrop: {
      absl::Status why = action.why;
      SetGroupHint(why, {.round = state.round, .incarnation = state.incarnation});
      return model->DropOpenStep(round, why);
    }
    case Participant::Action::Kind::kDiverged:
      break;
  }
  LogTo(options_.log, LogLevel::kError, "partition diverged",
        {{"model", options_.model},
         {"partition", options_.id.partition},
         {"round", round},
         {"version", state.last_commit.has_value() ? state.last_commit->version : 0}});
  Stop();
  model->Close(MakeError(
      absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
      absl::StrCat(Name(), ": a version that the other partitions have is missing here")));
}

// --- CommitGate ---

int64_t HostedPartition::round() const {
  absl::MutexLock lock(&mu_);
  return state_.round;
}

int64_t HostedPartition::tracks_revision() const {
  absl::MutexLock lock(&mu_);
  return state_.tracks_revision;
}

absl::Status HostedPartition::CheckLaunch(const Launch& launch) {
  absl::MutexLock lock(&mu_);
  if (launch.run_epoch == 0) return is_home() ? absl::OkStatus() : NotHomeErrorLocked();
  if (launch.incarnation > options_.id.incarnation) {
    return BusyError(absl::StrCat("incarnation ", launch.incarnation, " is not known here yet"));
  }
  if (launch.incarnation < options_.id.incarnation) {
    return FencedErrorLocked(absl::StrCat("incarnation ", launch.incarnation, " has ended"));
  }
  if (state_.round == 0 || launch.run_epoch > state_.run_epoch) {
    RequestSyncLocked();
    return BusyError(absl::StrCat("run epoch ", launch.run_epoch, " is not known here yet"));
  }
  if (launch.run_epoch == state_.run_epoch && launch.id == state_.launch_id) {
    return absl::OkStatus();
  }
  return FencedErrorLocked(absl::StrCat("run epoch ", launch.run_epoch, " of launch \"", launch.id,
                                        "\" is not open; epoch ", state_.run_epoch, " is"));
}

void HostedPartition::OnRunOpened(int64_t run_epoch, std::string_view launch_id) {
  absl::MutexLock lock(&mu_);
  if (rounds_.has_value() && rounds_->OpenRun(run_epoch, launch_id)) EndRoundLocked();
}

absl::Status HostedPartition::CheckPush(const PushStart& start) {
  absl::MutexLock lock(&mu_);
  if (is_stopped_) return FencedErrorLocked("the partition has been dropped");
  switch (participant_.OnHeader({.incarnation = start.incarnation,
                                 .round = start.round,
                                 .run_epoch = start.run_epoch,
                                 .step = start.step})) {
    case Participant::HeaderAnswer::kAccept:
      pushed_round_ = start.round;
      pushed_step_ = start.step;
      if (rounds_.has_value()) rounds_->NotePush(start.step);
      return absl::OkStatus();
    case Participant::HeaderAnswer::kStaleRound: {
      absl::Status why =
          MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleRound,
                    absl::StrCat(Name(), ": round ", start.round, " has ended; the current one is ",
                                 participant_.round()));
      // Other ranks have lost such a step, so it could not complete in the current round. The home
      // may not have heard of one that was accepted here.
      const bool was_accepted = pushed_round_ == start.round && start.step <= pushed_step_;
      const int64_t round = was_accepted ? start.round : 0;
      if (const absl::Status* loss = state_.FindLoss(start.step, round)) why = *loss;
      SetGroupHint(why, {.round = participant_.round(), .incarnation = options_.id.incarnation});
      return why;
    }
    case Participant::HeaderAnswer::kFenced:
      return FencedErrorLocked(absl::StrCat("the push is of incarnation ", start.incarnation,
                                            ", run epoch ", start.run_epoch));
    case Participant::HeaderAnswer::kPushesRejected:
      return MakeError(
          absl::StatusCode::kUnavailable, ErrorReason::kDraining,
          absl::StrCat(
              Name(),
              ": pushes are rejected while a server of the model stops, or its tensors move"),
          absl::Milliseconds(100));
    case Participant::HeaderAnswer::kSync:
    case Participant::HeaderAnswer::kReadRegistry:
      break;
  }
  RequestSyncLocked();
  return BusyError(absl::StrCat("round ", start.round, " of incarnation ", start.incarnation,
                                " given, the partition is in round ", participant_.round()));
}

absl::Status HostedPartition::AbandonRound(int64_t round, int64_t step, const absl::Status& why) {
  absl::MutexLock lock(&mu_);
  if (!rounds_.has_value()) return NotHomeErrorLocked();
  const GroupState& state = rounds_->state();
  if (round == 0) round = state.round;
  if (rounds_->Abort(round, step, why)) {
    EndRoundLocked();
    return absl::OkStatus();
  }
  if (!state.last_commit.has_value() || state.last_commit->round != round) return absl::OkStatus();
  return BusyError(absl::StrCat("round ", round, " has been committed as version ",
                                state.last_commit->version, ", which is being published"));
}

void HostedPartition::OnPrepared(int64_t round, const Version& record) {
  NoteHomePinnedVersions();
  absl::MutexLock lock(&mu_);
  if (is_stopped_) return;  // The model is being closed.
  if (participant_.EndReceiving(round, ToPreparedStep(record))) {
    prepare_time_ = SteadyNow();
    return SendVoteLocked();
  }
  // The round ended while the session was being made, so that its end did not find it.
  options_.peers->Post([self = shared_from_this(), round] {
    const std::shared_ptr<Model> model = self->model();
    if (model == nullptr) return;
    model->DropOpenStep(round, MakeError(absl::StatusCode::kAborted, ErrorReason::kStepAbandoned,
                                         absl::StrCat("round ", round, " has ended")));
  });
}

void HostedPartition::OnDropped(int64_t round, const absl::Status& why) {
  absl::MutexLock lock(&mu_);
  if (participant_.EndReceiving(round, why)) SendVoteLocked();
}

// --- Errors ---

std::string HostedPartition::Name() const {
  return absl::StrCat("model \"", options_.model, "\", partition ", options_.id.partition);
}

absl::Status HostedPartition::FencedErrorLocked(const std::string& why) const {
  absl::Status fenced =
      MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                absl::StrCat(Name(), " of incarnation ", options_.id.incarnation, ": ", why));
  SetGroupHint(fenced, {.round = state_.round, .incarnation = options_.id.incarnation});
  return fenced;
}

absl::Status HostedPartition::BusyError(const std::string& why) const {
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                   absl::StrCat(Name(), ": ", why), kRetryDelay);
}

absl::Status HostedPartition::StoppingError(int64_t partition) const {
  return MakeError(
      absl::StatusCode::kUnavailable, ErrorReason::kDraining,
      absl::StrCat("model \"", options_.model, "\": the server of partition ", partition,
                   ", member \"", options_.partitions[static_cast<size_t>(partition)].member,
                   "\", is shutting down"));
}

absl::Status HostedPartition::NotHomeErrorLocked() const {
  const std::string why = absl::StrCat(Name(), ": only the home, member \"",
                                       options_.partitions[0].member, "\", answers this call");
  const std::optional<std::string> address = AddressLocked(0);
  if (!address.has_value()) {
    return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                     absl::StrCat(why, ", and its address is not known now"), absl::Seconds(1));
  }
  absl::Status error = MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotHome, why);
  SetGroupHint(error, {.home = *address});
  return error;
}

std::optional<std::string> HostedPartition::AddressLocked(size_t partition) const {
  if (is_stopped_) return std::nullopt;
  const Partition& of = options_.partitions[partition];
  return options_.member->AddressOf(of.member, of.boot);
}

}  // namespace ema::group
