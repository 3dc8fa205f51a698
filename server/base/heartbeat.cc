// SPDX-License-Identifier: Apache-2.0
#include "server/base/heartbeat.h"

#include <utility>

namespace ema {
namespace {

thread_local std::atomic<int64_t>* current_count = nullptr;

}  // namespace

Heartbeat::Work::Work(Heartbeat* heartbeat) : heartbeat_(heartbeat) {
  if (heartbeat_ == nullptr) return;
  heartbeat_->Begin();
  current_count = &heartbeat_->count_;
}

Heartbeat::Work::~Work() {
  if (heartbeat_ == nullptr) return;
  current_count = nullptr;
  heartbeat_->End();
}

void Heartbeat::Beat() {
  if (current_count != nullptr) current_count->fetch_add(2, std::memory_order_relaxed);
}

Heartbeat* Heartbeats::Add(std::string name, NeededFor needed_for) {
  absl::MutexLock lock(&mu_);
  Worker& worker = workers_.emplace_back();
  worker.name = std::move(name);
  worker.needed_for = needed_for;
  return &worker.heartbeat;
}

void Heartbeats::Poll(Clock::time_point now) {
  absl::MutexLock lock(&mu_);
  last_poll_ = now;
  for (Worker& worker : workers_) {
    const int64_t count = worker.heartbeat.count_.load(std::memory_order_relaxed);
    if (count == worker.last_count && count % 2 != 0) continue;
    worker.last_count = count;
    worker.last_progress = now;
  }
}

std::vector<Heartbeats::Age> Heartbeats::Ages(Clock::time_point now) const {
  absl::MutexLock lock(&mu_);
  std::vector<Age> ages;
  if (last_poll_ == Clock::time_point()) return ages;
  ages.push_back({"watchdog", NeededFor::kServing, now - last_poll_});
  for (const Worker& worker : workers_) {
    const int64_t count = worker.heartbeat.count_.load(std::memory_order_relaxed);
    const bool is_silent = count == worker.last_count && count % 2 != 0;
    ages.push_back({worker.name, worker.needed_for,
                    is_silent ? now - worker.last_progress : Clock::duration::zero()});
  }
  return ages;
}

}  // namespace ema
