// SPDX-License-Identifier: Apache-2.0
//
// The text form of a track: what follows `--track`.
#ifndef EMA_CLIENT_CLI_TRACK_OPTION_H_
#define EMA_CLIENT_CLI_TRACK_OPTION_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/client.h"

namespace ema::cli {

// What a text says of a track. What it leaves out is absent, or empty.
struct TrackOption {
  std::string name;
  Schedule schedule;
  std::optional<TensorAction> buffers;
  std::optional<bool> compensated;
  std::optional<TrainingDuration> snapshot_interval;
  std::vector<TensorRule> tensor_rules;

  // The track that this makes of the one of that name before; null: there was none.
  TrackConfig On(const TrackConfig* before) const;
};

// Reads "NAME=" and a schedule as Schedule::Parse() does: "NAME=copy", "NAME=200ba" (a half-life),
// "NAME=200ba,update_interval=10ba", "NAME=smoothing=0.99". Besides the schedule's fields there may
// be TrackConfig's: snapshot_interval=1000ba, buffers=copy, compensated=true, and any number of
// tensor_rule=PATTERN:ACTION, such as tensor_rule=head.*:ignore, or with a schedule of its own
// tensor_rule=head.*:50ba; the last ':' counts. INVALID_ARGUMENT: anything else; the message quotes
// `text` and shows a right one.
absl::StatusOr<TrackOption> ParseTrackOption(std::string_view text);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_TRACK_OPTION_H_
