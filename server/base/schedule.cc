// SPDX-License-Identifier: Apache-2.0
#include "ema/schedule.h"

#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr double kLn2 = 0.693147180559945309417;

absl::Status BadSchedule(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule, message);
}

absl::Status BadTime(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadTime, message);
}

std::string Suffix(TimeUnit unit) { return std::string(TimeUnitSuffix(unit)); }

// The shortest text that reads back to the same number.
std::string NumberText(double value) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof(buffer), value).ptr};
}

bool IsAboveZero(double value) { return std::isfinite(value) && value > 0; }

TrainingDuration DefaultInterval(const Schedule::Rule& rule) {
  const auto* half_life_rule = std::get_if<HalfLifeRule>(&rule);
  if (half_life_rule == nullptr) return {1, TimeUnit::kBatch};
  const TimeUnit unit = half_life_rule->half_life.unit;
  const bool is_counted = unit != TimeUnit::kProgress && unit != TimeUnit::kSecond;
  return {is_counted ? 1.0 : 0.0, unit};
}

// floor(time / interval). Shares and seconds carry rounding errors: without a tolerance, 0.3 would
// be two intervals of 0.1. Counts are whole, and the floors of their quotients exact, up to 2^53.
double WholeIntervals(double time, const TrainingDuration& interval) {
  constexpr double kRelativeTolerance = 1e-12;
  const double ratio = time / interval.value;
  if (interval.unit == TimeUnit::kProgress || interval.unit == TimeUnit::kSecond) {
    return std::floor(ratio * (1 + kRelativeTolerance));
  }
  return std::floor(ratio);
}

struct Passage {
  double last = 0;
  double now = 0;
};

// From the last update to `now` in `unit`, which `user` ("half_life 2ep") needs.
absl::StatusOr<Passage> Measure(const TrainingTime& last, const TrainingTime& now, TimeUnit unit,
                                std::string_view user) {
  const std::optional<double> last_value = last.Get(unit);
  const std::optional<double> now_value = now.Get(unit);
  if (!now_value.has_value() || !last_value.has_value()) {
    return BadTime(absl::StrCat("training time ",
                                now_value.has_value() ? "of the last update " : "", "lacks \"",
                                Suffix(unit), "\", which ", std::string(user), " needs"));
  }
  if (!(*now_value >= *last_value)) {
    return BadTime(absl::StrCat("training time ", NumberText(*now_value), Suffix(unit),
                                " is before that of the last update, ", NumberText(*last_value),
                                Suffix(unit), ": it must not go back"));
  }
  return Passage{*last_value, *now_value};
}

float UpdateWeight(const Schedule::Rule& rule, double elapsed) {
  if (const auto* half_life_rule = std::get_if<HalfLifeRule>(&rule)) {
    return static_cast<float>(-std::expm1(-kLn2 * elapsed / half_life_rule->half_life.value));
  }
  if (const auto* constant_rule = std::get_if<ConstantDecayRule>(&rule)) {
    return static_cast<float>(1 - constant_rule->smoothing);
  }
  return 1;
}

}  // namespace

absl::StatusOr<Schedule> Schedule::Create(Rule rule,
                                          std::optional<TrainingDuration> update_interval) {
  if (const auto* half_life_rule = std::get_if<HalfLifeRule>(&rule);
      half_life_rule != nullptr && !IsAboveZero(half_life_rule->half_life.value)) {
    return BadSchedule(absl::StrCat("half_life \"", half_life_rule->half_life.ToString(),
                                    "\": must be finite and above 0, such as \"1000ba\"; for the "
                                    "latest weights as they are, use copy"));
  }
  if (const auto* constant_rule = std::get_if<ConstantDecayRule>(&rule);
      constant_rule != nullptr &&
      !(constant_rule->smoothing >= 0 && constant_rule->smoothing < 1)) {
    return BadSchedule(absl::StrCat("smoothing ", NumberText(constant_rule->smoothing),
                                    ": must be 0 or more and below 1, such as 0.999"));
  }
  if (update_interval.has_value() && !IsAboveZero(update_interval->value)) {
    return BadSchedule(absl::StrCat("update_interval \"", update_interval->ToString(),
                                    "\": must be finite and above 0, such as \"1ba\""));
  }
  const TrainingDuration interval = update_interval.value_or(DefaultInterval(rule));
  return Schedule(rule, interval);
}

absl::StatusOr<Schedule> Schedule::Parse(std::string_view text) {
  if (text == "copy") return Create(CopyRule{});
  absl::StatusOr<TrainingDuration> half_life = TrainingDuration::Parse(text);
  if (!half_life.ok()) {
    return BadSchedule(absl::StrCat("half_life ", half_life.status().message(), " (or \"copy\")"));
  }
  return Create(HalfLifeRule{*half_life});
}

absl::StatusOr<Schedule::Update> Schedule::Plan(const State& state, const TrainingTime& now) const {
  const auto* half_life_rule = std::get_if<HalfLifeRule>(&rule_);
  const TrainingTime& last = state.last_update.has_value() ? *state.last_update : now;
  Passage passage;
  if (half_life_rule != nullptr) {
    const TrainingDuration& half_life = half_life_rule->half_life;
    EMA_ASSIGN_OR_RETURN(passage, Measure(last, now, half_life.unit,
                                          absl::StrCat("half_life ", half_life.ToString())));
  }
  EMA_ASSIGN_OR_RETURN(const Passage intervals,
                       Measure(last, now, update_interval_.unit,
                               absl::StrCat("update_interval ", update_interval_.ToString())));
  if (half_life_rule == nullptr) passage = intervals;
  if (!state.last_update.has_value()) return Update{true, 1, 0};

  Update update;
  update.elapsed = passage.now - passage.last;
  update.due = update_interval_.value == 0 || WholeIntervals(intervals.now, update_interval_) >
                                                  WholeIntervals(intervals.last, update_interval_);
  if (update.due) update.update_weight = UpdateWeight(rule_, update.elapsed);
  return update;
}

std::string Schedule::ToString() const {
  std::string text = "copy";
  if (const auto* half_life_rule = std::get_if<HalfLifeRule>(&rule_)) {
    text = absl::StrCat("half_life ", half_life_rule->half_life.ToString());
  } else if (const auto* constant_rule = std::get_if<ConstantDecayRule>(&rule_)) {
    text = absl::StrCat("smoothing ", NumberText(constant_rule->smoothing));
  }
  if (update_interval_.value == 0) return absl::StrCat(text, ", every push");
  return absl::StrCat(text, ", update_interval ", update_interval_.ToString());
}

}  // namespace ema
