// SPDX-License-Identifier: Apache-2.0
//
// How long processes have been missing in the registry.
#ifndef EMA_SERVER_GROUP_MISSING_TIMER_H_
#define EMA_SERVER_GROUP_MISSING_TIMER_H_

#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema::group {

// Decides which processes have been missing for so long that they count as lost. A time in which
// this server did not run, or did not reach the registry, is not evidence: all processes then have
// the whole limit again. Not thread-safe.
class MissingTimer {
 public:
  using Process = std::pair<std::string, std::string>;  // Member and boot.

  explicit MissingTimer(absl::Duration limit) : limit_(limit) {}

  // To be called about once a second, with all processes that are missing now. Returns those that
  // have been missing in every call for at least the limit, and for how long. `last_contact`: when
  // the registry last answered.
  std::map<Process, absl::Duration> Update(const std::set<Process>& missing,
                                           SteadyTime last_contact, SteadyTime now);

 private:
  const absl::Duration limit_;
  SteadyTime last_update_ = SteadyTime::min();
  std::map<Process, SteadyTime> missing_since_;
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_MISSING_TIMER_H_
