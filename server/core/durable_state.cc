// SPDX-License-Identifier: Apache-2.0
#include "server/core/durable_state.h"

#include <algorithm>

namespace ema {

DurableState::Saved DurableState::saved() const {
  absl::MutexLock lock(&mu_);
  return saved_;
}

void DurableState::SetVersion(const VersionId& id, int64_t step,
                              std::optional<int64_t> settings_revision) {
  absl::MutexLock lock(&mu_);
  if (id < saved_.version) return;
  settings_revision_ = settings_revision.value_or(id == saved_.version ? settings_revision_ : -1);
  saved_.version = id;
  // A save may have begun before the rollback.
  saved_.step = id < rollback_version_ ? std::min(step, rollback_step_) : step;
}

bool DurableState::HasOtherSettings(const VersionId& id, int64_t settings_revision) const {
  absl::MutexLock lock(&mu_);
  return id == saved_.version && settings_revision_ != settings_revision;
}

std::optional<TrainingTime> DurableState::kept_time() const {
  absl::MutexLock lock(&mu_);
  return kept_time_;
}

void DurableState::SetKeptTime(const TrainingTime& time) {
  absl::MutexLock lock(&mu_);
  kept_time_ = time;
}

void DurableState::RollBackTo(const Version& record) {
  absl::MutexLock lock(&mu_);
  rollback_version_ = record.id();
  rollback_step_ = record.step;
  saved_.step = std::min(saved_.step, rollback_step_);
  if (kept_time_.has_value() && !record.time.CheckNotBefore(*kept_time_).ok()) {
    kept_time_ = record.time;
  }
}

}  // namespace ema
