// SPDX-License-Identifier: Apache-2.0
//
// Classifies push errors as outages or not, and limits how long a trainer waits in an outage.
#ifndef EMA_CLIENT_CPP_TRAINER_OUTAGE_TIMER_H_
#define EMA_CLIENT_CPP_TRAINER_OUTAGE_TIMER_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// True if the error of a push means that the server is unreachable or has lost the run.
bool IsOutage(const absl::Status& error);
// True if a retry of the step may succeed: the error comes from an outage, here or at another rank.
bool IsRetryableStep(const absl::Status& error);
// True if this rank can never push the step. The other ranks do not know that, so it must report
// it.
bool MustReportToOtherRanks(const absl::Status& error);

// Limits how long a trainer waits in one outage.
class OutageTimer {
 public:
  explicit OutageTimer(absl::Duration max_outage) : max_outage_(max_outage) {}

  // When the trainer stops waiting. Before an outage: as if one began now.
  SteadyTime deadline() const;
  // Whether to retry a step whose push failed with `error`. The first retryable error starts the
  // outage.
  bool ShouldRetry(const absl::Status& error);
  // Stops waiting until a push has succeeded.
  void StopWaiting() { has_stopped_waiting_ = true; }
  bool has_stopped_waiting() const { return has_stopped_waiting_; }
  // To be called when a push has succeeded.
  void EndOutage();

 private:
  const absl::Duration max_outage_;
  std::optional<SteadyTime> since_;
  bool has_stopped_waiting_ = false;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRAINER_OUTAGE_TIMER_H_
