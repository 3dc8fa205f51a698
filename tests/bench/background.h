// SPDX-License-Identifier: Apache-2.0
//
// What goes on beside a measurement.
#ifndef EMA_TESTS_BENCH_BACKGROUND_H_
#define EMA_TESTS_BENCH_BACKGROUND_H_

#include <cstddef>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ema::bench {

// Threads that do the same again and again while they are told to.
class Background {
 public:
  // `make_worker` is called in each thread, and gives what it does.
  Background(size_t thread_count, const std::function<std::function<void()>()>& make_worker) {
    for (size_t i = 0; i < thread_count; ++i) {
      threads_.emplace_back([this, make_worker] { Run(make_worker()); });
    }
  }
  ~Background() {
    absl::MutexLock lock(&mu_);
    state_ = State::kOver;
  }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Returns when as many calls have begun as there are threads.
  void Start() {
    absl::MutexLock lock(&mu_);
    state_ = State::kWorking;
    begun_ = 0;
    const auto is_busy = [this]()
                             ABSL_SHARED_LOCKS_REQUIRED(mu_) { return begun_ >= threads_.size(); };
    mu_.Await(absl::Condition(&is_busy));
  }
  // Returns when none of them runs any more.
  void Pause() {
    absl::MutexLock lock(&mu_);
    state_ = State::kPaused;
    const auto is_quiet = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return active_ == 0; };
    mu_.Await(absl::Condition(&is_quiet));
  }

 private:
  enum class State { kPaused, kWorking, kOver };

  void Run(const std::function<void()>& work) {
    const auto is_told = [this]()
                             ABSL_SHARED_LOCKS_REQUIRED(mu_) { return state_ != State::kPaused; };
    while (true) {
      {
        absl::MutexLock lock(&mu_, absl::Condition(&is_told));
        if (state_ == State::kOver) return;
        ++active_;
        ++begun_;
      }
      work();
      absl::MutexLock lock(&mu_);
      --active_;
    }
  }

  absl::Mutex mu_;
  State state_ ABSL_GUARDED_BY(mu_) = State::kPaused;
  int active_ ABSL_GUARDED_BY(mu_) = 0;
  size_t begun_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::jthread> threads_;  // Destroyed, and so joined, first.
};

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_BACKGROUND_H_
