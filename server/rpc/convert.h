// SPDX-License-Identifier: Apache-2.0
//
// Between the wire's messages and the core's structs. Reading checks what protobuf does not: every
// error names the field.
#ifndef EMA_SERVER_RPC_CONVERT_H_
#define EMA_SERVER_RPC_CONVERT_H_

#include <vector>

#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "ema/shard.h"
#include "ema/time.h"
#include "ema/v1/ema_service.pb.h"
#include "server/core/model.h"

namespace ema {

// INVALID_ARGUMENT: as the core's own checks. `default_max_pinned_versions` stands for 0.
absl::StatusOr<ModelConfig> FromProto(const v1::CreateModelRequest& request,
                                      int64_t default_max_pinned_versions);
absl::StatusOr<Manifest> FromProto(const v1::Manifest& manifest);
absl::StatusOr<TrackConfig> FromProto(const v1::Track& track);
TrainingTime FromProto(const v1::TrainingTime& time);
std::vector<Shard> FromProto(const v1::RankLayout& layout);

v1::Manifest ToProto(const Manifest& manifest);
v1::Track ToProto(const TrackConfig& track);
v1::TrainingTime ToProto(const TrainingTime& time);
// `tracks` are the record's model's.
v1::VersionRecord ToProto(const VersionRecord& record, const std::vector<Track>& tracks);
v1::Model ToProto(const Model& model, bool with_manifest);

}  // namespace ema

#endif  // EMA_SERVER_RPC_CONVERT_H_
