// SPDX-License-Identifier: Apache-2.0
//
// Callbacks that a model calls after each commit.
#ifndef EMA_SERVER_CORE_COMMIT_WATCHERS_H_
#define EMA_SERVER_CORE_COMMIT_WATCHERS_H_

#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace ema {

// Invariant: callbacks run one at a time, and none runs after its Unwatch() has returned.
// Thread-safe.
class CommitWatchers {
 public:
  // Calls `on_commit` after every commit and rollback and when the model closes, from any thread.
  // Returns the number for Unwatch().
  int64_t Watch(std::function<void()> on_commit) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for a running callback, so a callback must not call it.
  void Unwatch(int64_t watcher) ABSL_LOCKS_EXCLUDED(mu_);
  void CallAll() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  absl::Mutex mu_;  // Held while callbacks run, so that Unwatch() can wait for them.
  absl::flat_hash_map<int64_t, std::function<void()>> watchers_ ABSL_GUARDED_BY(mu_);
  int64_t last_watcher_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_COMMIT_WATCHERS_H_
