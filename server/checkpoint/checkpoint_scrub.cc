// SPDX-License-Identifier: Apache-2.0
//
// The part of CheckpointManager that reads checkpoints again, and sets bad ones aside.
#include <algorithm>

#include "server/base/steady_wait.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "server/checkpoint/pacer.h"
#include "server/checkpoint/restore.h"
#include "server/format/verify.h"

namespace ema {

absl::Status CheckpointManager::StoredError(Model& model, const std::string& name,
                                            const absl::Status& status) {
  // Of a deleted model the files go, which is no fault of theirs.
  // Calls of other models wait behind this one.
  if (absl::IsDataLoss(status) && model.closed().ok()) {
    SetAside(model, name, status, /*waits=*/false);
  }
  return LocateError(status, model.config().name, name);
}

void CheckpointManager::SetAside(Model& model, const std::string& name, const absl::Status& problem,
                                 bool waits) {
  const absl::StatusOr<bool> was_latest =
      store_->Quarantine(model.config().name, name, problem, waits);
  if (!was_latest.ok()) {
    Log(LogLevel::kError, "bad checkpoint not set aside", model,
        {{"checkpoint", name}, {"error", problem}, {"why_not", was_latest.status()}});
    return;
  }
  if (*was_latest) scheduler_->SaveNow(model.shared_from_this());
}

void CheckpointManager::NoteUnreadable(Model& model, const std::string& name,
                                       const absl::Status& problem) {
  Log(LogLevel::kError, "checkpoint not readable", model,
      {{"checkpoint", name}, {"error", problem}});
  // If that is not known, the next scrub asks again.
  if (store_->NoteRead(model.config().name, name, problem).value_or(false)) {
    scheduler_->SaveNow(model.shared_from_this());
  }
}

absl::Status CheckpointManager::ReadAgain(Model& model, const std::string& name) {
  const Heartbeat::Work at_work(scrub_heartbeat_);
  Pacer pacer(model);
  return VerifyCheckpoint(store_->file_system(), store_->Path(model.config().name, name), nullptr,
                          [&] {
                            pacer.Rest();
                            const bool goes_on = Rest(absl::ZeroDuration());
                            return goes_on ? absl::OkStatus() : absl::CancelledError();
                          })
      .status();
}

CheckpointManager::ScrubReport CheckpointManager::Scrub(ModelStore& models) {
  // Of the disk's time, readers and savers get the rest.
  constexpr int kRestPerRead = 9;
  ScrubReport report;
  const auto rest = [&](absl::Duration time) { return report.is_complete = Rest(time); };
  const auto skip = [&](Model& model, const std::string& name, const absl::Status& why) {
    Log(LogLevel::kError, "checkpoint not read again", model,
        {{"checkpoint", name}, {"error", why}});
    ++report.skipped_count;
  };
  for (const std::shared_ptr<Model>& model : models.List()) {
    const std::string& model_name = model->config().name;
    const auto all = store_->ListNames(model_name);
    if (!all.ok()) {
      Log(LogLevel::kError, "checkpoints not listed", *model, {{"error", all.status()}});
      ++report.skipped_count;
      continue;
    }
    for (const CheckpointStore::Stored& stored : *all) {
      if (!stored.problem.ok()) continue;
      while (store_->is_saving()) {
        if (!rest(absl::Seconds(1))) return report;
      }
      const SteadyTime begin = SteadyNow();
      {
        const auto held = store_->Hold(model_name, stored.name);
        if (!held.ok()) {
          skip(*model, stored.name, held.status());
          continue;
        }
        if (*held == nullptr) continue;  // Removed meanwhile.
        const absl::Status status = ReadAgain(*model, stored.name);
        // Of a deleted model the files go, which is no fault of theirs.
        if (absl::IsCancelled(status) || absl::IsNotFound(status) || !model->closed().ok()) {
          // It says nothing of the checkpoint.
        } else if (status.ok()) {
          store_->NoteRead(model_name, stored.name, status).status().IgnoreError();
        } else if (absl::IsDataLoss(status)) {
          SetAside(*model, stored.name, status, /*waits=*/true);
          ++report.bad_count;
        } else if (absl::IsUnavailable(status)) {
          NoteUnreadable(*model, stored.name, status);
          ++report.unreadable_count;
        } else {
          skip(*model, stored.name, status);
        }
      }
      if (!rest(absl::FromChrono(SteadyNow() - begin) * kRestPerRead)) return report;
    }
  }
  return report;
}

std::optional<absl::Time> CheckpointManager::scrub_time() {
  absl::MutexLock lock(&mu_);
  return scrub_time_;
}

void CheckpointManager::NoteScrubTime(absl::Time time) {
  {
    absl::MutexLock lock(&mu_);
    scrub_time_ = time;
  }
  // Only the next server asks for it: if it is lost, that counts from an earlier one, or its start.
  store_->NoteScrubTime(time).IgnoreError();
}

void CheckpointManager::RunScrub() {
  const absl::Duration interval = options_.scrub_interval;
  absl::Duration wait = std::max(*scrub_time() + interval - absl::Now(), absl::ZeroDuration());
  for (; Rest(wait); wait = interval) {
    const SteadyTime begin = SteadyNow();
    const ScrubReport report = Scrub(*models_);
    if (!report.is_complete) return;
    if (report.skipped_count == 0) NoteScrubTime(absl::Now());
    LogTo(options_.log, LogLevel::kInfo, "checkpoints read again",
          {{"bad", report.bad_count},
           {"unreadable", report.unreadable_count},
           {"skipped", report.skipped_count},
           {"seconds", absl::ToDoubleSeconds(absl::FromChrono(SteadyNow() - begin))}});
  }
}

bool CheckpointManager::Rest(absl::Duration time) {
  absl::MutexLock lock(&mu_);
  return !wait_.AwaitUntil(mu_, After(SteadyNow(), time),
                           [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_stopping_; });
}

}  // namespace ema
