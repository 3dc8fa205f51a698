// SPDX-License-Identifier: Apache-2.0
//
// Detects threads that make no progress.
#ifndef EMA_SERVER_BASE_HEARTBEAT_H_
#define EMA_SERVER_BASE_HEARTBEAT_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ema {

// The progress of one worker. A piece of work begins and ends, perhaps on different threads, and
// may report progress in between.
class Heartbeat {
 public:
  // The calling thread works for `heartbeat` while this object exists. Must not be nested.
  class Work {
   public:
    explicit Work(Heartbeat* heartbeat);  // May be null.
    ~Work();
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

   private:
    Heartbeat* const heartbeat_;
  };

  // Reports progress of the calling thread's worker, if it has one. Cheap.
  static void Beat();

  bool is_busy() const { return (count_.load(std::memory_order_relaxed) & 1) != 0; }
  // REQUIRES: not busy.
  void Begin() { count_.fetch_add(1, std::memory_order_relaxed); }
  // REQUIRES: busy.
  void End() { count_.fetch_add(1, std::memory_order_relaxed); }

 private:
  friend class Heartbeats;
  // Odd while working. Relaxed: the watchdog may see a change late.
  std::atomic<int64_t> count_ = 0;
};

// All workers of a server. A watchdog calls Poll() periodically. Thread-safe.
class Heartbeats {
 public:
  using Clock = std::chrono::steady_clock;
  // What a worker is needed for: this fails if the worker is stuck.
  enum class NeededFor { kServing, kCheckpoints, kNeither };

  // The result is valid as long as this object.
  Heartbeat* Add(std::string name, NeededFor needed_for) ABSL_LOCKS_EXCLUDED(mu_);

  // Records which workers have made progress since the last call.
  void Poll(Clock::time_point now) ABSL_LOCKS_EXCLUDED(mu_);

  struct Age {
    std::string name;
    NeededFor needed_for = NeededFor::kNeither;
    // Time without progress in the current piece of work, as Poll() has seen it.
    Clock::duration silent_time = Clock::duration::zero();
  };
  // The watchdog, then all workers in the order of Add(). Empty before the first Poll().
  std::vector<Age> Ages(Clock::time_point now) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Worker {
    std::string name;
    NeededFor needed_for = NeededFor::kNeither;
    Heartbeat heartbeat;
    int64_t last_count = 0;
    Clock::time_point last_progress;
  };

  mutable absl::Mutex mu_;
  std::deque<Worker> workers_ ABSL_GUARDED_BY(mu_);  // A deque: never moved. Heartbeats are atomic.
  Clock::time_point last_poll_ ABSL_GUARDED_BY(mu_);  // The epoch: none yet.
};

}  // namespace ema

#endif  // EMA_SERVER_BASE_HEARTBEAT_H_
