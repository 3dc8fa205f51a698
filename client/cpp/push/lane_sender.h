// SPDX-License-Identifier: Apache-2.0
//
// Sends a push through a same-host lane.
#ifndef EMA_CLIENT_CPP_PUSH_LANE_SENDER_H_
#define EMA_CLIENT_CPP_PUSH_LANE_SENDER_H_

#include "absl/status/statusor.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/push/push_messages.h"
#include "client/cpp/push/staged_chunks.h"
#include "ema/v1/ema_service.pb.h"
#include "server/wire/lane_pipe.h"

namespace ema::client_internal {

// Sends `messages` and waits for the reply; then the lane may be used for the next call. Blocks.
// `window`: the chunks, if the lane was connected with the window of their ring; null: the chunks
// are copied into the lane. CANCELLED: the interrupt fired, or the weights were released or cannot
// be read. DEADLINE_EXCEEDED. Other errors with a reason are the server's; an error without one
// means that the lane broke. After an error the lane has ended.
absl::StatusOr<v1::PushResponse> SendByLane(const PushMessages& messages, Client::Impl& client,
                                            LanePipe& lane, StagedChunks* window);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_LANE_SENDER_H_
