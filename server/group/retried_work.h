// SPDX-License-Identifier: Apache-2.0
//
// A thread for work that follows the registry.
#ifndef EMA_SERVER_GROUP_RETRIED_WORK_H_
#define EMA_SERVER_GROUP_RETRIED_WORK_H_

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema::group {

// Runs a function on a thread of its own after each Wake(), and again after an error, with a delay
// that grows from 1 s to a maximum. Thread-safe.
class RetriedWork {
 public:
  // `work` may block. It is called by one thread at a time.
  explicit RetriedWork(std::function<absl::Status()> work,
                       absl::Duration longest_delay = absl::Seconds(30));
  ~RetriedWork() { Stop(); }

  // Runs the work soon. If it is running, it runs once more after that.
  void Wake() ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for the work that is running; it does not run again. Called by one thread.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);

  const std::function<absl::Status()> work_;
  const absl::Duration longest_delay_;
  absl::Mutex mu_;
  SteadyWait wait_;  // Woken when one of the next two has changed.
  bool is_due_ ABSL_GUARDED_BY(mu_) = false;
  bool is_stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_RETRIED_WORK_H_
