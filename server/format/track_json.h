// SPDX-License-Identifier: Apache-2.0
//
// The parts of manifest.json about tracks: configs, states and records. Internal to this folder.
// Errors of parsing: CorruptManifest(), with the place.
#ifndef EMA_SERVER_FORMAT_TRACK_JSON_H_
#define EMA_SERVER_FORMAT_TRACK_JSON_H_

#include "absl/status/statusor.h"
#include "ema/model_info.h"
#include "ema/schedule.h"
#include "ema/time.h"
#include "ema/track.h"
#include "server/format/json_fields.h"

namespace ema {

Json EncodeTime(const TrainingTime& time);
absl::StatusOr<TrainingTime> ParseTime(const Fields& fields);

Json EncodeConfig(const TrackConfig& config);
absl::StatusOr<TrackConfig> ParseConfig(const Fields& fields);

Json EncodeState(const Schedule::State& state);
absl::StatusOr<Schedule::State> ParseState(const Fields& fields);

Json EncodeRecord(const TrackVersion& record);
absl::StatusOr<TrackVersion> ParseRecord(const Fields& fields);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_TRACK_JSON_H_
