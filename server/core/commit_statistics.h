// SPDX-License-Identifier: Apache-2.0
//
// Computes statistics by itself.
#ifndef EMA_SERVER_CORE_COMMIT_STATISTICS_H_
#define EMA_SERVER_CORE_COMMIT_STATISTICS_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/core/model.h"

namespace ema {

// Told of every commit; computes the statistics of each model's versions whose number is a multiple
// of N, in a thread of its own, one at a time, so that commits never wait. A version that comes
// while one of its model waits or is computed is passed over. Thread-safe.
class CommitStatistics {
 public:
  // REQUIRES: every_commits > 0.
  explicit CommitStatistics(int64_t every_commits);
  ~CommitStatistics();  // Waits for the one that is computed; those that wait are dropped.

  // As Model::Options::on_commit.
  void OnCommit(const std::shared_ptr<Model>& model, const Snapshot& snapshot)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until nothing is to be computed of the commits so far. For tests.
  void AwaitIdle() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // It is pinned only when its turn comes.
  struct Work {
    std::weak_ptr<Model> model;
    VersionId id;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mu_);

  const int64_t every_commits_;
  absl::Mutex mu_;  // Taken by commits: never held across a call of a model.
  std::deque<Work> work_ ABSL_GUARDED_BY(mu_);  // The first is being computed.
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_COMMIT_STATISTICS_H_
