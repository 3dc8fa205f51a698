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

// A push has ended so: the server is away, or has come back and does not know the run.
bool IsAway(const absl::Status& error);
// A step whose push has ended so may succeed later: an outage, here or of another rank.
bool IsWorthWaiting(const absl::Status& error);
// This rank cannot push the step, now or later, and the others do not know.
bool IsFinal(const absl::Status& error);

// How much longer a trainer waits for a server that is away, in all of one outage.
class Patience {
 public:
  explicit Patience(absl::Duration max_outage) : max_outage_(max_outage) {}

  // When it ends; of an outage that has not begun, as if it did now.
  SteadyTime until() const;
  // Whether a step may be tried again whose push has ended so; the first one begins the outage.
  bool LastsAfter(const absl::Status& error);
  // It has ended before the outage, as until() or the server said; no step is waited for until a
  // push has succeeded.
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
