// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/save_queue.h"

#include <utility>

namespace ema {

SaveQueue::SaveQueue(DataDirectory& data, absl::Duration disk_interval, Heartbeat* heartbeat)
    : data_(data), disk_interval_(disk_interval), heartbeat_(heartbeat) {
  UpdateFreeBytes();
  thread_ = std::thread([this] { Run(); });
}

bool SaveQueue::Push(std::function<void()> save) {
  absl::MutexLock lock(&mu_);
  if (is_stopping_) return false;
  saves_.push_back(std::move(save));
  wait_.WakeAll();
  return true;
}

void SaveQueue::Run() {
  const auto is_ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return is_stopping_ || !saves_.empty();
  };
  while (true) {
    std::function<void()> save;
    {
      absl::MutexLock lock(&mu_);
      if (wait_.AwaitUntil(mu_, After(SteadyNow(), disk_interval_), is_ready)) {
        if (saves_.empty()) return;
        save = std::move(saves_.front());
      }
    }
    const Heartbeat::Work at_work(heartbeat_);
    if (save != nullptr) save();
    UpdateFreeBytes();
    if (save == nullptr) {
      if (!data_.health().ok()) data_.CheckWritable().IgnoreError();
      continue;
    }
    save = nullptr;  // Releases the model before AwaitIdle() returns.
    absl::MutexLock lock(&mu_);
    saves_.pop_front();
  }
}

void SaveQueue::AwaitIdle() {
  const auto is_idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return saves_.empty(); };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&is_idle));
}

bool SaveQueue::is_stopping() const {
  absl::MutexLock lock(&mu_);
  return is_stopping_;
}

void SaveQueue::RequestStop() {
  absl::MutexLock lock(&mu_);
  is_stopping_ = true;
  wait_.WakeAll();
}

void SaveQueue::Stop() {
  RequestStop();
  if (thread_.joinable()) thread_.join();
}

}  // namespace ema
