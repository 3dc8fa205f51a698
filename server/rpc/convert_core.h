// SPDX-License-Identifier: Apache-2.0
//
// Converts between the wire's messages and the core's structs; server/wire/convert_types.h converts
// those of include/ema.
#ifndef EMA_SERVER_RPC_CONVERT_CORE_H_
#define EMA_SERVER_RPC_CONVERT_CORE_H_

#include "absl/status/statusor.h"
#include "ema/v1/ema_service.pb.h"
#include "server/core/checkpoints.h"
#include "server/core/model.h"
#include "server/wire/convert_types.h"

namespace ema {

// INVALID_ARGUMENT: as the core's own checks.
absl::StatusOr<ModelConfig> FromProto(const v1::CreateModelRequest& request);
absl::StatusOr<TrackChanges> FromProto(const v1::UpdateModelRequest& request);
absl::StatusOr<SynthesisRequest> FromProto(const v1::SynthesizeRequest& request);
ResumePoint FromProto(const v1::Resume& resume);

// Reads a CRC32C from an int64 field. INVALID_ARGUMENT: it does not fit into 32 bits.
absl::StatusOr<uint32_t> ReadChecksum(const std::string& field, int64_t value);

v1::Checkpoint ToProto(const CheckpointInfo& checkpoint);
v1::Label ToProto(const CheckpointLabel& label);
// Omits the tracks if the reader knows them from the plan of `known_revision`.
v1::PushPlan ToProto(const PushPlan& plan, int64_t known_revision = 0);
v1::Model ToProto(const Model& model, bool in_a_list);

}  // namespace ema

#endif  // EMA_SERVER_RPC_CONVERT_CORE_H_
