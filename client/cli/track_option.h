// SPDX-License-Identifier: Apache-2.0
//
// The text form of a track: what follows `--track`.
#ifndef EMA_CLIENT_CLI_TRACK_OPTION_H_
#define EMA_CLIENT_CLI_TRACK_OPTION_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "ema/client.h"

namespace ema::cli {

// Reads "NAME=copy", "NAME=200ba" (a half-life) or "NAME=smoothing:0.99", each with
// ",interval=10ba" behind it or not. INVALID_ARGUMENT: anything else; the message quotes `text` and
// shows a right one.
absl::StatusOr<TrackSpec> ParseTrackOption(std::string_view text);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_TRACK_OPTION_H_
