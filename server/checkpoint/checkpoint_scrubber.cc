// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_scrubber.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "ema/internal/catch_exceptions.h"
#include "server/checkpoint/pacer.h"
#include "server/format/verify.h"

namespace ema {

void CheckpointScrubber::Start(ModelStore& models, absl::Duration interval) {
  const absl::Time now = absl::Now();
  const absl::StatusOr<absl::Time> before = store_.data().ReadScrubTime();
  if (absl::IsNotFound(before.status())) {
    NoteTime(now);
  } else {
    absl::MutexLock lock(&mu_);
    time_ = std::min(before.value_or(now), now);
  }
  thread_ = std::thread([this, &models, interval] { Run(models, interval); });
}

void CheckpointScrubber::Run(ModelStore& models, absl::Duration interval) {
  absl::Duration wait = std::max(*time() + interval - absl::Now(), absl::ZeroDuration());
  for (; Wait(wait); wait = interval) {
    const SteadyTime begin = SteadyNow();
    const Report report = Scrub(models);
    if (!report.is_complete) return;
    if (report.skipped_count == 0) NoteTime(absl::Now());
    LogTo(log_, LogLevel::kInfo, "checkpoints read again",
          {{"bad", report.bad_count},
           {"unreadable", report.unreadable_count},
           {"skipped", report.skipped_count},
           {"seconds", absl::ToDoubleSeconds(Since(begin))}});
  }
}

CheckpointScrubber::Report CheckpointScrubber::Scrub(ModelStore& models) {
  Report report;
  for (const std::shared_ptr<Model>& model : models.List()) {
    if (!model->is_home()) continue;
    ScrubModel(*model, report);
    if (!report.is_complete) break;
  }
  return report;
}

void CheckpointScrubber::ScrubModel(Model& model, Report& report) {
  constexpr int kRestPerRead = 9;  // Nine tenths of the disk's time are for readers and savers.
  const ModelContext context = context_of_(model);
  const auto all = context.folder.ListNames();
  if (!all.ok()) {
    context.Log(LogLevel::kError, "checkpoints not listed", {{"error", all.status()}});
    ++report.skipped_count;
    return;
  }
  for (const CheckpointEntry& entry : *all) {
    if (!entry.problem.ok()) continue;
    while (report.is_complete && store_.is_saving()) report.is_complete = Wait(absl::Seconds(1));
    if (!report.is_complete) return;
    const SteadyTime begin = SteadyNow();
    ScrubCheckpoint(context, entry.name, report);
    report.is_complete = Wait(Since(begin) * kRestPerRead);
    if (!report.is_complete) return;
  }
}

void CheckpointScrubber::ScrubCheckpoint(const ModelContext& context, const std::string& name,
                                         Report& report) {
  const auto skip = [&](const absl::Status& why) {
    context.Log(LogLevel::kError, "checkpoint not read again",
                {{"checkpoint", name}, {"error", why}});
    ++report.skipped_count;
  };
  const auto held = context.folder.Hold(name);
  if (!held.ok()) return skip(held.status());
  if (*held == nullptr) return;  // It has been removed.
  const absl::Status status = CatchExceptions([&] { return Read(context, name); });
  // Deleting a model removes its files, which is no corruption.
  if (absl::IsCancelled(status) || absl::IsNotFound(status) || !context.model.CheckOpen().ok())
    return;
  const StoredVersions versions(context);
  if (status.ok()) {
    context.folder.NoteRead(name, status).status().IgnoreError();
  } else if (absl::IsDataLoss(status)) {
    versions.SetAside(name, status, /*waits=*/true);
    ++report.bad_count;
  } else if (absl::IsUnavailable(status)) {
    versions.NoteUnreadable(name, status);
    ++report.unreadable_count;
  } else {
    skip(status);
  }
}

absl::Status CheckpointScrubber::Read(const ModelContext& context, const std::string& name) {
  // Covers only the reading: handling the result may wait for a save.
  const Heartbeat::Work at_work(heartbeat_);
  Pacer pacer(context.model);
  return VerifyCheckpoint(context.folder.file_system(), context.folder.Path(name), nullptr,
                          [&]() -> absl::Status {
                            EMA_RETURN_IF_ERROR(pacer.Pause());
                            return Wait(absl::ZeroDuration()) ? absl::OkStatus()
                                                              : absl::CancelledError();
                          })
      .status();
}

std::optional<absl::Time> CheckpointScrubber::time() const {
  absl::MutexLock lock(&mu_);
  return time_;
}

void CheckpointScrubber::NoteTime(absl::Time time) {
  {
    absl::MutexLock lock(&mu_);
    time_ = time;
  }
  // Only the next server reads it; without it, that server scrubs earlier or later.
  store_.data().WriteScrubTime(time).IgnoreError();
}

bool CheckpointScrubber::Wait(absl::Duration time) {
  absl::MutexLock lock(&mu_);
  return !wait_.AwaitUntil(mu_, After(SteadyNow(), time),
                           [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_stopping_; });
}

void CheckpointScrubber::RequestStop() {
  absl::MutexLock lock(&mu_);
  is_stopping_ = true;
  wait_.WakeAll();
}

void CheckpointScrubber::Stop() {
  RequestStop();
  if (thread_.joinable()) thread_.join();
}

}  // namespace ema
