// SPDX-License-Identifier: Apache-2.0
//
// Whether the server's threads get on with their work.
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

// One worker. A piece of work has a begin and an end, perhaps on two threads; between them, whoever
// does it may show progress.
class Heartbeat {
 public:
  // The calling thread works while this lives. Not nested, and one worker on one thread.
  class Work {
   public:
    explicit Work(Heartbeat* heartbeat);  // May be null.
    ~Work();
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

   private:
    Heartbeat* const heartbeat_;
  };

  // The calling thread's worker, if it has one, has got on. Costs nothing.
  static void Beat();

  bool is_busy() const { return (count_.load(std::memory_order_relaxed) & 1) != 0; }
  // REQUIRES: not busy.
  void Begin() { count_.fetch_add(1, std::memory_order_relaxed); }
  // REQUIRES: busy.
  void End() { count_.fetch_add(1, std::memory_order_relaxed); }

 private:
  friend class Heartbeats;
  // Odd: at work. Relaxed: whoever looks may see it late.
  std::atomic<int64_t> count_ = 0;
};

// All workers of a server. Somebody looks at them every so often. Thread-safe.
class Heartbeats {
 public:
  using Clock = std::chrono::steady_clock;
  // Without which workers what does not work.
  enum class Need { kServing, kCheckpoints, kNeither };

  // Lives as long as this.
  Heartbeat* Add(std::string name, Need need) ABSL_LOCKS_EXCLUDED(mu_);

  void Look(Clock::time_point now) ABSL_LOCKS_EXCLUDED(mu_);

  struct Age {
    std::string name;
    Need need = Need::kNeither;
    // How long it has been at one piece of work without progress, as far as Look() has seen.
    Clock::duration silent_time = Clock::duration::zero();
  };
  // Of all, in the order of Add(); the first is whoever calls Look(), once it has.
  std::vector<Age> Ages(Clock::time_point now) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Worker {
    std::string name;
    Need need = Need::kNeither;
    Heartbeat heartbeat;
    int64_t last_count = 0;
    Clock::time_point last_progress;
  };

  mutable absl::Mutex mu_;
  std::deque<Worker> workers_ ABSL_GUARDED_BY(mu_);   // Never moved; heartbeats are not guarded.
  Clock::time_point last_look_ ABSL_GUARDED_BY(mu_);  // The epoch: there was none.
};

}  // namespace ema

#endif  // EMA_SERVER_BASE_HEARTBEAT_H_
