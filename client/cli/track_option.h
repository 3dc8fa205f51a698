// SPDX-License-Identifier: Apache-2.0
//
// The text form of a track, the value of `--track`.
#ifndef EMA_CLIENT_CLI_TRACK_OPTION_H_
#define EMA_CLIENT_CLI_TRACK_OPTION_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/client.h"

namespace ema::cli {

// A parsed track. Options that the text omits are absent or empty.
struct TrackOption {
  std::string name;
  Schedule schedule;
  std::optional<TensorAction> buffers;
  std::optional<Dtype> dtype;
  std::optional<TrainingDuration> snapshot_interval;
  std::vector<TensorRule> tensor_rules;

  // The track after these changes to `before`, the current track of that name; null: there is none.
  TrackConfig On(const TrackConfig* before) const;
};

// Parses "NAME=" and a schedule as Schedule::Parse() does: "NAME=copy", "NAME=200ba" (a half-life),
// "NAME=200ba,update_interval=10ba", "NAME=smoothing=0.99". Fields of TrackConfig may follow:
// snapshot_interval=1000ba, buffers=copy, dtype=float64, and any number of
// tensor_rule=PATTERN:ACTION, such as tensor_rule=head.*:ignore, or with its own schedule
// tensor_rule=head.*:50ba; the last ':' separates. INVALID_ARGUMENT: another form; the message
// quotes `text` and shows a valid one.
absl::StatusOr<TrackOption> ParseTrackOption(std::string_view text);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_TRACK_OPTION_H_
