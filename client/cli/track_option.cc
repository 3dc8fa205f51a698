// SPDX-License-Identifier: Apache-2.0
#include "client/cli/track_option.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/explain.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/nearest_name.h"

namespace ema::cli {
namespace {

std::string_view AsStd(absl::string_view text) { return {text.data(), text.size()}; }

// The first field may be a half-life or "copy" without a name.
absl::StatusOr<Schedule> ParseSchedule(std::string_view text) {
  const std::string_view first = text.substr(0, text.find(','));
  if (first.find('=') != std::string_view::npos || first.size() == text.size()) {
    return Schedule::Parse(text);
  }
  return Schedule::Parse(absl::StrCat(first == "copy" ? "" : "half_life=", std::string(first),
                                      first == "copy" ? "=true" : "",
                                      std::string(text.substr(first.size()))));
}

template <typename T>
absl::Status Set(absl::StatusOr<T> parsed, std::optional<T>& field) {
  if (!parsed.ok()) return parsed.status();
  if (field.has_value()) return absl::InvalidArgumentError("is given twice");
  field = *std::move(parsed);
  return absl::OkStatus();
}

absl::Status SetBuffers(absl::string_view text, TrackOption& option) {
  const std::optional<TensorAction> action = ParseTensorAction(AsStd(text));
  if (!action.has_value() || *action == TensorAction::kIgnore) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" given, expected average or copy"));
  }
  return Set<TensorAction>(*action, option.buffers);
}

absl::Status SetDtype(absl::string_view text, TrackOption& option) {
  if (text != "float32" && text != "float64") {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" given, expected float32 or float64"));
  }
  return Set(ParseDtype(AsStd(text)), option.dtype);
}

absl::Status SetSnapshotInterval(absl::string_view text, TrackOption& option) {
  return Set(TrainingDuration::Parse(AsStd(text)), option.snapshot_interval);
}

absl::Status AddTensorRule(absl::string_view text, TrackOption& option) {
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" given, expected PATTERN:ACTION, such as head.*:ignore"));
  }
  TensorRule rule = {.pattern = std::string(text.substr(0, colon))};
  const absl::string_view what = text.substr(colon + 1);
  if (const std::optional<TensorAction> action = ParseTensorAction(AsStd(what))) {
    rule.action = *action;
  } else {
    const absl::StatusOr<Schedule> schedule = ParseSchedule(AsStd(what));
    if (!schedule.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", what,
          "\" given, expected average, copy, ignore or a schedule: ", schedule.status().message()));
    }
    EMA_ASSIGN_OR_RETURN(rule.schedule, RuleSchedule(*schedule, option.schedule));
  }
  option.tensor_rules.push_back(std::move(rule));
  return absl::OkStatus();
}

// A field of a track that does not belong to its schedule.
struct Field {
  absl::string_view name;
  absl::Status (*take)(absl::string_view text, TrackOption& option);
};
constexpr Field kFields[] = {{"buffers", &SetBuffers},
                             {"dtype", &SetDtype},
                             {"snapshot_interval", &SetSnapshotInterval},
                             {"tensor_rule", &AddTensorRule}};

const Field* FindField(absl::string_view name) {
  for (const Field& field : kFields) {
    if (field.name == name) return &field;
  }
  return nullptr;
}

// Also suggests fields outside the schedule, unlike Schedule::Parse().
absl::Status CheckName(absl::string_view name) {
  std::vector<std::string_view> names;
  for (const ScheduleOption& option : ScheduleOptions()) names.emplace_back(option.field);
  for (const Field& field : kFields) names.push_back(AsStd(field.name));
  names.emplace_back("copy");
  if (std::find(names.begin(), names.end(), AsStd(name)) != names.end()) return absl::OkStatus();
  const std::string_view nearest =
      NearestName(AsStd(name), names, [](std::string_view candidate) { return candidate; });
  return absl::InvalidArgumentError(
      absl::StrCat("unknown field \"", name, "\"; did you mean \"", std::string(nearest), "\"?"));
}

}  // namespace

TrackConfig TrackOption::On(const TrackConfig* before) const {
  TrackConfig track = before != nullptr ? *before : TrackConfig{.name = name, .schedule = schedule};
  track.schedule = schedule;
  if (buffers.has_value()) track.buffers = *buffers;
  if (dtype.has_value()) track.dtype = *dtype;
  if (snapshot_interval.has_value()) track.snapshot_interval = snapshot_interval;
  if (!tensor_rules.empty()) track.tensor_rules = tensor_rules;
  return track;
}

absl::StatusOr<TrackOption> ParseTrackOption(std::string_view text) {
  const auto error = [text](absl::string_view why) {
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                     absl::StrCat("--track ", std::string(text), ": ", why,
                                  "; examples: raw=copy; fast=200ba; "
                                  "slow=2000ba,update_interval=10ba; old=smoothing=0.99"));
  };
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) return error("must be NAME=RULE");
  const std::string_view name = text.substr(0, equals);
  const absl::string_view rule(text.data() + equals + 1, text.size() - equals - 1);
  if (const absl::Status status = ValidateName("track", name); !status.ok()) {
    return error(status.message());
  }
  std::vector<absl::string_view> of_schedule;
  std::vector<std::pair<const Field*, absl::string_view>> others;
  for (const absl::string_view part : absl::StrSplit(rule, ',')) {
    const std::pair<absl::string_view, absl::string_view> words =
        absl::StrSplit(absl::StripAsciiWhitespace(part), absl::MaxSplits('=', 1));
    if (const Field* const field = FindField(words.first)) {
      others.emplace_back(field, words.second);
      continue;
    }
    if (part.find('=') != absl::string_view::npos) {
      if (const absl::Status status = CheckName(words.first); !status.ok()) {
        return error(status.message());
      }
    }
    of_schedule.push_back(part);
  }
  absl::StatusOr<Schedule> schedule = ParseSchedule(absl::StrJoin(of_schedule, ","));
  if (!schedule.ok()) return error(schedule.status().message());
  TrackOption option{.name = std::string(name), .schedule = *std::move(schedule)};
  for (const auto& [field, value] : others) {
    if (const absl::Status status = field->take(value, option); !status.ok()) {
      return error(absl::StrCat(field->name, " ", status.message()));
    }
  }
  return option;
}

}  // namespace ema::cli
