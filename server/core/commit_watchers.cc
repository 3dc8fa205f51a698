// SPDX-License-Identifier: Apache-2.0
#include "server/core/commit_watchers.h"

#include <utility>

namespace ema {

int64_t CommitWatchers::Watch(std::function<void()> on_commit) {
  absl::MutexLock lock(&mu_);
  watchers_[++last_watcher_] = std::move(on_commit);
  return last_watcher_;
}

void CommitWatchers::Unwatch(int64_t watcher) {
  absl::MutexLock lock(&mu_);
  watchers_.erase(watcher);
}

void CommitWatchers::CallAll() {
  absl::MutexLock lock(&mu_);
  for (const auto& [number, on_commit] : watchers_) on_commit();
}

}  // namespace ema
