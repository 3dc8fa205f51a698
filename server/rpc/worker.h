// SPDX-License-Identifier: Apache-2.0
//
// A thread for what would keep a queue's thread too long.
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
  // `name`: of what it runs, such as "saving-calls". At most `max_waiting` functions wait.
  Worker(std::string name, int64_t max_waiting)
      : name_(std::move(name)), max_waiting_(max_waiting) {}
  // REQUIRES: it has been stopped, or not started.
  ~Worker() = default;

  // Runs `function` later. RESOURCE_EXHAUSTED, TOO_MANY_CALLS: it will not, for too many wait.
  absl::Status Run(std::function<void()> function) ABSL_LOCKS_EXCLUDED(mu_);
  // `heartbeat`, which outlives this, is busy while a function runs. Once.
  void Start(Heartbeat* heartbeat);
  // Returns when all functions have run. Nothing may be given to it any more. Again, or before
  // Start(): does nothing.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  const std::string& name() const { return name_; }

 private:
  void Work(Heartbeat* heartbeat) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string name_;
  const int64_t max_waiting_;
  absl::Mutex mu_;
  std::deque<std::function<void()>> waiting_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_WORKER_H_
