// SPDX-License-Identifier: Apache-2.0
//
// Computes statistics of new versions in the background.
#ifndef EMA_SERVER_CORE_COMMIT_STATISTICS_H_
#define EMA_SERVER_CORE_COMMIT_STATISTICS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/core/model.h"

namespace ema {

// Computes the statistics of each model's versions whose number is a multiple of N, in a thread of
// its own, one at a time, so that commits never wait. Skips a version if another one of its model
// is queued or being computed. Thread-safe.
class CommitStatistics {
 public:
  // Computes the statistics of all tracks of a version, which its record then keeps.
  using Compute = std::function<absl::Status(Model&, const VersionId&)>;

  // REQUIRES: every_commits > 0.
  CommitStatistics(int64_t every_commits, Compute compute);
  ~CommitStatistics();  // Waits for the running computation, drops queued ones.

  // For Model::Options::on_commit.
  void OnCommit(const std::shared_ptr<Model>& model, const Snapshot& snapshot)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until nothing is queued or being computed. For tests.
  void AwaitIdle() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Pinned only when its computation begins.
  struct Work {
    std::weak_ptr<Model> model;
    VersionId id;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mu_);

  const int64_t every_commits_;
  const Compute compute_;
  absl::Mutex mu_;  // Taken by commits: never held across a call of a model.
  std::deque<Work> work_ ABSL_GUARDED_BY(mu_);  // The first is being computed.
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_COMMIT_STATISTICS_H_
