// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_scheduler.h"

#include <algorithm>
#include <utility>

#include "ema/error_reason.h"
#include "include/ema/internal/schedule_parts.h"

namespace ema {
namespace {

bool IsTrackDue(const TrackSnapshot& track, const std::optional<TrainingTime>& kept_time) {
  const std::optional<TrainingDuration>& interval = track.track->config().snapshot_interval;
  // Before its start a track has no profile.
  if (!interval.has_value() || !track.state[0].started.has_value()) return false;
  const std::optional<double> updated = track.state[0].last_update->Get(interval->unit);
  if (!updated.has_value()) return false;
  const double kept = kept_time.has_value() ? kept_time->Get(interval->unit).value_or(0) : 0;
  return WholeIntervals(*updated, *interval, /*phase=*/0) >
         WholeIntervals(kept, *interval, /*phase=*/0);
}

bool HasUnsaved(const Model& model) {
  const std::optional<Version> latest = model.history().latest();
  return latest.has_value() && latest->id() > model.durable().version();
}

}  // namespace

bool IsKeepDue(const Snapshot& snapshot, const std::optional<TrainingTime>& kept_time) {
  return std::any_of(snapshot.tracks.begin(), snapshot.tracks.end(),
                     [&](const TrackSnapshot& track) { return IsTrackDue(track, kept_time); });
}

bool IsSaveDue(const SavePolicy& policy, const Version& record, const VersionId& durable,
               int64_t durable_step) {
  if (record.id() <= durable) return false;
  // The numbers of versions continue after a restart.
  if (policy.every_commits > 0 && record.number - durable.version >= policy.every_commits) {
    return true;
  }
  return policy.step_multiple > 0 &&
         record.step / policy.step_multiple != durable_step / policy.step_multiple;
}

CheckpointScheduler::CheckpointScheduler(Options options)
    : options_(std::move(options)), thread_([this] { Run(); }) {}

CheckpointScheduler::~CheckpointScheduler() { Stop(); }

CheckpointScheduler::State& CheckpointScheduler::StateOfLocked(
    const std::shared_ptr<Model>& model) {
  const std::string& name = model->config().name;
  const auto found = states_.find(name);
  if (found != states_.end() && found->second.model.lock() == model) return found->second;
  // A new model: those that have gone are forgotten.
  std::erase_if(states_, [&](const auto& entry) {
    return entry.first == name || (entry.second.model.expired() && !entry.second.is_busy);
  });
  State& state = states_[name];
  state.model = model;
  return state;
}

void CheckpointScheduler::OnCommit(const std::shared_ptr<Model>& model, const Snapshot& snapshot) {
  const Version& record = snapshot.record;
  const SavePolicy& policy = options_.policy;
  const bool is_keep_due = IsKeepDue(snapshot, model->durable().kept_time());
  const DurableState::Saved saved = model->durable().saved();
  const bool is_save_due = IsSaveDue(policy, record, saved.version, saved.step);
  SnapshotRef exact;
  if ((is_keep_due || is_save_due) && policy.step_multiple > 0 &&
      record.step % policy.step_multiple == 0) {
    if (auto pinned = model->history().PinForSave(record.number, record.incarnation); pinned.ok()) {
      exact = *std::move(pinned);
    }
  }
  const SteadyTime now = SteadyNow();
  absl::MutexLock lock(&mu_);
  if (is_stopping_) return;
  State& state = StateOfLocked(model);
  if (policy.every > absl::ZeroDuration() && state.due_time == SteadyTime::max()) {
    state.due_time = std::max(now, After(state.saved_time.value_or(now), policy.every));
    WakeLocked();
  }
  const bool is_due = is_save_due || (is_keep_due && now >= state.keep_retry_time);
  if (is_due && state.is_busy) state.skipped_due_version = true;
  if (!is_due || state.is_busy || now < state.retry_time) return;
  state.is_busy = true;
  work_.push_back({model, std::move(exact)});
  wait_.WakeAll();
}

void CheckpointScheduler::OnSaved(const Model& model) {
  const bool is_current = !HasUnsaved(model);
  absl::MutexLock lock(&mu_);
  const auto it = states_.find(model.config().name);
  if (it != states_.end()) NoteSavedLocked(is_current, it->second);
}

void CheckpointScheduler::NoteSavedLocked(bool is_current, State& state) {
  state.saved_time = SteadyNow();
  state.due_time = is_current || options_.policy.every == absl::ZeroDuration()
                       ? SteadyTime::max()
                       : After(*state.saved_time, options_.policy.every);
  WakeLocked();
}

void CheckpointScheduler::WakeLocked() {
  due_times_changed_ = true;
  wait_.WakeAll();
}

void CheckpointScheduler::SaveNow(const std::shared_ptr<Model>& model) {
  absl::MutexLock lock(&mu_);
  State& state = StateOfLocked(model);
  state.is_save_requested = true;
  if (!state.is_busy) EnqueueLocked(state);
}

void CheckpointScheduler::EnqueueLocked(State& state, bool is_followup) {
  if (is_stopping_) return;
  state.is_busy = true;
  work_.push_back({state.model, nullptr, is_followup});
  wait_.WakeAll();
}

SteadyTime CheckpointScheduler::NextDueTimeLocked() const {
  SteadyTime next = SteadyTime::max();
  for (const auto& [name, state] : states_) {
    if (!state.is_busy) next = std::min(next, std::max(state.due_time, state.retry_time));
  }
  return next;
}

void CheckpointScheduler::QueueDueLocked() {
  const SteadyTime now = SteadyNow();
  for (auto it = states_.begin(); it != states_.end();) {
    State& state = it->second;
    if (state.is_busy || std::max(state.due_time, state.retry_time) > now) {
      ++it;
      continue;
    }
    if (state.model.expired()) {
      it = states_.erase(it);
      continue;
    }
    state.is_save_requested = true;
    EnqueueLocked(state);
    ++it;
  }
}

void CheckpointScheduler::Run() {
  const auto is_ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return is_stopping_ || due_times_changed_ || !work_.empty();
  };
  while (true) {
    std::shared_ptr<Model> model;
    SnapshotRef snapshot;
    bool is_followup = false;
    {
      absl::MutexLock lock(&mu_);
      wait_.AwaitUntil(mu_, NextDueTimeLocked(), is_ready);
      if (is_stopping_) return;
      due_times_changed_ = false;
      QueueDueLocked();
      if (work_.empty()) continue;
      model = work_.front().model.lock();
      snapshot = std::move(work_.front().snapshot);
      is_followup = work_.front().is_followup;
      work_.pop_front();
      if (model == nullptr) {
        std::erase_if(states_, [](const auto& entry) { return entry.second.model.expired(); });
      }
    }
    if (model != nullptr) Save(*model, std::move(snapshot), is_followup);
  }
}

void CheckpointScheduler::Save(Model& model, SnapshotRef snapshot, bool is_followup) {
  const SaveAttempt attempt = BeginSave(model, /*is_newest=*/snapshot == nullptr);
  Outcome outcome{.is_due = attempt.is_save_requested};
  if (snapshot == nullptr) {
    absl::StatusOr<SnapshotRef> pinned = model.history().PinForSave(0);
    if (pinned.ok()) {
      snapshot = *std::move(pinned);
    } else if (!is_followup || attempt.is_save_requested) {
      outcome.status = pinned.status();
    }
  }
  if (snapshot != nullptr) outcome = SaveVersion(model, snapshot, attempt);
  // Before it is idle.
  const absl::Status& error = outcome.error();
  if (!error.ok() && !outcome.is_gone() && options_.on_error &&
      (attempt.last_error.code() != error.code() ||
       GetErrorReason(attempt.last_error) != GetErrorReason(error))) {
    options_.on_error(model, snapshot, error);
  }
  EndSave(model, attempt, outcome);
}

CheckpointScheduler::SaveAttempt CheckpointScheduler::BeginSave(const Model& model,
                                                                bool is_newest) {
  absl::MutexLock lock(&mu_);
  const auto it = states_.find(model.config().name);
  if (it == states_.end()) return {};
  State& state = it->second;
  // But for a step that is saved itself, what is saved now is the newest.
  if (is_newest) state.skipped_due_version = false;
  return {.is_save_requested = std::exchange(state.is_save_requested, false),
          .may_keep = SteadyNow() >= state.keep_retry_time,
          .last_error = state.last_error};
}

CheckpointScheduler::Outcome CheckpointScheduler::SaveVersion(Model& model,
                                                              const SnapshotRef& snapshot,
                                                              const SaveAttempt& attempt) const {
  const bool keep = attempt.may_keep && IsKeepDue(*snapshot, model.durable().kept_time());
  // Another save may have come first.
  const DurableState::Saved saved = model.durable().saved();
  Outcome outcome{.is_due =
                      attempt.is_save_requested ||
                      IsSaveDue(options_.policy, snapshot->record, saved.version, saved.step)};
  if (keep || outcome.is_due) outcome.status = options_.save(model, snapshot, keep);
  // There may still be room for one that is not kept.
  if (keep && GetErrorReason(outcome.status) == ErrorReason::kDiskFull) {
    outcome.keep_status = std::exchange(outcome.status, absl::OkStatus());
    if (outcome.is_due) outcome.status = options_.save(model, snapshot, /*keep=*/false);
  }
  return outcome;
}

void CheckpointScheduler::EndSave(const Model& model, const SaveAttempt& attempt,
                                  const Outcome& outcome) {
  const bool is_current = !HasUnsaved(model);
  absl::MutexLock lock(&mu_);
  const auto it = states_.find(model.config().name);
  if (it == states_.end() || it->second.model.lock().get() != &model) return;
  if (outcome.is_gone()) {
    states_.erase(it);
    return;
  }
  State& state = it->second;
  state.is_busy = false;
  // While none is to be kept, the error that says why stays.
  if (attempt.may_keep || !outcome.error().ok()) state.last_error = outcome.error();
  if (!outcome.keep_status.ok()) {
    state.keep_retry_time = After(SteadyNow(), options_.retry_delay);
  }
  if (outcome.status.ok()) {
    if (outcome.is_due || outcome.keep_status.ok()) NoteSavedLocked(is_current, state);
    state.retry_time = SteadyTime::min();
    // What came meanwhile may mean a later version, and there may be no commit after it.
    if (state.is_save_requested || state.skipped_due_version) {
      EnqueueLocked(state, /*is_followup=*/true);
    }
    return;
  }
  state.retry_time = After(SteadyNow(), options_.retry_delay);
  // What was asked for is not forgotten.
  if (attempt.is_save_requested || state.is_save_requested) state.due_time = state.retry_time;
  WakeLocked();
}

void CheckpointScheduler::AwaitIdle() {
  const auto is_idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return std::none_of(states_.begin(), states_.end(),
                        [](const auto& entry) { return entry.second.is_busy; });
  };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&is_idle));
}

void CheckpointScheduler::Stop() {
  std::deque<Work> dropped;  // Lets go of its versions without the lock.
  {
    absl::MutexLock lock(&mu_);
    is_stopping_ = true;
    wait_.WakeAll();
    dropped.swap(work_);
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace ema
