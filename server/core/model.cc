// SPDX-License-Identifier: Apache-2.0
#include "server/core/model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr int64_t kNamedRanks = 16;  // At most so many ranks are named in a message.

absl::Status Aborted(ErrorReason reason, std::string message) {
  return MakeError(absl::StatusCode::kAborted, reason, message);
}

// What needs nothing of the model. INVALID_ARGUMENT: BAD_REQUEST, BAD_TIME.
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

}  // namespace

Model::Model(ModelConfig config, std::shared_ptr<Device> device,
             std::shared_ptr<MemoryBudget> budget, const Options& options)
    : config_(std::move(config)),
      device_(std::move(device)),
      budget_(std::move(budget)),
      host_budget_(options.host_budget != nullptr ? options.host_budget : budget_),
      attached_files_(host_budget_.get()),
      readings_(config_.manifest.get(), device_.get(), host_budget_.get()),
      history_({config_.name, options.incarnation, config_.max_pinned_versions,
                options.has_data_dir, [this] { return shared_from_this(); }}),
      options_(options),
      plan_revision_(options.incarnation),
      runs_(config_.name, options.incarnation),
      open_step_(config_.name) {}

absl::StatusOr<std::shared_ptr<Model>> Model::Create(
    ModelConfig config, const std::vector<std::shared_ptr<Track>>& tracks,
    std::shared_ptr<Device> device, std::shared_ptr<MemoryBudget> budget, const Options& options) {
  std::shared_ptr<Model> model(
      new Model(std::move(config), std::move(device), std::move(budget), options));
  int64_t bytes = 0;
  for (const std::shared_ptr<Track>& track : tracks) {
    const int64_t of_track = track->MemoryBytes(model->history_.version_count());
    if (__builtin_add_overflow(bytes, of_track, &bytes)) bytes = INT64_MAX;
  }
  const int64_t needed = model->manifest().memory_bytes();
  if (needed > TrainerRun::kFreeBytes) {
    EMA_ASSIGN_OR_RETURN(
        model->manifest_memory_,
        model->host_budget_->Reserve(
            absl::StrCat("the manifest of model \"", model->config_.name, "\""), needed));
  }
  // For all at once: a message that says what the model needs, not its second track.
  EMA_RETURN_IF_ERROR(
      model->budget_->Reserve(absl::StrCat("model \"", model->config_.name, "\""), bytes).status());
  absl::MutexLock lock(&model->mu_);
  for (const std::shared_ptr<Track>& track : tracks) {
    EMA_RETURN_IF_ERROR(model->AdmitTrackLocked(*track));
    model->tracks_.push_back(track);
  }
  return model;
}

absl::StatusOr<std::shared_ptr<const MemoryBudget::Reservation>> Model::ReserveMemory(
    std::string_view what, int64_t bytes) const {
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<MemoryBudget::Reservation> reserved,
                       budget_->Reserve(what, bytes));
  return std::shared_ptr<const MemoryBudget::Reservation>(
      reserved.release(),
      [device = device_, budget = budget_](const MemoryBudget::Reservation* reservation) {
        // What the others may use stays, and is not mapped anew at their next step.
        device->Trim(budget->reserved_bytes() - reservation->bytes());
        delete reservation;
      });
}

absl::StatusOr<Model::JoinResult> Model::JoinRun(const Launch& launch, int64_t rank,
                                                 int64_t world_size, RankLayout layout,
                                                 const std::optional<VersionId>& newest) {
  JoinResult result;
  result.layout_digest = layout.digest();
  std::shared_ptr<PushSession> fenced;
  std::vector<TrackRef> replaced;  // Let go of without the lock.
  bool is_new = false;
  {
    absl::MutexLock lock(&mu_);
    const SnapshotRef newest_version = history_.newest();
    EMA_RETURN_IF_ERROR(closing_);
    EMA_RETURN_IF_ERROR(runs_.CheckNotRollingBack());
    EMA_RETURN_IF_ERROR(runs_.CheckLaunch(launch));
    if (runs_.IsOpen(launch)) {
      EMA_RETURN_IF_ERROR(runs_.Join(launch, rank, world_size, std::move(layout)));
    } else {
      const VersionId now = newest_version != nullptr ? newest_version->record.id() : VersionId{};
      if (newest.has_value() && now != *newest) {
        return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kSessionBusy,
                         absl::StrCat("model \"", config_.name, "\": version ", now.version,
                                      " came while the run was to go on from version ",
                                      newest->version, "; open it again"),
                         absl::Milliseconds(20));
      }
      EMA_RETURN_IF_ERROR(runs_.Open(launch, rank, world_size, std::move(layout),
                                     config_.manifest.get(), host_budget_));
      replaced = ApplyPendingLocked();
      fenced = open_step_.EndRun();
      is_new = true;
    }
    result.run_epoch = runs_.epoch();
    result.ready = runs_.run()->ready();
    result.missing_ranks = runs_.run()->MissingRanks(kNamedRanks);
    if (newest_version != nullptr) result.latest = newest_version->record;
    result.plan = PlanLocked();
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
                              absl::StrCat("step ", fenced->plan().step, ": run epoch ",
                                           fenced->run().epoch(), " has been fenced by epoch ",
                                           result.run_epoch)));
  }
  return result;
}

absl::StatusOr<PushSession::StepPlan> Model::MakePlanLocked(const PushStart& start) const {
  const SnapshotRef current = history_.newest();
  if (start.plan_revision != 0 && start.plan_revision != plan_revision_) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kPlanChanged,
                     absl::StrCat("plan_revision: ", start.plan_revision, " given, model \"",
                                  config_.name, "\" has ", plan_revision_,
                                  ": its tracks have changed; OpenRun gives the new plan"));
  }
  if (start.frozen == FrozenTensors::kOmitted && !MayOmitFrozenLocked()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kPlanChanged,
        absl::StrCat("frozen: step ", start.step, " leaves the frozen tensors out, but model \"",
                     config_.name,
                     runs_.has_frozen_mismatches()
                         ? "\" needs them in each step: ranks did not agree whether they change"
                         : "\" has not the values of this run's in all of its tracks; push them "
                           "until PushPlan.may_omit_frozen is true"));
  }
  constexpr int64_t kMaxUpdates = int64_t{1} << 53;
  if (start.imported_updates < 0 ||
      start.imported_updates > (current == nullptr ? kMaxUpdates : 0)) {
    return BadRequest(absl::StrCat("imported_updates: ", start.imported_updates, " given, model \"",
                                   config_.name, "\" expects ",
                                   current == nullptr ? "0 to 2^53" : "0: it has a version"));
  }
  PushSession::StepPlan plan{start.step, start.time, start.frozen, start.imported_updates, {}};
  for (const TrackRef& track : tracks_) {
    const TrackSnapshot* const base = current != nullptr ? current->FindId(track->id()) : nullptr;
    std::vector<Schedule::Update> updates(SchedulesOf(track->config()).size());
    TrackState state = base != nullptr ? base->state : TrackState(updates.size());
    if (start.imported_updates > 0) {
      // This push is the last of them.
      const int64_t before = start.imported_updates - 1;
      for (Schedule::State& of_schedule : state) {
        of_schedule.update_count = of_schedule.averaged_count = before;
      }
    }
    if (!track->config().paused) {
      absl::StatusOr<std::vector<Schedule::Update>> planned =
          PlanTrack(track->config(), state, start.time);
      if (!planned.ok()) {
        return WithPlace(planned.status(), absl::StrCat("track \"", track->name(), "\": "));
      }
      updates = *std::move(planned);
      for (Schedule::Update& update : updates) {
        // The values are the average's own, also where an average begins at zero.
        if (start.imported_updates > 0 && update.due) {
          update.update_weight = 1;
          update.from_zero = false;
        }
      }
    }
    plan.tracks.push_back({track, base, std::move(state), std::move(updates)});
  }
  return plan;
}

absl::StatusOr<ConcurrencyLimit::Permit> Model::AcquireSessionPermit() const {
  if (options_.sessions == nullptr) return nullptr;
  ConcurrencyLimit::Permit permit = options_.sessions->Acquire();
  if (permit != nullptr) return permit;
  return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManySessions,
                   absl::StrCat("model \"", config_.name, "\": ", options_.sessions->limit(),
                                " steps are being pushed, as many as the server may have"),
                   absl::Milliseconds(100));
}

absl::StatusOr<Model::Joined> Model::GetSession(const PushStart& start) {
  std::shared_ptr<PushSession> abandoned;
  std::shared_ptr<PushSession> last;
  std::shared_ptr<TrainerRun> run;
  SnapshotRef base;
  PushSession::StepPlan plan;
  {
    absl::MutexLock lock(&mu_);
    base = history_.newest();
    EMA_RETURN_IF_ERROR(history_.closed());
    EMA_RETURN_IF_ERROR(runs_.CheckMayPush(start, base.get()));
    EMA_RETURN_IF_ERROR(ValidateStart(start));
    EMA_ASSIGN_OR_RETURN(const std::optional<uint32_t> committed_digest,
                         open_step_.CheckStep(start, base.get()));
    if (committed_digest.has_value()) {
      return Joined{.already_committed = RankPush::Committed{
                        .result = {base->record, /*duplicate=*/true, PlanLocked()},
                        .digest = *committed_digest}};
    }
    EMA_ASSIGN_OR_RETURN(std::shared_ptr<PushSession> session,
                         open_step_.FindSession(start, runs_));
    if (session != nullptr) return Joined{.session = std::move(session)};
    EMA_RETURN_IF_ERROR(closing_);
    EMA_RETURN_IF_ERROR(history_.CheckRoomForNext());
    EMA_ASSIGN_OR_RETURN(plan, MakePlanLocked(start));
    abandoned = open_step_.Take();
    last = open_step_.previous_session();
    run = runs_.run();
  }
  if (abandoned != nullptr) {
    DropStep(*abandoned,
             Aborted(ErrorReason::kStepAbandoned,
                     absl::StrCat("step ", abandoned->plan().step, ": rank ", start.rank,
                                  " began step ", start.step, " without having committed it")));
  }
  // The next version is built in the memory of those that go.
  history_.AwaitFreed();
  if (last != nullptr) last->AwaitFreed();
  EMA_ASSIGN_OR_RETURN(ConcurrencyLimit::Permit permit, AcquireSessionPermit());
  EMA_ASSIGN_OR_RETURN(
      std::shared_ptr<PushSession> session,
      PushSession::Create(
          {config_.name, config_.manifest, device_, config_.non_finite, options_.observer}, run,
          std::move(base), std::move(plan), std::move(permit)));
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(closing_);
  // OpenPush() and the start of RollBack() are serialized and no commit can happen without a
  // session: only a new run, or a rank that gives the step up, can have come between.
  if (runs_.run() != run) {
    return Aborted(ErrorReason::kFenced, absl::StrCat("run_epoch: ", start.run_epoch,
                                                      " has been fenced by ", runs_.epoch()));
  }
  EMA_RETURN_IF_ERROR(open_step_.CheckNotAbandoned(start.step));
  open_step_.Begin(session);
  return Joined{.session = std::move(session)};
}

absl::StatusOr<std::unique_ptr<RankPush>> Model::OpenPush(const PushStart& start,
                                                          PushCallback on_end) {
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<DeviceStream> device_stream, device_->NewStream());
  absl::MutexLock lock(&push_mu_);
  absl::Status refused;
  // A session that ends just now, by its commit perhaps, is seen as ended by the second look.
  for (int look = 0; look < 2; ++look) {
    EMA_ASSIGN_OR_RETURN(Joined joined, GetSession(start));
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

void Model::Publish(const std::shared_ptr<PushSession>& session) noexcept {
  const absl::Time begin = absl::Now();
  absl::StatusOr<PushSession::Taken> taken = session->TakeSnapshot();
  if (!taken.ok()) return FailSession(session, taken.status());
  const std::shared_ptr<Snapshot>& next = taken->snapshot;
  if (next == nullptr) return;  // Ended otherwise in the meantime.
  std::vector<uint32_t> digests = session->Digests();
  SnapshotRef evicted;
  std::vector<TrackRef> replaced;
  PushPlan plan;
  std::vector<LogEvent> warnings;
  {
    absl::MutexLock lock(&mu_);
    if (!open_step_.Detach(session.get())) return;  // Here, too.
    evicted = history_.Publish(next);
    open_step_.NoteCommit(*session, std::move(digests));
    replaced = ApplyPendingLocked();
    plan = PlanLocked();
    warnings = NewWarningsLocked(next->record);
  }
  taken->hold = nullptr;
  session->End(PushResult{next->record, /*duplicate=*/false, std::move(plan), absl::Now() - begin});
  // After the ranks have been told: a thousand blocks take longer than the rest of a commit.
  history_.Free(std::move(evicted));
  watchers_.CallAll();
  if (options_.on_commit) options_.on_commit(shared_from_this(), *next);
  if (!options_.log) return;
  for (const LogEvent& warning : warnings) options_.log(warning);
}

void Model::FailSession(const std::shared_ptr<PushSession>& session, const absl::Status& status) {
  {
    absl::MutexLock lock(&mu_);
    open_step_.Detach(session.get());
  }
  DropStep(*session, status);
}

void Model::DropStep(PushSession& session, const absl::Status& status) {
  if (!session.End(status)) return;
  const ErrorReason reason = GetErrorReason(status);
  LogThrottle& throttle = reason == ErrorReason::kNonFinite ? non_finite_drops_ : other_drops_;
  throttle.Tell(options_.log, LogLevel::kWarning, "step dropped",
                {{"model", config_.name},
                 {"run", session.run().epoch()},
                 {"step", session.plan().step},
                 {"reason", ErrorReasonName(reason)},
                 {"error", status}});
}

void Model::ExpireSession(SteadyTime now, SteadyTime::duration timeout) {
  std::shared_ptr<PushSession> session;
  {
    absl::MutexLock lock(&mu_);
    session = open_step_.session();
    if (session == nullptr || now - session->last_progress() < timeout) return;
    open_step_.Take();
  }
  DropStep(
      *session,
      Aborted(ErrorReason::kSessionExpired,
              absl::StrCat("step ", session->plan().step, ": nothing arrived for ",
                           absl::FormatDuration(absl::FromChrono(timeout)), "; missing ranks: ",
                           absl::StrJoin(session->MissingRanks(kNamedRanks), ", "))));
}

void Model::RefuseNew(const absl::Status& status) {
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

void Model::AwaitQuiet(absl::Duration timeout) {
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
  std::vector<SnapshotRef> synthesized;  // Freed without the lock.
  {
    absl::MutexLock lock(&mu_);
    history_.Close(status);
    synthesized.swap(synthesized_);
  }
  Drain(status, SteadyNow());
  watchers_.CallAll();
}

absl::Status Model::closed() const { return history_.closed(); }

void Model::Restore(std::shared_ptr<const Snapshot> snapshot) {
  absl::MutexLock lock(&mu_);
  runs_.Restore(snapshot->record);
  history_.Restore(std::move(snapshot));
}

}  // namespace ema
