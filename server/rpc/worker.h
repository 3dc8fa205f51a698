// SPDX-License-Identifier: Apache-2.0
//
// A thread for work that would block a queue's thread too long.
#ifndef EMA_SERVER_RPC_WORKER_H_
#define EMA_SERVER_RPC_WORKER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/base/heartbeat.h"

namespace ema {

// Runs functions one after another, on a thread of its own. Thread-safe.
class Worker {
 public:
  // `name`: of the work, such as "saving-calls". At most `max_waiting` functions wait, which hold
  // at most `max_bytes` together with the one that runs.
  Worker(std::string name, int64_t max_waiting, int64_t max_bytes)
      : name_(std::move(name)), max_waiting_(max_waiting), max_bytes_(max_bytes) {}
  // REQUIRES: it has been stopped, or not started.
  ~Worker() = default;

  // Queues `function`, which holds `bytes` of memory. RESOURCE_EXHAUSTED, TOO_MANY_CALLS: the queue
  // is full. INVALID_ARGUMENT: `bytes` is more than `max_bytes`.
  absl::Status Run(std::function<void()> function, int64_t bytes = 0) ABSL_LOCKS_EXCLUDED(mu_);
  // `heartbeat`, which outlives this, is busy while a function runs. Once.
  void Start(Heartbeat* heartbeat);
  // Returns when all functions have run; none may be added any more. Calling it again, or before
  // Start(), does nothing.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  const std::string& name() const { return name_; }

 private:
  struct Work {
    std::function<void()> function;
    int64_t bytes = 0;
  };
  void RunAll(Heartbeat* heartbeat) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string name_;
  const int64_t max_waiting_;
  const int64_t max_bytes_;
  absl::Mutex mu_;
  std::deque<Work> waiting_ ABSL_GUARDED_BY(mu_);
  int64_t held_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_WORKER_H_
