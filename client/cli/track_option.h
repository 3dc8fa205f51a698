// SPDX-License-Identifier: Apache-2.0
//
// The text form of a track: what follows `--track`.
#ifndef EMA_CLIENT_CLI_TRACK_OPTION_H_
#define EMA_CLIENT_CLI_TRACK_OPTION_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "ema/client.h"

namespace ema::cli {

// Reads "NAME=" and a schedule as Schedule::Parse() does: "NAME=copy", "NAME=200ba" (a half-life),
// "NAME=200ba,update_interval=10ba", "NAME=smoothing=0.99". Besides the schedule's fields there may
// be snapshot_interval: "NAME=sigma_rel=0.05,snapshot_interval=1000ba". INVALID_ARGUMENT: anything
// else; the message quotes `text` and shows a right one.
absl::StatusOr<TrackConfig> ParseTrackOption(std::string_view text);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_TRACK_OPTION_H_
