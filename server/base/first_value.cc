// SPDX-License-Identifier: Apache-2.0
#include "server/base/first_value.h"

#include <variant>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"

namespace ema {
namespace {

// Null: it goes on from its first value.
const char* WhyFirstValueIsLost(const Schedule& schedule) {
  constexpr const char* kWrittenOver =
      "soon after the start its updates write over the first value";
  constexpr const char* kFromZero = "it begins from zero, not from the first value";
  const Schedule::Rule& rule = schedule.rule();
  if (schedule.is_copy()) return nullptr;
  if (schedule.options().start.value > 0 &&
      schedule.options().before_start != Schedule::BeforeStart::kHold) {
    return "at its ema_start it takes a new first value (before_start=hold keeps it)";
  }
  if (const auto* const half_life = std::get_if<HalfLifeRule>(&rule)) {
    if (half_life->debias) return kFromZero;
    return half_life->ramp_ratio > 0 ? kWrittenOver : nullptr;
  }
  if (const auto* const constant = std::get_if<ConstantDecayRule>(&rule)) {
    return constant->zero_init == ConstantDecayRule::ZeroInit::kOff ? nullptr : kFromZero;
  }
  if (std::holds_alternative<UniformRule>(rule)) {
    return "the first value counts as one update, however many it is the mean of";
  }
  return kWrittenOver;
}

}  // namespace

absl::Status CheckKeepsFirstValue(const TrackConfig& track) {
  for (const Schedule* const schedule : SchedulesOf(track)) {
    const char* const why = WhyFirstValueIsLost(*schedule);
    if (why == nullptr) continue;
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                     absl::StrCat("track \"", track.name, "\" (", schedule->ToString(),
                                  ") would lose an imported average: ", why,
                                  "; import it into a half_life or smoothing track"));
  }
  return absl::OkStatus();
}

}  // namespace ema
