// SPDX-License-Identifier: Apache-2.0
//
// Converts between messages and the structs of include/ema/client.h; server/wire/convert_types.h
// has more conversions. A malformed reply of the server is INTERNAL.
#ifndef EMA_CLIENT_CPP_TRANSPORT_CONVERT_REPLIES_H_
#define EMA_CLIENT_CPP_TRANSPORT_CONVERT_REPLIES_H_

#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/client.h"
#include "ema/v1/ema_service.pb.h"
#include "ema/v1/lane.pb.h"
#include "server/wire/convert_types.h"

namespace ema::client_internal {

// The error that a lane's message carries.
absl::Status ErrorOf(const v1::LaneError& error);

// An INTERNAL error about a reply of the server.
absl::Status MalformedReply(std::string_view what);

using ema::FromProto;  // For the structs of include/ema.
// Without tensors (as from ListModels) the manifest is empty.
absl::StatusOr<ModelInfo> FromProto(const v1::Model& proto);
// `known`: the plan whose tracks the reply to a push may omit.
absl::StatusOr<RunPlan> FromProto(const v1::PushPlan& proto, const RunPlan& known = {});
absl::StatusOr<PullInfo> FromProto(const v1::PullHeader& proto);
absl::StatusOr<PushProgress> FromProto(const v1::QueryPushResponse& proto);
absl::StatusOr<CheckpointInfo> FromProto(const v1::Checkpoint& proto);
CheckpointLabel FromProto(const v1::Label& proto);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_CONVERT_REPLIES_H_
