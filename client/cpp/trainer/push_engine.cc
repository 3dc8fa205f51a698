// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/push_engine.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/transport/interrupt.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/track.h"

namespace ema::client_internal {
namespace {

// How long a reply is waited for after a push that failed: the ranks may have rejoined at different
// steps, and then the reply never comes. Long enough for all ranks to meet at the next step.
constexpr absl::Duration kOutOfStepWait = absl::Seconds(1);
// How long a trainer whose tracks are all paused waits for the plan.
constexpr absl::Duration kRefreshTimeout = absl::Seconds(1);
// How long it waits while it reports to the server a step that this rank cannot push.
constexpr absl::Duration kReportTimeout = absl::Seconds(1);
// How long a push whose time is over may take to end: it abandons the step on the server first.
constexpr absl::Duration kEndGrace = absl::Seconds(2);

constexpr const char* kBadTimeHint =
    ". The training time must continue from that of the average: give half_life and "
    "update_interval in batches, or a time (in Python attach(time=)) that continues from there";

absl::Status WrittenError(const std::string& model, int64_t step, std::string_view names) {
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kBadRequest,
                   absl::StrCat("model \"", model, "\": written since the push of step ", step,
                                " began, without WaitReleased() (in Python wait_released()): ",
                                names.empty() ? "some tensors, which have been restored since"
                                              : std::string(names)));
}

// The result of `function`. Where there is no memory, that is its error, so that the training goes
// on.
template <typename Function>
absl::Status WithoutMemory(const Function& function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("this rank has no memory for the push");
  }
}

}  // namespace

void StepWeights::Append(StepWeights more) {
  const auto append = [](auto& to, auto& from) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  };
  append(bytes, more.bytes);
  append(devices, more.devices);
  append(strides, more.strides);
  append(owners, more.owners);
  for (const GpuStream& stream : more.streams) {
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
  }
}

PushEngine::PushEngine(Options options, std::shared_ptr<const RunJoiner> joiner,
                       std::unique_ptr<Run> run, int64_t step)
    : options_(std::move(options)),
      model_(joiner->model()),
      joiner_(std::move(joiner)),
      rank_(joiner_->options().run.rank),
      log_(std::make_shared<TrainerLog>(
          model_, /*warns_of_all=*/options_.on_error != OnError::kSkip, options_.log)),
      step_(step),
      run_(std::move(run)),
      run_epoch_(run_ == nullptr ? 0 : run_->run_epoch()),
      wait_left_(options_.max_wait),
      outage_(options_.max_outage) {
  if (run_ == nullptr) {
    StartWithoutRun();
    return;
  }
  due_.Adopt(run_->plan());
  UpdateProgress([this](Progress& progress) { progress.version = run_->latest(); });
}

void PushEngine::StartWithoutRun() {
  // Counted from the start, so that all ranks push at the same steps once they have joined.
  RunPlan plan = {.revision = 1};
  for (const TrackConfig& track : joiner_->options().tracks)
    plan.tracks.push_back({.track = track});
  due_.Adopt(std::move(plan));
  ranks_agree_on_step_ = false;
  rejoiner_ = std::make_shared<Rejoiner>(joiner_, log_);
  // Where there is no thread for it, the next step tries again.
  (void)rejoiner_->Start();
}

void PushEngine::UpdateProgress(absl::FunctionRef<void(Progress&)> update) {
  absl::MutexLock lock(&progress_mu_);
  update(progress_);
}

PushEngine::Progress PushEngine::progress() const {
  absl::MutexLock lock(&progress_mu_);
  return progress_;
}

void PushEngine::WaitReleased(absl::Span<const GpuStream> streams) {
  const SteadyTime start = SteadyNow();
  AwaitCommit(SteadyTime::max());
  const std::shared_ptr<PendingPush> push = push_;
  if (push != nullptr && !push->WaitReleased(wait_left_, streams) && !IsInterrupted()) {
    const absl::Duration waited = Since(start);
    // The wait is shorter where the server is gone or hangs, or ranks have not joined.
    AbandonPush(push, absl::StrFormat(
                          "%sits bytes had not been sent after %.1f s",
                          waited < wait_left_ ? "the server or a rank was unavailable, and " : "",
                          absl::ToDoubleSeconds(waited)));
  }
  pushed_.reset();
  AbandonRetry();
  // A GPU may still copy: its memory is kept until the push has ended.
  if (push_ == nullptr || !reads_gpu_) owners_.clear();
  CountWait(start);
}

void PushEngine::CountWait(SteadyTime start) {
  const absl::Duration waited = Since(start);
  UpdateProgress([&](Progress& progress) { progress.stats.waited += waited; });
  wait_left_ = std::max(wait_left_ - waited, absl::ZeroDuration());
}

void PushEngine::AfterStep(int64_t step, const absl::StatusOr<TrainingTime>& now,
                           std::shared_ptr<TrainingStep> training_step) {
  if (is_closed_) return;
  const SteadyTime start = SteadyNow();
  step_.store(step, std::memory_order_relaxed);
  // The weights have changed.
  pushed_.reset();
  AbandonRetry();
  Poll();
  const absl::Status status =
      now.ok() ? WithoutMemory([&] { return PushIfDue(*now, training_step); }) : now.status();
  if (!status.ok() && !IsInterrupted()) Skip(step, status);
  CountWait(start);
  wait_left_ = options_.max_wait;
}

bool PushEngine::IsIdleAt(const absl::StatusOr<TrainingTime>& now) const {
  if (!is_idle() || !now.ok()) return false;
  const absl::StatusOr<std::vector<DueTracks::Due>> due = due_.At(*now);
  return due.ok() && due->empty();
}

absl::Status PushEngine::PushIfDue(const TrainingTime& now,
                                   const std::shared_ptr<TrainingStep>& training_step) {
  EMA_ASSIGN_OR_RETURN(std::vector<DueTracks::Due> due, DueAt(now));
  if (due.empty()) return absl::OkStatus();
  const bool can_push = AwaitRun() && AwaitPreviousPush();
  if (IsInterrupted()) return absl::OkStatus();
  if (can_push && run_ == nullptr) return DisconnectedError();  // A signal handler has closed it.
  // All ranks have the reply to the push before by now, and go by its plan from this step on.
  if (can_push) due_.Adopt(run_->plan());
  // A single rank may have adopted the plan when the reply came.
  EMA_ASSIGN_OR_RETURN(due, DueAt(now));
  due_.Count(due, now);
  if (due_.ArePaused(due)) {
    if (const std::shared_ptr<Run> run = run_; can_push && run != nullptr && !due.empty()) {
      const absl::Status status = run->RefreshPlan(kRefreshTimeout);
      // An error changes nothing: the plan is asked for again when the next update is due.
      if (!status.ok()) {
        Log(LogLevel::kDebug, absl::StrCat("cannot refresh the plan: ", ErrorText(status)));
      }
    }
    return absl::OkStatus();
  }
  if (can_push) return ReadAndStart(now, training_step);
  if (!skipped_before_.has_value()) skipped_before_ = progress().stats.skipped;
  UpdateProgress([](Progress& progress) { ++progress.stats.skipped; });
  return absl::OkStatus();
}

absl::StatusOr<std::vector<DueTracks::Due>> PushEngine::DueAt(const TrainingTime& now) const {
  absl::StatusOr<std::vector<DueTracks::Due>> due = due_.At(now);
  if (due.ok()) return due;
  std::string track;
  for (const RunPlan::Entry& entry : due_.tracks()) {
    if (PlanTrack(entry.track, entry.state, now).status() == due.status()) {
      track = absl::StrCat("track \"", entry.track.name, "\": ");
      break;
    }
  }
  // A run that started before the newest version reaches that time without any change.
  const std::optional<Version> version = progress().version;
  const bool is_behind = version.has_value() && step() < version->step;
  return MakeError(due.status().code(), GetErrorReason(due.status()),
                   absl::StrCat("model \"", model_, "\": ", track, due.status().message(),
                                is_behind ? "" : kBadTimeHint));
}

bool PushEngine::AwaitRun() {
  AdoptRejoinedRun(SteadyNow());
  if (waits() && run_ == nullptr && !outage_.has_stopped_waiting()) {
    AdoptRejoinedRun(outage_.deadline());
    if (run_ == nullptr && !IsInterrupted()) {
      ReportSkip(step(), DisconnectedError());
      outage_.StopWaiting();
    }
  }
  if (run_ != nullptr) WarnOfLostUpdates(step());
  return run_ != nullptr;
}

bool PushEngine::AwaitPreviousPush() {
  // Once: if the reply has not come by then, the steps that are due meanwhile are skipped at once.
  if (const std::shared_ptr<PendingPush> push = push_; push != nullptr && !has_waited_) {
    has_waited_ = true;
    const absl::Duration limit =
        ranks_agree_on_step_ ? wait_left_ : std::min(wait_left_, kOutOfStepWait);
    const SteadyTime start = SteadyNow();
    if (!push->WaitDone(limit) && !IsInterrupted()) {
      ReportSkip(step(), absl::DeadlineExceededError(
                             absl::StrFormat("the push of step %d had not ended after %.1f s",
                                             pending_step_, absl::ToDoubleSeconds(Since(start)))));
    }
  }
  CollectResult();
  return push_ == nullptr && run_ != nullptr;
}

absl::Status PushEngine::ReadAndStart(const TrainingTime& now,
                                      std::shared_ptr<TrainingStep> training_step) {
  const std::shared_ptr<Run> run = run_;
  EMA_ASSIGN_OR_RETURN(const bool changed, training_step->FrozenChanged());
  const bool frozen_changed = changed || frozen_changed_;
  frozen_changed_ = true;  // Until this push has succeeded.
  const bool omits_frozen = !frozen_changed && run->plan().may_omit_frozen;

  const RankLayout& layout = run->layout();
  const size_t count = layout.shards().size() - (omits_frozen ? layout.frozen_shards().size() : 0);
  EMA_ASSIGN_OR_RETURN(StepWeights weights, training_step->Read(*run, 0, count));
  // A signal handler has closed the run.
  if (run != run_ || push_ != nullptr) return DisconnectedError();
  return Start({.step = step(),
                .time = now,
                .frozen_changed = frozen_changed,
                .weights = std::move(weights),
                .training_step = std::move(training_step)});
}

absl::Status PushEngine::Start(Push push) {
  std::optional<Push> kept;
  if (waits()) kept = push;
  StepWeights& weights = push.weights;
  // Omitted shards are empty.
  const size_t count = run_->layout().shards().size();
  weights.bytes.resize(count);
  weights.devices.resize(count, -1);
  weights.strides.resize(count);
  owners_ = std::move(weights.owners);
  reads_gpu_ = !weights.streams.empty();
  PushOptions options = {
      .frozen_changed = push.frozen_changed,
      .gpu_weights = {.devices = std::move(weights.devices), .streams = std::move(weights.streams)},
      .strides = std::move(weights.strides),
      .check = options_.check};
  EMA_ASSIGN_OR_RETURN(push_, run_->StartPush(push.step, push.time, std::move(weights.bytes),
                                              options_.timeout, std::move(options)));
  pending_step_ = push.step;
  has_waited_ = false;
  pushed_ = std::move(kept);
  return absl::OkStatus();
}

void PushEngine::Poll(bool leaves_failure) {
  AdoptRejoinedRun(SteadyNow());
  CollectResult(leaves_failure);
}

std::shared_ptr<PendingPush> PushEngine::TakePush() {
  const int64_t sent_bytes = push_->stats().sent_bytes;
  UpdateProgress([&](Progress& progress) { progress.stats.sent_bytes += sent_bytes; });
  return std::exchange(push_, nullptr);
}

void PushEngine::CollectResult(bool leaves_failure, const absl::Status& because) {
  if (push_ == nullptr || !push_->done()) return;
  absl::StatusOr<Version> version = push_->Wait();
  if (!version.ok() && leaves_failure) return;
  log_->LaneUsed(TakePush()->stats());
  owners_.clear();
  if (!version.ok()) {
    absl::Status error = because.ok() ? version.status() : because;
    if (because.ok() && options_.check && GetErrorReason(error) == ErrorReason::kDigestMismatch) {
      error = WrittenError(model_, pending_step_, "");
      if (error_.ok()) error_ = error;
    }
    return Skip(pending_step_, error);
  }
  Log(LogLevel::kDebug, absl::StrCat("step ", pending_step_, " is version ", version->number));
  CountPushed(*std::move(version));
  pushed_.reset();
  ranks_agree_on_step_ = true;
  // With other ranks a plan is adopted at the next step that is due.
  if (options_.is_only_rank) due_.Adopt(run_->plan());
}

void PushEngine::AdoptRejoinedRun(SteadyTime until) {
  const std::shared_ptr<Rejoiner> rejoiner = rejoiner_;
  if (rejoiner == nullptr) return;
  std::optional<Rejoiner::RejoinedRun> joined;
  do {
    rejoiner->Await(std::min(until, After(SteadyNow(), Interrupt::kPollInterval)));
    joined = rejoiner->Take();
  } while (!joined.has_value() && !is_fenced() && !absl::IsCancelled(rejoiner->problem()) &&
           SteadyNow() < until && !IsInterrupted() && rejoiner == rejoiner_);
  if (!joined.has_value()) return;
  const bool is_first = run_epoch_ == 0;
  run_ = std::move(joined->run);
  run_epoch_ = run_->run_epoch();
  rejoiner_ = nullptr;
  rejoiner->Stop(SteadyTime::max());  // The thread is about to end.
  due_.OnRejoined();
  // By the version that it had when it was rejoined: the next step to be pushed may be later.
  CountLostUpdates();
  if (is_first) {
    UpdateProgress([this](Progress& progress) { progress.version = run_->latest(); });
    skipped_before_.reset();  // The warning at the start has said that these steps are lost.
    if (due_.tracks().empty()) due_.Adopt(run_->plan());
  }
  if (!joined->lost_version.has_value()) return;
  Log(LogLevel::kInfo,
      absl::StrCat("step ", joined->lost_version->step, " was committed; only the reply was lost"));
  // It was to be pushed again, or counts as skipped.
  if (retry_.has_value()) {
    retry_.reset();
  } else {
    UpdateProgress([](Progress& progress) { --progress.stats.skipped; });
  }
  CountPushed(*std::move(joined->lost_version));
}

void PushEngine::CountLostUpdates() {
  const std::optional<Version> there = run_->latest();
  const Progress before = progress();
  const std::optional<Version>& last = before.version;
  if (!last.has_value() || (there.has_value() && there->step >= last->step)) return;
  const int64_t kept = before.stats.pushes - before.stats.lost_versions;
  const int64_t lost =
      there.has_value() ? std::clamp<int64_t>(last->number - there->number, 0, kept) : kept;
  UpdateProgress([&](Progress& progress) {
    progress.stats.lost_versions += lost;
    progress.version = there;
  });
  lost_updates_ = {.from_step = std::nullopt, .count = lost};
  if (there.has_value()) {
    lost_updates_->from_step = last->step;
    lost_updates_->to_step = there->step;
  }
}

void PushEngine::WarnOfLostUpdates(int64_t next_step) {
  if (!lost_updates_.has_value()) return;
  const LostUpdates lost = *std::exchange(lost_updates_, std::nullopt);
  Log(LogLevel::kWarning,
      absl::StrCat(
          lost.from_step.has_value()
              ? absl::StrCat("the server has fallen back from step ", *lost.from_step, " to step ",
                             lost.to_step)
              : absl::StrCat("the server has lost the model, and the average starts again at step ",
                             next_step),
          "; ", lost.count, " of this trainer's updates are lost"));
  if (skipped_before_.has_value()) *skipped_before_ -= lost.count;
}

void PushEngine::CountPushed(Version version) {
  log_->PushSucceeded();
  frozen_changed_ = false;
  outage_.EndOutage();
  if (skipped_before_.has_value()) {
    const int64_t lost = progress().stats.skipped - *std::exchange(skipped_before_, std::nullopt);
    Log(LogLevel::kWarning, absl::StrCat("pushing again, ", lost, " steps were lost"));
  }
  if (rank_ == 0) log_->WarnOfStalledTracks(version);
  UpdateProgress([&](Progress& progress) {
    progress.version = std::move(version);
    ++progress.stats.pushes;
  });
}

void PushEngine::AwaitCommit(SteadyTime until) {
  if (!waits() || is_closed_) return;
  while (retry_.has_value() || (push_ != nullptr && !outage_.has_stopped_waiting())) {
    if (IsInterrupted()) return AbandonRetry();
    if (retry_.has_value()) {
      PushAgain(until);
      continue;
    }
    const std::shared_ptr<PendingPush> push = push_;
    const SteadyTime start = SteadyNow();
    // As long as the push has itself, or a push that takes long would be repeated without end.
    if (push->WaitDone(std::min(options_.timeout + kEndGrace, Until(until)))) {
      CollectResult();
    } else if (!IsInterrupted()) {
      push->WaitReleased(absl::ZeroDuration());
      AbandonPush(push, absl::StrFormat("it had not ended after %.1f s",
                                        absl::ToDoubleSeconds(Since(start))));
    }
  }
}

void PushEngine::PushAgain(SteadyTime until) {
  until = std::min(until, outage_.deadline());
  AdoptRejoinedRun(until);
  if (!retry_.has_value() || IsInterrupted()) return;
  if (run_ == nullptr || SteadyNow() >= until) {
    AbandonRetry();
    return outage_.StopWaiting();
  }
  WarnOfLostUpdates(retry_->step);
  Push push = *std::exchange(retry_, std::nullopt);
  const int64_t step = push.step;
  const absl::Status status = WithoutMemory([&]() -> absl::Status {
    const std::shared_ptr<Run> run = run_;
    const size_t have = push.weights.bytes.size();
    const size_t need = run->layout().shards().size();
    // A server that has forgotten the model needs the frozen tensors, too.
    if (have < need && !run->plan().may_omit_frozen) {
      EMA_ASSIGN_OR_RETURN(StepWeights frozen, push.training_step->Read(*run, have, need));
      push.weights.Append(std::move(frozen));
    }
    // A signal handler has closed the run.
    if (run != run_ || push_ != nullptr) return DisconnectedError();
    return Start(std::move(push));
  });
  if (!status.ok() && !IsInterrupted()) Skip(step, status);
}

void PushEngine::AbandonRetry() {
  if (!retry_.has_value()) return;
  const int64_t step = std::exchange(retry_, std::nullopt)->step;
  UpdateProgress([](Progress& progress) { ++progress.stats.skipped; });
  const absl::Status error = is_fenced() ? DisconnectedError() : retry_error_;
  ReportAbandonedStep(step, error);
  ReportSkip(step, error);
}

void PushEngine::ReportAbandonedStep(int64_t step, const absl::Status& why) const {
  if (options_.is_only_rank || is_closed_ || run_ == nullptr) return;
  const absl::Status status = run_->SkipStep(step, ErrorText(why), kReportTimeout).status();
  // Then the other ranks wait as long as they would without it.
  if (!status.ok()) {
    Log(LogLevel::kDebug, absl::StrCat("cannot tell the server that step ", step,
                                       " is abandoned: ", ErrorText(status)));
  }
}

absl::Status PushEngine::RejoinError() const {
  return rejoiner_ == nullptr ? absl::OkStatus() : rejoiner_->problem();
}

bool PushEngine::is_fenced() const { return GetErrorReason(RejoinError()) == ErrorReason::kFenced; }

absl::Status PushEngine::DisconnectedError() const {
  absl::Status problem = RejoinError();
  if (GetErrorReason(problem) == ErrorReason::kFenced) return problem;
  return absl::UnavailableError(absl::StrCat(
      "model \"", model_, "\": the server or a rank is unavailable: ", ErrorText(problem)));
}

absl::Status PushEngine::TakeError() {
  Poll();
  return std::exchange(error_, absl::OkStatus());
}

void PushEngine::AbandonWrittenPush(std::string_view names, std::string_view hint, bool raises) {
  const absl::Status error = WrittenError(model_, pending_step_, names);
  // The error begins with the model's name, as each line of the log does.
  if (options_.log) {
    options_.log(LogLevel::kWarning, absl::StrCat(error.message(), std::string(hint)));
  }
  pushed_.reset();
  AbandonRetry();
  if (const std::shared_ptr<PendingPush> push = push_; push != nullptr && !push->done()) {
    push->WaitReleased(absl::ZeroDuration());
    // No outage, as far as is known: the next step is pushed to the same run.
    push->Abandon();
    CollectResult(/*leaves_failure=*/false, error);
  } else if (raises) {
    CollectResult();  // The push may have found the write, too.
  }
  if (raises) error_ = error;
}

void PushEngine::AbandonPush(const std::shared_ptr<PendingPush>& push, const std::string& problem) {
  if (push_ != push) return;
  TakePush();
  Skip(pending_step_, absl::DeadlineExceededError(problem), push);
}

void PushEngine::Skip(int64_t step, const absl::Status& error, std::shared_ptr<PendingPush> lost) {
  ranks_agree_on_step_ = false;
  const bool is_outage = IsOutage(error);
  if (is_outage && !skipped_before_.has_value()) skipped_before_ = progress().stats.skipped;
  if (pushed_.has_value() && !is_closed_ && outage_.ShouldRetry(error)) {
    retry_ = *std::exchange(pushed_, std::nullopt);
    retry_error_ = error;
    UpdateProgress([&](Progress& progress) { progress.stats.last_error = error; });
    Log(LogLevel::kWarning,
        absl::StrFormat("push of step %d waits for the server, at most %g s: %s", step,
                        absl::ToDoubleSeconds(options_.max_outage), ErrorText(error)));
  } else {
    if (MustReportToOtherRanks(error)) ReportAbandonedStep(step, error);
    UpdateProgress([](Progress& progress) { ++progress.stats.skipped; });
    ReportSkip(step, error);
  }
  pushed_.reset();
  if (is_closed_ || run_ == nullptr || !is_outage) return;
  rejoiner_ = std::make_shared<Rejoiner>(joiner_, log_, step, std::move(lost),
                                         std::exchange(run_, nullptr));
  // Where there is no thread for it, the next step tries again.
  (void)rejoiner_->Start();
}

void PushEngine::ReportSkip(int64_t step, const absl::Status& error) {
  UpdateProgress([&](Progress& progress) { progress.stats.last_error = error; });
  // Once the outage has lasted too long it raises no more: the ranks may notice it at different
  // steps, and an error that not all of them raise would keep them apart.
  const bool is_waited = waits() && !outage_.has_stopped_waiting() && IsRetryableStep(error);
  if (is_waited || options_.on_error == OnError::kRaise) error_ = error;
  if (options_.on_skip) options_.on_skip(step, error);
  log_->SkippedStep(step, error);
}

absl::Status PushEngine::WaitPushed(absl::Duration timeout) {
  AwaitCommit(SteadyTime::max());
  if (const std::shared_ptr<PendingPush> push = push_;
      push != nullptr && !push->WaitDone(timeout)) {
    return absl::DeadlineExceededError(
        absl::StrCat("the push of step ", pending_step_, " has not ended"));
  }
  Poll();
  return absl::OkStatus();
}

void PushEngine::EndPushes(absl::Duration timeout) {
  if (is_closed_) return;
  const SteadyTime start = SteadyNow();
  const SteadyTime until = After(start, timeout);
  AwaitCommit(until);
  is_closed_ = true;
  if (const std::shared_ptr<PendingPush> push = push_; push != nullptr) {
    if (push->WaitDone(Until(until))) {
      CollectResult();
    } else if (!IsInterrupted()) {
      AbandonPush(push, absl::StrFormat("it had not ended %.1f s after the last step",
                                        absl::ToDoubleSeconds(Since(start))));
    }
  }
}

void PushEngine::Leave(absl::Duration timeout) {
  is_closed_ = true;
  // An interrupted call of this thread may hold it, and waits for its end.
  if (push_ != nullptr) push_->Abandon();
  push_ = nullptr;
  pushed_.reset();
  retry_.reset();
  owners_.clear();
  if (const auto rejoiner = std::exchange(rejoiner_, nullptr); rejoiner != nullptr) {
    rejoiner->Stop(After(SteadyNow(), timeout));
  }
  run_ = nullptr;
  joiner_ = nullptr;  // And with it the client.
}

}  // namespace ema::client_internal
