// SPDX-License-Identifier: Apache-2.0
#include "server/core/commit_statistics.h"

#include <algorithm>
#include <utility>

#include "ema/internal/catch_exceptions.h"

namespace ema {

CommitStatistics::CommitStatistics(int64_t every_commits, Compute compute)
    : every_commits_(every_commits), compute_(std::move(compute)), thread_([this] { Run(); }) {}

CommitStatistics::~CommitStatistics() {
  {
    absl::MutexLock lock(&mu_);
    is_stopping_ = true;
  }
  thread_.join();
}

void CommitStatistics::OnCommit(const std::shared_ptr<Model>& model, const Snapshot& snapshot) {
  if (snapshot.record.number % every_commits_ != 0) return;
  absl::MutexLock lock(&mu_);
  const bool is_busy = std::any_of(work_.begin(), work_.end(), [&](const Work& work) {
    return !work.model.owner_before(model) && !model.owner_before(work.model);
  });
  if (!is_busy) work_.push_back({model, snapshot.record.id()});
}

void CommitStatistics::AwaitIdle() {
  absl::MutexLock lock(&mu_);
  const auto is_idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return work_.empty(); };
  mu_.Await(absl::Condition(&is_idle));
}

void CommitStatistics::Run() {
  const auto has_news = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return is_stopping_ || !work_.empty();
  };
  while (true) {
    Work work;
    {
      absl::MutexLock lock(&mu_, absl::Condition(&has_news));
      if (is_stopping_) return;
      work = work_.front();
    }
    if (const std::shared_ptr<Model> model = work.model.lock()) {
      // The version may have been freed, readers may hold the most versions, or memory may be
      // short: later versions follow. A failed device is reported by its health.
      CatchExceptions([&] { return compute_(*model, work.id); }).IgnoreError();
    }
    absl::MutexLock lock(&mu_);
    work_.pop_front();
  }
}

}  // namespace ema
