// SPDX-License-Identifier: Apache-2.0
//
// The thread that rejoins a run whose server is unreachable.
#ifndef EMA_CLIENT_CPP_TRAINER_REJOINER_H_
#define EMA_CLIENT_CPP_TRAINER_REJOINER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/trainer/run_joiner.h"
#include "client/cpp/trainer/trainer_log.h"
#include "client/cpp/transport/retry.h"
#include "ema/client.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// Abandons a push (may be null) and leaves its run, then opens the run again, repeatedly until all
// ranks have joined, and queries whether the lost step was committed. For the training thread.
class Rejoiner : public std::enable_shared_from_this<Rejoiner> {
 public:
  struct RejoinedRun {
    std::unique_ptr<Run> run;
    // The version of the lost step, if only its reply was lost. Absent: the step was not committed.
    std::optional<Version> lost_version;
  };

  // The thread calls `log`. `lost_step`: of `push`, or the last skipped one.
  Rejoiner(std::shared_ptr<const RunJoiner> joiner, std::shared_ptr<const TrainerLog> log,
           int64_t lost_step, std::shared_ptr<PendingPush> push, std::shared_ptr<Run> run);
  // For a run that was never open, because the server was unreachable when the training started.
  Rejoiner(std::shared_ptr<const RunJoiner> joiner, std::shared_ptr<const TrainerLog> log);
  // REQUIRES: Stop() was called if Start() was.
  ~Rejoiner();
  Rejoiner(const Rejoiner&) = delete;
  Rejoiner& operator=(const Rejoiner&) = delete;

  // Starts the thread, unless it is running. False: the system has no thread for it; problem() has
  // the error.
  bool Start() ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until Take() has a run, no other try follows, or `until` has passed. If the thread could
  // not be started, keeps trying to start it.
  void Await(SteadyTime until) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the run, once; absent: it has not been rejoined yet.
  std::optional<RejoinedRun> Take() ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the tries. Waits until `until` for the running call (each takes at most two seconds, but
  // RunJoiner::OpenTimeout() if it resumes from the server's disk); if that takes longer, the
  // thread ends by itself later and leaves its run.
  void Stop(SteadyTime until) ABSL_LOCKS_EXCLUDED(mu_);
  // The error of the last try. ABORTED, FENCED: a newer run pushes, so no other try follows.
  // CANCELLED: Client::Options::is_interrupted.
  absl::Status problem() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Work() ABSL_LOCKS_EXCLUDED(mu_);
  // Tries once. Returns the pause before the next try; nullopt: no other try follows.
  std::optional<absl::Duration> Try(Backoff& backoff) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits at most `max_wait` until the thread must end. True: it must.
  bool AwaitStop(absl::Duration max_wait) ABSL_LOCKS_EXCLUDED(mu_);
  // Sets `is_reachable` when the server has opened the run.
  absl::StatusOr<RejoinedRun> Join(bool& is_reachable);
  void LogProblem(const absl::Status& problem, const absl::Status& previous);
  bool IsSettledLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const std::shared_ptr<const RunJoiner> joiner_;
  const std::shared_ptr<const TrainerLog> log_;
  const std::optional<int64_t> lost_step_;  // Absent: the run was never open.
  const absl::Time started_ = absl::Now();
  // These belong to the thread once it runs.
  int64_t lost_run_epoch_ = 0;
  std::shared_ptr<PendingPush> lost_push_;
  std::shared_ptr<Run> lost_run_;
  bool has_warned_ = false;
  mutable absl::Mutex mu_;
  SteadyWait wait_;  // Woken when one of the guarded members changes.
  bool is_stopped_ ABSL_GUARDED_BY(mu_) = false;
  bool is_done_ ABSL_GUARDED_BY(mu_) = true;  // The thread does not run, or is about to end.
  std::optional<RejoinedRun> joined_ ABSL_GUARDED_BY(mu_);
  absl::Status problem_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRAINER_REJOINER_H_
