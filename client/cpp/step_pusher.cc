// SPDX-License-Identifier: Apache-2.0
#include "ema/step_pusher.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cpp/due_tracks.h"
#include "client/cpp/joining.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"

namespace ema {
namespace {

using client_internal::DueTracks;
using client_internal::Joining;

// For a server that is away, in a thread of its own: how long each call of a try to join again may
// take, and what lies between two tries.
constexpr absl::Duration kRejoinTimeout = absl::Seconds(2);
constexpr absl::Duration kRejoinInterval = absl::Milliseconds(250);
// How long a reply is waited for after a push that failed: the ranks may have come back at
// different steps, and then it never comes. Long enough for all to meet at the next one.
constexpr absl::Duration kOutOfStepWait = absl::Seconds(1);
// How long a trainer whose tracks are all paused waits for an answer whether they still are.
constexpr absl::Duration kRefreshTimeout = absl::Seconds(1);

bool IsAway(const absl::Status& error) {
  switch (GetErrorReason(error)) {
    // What a push ends with that has found the server restarted.
    case ErrorReason::kFenced:
    case ErrorReason::kModelNotFound:
    case ErrorReason::kRunIncomplete:
      return true;
    default:
      return absl::IsUnavailable(error) || absl::IsDeadlineExceeded(error);
  }
}

TrainingTime TimeAt(const StepPusher::Options& options, int64_t step) {
  if (options.time) return options.time(step);
  TrainingTime time;
  time.Set(TimeUnit::kBatch, static_cast<double>(step));
  return time;
}

// Joins a run again, and waits until all ranks have, in a thread of its own.
class Rejoiner {
 public:
  // `joining` outlives this object. Lets `push` (may be null) and `run` go first.
  Rejoiner(const Joining* joining, std::unique_ptr<PendingPush> push, std::unique_ptr<Run> run)
      : joining_(*joining), thread_([this, push = std::move(push), run = std::move(run)]() mutable {
          push.reset();
          run.reset();
          Work();
        }) {}
  // Waits for the calls of a try that is under way.
  ~Rejoiner() {
    stop_.Notify();
    thread_.join();
  }
  Rejoiner(const Rejoiner&) = delete;
  Rejoiner& operator=(const Rejoiner&) = delete;

  // The run, once; null: not yet.
  std::unique_ptr<Run> Take() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return std::move(run_);
  }
  // Of the last try.
  absl::Status problem() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return problem_;
  }

 private:
  void Work() ABSL_LOCKS_EXCLUDED(mu_) {
    do {
      absl::StatusOr<std::unique_ptr<Run>> run = joining_.JoinAgain(kRejoinTimeout);
      absl::MutexLock lock(&mu_);
      problem_ = run.status();
      if (run.ok()) run_ = *std::move(run);
      // FENCED: the server knows this launch, and a newer one has taken over.
      if (run_ != nullptr || GetErrorReason(problem_) == ErrorReason::kFenced) return;
    } while (!stop_.WaitForNotificationWithTimeout(kRejoinInterval));
  }

  const Joining& joining_;
  absl::Notification stop_;
  mutable absl::Mutex mu_;
  std::unique_ptr<Run> run_ ABSL_GUARDED_BY(mu_);
  absl::Status problem_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // Last: it uses the others.
};

}  // namespace

class StepPusher::Impl {
 public:
  Impl(std::unique_ptr<Joining> joining, std::unique_ptr<Run> run, Options options)
      : joining_(std::move(joining)),
        options_(std::move(options)),
        run_(std::move(run)),
        version_(run_->latest()),
        wait_left_(options_.max_wait) {
    due_.Adopt(run_->plan());
    step_ = options_.resume.has_value()
                ? options_.resume->step
                : options_.start_step.value_or(version_.has_value() ? version_->step : 0);
  }

  void WaitReleased();
  void AfterStep(const ReadWeights& read);
  absl::StatusOr<std::optional<Version>> WaitPushed(absl::Duration timeout);
  void Close();
  Stats stats();
  int64_t step() const { return step_; }
  std::optional<Version> version() {
    Harvest();
    return version_;
  }

 private:
  absl::Status PushIfDue(const ReadWeights& read);
  absl::Status StartPush(const TrainingTime& now, const ReadWeights& read);
  absl::StatusOr<std::vector<uint32_t>> FrozenSums(const ReadWeights& read);
  absl::StatusOr<Weights> ReadShard(const Shard& shard, bool is_pushed,
                                    const ReadWeights& read) const;
  bool PreviousHasEnded();
  void Harvest();
  void ComeBack();
  void Drop(const std::string& problem);
  void Skip(int64_t step, const absl::Status& error, std::unique_ptr<PendingPush> lost = nullptr);
  void Note(int64_t step, const absl::Status& error);
  // Counts what the training has waited since.
  void CountWait(absl::Time start);

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
  std::optional<std::vector<uint32_t>> frozen_sums_;
  std::vector<uint32_t> pending_sums_;
  bool has_pushed_ = false;

  std::vector<std::shared_ptr<const void>> kept_;  // What the push reads.
  int64_t pending_step_ = 0;
  bool has_waited_ = false;  // For its reply.
  std::unique_ptr<PendingPush> push_;
  std::unique_ptr<Rejoiner> rejoiner_;  // Null, or at work, or has been fenced.
};

void StepPusher::Impl::WaitReleased() {
  if (push_ == nullptr) return;
  const absl::Time start = absl::Now();
  if (!push_->WaitReleased(wait_left_)) {
    Drop(absl::StrCat("its bytes had not left after ", absl::FormatDuration(absl::Now() - start)));
  }
  kept_.clear();
  CountWait(start);
}

void StepPusher::Impl::CountWait(absl::Time start) {
  const absl::Duration waited = absl::Now() - start;
  stats_.waited += waited;
  wait_left_ = std::max(wait_left_ - waited, absl::ZeroDuration());
}

void StepPusher::Impl::AfterStep(const ReadWeights& read) {
  if (closed_) return;
  const absl::Time start = absl::Now();
  ++step_;
  ComeBack();
  Harvest();
  if (const absl::Status status = PushIfDue(read); !status.ok()) Skip(step_, status);
  CountWait(start);
  wait_left_ = options_.max_wait;
}

absl::Status StepPusher::Impl::PushIfDue(const ReadWeights& read) {
  const TrainingTime now = TimeAt(options_, step_);
  EMA_ASSIGN_OR_RETURN(std::vector<DueTracks::Due> due, due_.At(now));
  if (due.empty()) return absl::OkStatus();
  const bool can_push = run_ != nullptr && PreviousHasEnded();
  // All ranks have the reply to the push before by now, and go by its plan from this step on.
  if (can_push && due_.Adopt(run_->plan())) {
    EMA_ASSIGN_OR_RETURN(due, due_.At(now));
  }
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

bool StepPusher::Impl::PreviousHasEnded() {
  // Once: if the reply has not come by then, the steps that are due meanwhile are skipped at once.
  if (push_ != nullptr && !has_waited_) {
    has_waited_ = true;
    const absl::Duration limit = in_step_ ? wait_left_ : std::min(wait_left_, kOutOfStepWait);
    const absl::Time start = absl::Now();
    if (!push_->WaitDone(limit)) {
      Note(pending_step_,
           absl::DeadlineExceededError(absl::StrCat("the push had not ended after ",
                                                    absl::FormatDuration(absl::Now() - start))));
    }
  }
  Harvest();
  return push_ == nullptr && run_ != nullptr;
}

absl::Status StepPusher::Impl::StartPush(const TrainingTime& now, const ReadWeights& read) {
  EMA_ASSIGN_OR_RETURN(std::vector<uint32_t> sums, FrozenSums(read));
  const bool frozen_changed = has_pushed_ && frozen_sums_ != sums;
  // Until its reply says that the server has these values, it may have others.
  frozen_sums_.reset();
  pending_sums_ = std::move(sums);
  has_pushed_ = true;
  const bool omits_frozen = !frozen_changed && run_->plan().may_omit_frozen;

  const RankLayout& layout = run_->layout();
  std::vector<std::span<const std::byte>> shards(layout.shards().size());
  const size_t count = shards.size() - (omits_frozen ? layout.frozen_shards().size() : 0);
  kept_.clear();
  for (size_t i = 0; i < count; ++i) {
    EMA_ASSIGN_OR_RETURN(Weights weights, ReadShard(layout.shards()[i], /*is_pushed=*/true, read));
    shards[i] = weights.bytes;
    kept_.push_back(std::move(weights.keep_alive));
  }
  EMA_ASSIGN_OR_RETURN(
      push_, run_->StartPush(step_, now, std::move(shards), options_.timeout, frozen_changed));
  pending_step_ = step_;
  has_waited_ = false;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint32_t>> StepPusher::Impl::FrozenSums(const ReadWeights& read) {
  std::vector<uint32_t> sums;
  for (const int64_t i : joining_->frozen()) {
    // All of it, not this rank's share: all ranks must find the same.
    EMA_ASSIGN_OR_RETURN(const Weights weights, ReadShard(WholeTensor(joining_->manifest(), i),
                                                          /*is_pushed=*/false, read));
    sums.push_back(Crc32c(0, weights.bytes));
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

void StepPusher::Impl::Harvest() {
  if (push_ == nullptr || !push_->done()) return;
  const std::unique_ptr<PendingPush> push = std::move(push_);
  kept_.clear();
  stats_.sent_bytes += push->stats().sent_bytes;
  absl::StatusOr<Version> version = push->Wait();
  if (!version.ok()) return Skip(pending_step_, version.status());
  version_ = *std::move(version);
  ++stats_.pushes;
  in_step_ = true;
  frozen_sums_ = std::move(pending_sums_);
  // With other ranks a plan is adopted at the next step that is due.
  if (options_.world_size == 1) due_.Adopt(run_->plan());
}

void StepPusher::Impl::ComeBack() {
  if (rejoiner_ == nullptr) return;
  run_ = rejoiner_->Take();
  if (run_ == nullptr) return;
  rejoiner_ = nullptr;
  due_.GoOn();
}

void StepPusher::Impl::Drop(const std::string& problem) {
  std::unique_ptr<PendingPush> push = std::move(push_);
  stats_.sent_bytes += push->stats().sent_bytes;
  Skip(pending_step_, absl::DeadlineExceededError(problem), std::move(push));
}

void StepPusher::Impl::Skip(int64_t step, const absl::Status& error,
                            std::unique_ptr<PendingPush> lost) {
  ++stats_.skipped;
  in_step_ = false;
  Note(step, error);
  if (closed_ || run_ == nullptr || !IsAway(error)) return;
  try {
    rejoiner_ = std::make_unique<Rejoiner>(joining_.get(), std::move(lost), std::move(run_));
  } catch (const std::system_error& no_thread) {
    stats_.last_error =
        absl::UnavailableError(absl::StrCat("no thread to join the run again: ", no_thread.what()));
  }
}

void StepPusher::Impl::Note(int64_t step, const absl::Status& error) {
  stats_.last_error = error;
  if (options_.on_skip) options_.on_skip(step, error);
}

absl::StatusOr<std::optional<Version>> StepPusher::Impl::WaitPushed(absl::Duration timeout) {
  if (timeout == absl::ZeroDuration()) timeout = options_.timeout;
  if (push_ != nullptr && !push_->WaitDone(timeout)) {
    return absl::DeadlineExceededError(absl::StrCat(
        "model \"", joining_->model(), "\": the push of step ", pending_step_, " has not ended"));
  }
  return version();
}

void StepPusher::Impl::Close() {
  if (closed_) return;
  closed_ = true;
  if (push_ != nullptr) {
    if (push_->WaitDone(options_.timeout)) {
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
  Harvest();
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
StepPusher::~StepPusher() { impl_->Close(); }

void StepPusher::WaitReleased() { impl_->WaitReleased(); }
void StepPusher::AfterStep(const ReadWeights& read) { impl_->AfterStep(read); }
absl::StatusOr<std::optional<Version>> StepPusher::WaitPushed(absl::Duration timeout) {
  return impl_->WaitPushed(timeout);
}
void StepPusher::Close() { impl_->Close(); }
StepPusher::Stats StepPusher::stats() { return impl_->stats(); }
int64_t StepPusher::step() const { return impl_->step(); }
std::optional<Version> StepPusher::version() { return impl_->version(); }

}  // namespace ema
