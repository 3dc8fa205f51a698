// SPDX-License-Identifier: Apache-2.0
//
// How long a trainer waits for a push.
#ifndef EMA_CLIENT_CPP_PUSH_AWAIT_PUSH_H_
#define EMA_CLIENT_CPP_PUSH_AWAIT_PUSH_H_

#include <cstdint>
#include <functional>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "client/cpp/transport/interrupt.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// How long a trainer whose max_wait is over waits for the message that drops the step.
inline constexpr absl::Duration kAbandonGrace = absl::Milliseconds(250);
// How long a push of weights on a GPU may take to end after it was abandoned. This covers the grace
// period of the copies and the server's reply.
inline constexpr absl::Duration kHangLimit = absl::Seconds(10);

// Callbacks by which AwaitWhileReachable() observes a push to one server or to a group.
struct PushHealth {
  std::function<int64_t()> progress_count;
  std::function<bool()> is_cut_off;
  std::function<bool(SteadyTime deadline, Interrupt* interrupt)> server_responds;
};

// Calls `await` repeatedly, each time with the longest time that it may wait, until it returns
// true. False: `max_wait` is over, the push is cut off, `interrupt` was fired, or no byte moves and
// the server does not answer.
bool AwaitWhileReachable(absl::Duration max_wait, const PushHealth& health, Interrupt* interrupt,
                         absl::FunctionRef<bool(absl::Duration)> await);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_AWAIT_PUSH_H_
