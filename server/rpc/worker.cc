// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/worker.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"

namespace ema {

absl::Status Worker::Run(std::function<void()> function, int64_t bytes) {
  if (bytes > max_bytes_) {
    return BadRequest(absl::StrCat("the request takes ", bytes,
                                   " bytes of memory, expected at most ", max_bytes_));
  }
  absl::MutexLock lock(&mu_);
  const auto count = static_cast<int64_t>(waiting_.size());
  if (count >= max_waiting_ || held_bytes_ + bytes > max_bytes_) {
    constexpr absl::Duration kRetryDelay = absl::Seconds(1);  // The calls before it take long.
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyCalls,
                     absl::StrCat(count, " calls wait for ", name_, " and hold ", held_bytes_,
                                  " bytes (limits ", max_waiting_, " and ", max_bytes_, ")"),
                     kRetryDelay);
  }
  held_bytes_ += bytes;
  waiting_.push_back({std::move(function), bytes});
  return absl::OkStatus();
}

void Worker::Start(Heartbeat* heartbeat) {
  thread_ = std::thread([this, heartbeat] { RunAll(heartbeat); });
}

void Worker::Stop() {
  {
    absl::MutexLock lock(&mu_);
    is_stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void Worker::RunAll(Heartbeat* heartbeat) {
  const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return is_stopping_ || !waiting_.empty();
  };
  Work work;
  while (true) {
    {
      absl::MutexLock lock(&mu_, absl::Condition(&ready));
      held_bytes_ -= work.bytes;
      if (waiting_.empty()) return;
      work = std::move(waiting_.front());
      waiting_.pop_front();
    }
    const Heartbeat::Work at_work(heartbeat);
    work.function();
    work.function = nullptr;
  }
}

}  // namespace ema
