// SPDX-License-Identifier: Apache-2.0
#include "client/cli/track_option.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::cli {
namespace {

constexpr std::string_view kSmoothing = "smoothing:";
constexpr std::string_view kInterval = "interval=";

// Cuts `text` at the first `separator`. Absent: there is none.
std::optional<std::pair<std::string_view, std::string_view>> Cut(std::string_view text,
                                                                 char separator) {
  const size_t position = text.find(separator);
  if (position == std::string_view::npos) return std::nullopt;
  return std::pair(text.substr(0, position), text.substr(position + 1));
}

absl::StatusOr<Schedule> ParseRule(std::string_view rule,
                                   std::optional<TrainingDuration> interval) {
  if (rule == "copy") return Schedule::Create(CopyRule{}, interval);
  if (rule.substr(0, kSmoothing.size()) == kSmoothing) {
    double smoothing = 0;
    if (!absl::SimpleAtod(std::string(rule.substr(kSmoothing.size())), &smoothing)) {
      return absl::InvalidArgumentError("smoothing must be a number");
    }
    return Schedule::Create(ConstantDecayRule{smoothing}, interval);
  }
  EMA_ASSIGN_OR_RETURN(const TrainingDuration half_life, TrainingDuration::Parse(rule));
  return Schedule::Create(HalfLifeRule{half_life}, interval);
}

absl::StatusOr<Schedule> ParseSchedule(std::string_view text) {
  std::optional<TrainingDuration> interval;
  if (const auto parts = Cut(text, ','); parts.has_value()) {
    if (parts->second.substr(0, kInterval.size()) != kInterval) {
      return absl::InvalidArgumentError("what follows the comma must be interval=...");
    }
    EMA_ASSIGN_OR_RETURN(interval, TrainingDuration::Parse(parts->second.substr(kInterval.size())));
    text = parts->first;
  }
  return ParseRule(text, interval);
}

}  // namespace

absl::StatusOr<TrackSpec> ParseTrackOption(std::string_view text) {
  const auto error = [text](std::string_view why) {
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                     absl::StrCat("--track ", std::string(text), ": ", std::string(why),
                                  "; right ones are raw=copy, fast=200ba, "
                                  "slow=2000ba,interval=10ba and old=smoothing:0.99"));
  };
  const auto parts = Cut(text, '=');
  if (!parts.has_value()) return error("must be NAME=RULE");
  if (const absl::Status name = ValidateName("track", parts->first); !name.ok()) {
    return error({name.message().data(), name.message().size()});
  }
  absl::StatusOr<Schedule> schedule = ParseSchedule(parts->second);
  if (!schedule.ok()) {
    return error({schedule.status().message().data(), schedule.status().message().size()});
  }
  return TrackSpec{std::string(parts->first), *std::move(schedule)};
}

}  // namespace ema::cli
