// SPDX-License-Identifier: Apache-2.0
//
// The trainer's side of the protocol: decides which steps are pushed, and handles failed pushes.
// StepPusher (C++) and attach() (Python) both use it.
#ifndef EMA_CLIENT_CPP_TRAINER_PUSH_ENGINE_H_
#define EMA_CLIENT_CPP_TRAINER_PUSH_ENGINE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/push/due_tracks.h"
#include "client/cpp/trainer/outage_timer.h"
#include "client/cpp/trainer/rejoiner.h"
#include "client/cpp/trainer/run_joiner.h"
#include "client/cpp/trainer/trainer_log.h"
#include "ema/client.h"
#include "ema/step_pusher.h"
#include "ema/time.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// Some of a rank's shards, in the order of its layout.
struct StepWeights {
  std::vector<std::span<const std::byte>> bytes;
  std::vector<int> devices;      // One for each shard; see GpuWeights.
  std::vector<Strides> strides;  // One for each shard; see PushOptions.
  std::vector<GpuStream> streams;
  // They keep the memory valid. Any thread may destroy them.
  std::vector<std::shared_ptr<const void>> owners;

  // Adds the shards that follow in the layout.
  void Append(StepWeights more);
};

// Provides the weights of a step that is due. Called only by the training thread.
class TrainingStep {
 public:
  virtual ~TrainingStep() = default;

  // Whether a frozen tensor has changed since the last call, possibly for an earlier step. Called
  // once, before Read().
  virtual absl::StatusOr<bool> FrozenChanged() = 0;
  // The weights of the shards [begin, end) of the run's layout. They must not change until
  // PushEngine::WaitReleased() has returned.
  virtual absl::StatusOr<StepWeights> Read(const Run& run, size_t begin, size_t end) = 0;
};

// One rank of a trainer. Calls must not overlap, and all but Poll(true) come from the training
// thread; progress() and step() may be called at any time by any thread.
//
// A signal handler of the training thread may call the engine again, during a wait or a call of
// TrainingStep: the outer call then continues from the state that the inner one has left.
//
// A push reads the weights in place from AfterStep() to WaitReleased(). A step that cannot be
// pushed is skipped and counted, or pushed again (OnError::kWait). While the server is unreachable
// a thread tries to rejoin the run.
class PushEngine {
 public:
  using OnError = StepPusher::OnError;
  using Stats = StepPusher::Stats;

  struct Options {
    bool is_only_rank = true;
    // These four: see StepPusher::Options.
    absl::Duration max_wait = absl::Seconds(30);
    absl::Duration timeout = absl::Seconds(60);
    OnError on_error = OnError::kSkip;
    absl::Duration max_outage = absl::Minutes(2);
    // See PushOptions::check. A push that fails this check sets the error of TakeError(), whatever
    // `on_error` is.
    bool check = false;
    // See StepPusher::Options::on_skip.
    std::function<void(int64_t step, const absl::Status& error)> on_skip;
    // May be null. Called by the training thread and by the one that rejoins.
    LogFunction log;
    // Polled by the training thread in waits; true ends the wait. May run signal handlers. May be
    // null.
    std::function<bool()> is_interrupted;
  };

  // `step`: steps that the trainer has done before. All ranks have joined `run`. Null: the server
  // was unreachable, and a thread opens the run by RunJoiner::Open() instead of Reopen().
  PushEngine(Options options, std::shared_ptr<const RunJoiner> joiner, std::unique_ptr<Run> run,
             int64_t step);
  ~PushEngine() { Leave(); }
  PushEngine(const PushEngine&) = delete;
  PushEngine& operator=(const PushEngine&) = delete;

  // See StepPusher::WaitReleased().
  void WaitReleased(absl::Span<const GpuStream> streams);
  // The training has done `step` steps, the last one at `now`. Pushes it if an update is due. An
  // error in `now`: the step is skipped.
  void AfterStep(int64_t step, const absl::StatusOr<TrainingTime>& now,
                 std::shared_ptr<TrainingStep> training_step);
  // True if AfterStep() at `now`, WaitReleased() and TakeError() would neither wait nor read
  // weights.
  bool IsIdleAt(const absl::StatusOr<TrainingTime>& now) const;
  bool is_idle() const { return push_ == nullptr && !retry_.has_value() && rejoiner_ == nullptr; }
  // Abandons the pending push, because the weights that it reads in place were written. `names`:
  // the written tensors; empty if unknown. `raises`: TakeError() returns the error. `hint` is
  // appended to the warning.
  void AbandonWrittenPush(std::string_view names, std::string_view hint, bool raises);
  // See StepPusher::TakeError().
  absl::Status TakeError();
  // See StepPusher::WaitPushed().
  absl::Status WaitPushed(absl::Duration timeout);
  // Waits for the last push, at most `timeout`. Later steps are neither pushed nor counted.
  void EndPushes(absl::Duration timeout);
  // Leaves the run, and abandons a push that has not ended. Waits at most `timeout` for a running
  // call that rejoins the run; a longer one ends by itself.
  void Leave(absl::Duration timeout = absl::InfiniteDuration());

  // Takes the result of the pending push, if it has ended, and adopts a rejoined run.
  // `leaves_failure`: leaves a failed push to the training thread, since handling it may take a
  // second.
  void Poll(bool leaves_failure = false);
  bool is_pending_push_done() const { return push_ == nullptr || push_->done(); }

  int64_t rank() const { return rank_; }
  // The epoch of the run; while the server is unreachable, of the last run. 0: there was none.
  int64_t run_epoch() const { return run_epoch_; }
  bool is_disconnected() const { return run_ == nullptr; }  // No run to push to.
  // A newer run pushes, or the model was rolled back: this engine will never push again.
  bool is_fenced() const;
  // The error that explains why nothing can be pushed now.
  absl::Status DisconnectedError() const;
  // The error of the last try to rejoin; OK: there was none.
  absl::Status RejoinError() const;
  bool is_closed() const { return is_closed_; }  // EndPushes() or Leave() was called.
  const std::vector<RunPlan::Entry>& tracks() const { return due_.tracks(); }

  // Any thread may call these. A push that has just ended may not be counted yet.
  int64_t step() const { return step_.load(std::memory_order_relaxed); }
  struct Progress {
    Stats stats;
    std::optional<Version> version;  // See StepPusher::version().
  };
  Progress progress() const ABSL_LOCKS_EXCLUDED(progress_mu_);

 private:
  // The weights of a step, kept for a retry as long as they do not change.
  struct Push {
    int64_t step = 0;
    TrainingTime time;
    bool frozen_changed = false;
    StepWeights weights;  // Without the layout's last shards, if these are frozen and omitted.
    std::shared_ptr<TrainingStep> training_step;
  };

  bool waits() const { return options_.on_error == OnError::kWait; }
  bool IsInterrupted() const { return options_.is_interrupted && options_.is_interrupted(); }
  void UpdateProgress(absl::FunctionRef<void(Progress&)> update) ABSL_LOCKS_EXCLUDED(progress_mu_);
  void Log(LogLevel level, std::string_view text) const { log_->Write(level, text); }

  absl::Status PushIfDue(const TrainingTime& now,
                         const std::shared_ptr<TrainingStep>& training_step);
  // The tracks that a push at `now` would update.
  absl::StatusOr<std::vector<DueTracks::Due>> DueAt(const TrainingTime& now) const;
  absl::Status ReadAndStart(const TrainingTime& now, std::shared_ptr<TrainingStep> training_step);
  absl::Status Start(Push push);
  // Whether there is a run to push to; with kWait, waits for one.
  bool AwaitRun();
  // Whether the previous push has ended and the run is still there; waits for the reply once.
  bool AwaitPreviousPush();
  // Takes the result of the pending push if it has ended. `because`: replaces the push's own error.
  void CollectResult(bool leaves_failure = false, const absl::Status& because = absl::OkStatus());
  // Adopts the rejoined run; waits for it at most until `until`.
  void AdoptRejoinedRun(SteadyTime until);
  // Starts to join a run that was never open.
  void StartWithoutRun();
  // Counts the updates that are missing on the server of the rejoined run.
  void CountLostUpdates();
  // Warns of the counted lost updates, once the next step to be pushed is known.
  void WarnOfLostUpdates(int64_t next_step);
  void CountPushed(Version version);
  // With kWait: waits until the pushed step is a version, and retries it after an outage, while the
  // weights do not change. After an outage that lasted too long it does nothing until a push has
  // succeeded, since the ranks may be at different steps.
  void AwaitCommit(SteadyTime until);
  void PushAgain(SteadyTime until);
  void AbandonRetry();
  // Reports to the server that this rank will not push the step, so that no other rank waits for
  // it.
  void ReportAbandonedStep(int64_t step, const absl::Status& why) const;
  // Ends `push`, if it is still the pending one. REQUIRES: it reads no weights any more.
  void AbandonPush(const std::shared_ptr<PendingPush>& push, const std::string& problem);
  std::shared_ptr<PendingPush> TakePush();
  // Counts a step that was not pushed, or keeps it for a retry; starts to rejoin the run if the
  // error means an outage.
  void Skip(int64_t step, const absl::Status& error, std::shared_ptr<PendingPush> lost = nullptr);
  void ReportSkip(int64_t step, const absl::Status& error);
  void CountWait(SteadyTime start);

  const Options options_;
  const std::string model_;
  std::shared_ptr<const RunJoiner> joiner_;  // Null after Leave().
  const int64_t rank_;
  const std::shared_ptr<TrainerLog> log_;
  DueTracks due_;
  bool is_closed_ = false;
  std::atomic<int64_t> step_;
  // Shared with calls that a signal handler has interrupted; so are `push_` and `rejoiner_`.
  std::shared_ptr<Run> run_;  // Null while the server is unreachable, and after Leave().
  int64_t run_epoch_;         // 0: no run was open yet.
  // The part of max_wait that is left for waits until the end of the next AfterStep().
  absl::Duration wait_left_;
  // False: the last push failed, so the ranks may push at different steps.
  bool ranks_agree_on_step_ = true;

  // Frozen tensors have changed since the last successful push, or a push has failed since then:
  // after a failure all ranks push them, so that they agree.
  bool frozen_changed_ = false;

  std::vector<std::shared_ptr<const void>> owners_;  // Keep the memory that the push reads.
  bool reads_gpu_ = false;
  int64_t pending_step_ = 0;
  bool has_waited_ = false;  // The training thread has waited for the pending push's reply once.
  std::shared_ptr<PendingPush> push_;
  // Not null while the server is unreachable, and after this run was fenced.
  std::shared_ptr<Rejoiner> rejoiner_;
  // Updates that the server has lost, until WarnOfLostUpdates() reports them.
  struct LostUpdates {
    std::optional<int64_t> from_step;  // Absent: the server has forgotten the model.
    int64_t to_step = 0;
    int64_t count = 0;
  };
  std::optional<LostUpdates> lost_updates_;
  // Number of steps skipped before the current outage. Absent: there is no outage.
  std::optional<int64_t> skipped_before_;

  absl::Status error_;  // For TakeError().
  // For kWait.
  OutageTimer outage_;
  std::optional<Push> pushed_;  // The step of `push_`, while its weights do not change.
  std::optional<Push> retry_;   // A failed step that will be pushed again.
  absl::Status retry_error_;

  mutable absl::Mutex progress_mu_;
  Progress progress_ ABSL_GUARDED_BY(progress_mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRAINER_PUSH_ENGINE_H_
