// SPDX-License-Identifier: Apache-2.0
//
// Converts between the wire's messages and the structs of include/ema, for server and clients
// alike. Reading checks what protobuf does not: every error names the field.
#ifndef EMA_SERVER_WIRE_CONVERT_TYPES_H_
#define EMA_SERVER_WIRE_CONVERT_TYPES_H_

#include <grpcpp/support/status.h>

#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "ema/schedule.h"
#include "ema/selection.h"
#include "ema/shard.h"
#include "ema/time.h"
#include "ema/track.h"
#include "ema/v1/error.pb.h"
#include "ema/v1/types.pb.h"
#include "ema/version.h"

namespace ema {

// The trailer that carries an ErrorDetail.
inline constexpr char kErrorDetailKey[] = "ema-error-detail-bin";

// An error with the reason, the retry delay and the GroupHint of `detail`. REQUIRES: it is not OK.
absl::Status ErrorFromDetail(absl::StatusCode code, std::string_view message,
                             const v1::ErrorDetail& detail);
// `detail`: a serialized ErrorDetail. If it is malformed, the error has only the
// code and the message of `status`.
absl::Status ErrorFromDetail(const grpc::Status& status, std::string_view detail);

// INVALID_ARGUMENT, BAD_MANIFEST: a dtype that this build does not know; not otherwise validated.
absl::StatusOr<TensorSpec> FromProto(const v1::TensorSpec& proto);
// INVALID_ARGUMENT, BAD_MANIFEST: as Manifest::Create().
absl::StatusOr<Manifest> FromProto(const v1::Manifest& proto);
// INVALID_ARGUMENT, BAD_SCHEDULE: as Schedule::FromFields(); not otherwise validated.
absl::StatusOr<TrackConfig> FromProto(const v1::Track& proto);
TrainingTime FromProto(const v1::TrainingTime& proto);
Schedule::State FromProto(const v1::ScheduleState& proto);
TrackStatistics FromProto(const v1::TrackStatistics& proto);
Version FromProto(const v1::VersionRecord& proto);
std::vector<Shard> FromProto(const v1::RankLayout& proto);
// INVALID_ARGUMENT, BAD_REQUEST: a dtype that this build does not know; not otherwise validated.
absl::StatusOr<Selection> FromProto(const v1::Selection& proto);

void ToProto(const TensorSpec& spec, v1::TensorSpec* proto);
void ToProto(const Manifest& manifest, v1::Manifest* proto);
void ToProto(const TrackConfig& track, v1::Track* proto);
void ToProto(const TrainingTime& time, v1::TrainingTime* proto);
void ToProto(const Schedule::State& state, v1::ScheduleState* proto);
void ToProto(const TrackStatistics& statistics, v1::TrackStatistics* proto);
v1::VersionRecord ToProto(const Version& version);
void ToProto(const RankLayout& layout, v1::RankLayout* proto);
void ToProto(const Selection& selection, v1::Selection* proto);

}  // namespace ema

#endif  // EMA_SERVER_WIRE_CONVERT_TYPES_H_
