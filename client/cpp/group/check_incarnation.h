// SPDX-License-Identifier: Apache-2.0
//
// Whether a model on a group of servers has moved.
#ifndef EMA_CLIENT_CPP_GROUP_CHECK_INCARNATION_H_
#define EMA_CLIENT_CPP_GROUP_CHECK_INCARNATION_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/transport/interrupt.h"

namespace ema::client_internal {

// Interval of CheckIncarnation() in a call that waits for a server, which may have been replaced.
inline constexpr absl::Duration kIncarnationCheckInterval = absl::Seconds(2);

// ABORTED, FENCED: the group has a newer incarnation of the model than `incarnation`. OK: it has
// none, or no server has answered within a second.
absl::Status CheckIncarnation(Client::Impl& client, const std::string& model, int64_t incarnation,
                              Interrupt* interrupt);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GROUP_CHECK_INCARNATION_H_
