// SPDX-License-Identifier: Apache-2.0
//
// Which errors of a push mean that the server is away, and how long a trainer waits for it.
#ifndef EMA_CLIENT_CPP_TRAINER_PATIENCE_H_
#define EMA_CLIENT_CPP_TRAINER_PATIENCE_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// True if the error of a push means that the server is unreachable or has lost the run.
bool IsAway(const absl::Status& error);
// True if a retry of the step may succeed: after an outage, here or of another rank.
bool IsWorthWaiting(const absl::Status& error);
// True if this rank cannot push the step, now or later, and the other ranks do not know.
bool IsFinal(const absl::Status& error);

// How much longer a trainer waits for a server that is away, in all of one outage.
class Patience {
 public:
  explicit Patience(absl::Duration max_outage) : max_outage_(max_outage) {}

  // When it ends; of an outage that has not begun, as if it did now.
  SteadyTime until() const;
  // Whether a step whose push failed with `error` may be pushed again. The first such error begins
  // the outage.
  bool LastsAfter(const absl::Status& error);
  // Stops waiting until a push has succeeded.
  void GiveUp() { is_over_ = true; }
  bool is_over() const { return is_over_; }
  // A push has succeeded.
  void EndOutage();

 private:
  const absl::Duration max_outage_;
  std::optional<SteadyTime> since_;
  bool is_over_ = false;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRAINER_PATIENCE_H_
