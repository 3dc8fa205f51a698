// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "server/base/schedule_parts.h"

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

}  // namespace

bool IsKeepDue(const Snapshot& snapshot, const std::optional<TrainingTime>& kept_time) {
  return std::any_of(snapshot.tracks.begin(), snapshot.tracks.end(),
                     [&](const TrackSnapshot& track) { return IsTrackDue(track, kept_time); });
}

CheckpointScheduler::CheckpointScheduler(Options options)
    : options_(std::move(options)), thread_([this] { Run(); }) {}

CheckpointScheduler::~CheckpointScheduler() { Stop(); }

void CheckpointScheduler::OnCommit(const std::shared_ptr<Model>& model, const Snapshot& snapshot) {
  if (!IsKeepDue(snapshot, model->kept_time())) return;
  absl::MutexLock lock(&mu_);
  if (is_stopping_) return;
  State& state = states_[model->config().name];
  if (state.is_busy || absl::Now() < state.retry_time) return;
  state.is_busy = true;
  work_.push_back({model->config().name, model});
}

void CheckpointScheduler::Run() {
  const auto is_ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return is_stopping_ || !work_.empty();
  };
  while (true) {
    std::shared_ptr<Model> model;
    {
      absl::MutexLock lock(&mu_, absl::Condition(&is_ready));
      if (is_stopping_) return;
      model = work_.front().model.lock();
      if (model == nullptr) states_.erase(work_.front().model_name);
      work_.pop_front();
    }
    if (model != nullptr) Save(*model);
  }
}

void CheckpointScheduler::Save(Model& model) {
  const std::string& name = model.config().name;
  const absl::StatusOr<SnapshotRef> pinned = model.PinVersion(0);
  absl::Status status = pinned.status();
  // A save by somebody else may have come first.
  if (status.ok() && IsKeepDue(**pinned, model.kept_time())) {
    status = options_.save(model, *pinned);
  }
  bool is_new_error = false;
  {
    absl::MutexLock lock(&mu_);
    State& state = states_[name];
    state.is_busy = false;
    // Of a model that has been deleted, nothing is missing.
    if (status.ok() || absl::IsNotFound(status)) {
      states_.erase(name);
      return;
    }
    state.retry_time = absl::Now() + options_.retry_delay;
    is_new_error = state.last_error.code() != status.code() ||
                   GetErrorReason(state.last_error) != GetErrorReason(status);
    state.last_error = status;
  }
  if (is_new_error && options_.on_error) options_.on_error(model, status);
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
  {
    absl::MutexLock lock(&mu_);
    is_stopping_ = true;
    work_.clear();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace ema
