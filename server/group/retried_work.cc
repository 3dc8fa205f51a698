// SPDX-License-Identifier: Apache-2.0
#include "server/group/retried_work.h"

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "ema/internal/catch_exceptions.h"

namespace ema::group {
namespace {

constexpr absl::Duration kFirstDelay = absl::Seconds(1);
constexpr absl::Duration kLongestDelay = absl::Seconds(30);

}  // namespace

RetriedWork::RetriedWork(std::function<absl::Status()> work)
    : work_(std::move(work)), thread_(&RetriedWork::Run, this) {}

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
    delay = status.ok() ? kFirstDelay : std::min(2 * delay, kLongestDelay);
  }
}

}  // namespace ema::group
