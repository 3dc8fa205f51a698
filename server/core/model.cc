// SPDX-License-Identifier: Apache-2.0
#include "server/core/model.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr int64_t kDescribedRanks = 8;    // Description::run.
constexpr int64_t kNamedRanges = 1024;    // QueryPushResponse.missing.
constexpr size_t kMaxReasonBytes = 1024;  // QueryPushRequest.skip_reason.

absl::Status Aborted(ErrorReason reason, std::string message) {
  return MakeError(absl::StatusCode::kAborted, reason, message);
}

// Checks what can be checked without the model. INVALID_ARGUMENT: BAD_REQUEST, BAD_TIME.
absl::Status ValidateStart(const PushStart& start) {
  constexpr int64_t kMaxStep = int64_t{1} << 62;
  if (start.step < 0 || start.step > kMaxStep) {
    return BadRequest(absl::StrCat("step: ", start.step, " given, expected 0 to 2^62"));
  }
  if (start.stream_group < 0 || start.stream_count < 0 || start.stream_count > kMaxStreamsOfRank ||
      (start.stream_count > 1 && start.stream_group == 0)) {
    return BadRequest(absl::StrCat("stream_count: ", start.stream_count, " of stream_group ",
                                   start.stream_group, " given, expected up to ", kMaxStreamsOfRank,
                                   ", and a group, above 0, for more than one"));
  }
  return start.time.Validate();
}

absl::Status CheckSkipReason(bool abandon_if_unfinished, std::string_view skip_reason) {
  if (skip_reason.empty()) return absl::OkStatus();
  if (skip_reason.size() > kMaxReasonBytes) {
    return BadRequest(absl::StrCat("skip_reason: ", skip_reason.size(),
                                   " bytes given, expected up to ", kMaxReasonBytes));
  }
  if (abandon_if_unfinished) return absl::OkStatus();
  return BadRequest("skip_reason: given without abandon_if_unfinished");
}

}  // namespace

Model::Model(ModelConfig config, DeviceMemory memory, const Options& options)
    : config_(std::move(config)),
      options_(options),
      memory_(std::move(memory)),
      host_budget_(options.host_budget != nullptr ? options.host_budget : memory_.budget),
      attached_files_(host_budget_.get()),
      history_({config_.name, options.incarnation, config_.max_pinned_versions,
                options.has_data_dir, keep_alive()}),
      tracks_({config_.name, config_.manifest, memory_, host_budget_, options.block_bytes,
               options.incarnation, options.has_data_dir, keep_alive()},
              &history_),
      readings_(&history_, &tracks_, config_.manifest.get(), memory_.device.get(),
                host_budget_.get(), keep_alive()),
      runs_(config_.name, options.incarnation),
      open_step_(config_.name) {}

absl::StatusOr<std::shared_ptr<Model>> Model::Create(
    ModelConfig config, const std::vector<std::shared_ptr<Track>>& tracks,
    std::shared_ptr<Device> device, std::shared_ptr<MemoryBudget> budget, const Options& options) {
  std::shared_ptr<Model> model(
      new Model(std::move(config), {std::move(device), std::move(budget)}, options));
  int64_t bytes = 0;
  for (const std::shared_ptr<Track>& track : tracks) {
    const int64_t of_track = track->MemoryBytes(model->history_.version_count());
    if (__builtin_add_overflow(bytes, of_track, &bytes)) bytes = INT64_MAX;
  }
  const std::string name = absl::StrCat("model \"", model->config_.name, "\"");
  const int64_t needed = model->manifest().memory_bytes();
  if (needed > TrainerRun::kUnbudgetedBytes) {
    EMA_ASSIGN_OR_RETURN(
        model->manifest_memory_,
        model->host_budget_->Reserve(absl::StrCat("the manifest of ", name), needed));
  }
  // Reserved for all tracks together first, so that an error names the model's total.
  EMA_RETURN_IF_ERROR(model->memory_.budget->Reserve(name, bytes).status());
  EMA_RETURN_IF_ERROR(model->tracks_.AddFirst(tracks));
  return model;
}

Model::Description Model::Describe() const {
  absl::MutexLock lock(&mu_);
  TrackTable::State tracks = tracks_.state();
  Description now{.tracks = std::move(tracks.tracks),
                  .pending_tracks = std::move(tracks.pending_tracks),
                  .plan_revision = tracks.plan_revision,
                  .settings_revision = tracks.revision + attached_files_.revision(),
                  .reserved_bytes = tracks.reserved_bytes,
                  .run_epoch = runs_.epoch(),
                  .begun_step = open_step_.begun_step(),
                  .latest = history_.latest(),
                  .saved = durable_.saved(),
                  .session = open_step_.session(),
                  .run = {}};
  if (const TrainerRun* const run = runs_.run().get(); run != nullptr) {
    now.run = {run->epoch(), run->world_size(), run->MissingRanks(kDescribedRanks),
               run->is_ready()};
  }
  return now;
}

absl::Status Model::UpdateTracks(const TrackChanges& changes) {
  if (!changes.put.empty()) EMA_RETURN_IF_ERROR(CheckTrackCount(changes.put.size()));
  GlobBudget budget;
  for (const TrackConfig& config : changes.put) {
    EMA_RETURN_IF_ERROR(ValidateTrack(config, manifest(), budget));
  }
  EMA_ASSIGN_OR_RETURN(const std::vector<std::shared_ptr<Track>> put,
                       MakeTracks(changes.put, manifest(), *host_budget_));
  // Dropped, as what is not used of `put`, without the lock.
  TrackTable::Replaced replaced;
  TrackTable::Replaced applied;
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(history_.CheckOpen());
  EMA_ASSIGN_OR_RETURN(replaced, tracks_.Change(changes, put, history_.newest().get()));
  // Without a run, or an active track, there may never be a next commit.
  if (runs_.run() == nullptr || tracks_.AreAllPaused()) applied = tracks_.ApplyPending();
  return absl::OkStatus();
}

absl::Status Model::ProposeTracks(const TrackChanges& changes, int64_t number, int64_t accepted) {
  EMA_ASSIGN_OR_RETURN(const std::vector<std::shared_ptr<Track>> put,
                       MakeTracks(changes.put, manifest(), *host_budget_));
  TrackTable::Replaced replaced;  // Dropped without the lock, as what is not used of `put`.
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(history_.CheckOpen());
  EMA_ASSIGN_OR_RETURN(replaced,
                       tracks_.Propose(changes, put, history_.newest().get(), number, accepted));
  return absl::OkStatus();
}

bool Model::AcceptTracks(int64_t number) {
  TrackTable::Replaced replaced;
  absl::MutexLock lock(&mu_);
  replaced = tracks_.Accept(number);
  return runs_.run() == nullptr || tracks_.AreAllPaused();
}

void Model::WithdrawTracks(int64_t number) {
  TrackTable::Replaced replaced;
  absl::MutexLock lock(&mu_);
  replaced = tracks_.Withdraw(number);
}

void Model::ApplyTracksInForce() {
  TrackTable::Replaced replaced;
  absl::MutexLock lock(&mu_);
  if (!open_step_.is_prepared()) replaced = ApplyPendingLocked();
}

TrackTable::Replaced Model::ApplyPendingLocked() {
  return is_partition() ? tracks_.ApplyPending(options_.gate->tracks_revision())
                        : tracks_.ApplyPending();
}

absl::StatusOr<Model::JoinResult> Model::JoinRun(const Launch& launch, int64_t rank,
                                                 int64_t world_size, RankLayout layout,
                                                 const std::optional<VersionId>& newest) {
  JoinResult result;
  result.layout_digest = layout.digest();
  std::shared_ptr<PushSession> fenced;
  TrackTable::Replaced replaced;  // Dropped without the lock.
  bool is_new = false;
  {
    absl::MutexLock lock(&mu_);
    const SnapshotRef newest_version = history_.newest();
    EMA_RETURN_IF_ERROR(closing_);
    EMA_RETURN_IF_ERROR(runs_.CheckNotRollingBack());
    // First: the launch's incarnation may have ended, and its error then says so.
    if (is_partition()) EMA_RETURN_IF_ERROR(options_.gate->CheckLaunch(launch));
    EMA_RETURN_IF_ERROR(runs_.CheckLaunch(launch));
    if (runs_.IsOpen(launch)) {
      const TrainerRun& run = *runs_.run();
      // A new process of the rank does not know the run's epoch yet.
      const bool has_restarted = launch.last_run_epoch != run.epoch() && rank >= 0 &&
                                 rank < run.world_size() && run.layout(rank) != nullptr;
      EMA_RETURN_IF_ERROR(runs_.Join(launch, rank, world_size, std::move(layout)));
      if (is_partition() && has_restarted) {
        // It may push the open step with other bytes, and some partitions have the first ones.
        const absl::Status why =
            Aborted(ErrorReason::kStepAbandoned, absl::StrCat("rank ", rank, " has restarted"));
        options_.gate->AbandonRound(/*round=*/0, /*step=*/0, why).IgnoreError();
      }
    } else {
      if (const absl::Status prepared = open_step_.CheckNotPrepared(); !prepared.ok()) {
        // It may wait for a partition without end. Once its round has ended, the call succeeds.
        const absl::Status why =
            Aborted(ErrorReason::kFenced, "a newer run of the model is being opened");
        options_.gate->AbandonRound(open_step_.session()->plan().round, /*step=*/0, why)
            .IgnoreError();
        return prepared;
      }
      const VersionId now = newest_version != nullptr ? newest_version->record.id() : VersionId{};
      if (newest.has_value() && now != *newest) {
        return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                         absl::StrCat("model \"", config_.name, "\": version ", now.version,
                                      " was committed while the run was being opened at version ",
                                      newest->version, "; open the run again"),
                         absl::Milliseconds(20));
      }
      EMA_RETURN_IF_ERROR(runs_.Open(launch, rank, world_size, std::move(layout),
                                     config_.manifest.get(), host_budget_));
      fenced = open_step_.EndRun();
      if (is_partition()) options_.gate->OnRunOpened(runs_.epoch(), launch.id);
      replaced = ApplyPendingLocked();
      is_new = true;
    }
    result.run_epoch = runs_.epoch();
    result.ready = runs_.run()->is_ready();
    result.missing_ranks = runs_.run()->MissingRanks(kNamedRanks);
    if (newest_version != nullptr) result.latest = newest_version->record;
    result.plan = tracks_.Plan(newest_version.get(), runs_);
  }
  if (is_new) {
    LogTo(options_.log, LogLevel::kInfo, "run opened",
          {{"model", config_.name},
           {"run", result.run_epoch},
           {"launch", launch.id},
           {"ranks", world_size}});
  }
  if (fenced != nullptr) {
    DropStep(*fenced, Aborted(ErrorReason::kFenced,
                              absl::StrCat("step ", fenced->plan().step,
                                           ": a newer run of the model has been opened")));
  }
  return result;
}

absl::StatusOr<bool> Model::IsRunOpen(const Launch& launch) const {
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(closing_);
  EMA_RETURN_IF_ERROR(runs_.CheckLaunch(launch));
  return runs_.IsOpen(launch);
}

absl::StatusOr<std::unique_ptr<RankPush>> Model::OpenPush(const PushStart& start,
                                                          PushCallback on_end) {
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<DeviceStream> device_stream, device().NewStream());
  absl::MutexLock lock(&push_mu_);
  absl::Status refused;
  // A session that ends just now, by its commit perhaps, is seen as ended by the second look.
  for (int look = 0; look < 2; ++look) {
    EMA_ASSIGN_OR_RETURN(StepSession joined, GetSession(start));
    if (joined.already_committed.has_value()) {
      return std::make_unique<RankPush>(*std::move(joined.already_committed), std::move(on_end));
    }
    const absl::StatusOr<int64_t> stream = joined.session->OpenStream(start, on_end);
    if (stream.ok()) {
      return std::make_unique<RankPush>(shared_from_this(), std::move(joined.session), start.rank,
                                        *stream, std::move(device_stream));
    }
    refused = stream.status();
    if (GetErrorReason(refused) == ErrorReason::kBadRequest) break;
  }
  return refused;
}

absl::StatusOr<Model::StepSession> Model::GetSession(const PushStart& start) {
  std::shared_ptr<PushSession> abandoned;
  std::shared_ptr<PushSession> last;
  std::shared_ptr<TrainerRun> run;
  SnapshotRef base;
  StepPlan plan;
  TrackTable::Replaced replaced;  // Dropped without the lock.
  {
    absl::MutexLock lock(&mu_);
    const SnapshotRef newest = history_.newest();
    EMA_RETURN_IF_ERROR(history_.CheckOpen());
    EMA_RETURN_IF_ERROR(runs_.CheckMayPush(start, newest.get()));
    EMA_RETURN_IF_ERROR(ValidateStart(start));
    EMA_ASSIGN_OR_RETURN(const std::optional<uint32_t> committed_digest,
                         open_step_.CheckStep(start, newest.get()));
    if (committed_digest.has_value()) {
      return StepSession{
          .already_committed = RankPush::Committed{
              .result = {newest->record, /*is_duplicate=*/true, tracks_.Plan(newest.get(), runs_)},
              .digest = *committed_digest}};
    }
    if (is_partition()) EMA_RETURN_IF_ERROR(options_.gate->CheckPush(start));
    EMA_ASSIGN_OR_RETURN(std::shared_ptr<PushSession> session,
                         open_step_.JoinSession(start, runs_));
    if (session != nullptr) return StepSession{.session = std::move(session)};
    EMA_RETURN_IF_ERROR(closing_);
    EMA_RETURN_IF_ERROR(history_.CheckRoomForNext());
    // The plan of a round has the tracks that are in force in it.
    if (is_partition()) replaced = ApplyPendingLocked();
    EMA_ASSIGN_OR_RETURN(plan, tracks_.PlanStep(start, newest.get(), runs_));
    abandoned = open_step_.Take();
    last = open_step_.previous_session();
    run = runs_.run();
    base = newest;
  }
  if (abandoned != nullptr && abandoned->plan().round != start.round) {
    DropStep(*abandoned, Aborted(ErrorReason::kStepAbandoned,
                                 absl::StrCat("step ", abandoned->plan().step, ": its round ",
                                              abandoned->plan().round, " has ended")));
  } else if (abandoned != nullptr) {
    DropStep(*abandoned,
             Aborted(ErrorReason::kStepAbandoned,
                     absl::StrCat("step ", abandoned->plan().step, ": rank ", start.rank,
                                  " began step ", start.step, " without having committed it")));
    // The round ends with that step, and this one belongs to the next round.
    if (is_partition()) {
      return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                       absl::StrCat("step ", start.step, ": round ", start.round, " is ending"),
                       absl::Milliseconds(20));
    }
  }
  // The next version is built in the memory of versions that are being freed.
  history_.AwaitFreed();
  if (last != nullptr) last->AwaitFreed();
  EMA_ASSIGN_OR_RETURN(ConcurrencyLimit::Permit permit, AcquireSessionPermit());
  EMA_ASSIGN_OR_RETURN(
      std::shared_ptr<PushSession> session,
      PushSession::Create({config_.name, config_.manifest, memory_.device, config_.non_finite,
                           options_.observer, is_partition()},
                          run, std::move(base), std::move(plan), std::move(permit)));
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(closing_);
  // OpenPush() and the start of RollBack() are serialized and no commit can happen without a
  // session: only a new run, or a rank that gives the step up, can have come between.
  if (runs_.run() != run) {
    return Aborted(ErrorReason::kFenced,
                   absl::StrCat("step ", start.step, ": a newer run of the model has been opened"));
  }
  EMA_RETURN_IF_ERROR(open_step_.CheckNotSkipped(start.step));
  open_step_.Begin(session);
  return StepSession{.session = std::move(session)};
}

absl::StatusOr<ConcurrencyLimit::Permit> Model::AcquireSessionPermit() const {
  if (options_.sessions == nullptr) return nullptr;
  ConcurrencyLimit::Permit permit = options_.sessions->Acquire();
  if (permit != nullptr) return permit;
  return MakeError(
      absl::StatusCode::kResourceExhausted, ErrorReason::kTooManySessions,
      absl::StrCat("model \"", config_.name, "\": the server has ", options_.sessions->limit(),
                   " open steps, the maximum (--max-sessions)"),
      absl::Milliseconds(100));
}

void Model::CompleteStep(const std::shared_ptr<PushSession>& session) noexcept {
  const absl::Time begin = absl::Now();
  absl::StatusOr<PushSession::FinishedSnapshot> taken = session->TakeSnapshot();
  if (!taken.ok()) return FailSession(session, taken.status());
  if (taken->snapshot == nullptr) return;  // The session has ended meanwhile.
  // The step is complete: all ranks have committed, and the next version exists. It is not
  // visible yet.
  OpenStep::Prepared step{session, *std::move(taken), begin};
  if (is_partition()) return Prepare(std::move(step));
  PublishedStep published;
  {
    absl::MutexLock lock(&mu_);
    if (!open_step_.Detach(session.get())) return;
    published = PublishLocked(std::move(step), absl::Now(), /*home_pinned_versions=*/{});
  }
  FinishPublishing(std::move(published));
}

void Model::Prepare(OpenStep::Prepared step) {
  const int64_t round = step.session->plan().round;
  const Version record = step.version.snapshot->record;
  {
    absl::MutexLock lock(&mu_);
    if (!open_step_.Prepare(step)) return;
  }
  options_.gate->OnPrepared(round, record);
}

bool Model::PublishPrepared(int64_t round, Decision decision) {
  PublishedStep published;
  {
    absl::MutexLock lock(&mu_);
    if (!open_step_.is_prepared() || open_step_.session()->plan().round != round) return false;
    std::optional<OpenStep::Prepared> step = open_step_.TakePrepared();
    Version& record = step->version.snapshot->record;
    record.skipped_tensor_count = decision.skipped_tensor_count;
    record.skipped_tensors = std::move(decision.skipped_tensors);
    published =
        PublishLocked(*std::move(step), decision.commit_time, decision.home_pinned_versions);
  }
  FinishPublishing(std::move(published));
  return true;
}

Model::PublishedStep Model::PublishLocked(OpenStep::Prepared step, absl::Time commit_time,
                                          const std::vector<int64_t>& home_pinned_versions) {
  const std::shared_ptr<Snapshot>& next = step.version.snapshot;
  PublishedStep published;
  // Before ApplyPending(): a track that goes now may have a value in `next`, and its name must not
  // look free meanwhile.
  published.evicted = history_.Publish(next, commit_time, home_pinned_versions);
  open_step_.NoteCommit(*step.session);
  published.replaced = ApplyPendingLocked();
  published.plan = tracks_.Plan(next.get(), runs_);
  published.warnings = tracks_.NewWarnings(next->record);
  published.step = std::move(step);
  return published;
}

void Model::FinishPublishing(PublishedStep published) {
  OpenStep::Prepared& step = published.step;
  const std::shared_ptr<const Snapshot> version = step.version.snapshot;
  step.version = {};
  step.session->End(PushResult{version->record, /*is_duplicate=*/false, std::move(published.plan),
                               absl::Now() - step.begin});
  // After the ranks have their replies: freeing a thousand blocks takes longer than the rest of a
  // commit.
  history_.Free(std::move(published.evicted));
  Announce(*version);
  if (!options_.log) return;
  for (const LogEvent& warning : published.warnings) options_.log(warning);
}

void Model::Announce(const Snapshot& version) {
  watchers_.CallAll();
  if (options_.on_commit) options_.on_commit(shared_from_this(), version);
}

void Model::FailSession(const std::shared_ptr<PushSession>& session, const absl::Status& status) {
  {
    absl::MutexLock lock(&mu_);
    if (!open_step_.Detach(session.get())) return;
  }
  DropStep(*session, status);
}

void Model::DropOpenStep(int64_t round, const absl::Status& status) {
  std::optional<OpenStep::Prepared> prepared;
  std::shared_ptr<PushSession> session;
  {
    absl::MutexLock lock(&mu_);
    if (open_step_.session() == nullptr || open_step_.session()->plan().round > round) return;
    prepared = open_step_.TakePrepared();
    session = prepared.has_value() ? prepared->session : open_step_.Take();
  }
  // Before the ranks get the error: their next step needs its memory.
  if (prepared.has_value()) prepared->version = {};
  if (session != nullptr) DropStep(*session, status);
}

void Model::DropStep(PushSession& session, const absl::Status& status) {
  if (!session.End(status)) return;
  const ErrorReason reason = GetErrorReason(status);
  LogThrottle& throttle = reason == ErrorReason::kNonFinite ? non_finite_drops_ : other_drops_;
  throttle.Log(options_.log, LogLevel::kWarning, "step dropped",
               {{"model", config_.name},
                {"run", session.run().epoch()},
                {"step", session.plan().step},
                {"reason", ErrorReasonName(reason)},
                {"error", status}});
  if (is_partition()) options_.gate->OnDropped(session.plan().round, status);
}

absl::StatusOr<Model::PushState> Model::QueryPush(int64_t run_epoch, int64_t step, int64_t rank,
                                                  bool abandon_if_unfinished,
                                                  std::string_view skip_reason, int64_t round) {
  EMA_RETURN_IF_ERROR(CheckSkipReason(abandon_if_unfinished, skip_reason));
  const absl::Status abandoned =
      skip_reason.empty() ? Aborted(ErrorReason::kStepAbandoned,
                                    absl::StrCat("step ", step, ": abandoned by rank ", rank))
                          : SkippedStep{rank, std::string(skip_reason)}.status(step);
  PushState result;
  std::shared_ptr<PushSession> session;
  bool is_abandoned = false;
  {
    absl::MutexLock lock(&mu_);
    const SnapshotRef newest = history_.newest();
    EMA_RETURN_IF_ERROR(history_.CheckOpen());
    EMA_RETURN_IF_ERROR(runs_.CheckRank(run_epoch, rank, newest.get()));
    history_.VisitRecords([&](const Version& record) {
      if (record.step == step && record.run_epoch == run_epoch) result.record = record;
      return !result.record.has_value();
    });
    if (result.record.has_value()) {
      result.state = PushState::State::kCommitted;
      result.rank_committed = true;
      result.plan = tracks_.Plan(newest.get(), runs_);
      result.digest = open_step_.CommittedDigest(run_epoch, step, rank);
      return result;
    }
    if (!skip_reason.empty()) {
      open_step_.NoteSkipped(step, {rank, std::string(skip_reason)}, newest.get());
    }
    session = open_step_.session();
    const bool is_open = session != nullptr && session->plan().step == step;
    if (is_partition() && abandon_if_unfinished) {
      // The gate ends the step here, too. In the round that the caller names, the step may be open
      // in other partitions only. In the current one, they may have another step.
      const bool is_round_known = is_open || round != 0;
      if (round == 0 && is_open) round = session->plan().round;
      // The call is late: this rank has begun a later step in that round, which cannot be committed
      // with any other step.
      const bool is_superseded =
          session != nullptr && session->plan().round == round && session->plan().step > step;
      if (is_round_known && !is_superseded) {
        EMA_RETURN_IF_ERROR(options_.gate->AbandonRound(round, step, abandoned));
      }
      result.state = is_round_known ? PushState::State::kAbandoned : PushState::State::kUnknown;
      return result;
    }
    if (!is_open) {
      result.state = PushState::State::kUnknown;
      return result;
    }
    is_abandoned = abandon_if_unfinished && open_step_.Take() != nullptr;
  }
  if (is_abandoned) {
    DropStep(*session, abandoned);
    result.state = PushState::State::kAbandoned;
    return result;
  }
  result.state = PushState::State::kOpen;
  result.rank_committed = session->HasRankCommitted(rank);
  result.missing_ranks = session->MissingRanks(kNamedRanks);
  const RankLayout& layout = *session->run().layout(rank);
  for (const Coverage::Range& range : session->Missing(rank, kNamedRanges)) {
    const int64_t tensor = layout.shards()[layout.FindShard(range.offset)].tensor_index;
    result.missing.emplace_back(range, manifest().tensor(tensor).name);
  }
  return result;
}

void Model::ExpireSession(SteadyTime now, SteadyTime::duration timeout) {
  std::shared_ptr<PushSession> session;
  {
    absl::MutexLock lock(&mu_);
    session = open_step_.session();
    if (session == nullptr || now - session->last_progress() < timeout) return;
    if (open_step_.Take() == nullptr) return;
  }
  DropStep(*session,
           Aborted(ErrorReason::kSessionExpired,
                   absl::StrCat("step ", session->plan().step, ": nothing arrived for ",
                                absl::FormatDuration(absl::FromChrono(timeout)),
                                " (--session-timeout); missing ranks: ",
                                absl::StrJoin(session->MissingRanks(kNamedRanks), ", "))));
}

void Model::StopAcceptingWork(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  closing_ = status;
}

void Model::Drain(const absl::Status& status, SteadyTime deadline) {
  std::shared_ptr<PushSession> session;
  {
    absl::MutexLock lock(&mu_);
    closing_ = status;
    open_step_.changed().AwaitUntil(mu_, deadline, [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return open_step_.session() == nullptr;
    });
    session = open_step_.Take();
  }
  if (session != nullptr) DropStep(*session, status);
}

void Model::AwaitNoPush(absl::Duration timeout) {
  // Longer than a trainer that pushes step after step takes to begin the next one.
  constexpr std::chrono::milliseconds kMoment(100);
  const SteadyTime deadline = After(SteadyNow(), timeout);
  const PushSession* seen = nullptr;
  SteadyTime until;
  absl::MutexLock lock(&mu_);
  const auto has_changed = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return open_step_.session().get() != seen;
  };
  do {
    seen = open_step_.session().get();
    until = seen != nullptr ? deadline : std::min(deadline, open_step_.last_end() + kMoment);
  } while (open_step_.changed().AwaitUntil(mu_, until, has_changed));
}

void Model::Close(const absl::Status& status) {
  {
    absl::MutexLock lock(&mu_);
    history_.Close(status);
  }
  tracks_.DropSynthesized();
  StopAcceptingWork(status);
  DropOpenStep(std::numeric_limits<int64_t>::max(), status);
  watchers_.CallAll();
}

absl::Status Model::CheckOpen() const { return history_.CheckOpen(); }

void Model::Restore(std::shared_ptr<const Snapshot> snapshot, int64_t fenced_run_epoch) {
  absl::MutexLock lock(&mu_);
  runs_.Restore(snapshot->record, fenced_run_epoch);
  history_.Restore(std::move(snapshot));
}

void Model::PublishCopy(std::shared_ptr<const Snapshot> copy) {
  SnapshotRef evicted;
  {
    absl::MutexLock lock(&mu_);
    evicted = history_.PublishCopy(copy);
  }
  history_.Free(std::move(evicted));
  Announce(*copy);
}

}  // namespace ema
