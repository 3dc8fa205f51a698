// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/group_part.h"

#include <algorithm>

namespace ema::client_internal {

bool SendSlots::Acquire(int64_t position, SteadyTime deadline, Interrupt* interrupt) {
  absl::MutexLock lock(&mu_);
  waiting_.insert(position);
  const auto is_next = [this, position]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return free_ > 0 && *waiting_.begin() == position;
  };
  bool has_turn = false;
  while (true) {
    const SteadyTime until = std::min(deadline, After(SteadyNow(), Interrupt::kPollInterval));
    has_turn = wait_.AwaitUntil(mu_, until, is_next);
    if (has_turn) break;
    // Not under the lock: asking may run the user's code.
    mu_.Unlock();
    const bool is_over = interrupt->fired() || SteadyNow() >= deadline;
    mu_.Lock();
    if (is_over) break;
  }
  waiting_.erase(position);
  if (has_turn) --free_;
  wait_.WakeAll();
  return has_turn;
}

void SendSlots::Release() {
  absl::MutexLock lock(&mu_);
  ++free_;
  wait_.WakeAll();
}

}  // namespace ema::client_internal
