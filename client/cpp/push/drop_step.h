// SPDX-License-Identifier: Apache-2.0
//
// What remains to be done when a push has failed.
#ifndef EMA_CLIENT_CPP_PUSH_DROP_STEP_H_
#define EMA_CLIENT_CPP_PUSH_DROP_STEP_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/push/run_core.h"
#include "ema/run.h"

namespace ema::client_internal {

struct FailedPush {
  int64_t step = 0;
  // The newest round in which a part of it has begun; 0: the model is on one server. If no part has
  // begun, the round in which the push would have begun.
  int64_t round = 0;
  absl::Status error;
  bool has_begun = false;     // The server may know the step.
  bool is_abandoned = false;  // By this rank.
  std::string name;           // For the error.
};

// Drops the step on the server of `run` (the home, if the model is on a group), unless the error
// shows that this is unnecessary. Returns the step's progress if this push was committed. Otherwise
// returns SESSION_EXPIRED if the push timed out while other ranks were missing, STEP_ABANDONED if
// this rank abandoned it, or else the error of the push. Blocks at most a second.
absl::StatusOr<PushProgress> DropStep(RunCore& run, const FailedPush& failed);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_DROP_STEP_H_
