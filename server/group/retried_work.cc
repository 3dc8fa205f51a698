// SPDX-License-Identifier: Apache-2.0
#include "server/group/retried_work.h"

#include <algorithm>
#include <utility>

#include "ema/internal/catch_exceptions.h"

namespace ema::group {
namespace {

constexpr absl::Duration kFirstDelay = absl::Seconds(1);

}  // namespace

RetriedWork::RetriedWork(std::function<absl::Status()> work, absl::Duration longest_delay)
    : work_(std::move(work)), longest_delay_(longest_delay), thread_(&RetriedWork::Run, this) {}

void RetriedWork::Wake() {
  absl::MutexLock lock(&mu_);
  is_due_ = true;
  wait_.WakeAll();
}

void RetriedWork::Stop() {
  if (!thread_.joinable()) return;
  {
    absl::MutexLock lock(&mu_);
    is_stopped_ = true;
    wait_.WakeAll();
  }
  thread_.join();
}

void RetriedWork::Run() {
  absl::Duration delay = kFirstDelay;
  SteadyTime retry_time = SteadyTime::max();
  const auto is_awake = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_due_ || is_stopped_; };
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      wait_.AwaitUntil(mu_, retry_time, is_awake);
      if (is_stopped_) return;
      is_due_ = false;
    }
    const absl::Status status = CatchExceptions(work_);
    retry_time = status.ok() ? SteadyTime::max() : After(SteadyNow(), delay);
    delay = status.ok() ? kFirstDelay : std::min(2 * delay, longest_delay_);
  }
}

}  // namespace ema::group
