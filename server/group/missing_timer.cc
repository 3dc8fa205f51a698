// SPDX-License-Identifier: Apache-2.0
#include "server/group/missing_timer.h"

namespace ema::group {
namespace {

// A running server reaches the registry several times in this time.
constexpr std::chrono::seconds kLongestGap(10);

}  // namespace

std::map<MissingTimer::Process, absl::Duration> MissingTimer::Update(
    const std::set<Process>& missing, SteadyTime last_contact, SteadyTime now) {
  const bool has_gap = now > last_update_ + kLongestGap || now > last_contact + kLongestGap;
  last_update_ = now;
  std::map<Process, SteadyTime> missing_since;
  std::map<Process, absl::Duration> lost;
  for (const Process& process : missing) {
    const auto known = missing_since_.find(process);
    const bool is_new = has_gap || known == missing_since_.end();
    const SteadyTime since = is_new ? now : known->second;
    missing_since.emplace(process, since);
    const absl::Duration age = absl::FromChrono(now - since);
    if (age >= limit_) lost.emplace(process, age);
  }
  missing_since_ = std::move(missing_since);
  return lost;
}

}  // namespace ema::group
