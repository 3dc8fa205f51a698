// SPDX-License-Identifier: Apache-2.0
//
// Lets a run have one push at a time.
#ifndef EMA_CLIENT_CPP_PUSH_CURRENT_PUSH_H_
#define EMA_CLIENT_CPP_PUSH_CURRENT_PUSH_H_

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/push/opened_run.h"
#include "client/cpp/push/running_push.h"

namespace ema::client_internal {

// The last push of a run. Thread-safe.
class CurrentPush {
 public:
  // Starts `push` of `run`. FAILED_PRECONDITION, MODEL_BUSY: the previous push has not ended.
  // UNAVAILABLE: the system has no thread for it.
  absl::Status Start(const OpenedRun& run, const std::shared_ptr<RunningPush>& push)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Abandons the push, if one is running.
  void End() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  absl::Mutex mu_;  // Never acquired while a mutex of a push is held.
  std::weak_ptr<RunningPush> push_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_CURRENT_PUSH_H_
