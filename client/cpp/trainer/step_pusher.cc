// SPDX-License-Identifier: Apache-2.0
#include "ema/step_pusher.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/push/due_tracks.h"
#include "client/cpp/trainer/joining.h"
#include "client/cpp/trainer/patience.h"
#include "client/cpp/trainer/rejoiner.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/base/steady_wait.h"

namespace ema {
namespace {

using client_internal::DueTracks;
using client_internal::Joining;
using client_internal::Patience;
using client_internal::Rejoiner;

// How long a reply is waited for after a push that failed: the ranks may have come back at
// different steps, and then it never comes. Long enough for all to meet at the next one.
constexpr absl::Duration kOutOfStepWait = absl::Seconds(1);
// How long a trainer whose tracks are all paused waits for an answer whether they still are.
constexpr absl::Duration kRefreshTimeout = absl::Seconds(1);
// How long it waits while the server is told of a step that this rank cannot push.
constexpr absl::Duration kGiveUpTimeout = absl::Seconds(1);
// How long a push whose time is over may take to say why: it tells the server first.
constexpr absl::Duration kEndGrace = absl::Seconds(2);
// How long an exception waits for the last push.
constexpr absl::Duration kExceptionWait = absl::Seconds(1);

TrainingTime TimeAt(const StepPusher::Options& options, int64_t step) {
  if (options.time) return options.time(step);
  return TrainingTime::AtBatch(step);
}

}  // namespace

class StepPusher::Impl {
 public:
  Impl(std::unique_ptr<Joining> joining, std::unique_ptr<Run> run, Options options)
      : joining_(std::move(joining)),
        options_(std::move(options)),
        run_(std::move(run)),
        version_(run_->latest()),
        wait_left_(options_.max_wait),
        patience_(options_.max_outage) {
    due_.Adopt(run_->plan());
    step_ = options_.resume.has_value()
                ? options_.resume->step
                : options_.start_step.value_or(version_.has_value() ? version_->step : 0);
  }

  void WaitReleased(absl::Span<const GpuStream> streams);
  void AfterStep(const ReadWeights& read);
  absl::Status TakeError();
  absl::StatusOr<std::optional<Version>> WaitPushed(absl::Duration timeout);
  // Waits so long at most for the last push.
  void Close(absl::Duration timeout);
  void Close() { Close(options_.timeout); }
  Stats stats();
  int64_t step() const { return step_; }
  std::optional<Version> version() {
    Look();
    return version_;
  }

 private:
  // What is pushed at a step, so that it can be pushed again while the weights are the same.
  struct Push {
    int64_t step = 0;
    TrainingTime time;
    bool frozen_changed = false;
    std::vector<Weights>
        shards;  // Those of the layout; without the last ones, if these are frozen.
    ReadWeights read;
  };

  absl::Status PushIfDue(const ReadWeights& read);
  absl::Status StartPush(const TrainingTime& now, const ReadWeights& read);
  absl::Status ReadShards(size_t count, Push& push) const;
  absl::Status Start(Push push);
  absl::StatusOr<std::vector<uint64_t>> FrozenSums(const ReadWeights& read);
  absl::StatusOr<Weights> ReadShard(const Shard& shard, bool is_pushed,
                                    const ReadWeights& read) const;
  bool waits() const { return options_.on_error == OnError::kWait; }
  // Whether there is a run to push to; with kWait, waits for that.
  bool IsBack();
  bool PreviousHasEnded();
  // Takes what there is by now: a run that has been joined again, the result of the push.
  void Look();
  void Harvest();
  // Takes the run that has been joined again, for which it waits.
  void ComeBack(SteadyTime until);
  // Counts what the server that it has come back to does not have any more.
  void LookBack();
  void CountPushed(Version version);
  // With kWait: waits until the pushed step is a version, and pushes it again after an outage,
  // while nothing else writes the weights. Once an outage has lasted too long it does nothing until
  // a push has succeeded: the ranks may be at different steps.
  void Settle(SteadyTime until);
  void PushAgain(SteadyTime until);
  // Gives up the step that would be pushed again.
  void Lose();
  // Says that this rank will not push the step, so that no other waits for it.
  void GiveUp(int64_t step, const absl::Status& why);
  // Why nothing can be pushed now.
  absl::Status AwayError() const;
  void Drop(const std::string& problem);
  void Skip(int64_t step, const absl::Status& error, std::unique_ptr<PendingPush> lost = nullptr);
  void Note(int64_t step, const absl::Status& error);
  // Counts what the training has waited since.
  void CountWait(SteadyTime start);

  const std::unique_ptr<Joining> joining_;
  const Options options_;
  DueTracks due_;
  bool closed_ = false;
  int64_t step_ = 0;
  std::unique_ptr<Run> run_;  // Null while the server is away, and after Close().
  std::optional<Version> version_;
  Stats stats_;
  // What is left of max_wait until the end of the next AfterStep().
  absl::Duration wait_left_;
  // False: the last push failed, so ranks may push at different steps.
  bool in_step_ = true;

  // Checksums of the frozen tensors as the server has them, if this rank knows: of its last push,
  // if that succeeded. Before the first the run has none.
  std::optional<std::vector<uint64_t>> frozen_sums_;
  std::vector<uint64_t> pending_sums_;
  bool has_pushed_ = false;

  std::vector<std::shared_ptr<const void>> kept_;  // What the push reads.
  bool reads_gpu_ = false;                         // Some of it there.
  int64_t pending_step_ = 0;
  bool has_waited_ = false;  // For its reply.
  std::unique_ptr<PendingPush> push_;
  // Null, or at work, or waits for a thread to be had, or has been fenced.
  std::unique_ptr<Rejoiner> rejoiner_;

  absl::Status error_;  // For TakeError().
  // For kWait.
  Patience patience_;
  std::optional<Push> pushed_;  // What `push_` is of, while the weights are the same.
  std::optional<Push> again_;   // It has failed, and will be tried again.
  absl::Status again_error_;
};

void StepPusher::Impl::WaitReleased(absl::Span<const GpuStream> streams) {
  const SteadyTime start = SteadyNow();
  Settle(SteadyTime::max());
  if (push_ != nullptr && !push_->WaitReleased(wait_left_, streams)) {
    Drop(absl::StrCat("its bytes had not left after ", absl::FormatDuration(Since(start))));
  }
  pushed_.reset();
  Lose();
  // A GPU may still copy: what is there is kept until the push has ended.
  if (push_ == nullptr || !reads_gpu_) kept_.clear();
  CountWait(start);
}

void StepPusher::Impl::CountWait(SteadyTime start) {
  const absl::Duration waited = Since(start);
  stats_.waited += waited;
  wait_left_ = std::max(wait_left_ - waited, absl::ZeroDuration());
}

void StepPusher::Impl::AfterStep(const ReadWeights& read) {
  if (closed_) return;
  const SteadyTime start = SteadyNow();
  ++step_;
  // The weights are others now.
  pushed_.reset();
  Lose();
  Look();
  if (const absl::Status status = PushIfDue(read); !status.ok()) Skip(step_, status);
  CountWait(start);
  wait_left_ = options_.max_wait;
}

absl::Status StepPusher::Impl::PushIfDue(const ReadWeights& read) {
  const TrainingTime now = TimeAt(options_, step_);
  EMA_ASSIGN_OR_RETURN(std::vector<DueTracks::Due> due, due_.At(now));
  if (due.empty()) return absl::OkStatus();
  const bool can_push = IsBack() && PreviousHasEnded();
  // All ranks have the reply to the push before by now, and go by its plan from this step on.
  if (can_push) due_.Adopt(run_->plan());
  // Alone, this rank may have gone by it since the reply.
  EMA_ASSIGN_OR_RETURN(due, due_.At(now));
  due_.Count(due, now);
  if (due_.ArePaused(due)) {
    // An error changes nothing: it is asked again when the next one is due.
    if (can_push && !due.empty()) (void)run_->RefreshPlan(kRefreshTimeout);
    return absl::OkStatus();
  }
  if (can_push) return StartPush(now, read);
  ++stats_.skipped;
  return absl::OkStatus();
}

bool StepPusher::Impl::IsBack() {
  if (waits() && run_ == nullptr && !patience_.is_over()) {
    ComeBack(patience_.until());
    if (run_ == nullptr) {
      Note(step_, AwayError());
      patience_.GiveUp();
    }
  }
  return run_ != nullptr;
}

bool StepPusher::Impl::PreviousHasEnded() {
  // Once: if the reply has not come by then, the steps that are due meanwhile are skipped at once.
  if (push_ != nullptr && !has_waited_) {
    has_waited_ = true;
    const absl::Duration limit = in_step_ ? wait_left_ : std::min(wait_left_, kOutOfStepWait);
    const SteadyTime start = SteadyNow();
    if (!push_->WaitDone(limit)) {
      Note(step_, absl::DeadlineExceededError(absl::StrCat("the push of step ", pending_step_,
                                                           " had not ended after ",
                                                           absl::FormatDuration(Since(start)))));
    }
  }
  Harvest();
  return push_ == nullptr && run_ != nullptr;
}

absl::Status StepPusher::Impl::StartPush(const TrainingTime& now, const ReadWeights& read) {
  EMA_ASSIGN_OR_RETURN(std::vector<uint64_t> sums, FrozenSums(read));
  const bool frozen_changed = has_pushed_ && frozen_sums_ != sums;
  // Until its reply says that the server has these values, it may have others.
  frozen_sums_.reset();
  pending_sums_ = std::move(sums);
  has_pushed_ = true;
  const bool omits_frozen = !frozen_changed && run_->plan().may_omit_frozen;

  const RankLayout& layout = run_->layout();
  Push push = {.step = step_, .time = now, .frozen_changed = frozen_changed, .read = read};
  EMA_RETURN_IF_ERROR(ReadShards(
      layout.shards().size() - (omits_frozen ? layout.frozen_shards().size() : 0), push));
  return Start(std::move(push));
}

absl::Status StepPusher::Impl::ReadShards(size_t count, Push& push) const {
  for (size_t i = push.shards.size(); i < count; ++i) {
    EMA_ASSIGN_OR_RETURN(Weights weights,
                         ReadShard(run_->layout().shards()[i], /*is_pushed=*/true, push.read));
    push.shards.push_back(std::move(weights));
  }
  return absl::OkStatus();
}

absl::Status StepPusher::Impl::Start(Push push) {
  std::vector<std::span<const std::byte>> shards(run_->layout().shards().size());
  PushOptions options = {.frozen_changed = push.frozen_changed,
                         .gpu_weights = {.devices = std::vector<int>(shards.size(), -1)}};
  std::vector<GpuStream>& streams = options.gpu_weights.streams;
  kept_.clear();
  for (size_t i = 0; i < push.shards.size(); ++i) {
    const Weights& weights = push.shards[i];
    shards[i] = weights.bytes;
    kept_.push_back(weights.keep_alive);
    if (!weights.gpu.has_value()) continue;
    options.gpu_weights.devices[i] = weights.gpu->device;
    if (std::find(streams.begin(), streams.end(), *weights.gpu) == streams.end()) {
      streams.push_back(*weights.gpu);
    }
  }
  reads_gpu_ = !streams.empty();
  EMA_ASSIGN_OR_RETURN(push_, run_->StartPush(push.step, push.time, std::move(shards),
                                              options_.timeout, std::move(options)));
  pending_step_ = push.step;
  has_waited_ = false;
  if (waits()) pushed_ = std::move(push);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint64_t>> StepPusher::Impl::FrozenSums(const ReadWeights& read) {
  std::vector<uint64_t> sums;
  for (const int64_t i : joining_->frozen()) {
    // All of it, not this rank's share: all ranks must find the same.
    EMA_ASSIGN_OR_RETURN(const Weights weights, ReadShard(WholeTensor(joining_->manifest(), i),
                                                          /*is_pushed=*/false, read));
    sums.push_back(weights.checksum.has_value() ? *weights.checksum : Crc32c(0, weights.bytes));
  }
  return sums;
}

// REQUIRES: the shard is contiguous in its tensor, as those of EvenShare() are.
absl::StatusOr<StepPusher::Weights> StepPusher::Impl::ReadShard(const Shard& shard, bool is_pushed,
                                                                const ReadWeights& read) const {
  const TensorSpec& spec = joining_->manifest().tensor(shard.tensor_index);
  int64_t first = 0;
  for (size_t d = 0; d < spec.shape.size(); ++d) first = first * spec.shape[d] + shard.offsets[d];
  return read({.tensor_index = joining_->given_index(shard.tensor_index),
               .first = first,
               .count = shard.element_count(),
               .is_pushed = is_pushed});
}

void StepPusher::Impl::Look() {
  ComeBack(SteadyNow());
  Harvest();
}

void StepPusher::Impl::Harvest() {
  if (push_ == nullptr || !push_->done()) return;
  const std::unique_ptr<PendingPush> push = std::move(push_);
  kept_.clear();
  stats_.sent_bytes += push->stats().sent_bytes;
  absl::StatusOr<Version> version = push->Wait();
  if (!version.ok()) return Skip(pending_step_, version.status());
  CountPushed(*std::move(version));
  pushed_.reset();
  in_step_ = true;
  // With other ranks a plan is adopted at the next step that is due.
  if (options_.world_size == 1) due_.Adopt(run_->plan());
}

void StepPusher::Impl::ComeBack(SteadyTime until) {
  if (rejoiner_ == nullptr) return;
  rejoiner_->Await(until);
  std::optional<Rejoiner::Joined> joined = rejoiner_->Take();
  if (!joined.has_value()) return;
  run_ = std::move(joined->run);
  rejoiner_ = nullptr;
  due_.GoOn();
  // By what there was when it joined: the step that is asked for next may be later.
  LookBack();
  if (joined->lost_version.has_value()) {
    // It was to be pushed again, or counts as skipped.
    if (again_.has_value()) {
      again_.reset();
    } else {
      --stats_.skipped;
    }
    CountPushed(*std::move(joined->lost_version));
  }
}

void StepPusher::Impl::LookBack() {
  const std::optional<Version> there = run_->latest();
  if (!version_.has_value() || (there.has_value() && there->step >= version_->step)) return;
  const int64_t kept = stats_.pushes - stats_.gone;
  stats_.gone +=
      there.has_value() ? std::clamp<int64_t>(version_->number - there->number, 0, kept) : kept;
  version_ = there;
}

void StepPusher::Impl::CountPushed(Version version) {
  version_ = std::move(version);
  ++stats_.pushes;
  frozen_sums_ = std::move(pending_sums_);
  patience_.EndOutage();
}

void StepPusher::Impl::Settle(SteadyTime until) {
  if (!waits() || closed_) return;
  while (again_.has_value() || (push_ != nullptr && !patience_.is_over())) {
    if (again_.has_value()) {
      PushAgain(until);
      continue;
    }
    const SteadyTime start = SteadyNow();
    // Not max_wait: what takes long on a server that is there would not take less from the start.
    if (push_->WaitDone(std::min(options_.timeout + kEndGrace, Until(until)))) {
      Harvest();
    } else {
      push_->WaitReleased(absl::ZeroDuration());
      Drop(absl::StrCat("it had not ended after ", absl::FormatDuration(Since(start))));
    }
  }
}

void StepPusher::Impl::PushAgain(SteadyTime until) {
  until = std::min(until, patience_.until());
  ComeBack(until);
  if (!again_.has_value()) return;
  if (run_ == nullptr || SteadyNow() >= until) {
    Lose();
    return patience_.GiveUp();
  }
  Push push = *std::move(again_);
  again_.reset();
  const int64_t step = push.step;
  absl::Status status;
  // A server that has forgotten the model needs the frozen ones, too.
  if (!run_->plan().may_omit_frozen) status = ReadShards(run_->layout().shards().size(), push);
  if (status.ok()) status = Start(std::move(push));
  if (!status.ok()) Skip(step, status);
}

void StepPusher::Impl::Lose() {
  if (!again_.has_value()) return;
  const int64_t step = again_->step;
  again_.reset();
  ++stats_.skipped;
  const bool is_fenced =
      rejoiner_ != nullptr && GetErrorReason(rejoiner_->problem()) == ErrorReason::kFenced;
  const absl::Status error = is_fenced ? AwayError() : again_error_;
  GiveUp(step, error);
  Note(step, error);
}

void StepPusher::Impl::GiveUp(int64_t step, const absl::Status& why) {
  if (options_.world_size == 1 || closed_ || run_ == nullptr) return;
  // Where it cannot be told, the others wait as long as they would without.
  (void)run_->GiveUp(step, std::string(why.message()), kGiveUpTimeout);
}

absl::Status StepPusher::Impl::AwayError() const {
  absl::Status problem = rejoiner_ == nullptr ? absl::OkStatus() : rejoiner_->problem();
  if (GetErrorReason(problem) == ErrorReason::kFenced) return problem;
  return absl::UnavailableError(absl::StrCat(
      "model \"", joining_->model(), "\": the server is away, or a rank: ", problem.message()));
}

absl::Status StepPusher::Impl::TakeError() {
  Look();
  return std::exchange(error_, absl::OkStatus());
}

void StepPusher::Impl::Drop(const std::string& problem) {
  std::unique_ptr<PendingPush> push = std::move(push_);
  stats_.sent_bytes += push->stats().sent_bytes;
  Skip(pending_step_, absl::DeadlineExceededError(problem), std::move(push));
}

void StepPusher::Impl::Skip(int64_t step, const absl::Status& error,
                            std::unique_ptr<PendingPush> lost) {
  in_step_ = false;
  if (pushed_.has_value() && !closed_ && patience_.LastsAfter(error)) {
    again_ = *std::move(pushed_);
    again_error_ = error;
    stats_.last_error = error;
  } else {
    if (client_internal::IsFinal(error)) GiveUp(step, error);
    ++stats_.skipped;
    Note(step, error);
  }
  pushed_.reset();
  if (closed_ || run_ == nullptr || !client_internal::IsAway(error)) return;
  rejoiner_ = std::make_unique<Rejoiner>(joining_.get(), step, std::move(lost), std::move(run_));
  // Where there is no thread for it, the next step tries again.
  (void)rejoiner_->Start();
}

void StepPusher::Impl::Note(int64_t step, const absl::Status& error) {
  stats_.last_error = error;
  // An outage that is over has been told of: the ranks may find the server at different steps, and
  // an error that not all of them give would keep them apart.
  const bool is_waited = waits() && !patience_.is_over() && client_internal::IsWorthWaiting(error);
  if (is_waited || options_.on_error == OnError::kRaise) error_ = error;
  if (options_.on_skip) options_.on_skip(step, error);
}

absl::StatusOr<std::optional<Version>> StepPusher::Impl::WaitPushed(absl::Duration timeout) {
  if (timeout == absl::ZeroDuration()) timeout = options_.timeout;
  Settle(SteadyTime::max());
  if (push_ != nullptr && !push_->WaitDone(timeout)) {
    return absl::DeadlineExceededError(absl::StrCat(
        "model \"", joining_->model(), "\": the push of step ", pending_step_, " has not ended"));
  }
  return version();
}

void StepPusher::Impl::Close(absl::Duration timeout) {
  if (closed_) return;
  const SteadyTime until = After(SteadyNow(), timeout);
  Settle(until);
  closed_ = true;
  if (push_ != nullptr) {
    if (push_->WaitDone(Until(until))) {
      Harvest();
    } else {
      Drop("it had not ended when training did");
    }
  }
  kept_.clear();
  rejoiner_ = nullptr;
  run_ = nullptr;
}

StepPusher::Stats StepPusher::Impl::stats() {
  Look();
  Stats result = stats_;
  result.is_away = run_ == nullptr && !closed_;
  if (rejoiner_ != nullptr) {
    absl::Status problem = rejoiner_->problem();
    if (!problem.ok()) result.last_error = std::move(problem);
  }
  return result;
}

absl::StatusOr<std::unique_ptr<StepPusher>> StepPusher::Create(Client& client,
                                                               std::string_view model,
                                                               const Manifest& manifest,
                                                               TensorSet frozen, Options options) {
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<Joining> joining,
                       Joining::Make(client, model, manifest, frozen, options));
  const TrainingTime now = TimeAt(options, options.start_step.value_or(0));
  for (const TrackConfig& track : options.tracks) {
    // A unit that it needs must be counted.
    EMA_RETURN_IF_ERROR(PlanTrack(track, {}, now).status());
  }
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<Run> run, joining->Join());
  return std::unique_ptr<StepPusher>(new StepPusher(
      std::make_unique<Impl>(std::move(joining), std::move(run), std::move(options))));
}

StepPusher::StepPusher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

StepPusher::~StepPusher() {
  if (std::uncaught_exceptions() > 0) impl_->Close(kExceptionWait);
  impl_->Close();
}

void StepPusher::WaitReleased(absl::Span<const GpuStream> streams) { impl_->WaitReleased(streams); }
void StepPusher::AfterStep(const ReadWeights& read) { impl_->AfterStep(read); }
absl::Status StepPusher::TakeError() { return impl_->TakeError(); }
absl::StatusOr<std::optional<Version>> StepPusher::WaitPushed(absl::Duration timeout) {
  return impl_->WaitPushed(timeout);
}
void StepPusher::Close() { impl_->Close(); }
StepPusher::Stats StepPusher::stats() { return impl_->stats(); }
int64_t StepPusher::step() const { return impl_->step(); }
std::optional<Version> StepPusher::version() { return impl_->version(); }

}  // namespace ema
