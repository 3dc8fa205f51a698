// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/import_check.h"

#include <cmath>
#include <string>
#include <variant>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"

namespace ema {
namespace {

bool CountsUpdates(const Schedule::Rule& rule) {
  const auto* const constant = std::get_if<ConstantDecayRule>(&rule);
  return std::holds_alternative<UniformRule>(rule) ||
         (constant != nullptr && constant->zero_init != ConstantDecayRule::ZeroInit::kOff);
}

// The unit that the rule's age is counted in; absent: it does not depend on its age.
std::optional<TimeUnit> AgeUnit(const Schedule& schedule) {
  const Schedule::Rule& rule = schedule.rule();
  if (schedule.is_copy() || std::holds_alternative<ConstantDecayRule>(rule) ||
      std::holds_alternative<DecaysRule>(rule) || std::holds_alternative<UniformRule>(rule) ||
      std::holds_alternative<MeanOfLastRule>(rule)) {
    return std::nullopt;
  }
  if (const auto* const half_life = std::get_if<HalfLifeRule>(&rule)) {
    if (half_life->ramp_ratio == 0 && !half_life->debias) return std::nullopt;
    if (!std::isinf(half_life->half_life.value)) return half_life->half_life.unit;
  }
  return schedule.update_interval().unit;
}

// Empty: the average continues from its first value.
std::string WhyFirstValueIsLost(const Schedule& schedule, const TrainingTime& now,
                                int64_t updates) {
  if (schedule.is_copy()) return "";
  if (schedule.kept_weights_count() > 0) {
    return "a mean of the last updates needs the weights of each of them";
  }
  const TrainingDuration& start = schedule.options().start;
  const bool has_started = start.value == 0 || now.Get(start.unit).value_or(0) >= start.value;
  const std::optional<TimeUnit> age_unit = AgeUnit(schedule);
  const bool holds = schedule.options().before_start == Schedule::BeforeStart::kHold;
  if (!has_started && (!holds || age_unit.has_value())) {
    return absl::StrCat("it is from before its ema_start ", start.ToString(),
                        age_unit.has_value() ? "" : " (before_start=hold keeps it)");
  }
  if (age_unit.has_value()) {
    const std::string suffix(TimeUnitSuffix(*age_unit));
    if (start.value > 0 && start.unit != *age_unit) {
      return absl::StrCat("the schedule counts ", suffix, " from the update at ema_start ",
                          start.ToString(), ", which is not known");
    }
    if (!(now.Get(*age_unit).value_or(0) > start.value)) {
      return absl::StrCat("the schedule depends on the average's age in ", suffix,
                          ": give the step, or the training time, of the average");
    }
  }
  if (CountsUpdates(schedule.rule()) && updates <= 0) {
    return "the schedule counts updates: give the number of updates that the average contains";
  }
  return "";
}

}  // namespace

absl::Status CheckCanContinueImport(const TrackConfig& track, const TrainingTime& now,
                                    int64_t updates) {
  for (const Schedule* const schedule : SchedulesOf(track)) {
    const std::string why = WhyFirstValueIsLost(*schedule, now, updates);
    if (why.empty()) continue;
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                     absl::StrCat("track \"", track.name, "\" (", schedule->ToString(),
                                  ") would lose an imported average: ", why));
  }
  return absl::OkStatus();
}

}  // namespace ema
