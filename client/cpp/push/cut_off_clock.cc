// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/cut_off_clock.h"

#include <algorithm>
#include <utility>

namespace ema::client_internal {

void CutOffClock::SetCutOff(bool is_cut_off) {
  absl::MutexLock lock(&mu_);
  since_ = is_cut_off ? std::min(since_, SteadyNow()) : SteadyTime::max();
}

absl::Duration CutOffClock::cut_off_time() const {
  absl::MutexLock lock(&mu_);
  return std::max(Since(since_), absl::ZeroDuration());
}

CutOffClock::Pause::Pause(CutOffClock& clock) : clock_(clock) {
  absl::MutexLock lock(&clock_.mu_);
  since_ = std::exchange(clock_.since_, SteadyTime::max());
}

CutOffClock::Pause::~Pause() {
  absl::MutexLock lock(&clock_.mu_);
  if (since_ != SteadyTime::max()) clock_.since_ = since_ + (SteadyNow() - start_);
}

}  // namespace ema::client_internal
