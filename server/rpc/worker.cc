// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/worker.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"

namespace ema {

absl::Status Worker::Run(std::function<void()> function) {
  absl::MutexLock lock(&mu_);
  if (static_cast<int64_t>(waiting_.size()) >= max_waiting_) {
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyCalls,
                     absl::StrCat("the server has ", max_waiting_, " calls waiting (", name_,
                                  "), as many as it may have"),
                     absl::Seconds(1));  // What they wait for takes its time.
  }
  waiting_.push_back(std::move(function));
  return absl::OkStatus();
}

void Worker::Start(Heartbeat* heartbeat) {
  thread_ = std::thread([this, heartbeat] { Work(heartbeat); });
}

void Worker::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void Worker::Work(Heartbeat* heartbeat) {
  const auto ready = [this]()
                         ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stopping_ || !waiting_.empty(); };
  while (true) {
    std::function<void()> function;
    {
      absl::MutexLock lock(&mu_, absl::Condition(&ready));
      if (waiting_.empty()) return;
      function = std::move(waiting_.front());
      waiting_.pop_front();
    }
    const Heartbeat::Work at_work(heartbeat);
    function();
  }
}

}  // namespace ema
