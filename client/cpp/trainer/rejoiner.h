// SPDX-License-Identifier: Apache-2.0
//
// A run whose server is away, and the thread that joins it again.
#ifndef EMA_CLIENT_CPP_TRAINER_REJOINER_H_
#define EMA_CLIENT_CPP_TRAINER_REJOINER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/trainer/joining.h"
#include "ema/client.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// Lets a push (may be null) and its run go, then joins again until all ranks have, and asks what
// has become of a step whose push has ended so. For the thread that trains.
class Rejoiner {
 public:
  struct Joined {
    std::unique_ptr<Run> run;
    // What the lost step has become after all: only the reply was lost. Absent: nothing.
    std::optional<Version> lost_version;
  };

  // `joining` outlives this object.
  Rejoiner(const Joining* joining, int64_t lost_step, std::unique_ptr<PendingPush> push,
           std::unique_ptr<Run> run);
  // Waits for the calls of a try that is under way.
  ~Rejoiner();
  Rejoiner(const Rejoiner&) = delete;
  Rejoiner& operator=(const Rejoiner&) = delete;

  // Starts the thread; where it runs already, it does nothing. False: the system has no thread for
  // it now, as problem() says.
  bool Start() ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until there is a run to take, or will be none for now, or it is `until`; meanwhile it
  // starts the thread as soon as the system has one.
  void Await(SteadyTime until) ABSL_LOCKS_EXCLUDED(mu_);
  // The run, once; absent: not yet.
  std::optional<Joined> Take() ABSL_LOCKS_EXCLUDED(mu_);
  // Of the last try. ABORTED, FENCED: a newer run pushes, so there will be no other. CANCELLED:
  // Client::Options::is_interrupted.
  absl::Status problem() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Work() ABSL_LOCKS_EXCLUDED(mu_);
  // True: it is to end; waits for that.
  bool AwaitStop(absl::Duration max_wait) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Joined> Join() const;
  bool IsSettledLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const Joining& joining_;
  const int64_t lost_step_;
  const int64_t lost_run_epoch_;
  // The thread's, once it runs.
  std::unique_ptr<PendingPush> lost_push_;
  std::unique_ptr<Run> lost_run_;
  mutable absl::Mutex mu_;
  SteadyWait wait_;  // Woken when one of these changes.
  bool is_stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<Joined> joined_ ABSL_GUARDED_BY(mu_);
  absl::Status problem_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRAINER_REJOINER_H_
