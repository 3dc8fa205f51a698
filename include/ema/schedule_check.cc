// SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "include/ema/internal/schedule_parts.h"

namespace ema {
namespace {

using BeforeStart = Schedule::BeforeStart;
using ZeroInit = ConstantDecayRule::ZeroInit;

bool IsAboveZero(double value) { return std::isfinite(value) && value > 0; }

absl::Status BadNumber(std::string_view field, double value, std::string_view must) {
  return BadSchedule(
      absl::StrCat(std::string(field), " ", NumberText(value), ": must be ", std::string(must)));
}

// Only what TrainingDuration::Parse() gives: then every schedule can be written and read back.
absl::Status CheckDuration(std::string_view field, const TrainingDuration& duration) {
  const absl::StatusOr<TrainingDuration> parsed = TrainingDuration::Parse(duration.ToString());
  if (parsed.ok()) return absl::OkStatus();
  return BadSchedule(absl::StrCat(std::string(field), " ", parsed.status().message()));
}

absl::Status CheckAboveZero(std::string_view field, const TrainingDuration& duration,
                            std::string_view example) {
  if (IsAboveZero(duration.value)) return CheckDuration(field, duration);
  return BadSchedule(absl::StrCat(std::string(field), " \"", duration.ToString(),
                                  "\": must be finite and above 0, such as ",
                                  std::string(example)));
}

absl::Status CheckRule(const HalfLifeRule& rule) {
  if (rule.ramp_ratio != 0 && !IsAboveZero(rule.ramp_ratio)) {
    return BadNumber("ramp_ratio", rule.ramp_ratio, "finite and above 0, such as 0.09");
  }
  if (rule.debias && rule.ramp_ratio > 0) {
    return BadSchedule(absl::StrCat("debias \"true\": has no use with ramp_ratio ",
                                    NumberText(rule.ramp_ratio),
                                    ", which leaves nothing of the beginning; a right one is "
                                    "half_life=1000ba, debias=true"));
  }
  if (std::isinf(rule.half_life.value) && rule.ramp_ratio > 0) return absl::OkStatus();
  return CheckAboveZero("half_life", rule.half_life,
                        "\"1000ba\"; for the latest weights as they are, use copy");
}

absl::Status CheckRule(const ConstantDecayRule& rule) {
  if (rule.smoothing >= 0 && rule.smoothing < 1) return absl::OkStatus();
  return BadNumber("smoothing", rule.smoothing, "0 or more and below 1, such as 0.999");
}

absl::Status CheckDecayLimits(double min_decay, double max_decay) {
  if (!(max_decay >= 0 && max_decay <= 1)) {
    return BadNumber("max_decay", max_decay, "0 to 1, such as 0.9999");
  }
  if (!(min_decay >= 0 && min_decay <= max_decay)) {
    return BadNumber("min_decay", min_decay,
                     absl::StrCat("0 to max_decay ", NumberText(max_decay), ", such as 0"));
  }
  return absl::OkStatus();
}

absl::Status CheckCountOffset(double offset) {
  if (offset >= 0 && std::isfinite(offset)) return absl::OkStatus();
  return BadNumber("count_offset", offset, "finite and 0 or more, such as 1");
}

absl::Status CheckRule(const InverseGammaRule& rule) {
  EMA_RETURN_IF_ERROR(CheckCountOffset(rule.count_offset));
  if (!IsAboveZero(rule.inv_gamma)) {
    return BadNumber("inv_gamma", rule.inv_gamma, "finite and above 0, such as 1");
  }
  if (!IsAboveZero(rule.power)) {
    return BadNumber("power", rule.power, "finite and above 0, such as 0.75");
  }
  return CheckDecayLimits(rule.min_decay, rule.max_decay);
}

absl::Status CheckRule(const RampRule& rule) {
  EMA_RETURN_IF_ERROR(CheckCountOffset(rule.count_offset));
  if (!(std::isfinite(rule.ramp) && rule.ramp >= 1)) {
    return BadNumber("ramp", rule.ramp, "finite and 1 or more, such as 10");
  }
  return CheckDecayLimits(rule.min_decay, rule.max_decay);
}

absl::Status CheckRule(const ExponentialRampRule& rule) {
  if (!IsAboveZero(rule.exp_ramp)) {
    return BadNumber("exp_ramp", rule.exp_ramp, "finite and above 0, such as 2000");
  }
  EMA_RETURN_IF_ERROR(CheckCountOffset(rule.count_offset));
  return CheckDecayLimits(0, rule.max_decay);
}

absl::Status CheckRule(const DecaysRule& rule) {
  if (rule.points.empty()) {
    return BadSchedule("decays \"\": must have a point, such as \"0ba:0.9 1000ba:0.999\"");
  }
  const DecaysRule::Point* last = nullptr;
  for (const DecaysRule::Point& point : rule.points) {
    EMA_RETURN_IF_ERROR(CheckDuration("decays", point.time));
    if (last != nullptr &&
        (point.time.unit != last->time.unit || !(point.time.value > last->time.value))) {
      return BadSchedule(absl::StrCat("decays: ", point.time.ToString(), " after ",
                                      last->time.ToString(),
                                      ": the times must grow, in one unit, such as "
                                      "\"0ba:0.9 1000ba:0.999\""));
    }
    if (!(point.decay >= 0 && point.decay <= 1)) {
      return BadNumber(absl::StrCat("decays: ", point.time.ToString()), point.decay,
                       "0 to 1, such as 0.999");
    }
    last = &point;
  }
  return absl::OkStatus();
}

absl::Status CheckRule(const PowerFunctionRule& rule) {
  if (!(rule.sigma_rel > 0 && rule.sigma_rel <= kMaxSigmaRel)) {
    return BadNumber("sigma_rel", rule.sigma_rel,
                     absl::StrCat("above 0 and at most ", NumberText(kMaxSigmaRel),
                                  " (the uniform average), such as 0.05"));
  }
  if (rule.age_offset >= 0 && std::isfinite(rule.age_offset)) return absl::OkStatus();
  return BadNumber("age_offset", rule.age_offset, "finite and 0 or more, such as 1");
}

absl::Status CheckRule(const UniformRule& /*rule*/) { return absl::OkStatus(); }
absl::Status CheckRule(const MeanOfLastRule& rule) {
  if (rule.count >= MeanOfLastRule::kMinCount && rule.count <= MeanOfLastRule::kMaxCount) {
    return absl::OkStatus();
  }
  return BadSchedule(absl::StrCat("mean_of_last ", rule.count, ": must be ",
                                  MeanOfLastRule::kMinCount, " to ", MeanOfLastRule::kMaxCount,
                                  ", such as 5; for the latest weights as they are, use copy"));
}

absl::Status CheckRule(const CopyRule& /*rule*/) { return absl::OkStatus(); }

absl::Status CheckInterval(const Schedule::Options& options) {
  const std::optional<TrainingDuration>& given = options.update_interval;
  if (given.has_value()) {
    EMA_RETURN_IF_ERROR(CheckAboveZero("update_interval", *given, "\"1ba\""));
  }
  const TrainingDuration interval = given.value_or(DefaultInterval(options.rule));
  if (IsWarmUp(options.rule) && !IsCounted(interval.unit)) {
    return BadSchedule(absl::StrCat("update_interval \"", interval.ToString(),
                                    "\": a warm-up goes by a count of ba, ep, sp, tok or iter, "
                                    "such as \"1ba\""));
  }
  constexpr int64_t kMaxPhase = int64_t{1} << 53;
  const int64_t phase = options.interval_phase;
  if (phase < 0 || phase > kMaxPhase) {
    return BadSchedule(absl::StrCat("interval_phase ", phase, ": must be 0 to 2^53, such as 1"));
  }
  if (phase > 0 && !IsCounted(interval.unit)) {
    return BadSchedule(
        absl::StrCat("interval_phase ", phase, ": has no use with an interval in ",
                     std::string(TimeUnitSuffix(interval.unit)),
                     ", only in ba, ep, sp, tok and iter, such as update_interval=10ba"));
  }
  return absl::OkStatus();
}

const char* BeforeStartName(BeforeStart before_start) {
  return before_start == BeforeStart::kCopy   ? "copy"
         : before_start == BeforeStart::kHold ? "hold"
                                              : "reinit";
}

// A copy has no start.
absl::Status CheckCopy(const Schedule::Options& options) {
  std::string field;
  if (options.start.value > 0) {
    field = absl::StrCat("ema_start \"", options.start.ToString(), "\"");
  } else if (options.before_start != BeforeStart::kReinit) {
    field = absl::StrCat("before_start \"", BeforeStartName(options.before_start), "\"");
  } else if (options.end.has_value()) {
    field = absl::StrCat("ema_end \"", options.end->ToString(), "\"");
  } else {
    return absl::OkStatus();
  }
  return BadSchedule(absl::StrCat(field,
                                  ": has no use with copy, which always has the latest weights; "
                                  "use it with an average, such as half_life=1000ba"));
}

absl::Status CheckStartAndEnd(const Schedule::Options& options) {
  const TrainingDuration& start = options.start;
  const std::optional<TrainingDuration>& end = options.end;
  EMA_RETURN_IF_ERROR(CheckDuration("ema_start", start));
  if (end.has_value()) EMA_RETURN_IF_ERROR(CheckAboveZero("ema_end", *end, "\"0.9dur\""));
  if (std::holds_alternative<CopyRule>(options.rule)) EMA_RETURN_IF_ERROR(CheckCopy(options));
  if (end.has_value() && end->unit == start.unit && end->value <= start.value) {
    return BadSchedule(absl::StrCat("ema_end \"", end->ToString(), "\": must be after ema_start \"",
                                    start.ToString(),
                                    "\", such as ema_start=0.7dur, "
                                    "ema_end=0.9dur"));
  }
  const auto* constant = std::get_if<ConstantDecayRule>(&options.rule);
  if (constant != nullptr && constant->zero_init == ZeroInit::kPlain &&
      options.before_start != BeforeStart::kReinit) {
    return BadSchedule(absl::StrCat(
        "zero_init \"plain\": begins with zeros at the start, where before_start \"",
        BeforeStartName(options.before_start),
        "\" continues from what it has; give one that does not, such as before_start=reinit"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status BadSchedule(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule, message);
}

std::string NumberText(double value) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof(buffer), value).ptr};
}

absl::Status CheckOptions(const Schedule::Options& options) {
  EMA_RETURN_IF_ERROR(std::visit([](const auto& rule) { return CheckRule(rule); }, options.rule));
  EMA_RETURN_IF_ERROR(CheckInterval(options));
  return CheckStartAndEnd(options);
}

}  // namespace ema
