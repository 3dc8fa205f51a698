// SPDX-License-Identifier: Apache-2.0
#include "client/cli/track_option.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::cli {
namespace {

// A half-life or "copy" may come without its name.
absl::StatusOr<Schedule> ParseSchedule(std::string_view text) {
  const std::string_view first = text.substr(0, text.find(','));
  if (first.find('=') != std::string_view::npos || first.size() == text.size()) {
    return Schedule::Parse(text);
  }
  return Schedule::Parse(absl::StrCat(first == "copy" ? "" : "half_life=", std::string(first),
                                      first == "copy" ? "=true" : "",
                                      std::string(text.substr(first.size()))));
}

}  // namespace

absl::StatusOr<TrackConfig> ParseTrackOption(std::string_view text) {
  const auto error = [text](std::string_view why) {
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                     absl::StrCat("--track ", std::string(text), ": ", std::string(why),
                                  "; right ones are raw=copy, fast=200ba, "
                                  "slow=2000ba,update_interval=10ba and old=smoothing=0.99"));
  };
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) return error("must be NAME=RULE");
  const std::string_view name = text.substr(0, equals);
  const std::string_view rule = text.substr(equals + 1);
  if (const absl::Status status = ValidateName("track", name); !status.ok()) {
    return error({status.message().data(), status.message().size()});
  }
  // All but the fields of the track itself is the schedule.
  constexpr char kSnapshotInterval[] = "snapshot_interval=";
  std::vector<std::string> fields;
  std::optional<TrainingDuration> snapshot_interval;
  for (absl::string_view field : absl::StrSplit(absl::string_view(rule.data(), rule.size()), ',')) {
    absl::string_view value = absl::StripAsciiWhitespace(field);
    if (!absl::ConsumePrefix(&value, kSnapshotInterval)) {
      fields.emplace_back(field);
      continue;
    }
    const absl::StatusOr<TrainingDuration> interval =
        TrainingDuration::Parse({value.data(), value.size()});
    if (!interval.ok() || snapshot_interval.has_value()) {
      return error(interval.ok() ? "snapshot_interval is given twice"
                                 : absl::StrCat("snapshot_interval ", interval.status().message()));
    }
    snapshot_interval = *interval;
  }
  absl::StatusOr<Schedule> schedule = ParseSchedule(absl::StrJoin(fields, ","));
  if (!schedule.ok()) {
    return error({schedule.status().message().data(), schedule.status().message().size()});
  }
  return TrackConfig{.name = std::string(name),
                     .schedule = *std::move(schedule),
                     .snapshot_interval = snapshot_interval};
}

}  // namespace ema::cli
