// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/await_push.h"

#include <algorithm>

namespace ema::client_internal {
namespace {

// How long nothing may move, no byte and no reply, before the server is asked whether it is there,
// and how long it may take to answer: one that hangs keeps its streams open.
constexpr absl::Duration kStillGrace = absl::Seconds(4);
constexpr absl::Duration kAnswerTimeout = absl::Seconds(1);

}  // namespace

bool AwaitWhileReachable(absl::Duration max_wait, const PushHealth& health, Interrupt* interrupt,
                         absl::FunctionRef<bool(absl::Duration)> await) {
  const SteadyTime wait_end = After(SteadyNow(), max_wait);
  int64_t before = health.progress_count();
  SteadyTime still_since = SteadyNow();
  do {
    if (await(std::min(Until(wait_end), Interrupt::kPollInterval))) return true;
    const SteadyTime now = SteadyNow();
    const bool is_still = before == health.progress_count();
    if (is_still && Since(still_since) < kStillGrace) continue;
    if (is_still && now < wait_end &&
        !health.server_responds(std::min(wait_end, After(now, kAnswerTimeout)), interrupt)) {
      return await(absl::ZeroDuration());
    }
    before = health.progress_count();
    still_since = SteadyNow();
  } while (SteadyNow() < wait_end && !health.is_cut_off() && !interrupt->fired());
  return false;
}

}  // namespace ema::client_internal
