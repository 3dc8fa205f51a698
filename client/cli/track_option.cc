// SPDX-License-Identifier: Apache-2.0
#include "client/cli/track_option.h"

#include <utility>

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

absl::StatusOr<TensorAction> ParseAction(absl::string_view text) {
  for (const TensorAction action :
       {TensorAction::kAverage, TensorAction::kCopy, TensorAction::kIgnore}) {
    const std::string_view name = TensorActionName(action);
    if (text == absl::string_view(name.data(), name.size())) return action;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text, "\" given, expected average, copy or ignore"));
}

absl::StatusOr<bool> ParseBool(absl::string_view text) {
  if (text == "true" || text == "false") return text == "true";
  return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" given, expected true or false"));
}

absl::StatusOr<TensorRule> ParseRule(absl::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" given, expected PATTERN:ACTION, such as head.*:ignore"));
  }
  EMA_ASSIGN_OR_RETURN(const TensorAction action, ParseAction(text.substr(colon + 1)));
  return TensorRule{.pattern = std::string(text.substr(0, colon)), .action = action};
}

// A field that is not of the schedule.
absl::Status TakeField(absl::string_view name, absl::string_view value, TrackOption& option) {
  const auto set = [](auto& field, auto parsed) -> absl::Status {
    if (!parsed.ok()) return parsed.status();
    if (field.has_value()) return absl::InvalidArgumentError("is given twice");
    field = *std::move(parsed);
    return absl::OkStatus();
  };
  if (name == "buffers") return set(option.buffers, ParseAction(value));
  if (name == "compensated") return set(option.compensated, ParseBool(value));
  if (name == "snapshot_interval") {
    return set(option.snapshot_interval, TrainingDuration::Parse({value.data(), value.size()}));
  }
  EMA_ASSIGN_OR_RETURN(TensorRule rule, ParseRule(value));
  option.tensor_rules.push_back(std::move(rule));
  return absl::OkStatus();
}

}  // namespace

TrackConfig TrackOption::On(const TrackConfig* before) const {
  TrackConfig track = {.name = name, .schedule = schedule};
  if (before != nullptr) track = *before;
  track.schedule = schedule;
  if (buffers.has_value()) track.buffers = *buffers;
  if (compensated.has_value()) track.compensated = *compensated;
  if (snapshot_interval.has_value()) track.snapshot_interval = snapshot_interval;
  if (!tensor_rules.empty()) track.tensor_rules = tensor_rules;
  return track;
}

absl::StatusOr<TrackOption> ParseTrackOption(std::string_view text) {
  const auto error = [text](absl::string_view why) {
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                     absl::StrCat("--track ", std::string(text), ": ", why,
                                  "; right ones are raw=copy, fast=200ba, "
                                  "slow=2000ba,update_interval=10ba and old=smoothing=0.99"));
  };
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) return error("must be NAME=RULE");
  const std::string_view name = text.substr(0, equals);
  const absl::string_view rule(text.data() + equals + 1, text.size() - equals - 1);
  if (const absl::Status status = ValidateName("track", name); !status.ok()) {
    return error(status.message());
  }
  std::vector<absl::string_view> of_schedule;
  std::vector<std::pair<absl::string_view, absl::string_view>> others;
  for (const absl::string_view field : absl::StrSplit(rule, ',')) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(absl::StripAsciiWhitespace(field), absl::MaxSplits('=', 1));
    const bool is_other = parts.first == "buffers" || parts.first == "compensated" ||
                          parts.first == "snapshot_interval" || parts.first == "tensor_rule";
    is_other ? others.push_back(parts) : of_schedule.push_back(field);
  }
  absl::StatusOr<Schedule> schedule = ParseSchedule(absl::StrJoin(of_schedule, ","));
  if (!schedule.ok()) return error(schedule.status().message());
  TrackOption option{.name = std::string(name), .schedule = *std::move(schedule)};
  for (const auto& [field, value] : others) {
    if (const absl::Status status = TakeField(field, value, option); !status.ok()) {
      return error(absl::StrCat(field, " ", status.message()));
    }
  }
  return option;
}

}  // namespace ema::cli
