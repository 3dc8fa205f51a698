// SPDX-License-Identifier: Apache-2.0
//
// Between the wire's messages and the structs of include/ema/client.h; server/wire/convert.h has
// the others. A reply that no right server sends is INTERNAL.
#ifndef EMA_CLIENT_CPP_TRANSPORT_CONVERT_H_
#define EMA_CLIENT_CPP_TRANSPORT_CONVERT_H_

#include <grpcpp/support/status.h>

#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/client.h"
#include "ema/v1/ema_service.pb.h"
#include "ema/v1/lane.pb.h"
#include "server/wire/convert.h"

namespace ema::client_internal {

// The trailer that carries an ErrorDetail.
inline constexpr char kErrorDetailKey[] = "ema-error-detail-bin";

// `status` with the reason and the retry delay of `detail`, a serialized ErrorDetail. REQUIRES:
// status is not OK.
absl::Status ErrorFromDetail(const grpc::Status& status, std::string_view detail);
// The same, as a lane has it.
absl::Status ErrorOf(const v1::LaneError& error);

// INTERNAL.
absl::Status MalformedReply(std::string_view what);

using ema::FromProto;  // Those of include/ema.
// UNIMPLEMENTED: the model does not lie whole on the server that answered.
absl::Status CheckPartitions(const v1::Model& proto);
// Without tensors (as ListModels gives it): an empty manifest.
absl::StatusOr<ModelInfo> FromProto(const v1::Model& proto);
// `known`: the plan whose tracks a reply to a push may leave out.
absl::StatusOr<RunPlan> FromProto(const v1::PushPlan& proto, const RunPlan& known = {});
absl::StatusOr<PullInfo> FromProto(const v1::PullHeader& proto);
absl::StatusOr<PushProgress> FromProto(const v1::QueryPushResponse& proto);
absl::StatusOr<Client::CheckpointInfo> FromProto(const v1::Checkpoint& proto);
Client::Label FromProto(const v1::Label& proto);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_CONVERT_H_
