// SPDX-License-Identifier: Apache-2.0
#include "ema/schedule.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "include/ema/internal/schedule_parts.h"

namespace ema {
namespace {

constexpr double kLn2 = 0.693147180559945309417;
constexpr double kPi = 3.14159265358979323846;
// Shares and seconds carry rounding errors: without a tolerance, 0.3 would be two intervals of 0.1.
constexpr double kRelativeTolerance = 1e-12;

using BeforeStart = Schedule::BeforeStart;
using ZeroInit = ConstantDecayRule::ZeroInit;

absl::Status TimeError(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadTime, message);
}

// A field of the schedule that asks for a unit of training time.
struct Clock {
  const char* field;
  const TrainingDuration& duration;
};

// `now` in the clock's unit.
absl::StatusOr<double> Read(const Clock& clock, const TrainingTime& now) {
  const TimeUnit unit = clock.duration.unit;
  const std::optional<double> value = now.Get(unit);
  if (!value.has_value()) {
    return TimeError(absl::StrCat("training time lacks \"", std::string(TimeUnitSuffix(unit)),
                                  "\", which ", clock.field, " ", clock.duration.ToString(),
                                  " needs"));
  }
  return *value;
}

// `then`, an earlier time that `what` ("last update") is at, in the clock's unit.
absl::StatusOr<double> ReadEarlier(const Clock& clock, const TrainingTime& then, const char* what) {
  const std::optional<double> value = then.Get(clock.duration.unit);
  if (value.has_value()) return *value;
  return TimeError(absl::StrCat("training time of the ", what, " lacks \"",
                                std::string(TimeUnitSuffix(clock.duration.unit)), "\", which ",
                                clock.field, " ", clock.duration.ToString(), " needs"));
}

struct Passage {
  double last = 0;
  double now = 0;
};

// From the last update (before the first: from now) to `now`.
absl::StatusOr<Passage> Measure(const Clock& clock, const Schedule::State& state,
                                const TrainingTime& now) {
  EMA_ASSIGN_OR_RETURN(const double value, Read(clock, now));
  if (!state.last_update.has_value()) return Passage{value, value};
  EMA_ASSIGN_OR_RETURN(const double last, ReadEarlier(clock, *state.last_update, "last update"));
  if (value < last) {
    const TimeUnit unit = clock.duration.unit;
    return TimeError(absl::StrCat("training time ", TrainingDuration{value, unit}.ToString(),
                                  " is before that of the last update, ",
                                  TrainingDuration{last, unit}.ToString(),
                                  ": it must not go back"));
  }
  return Passage{last, value};
}

bool IsAtLeast(double time, const TrainingDuration& limit) {
  return IsCounted(limit.unit) ? time >= limit.value
                               : time * (1 + kRelativeTolerance) >= limit.value;
}

bool IsAfter(double time, const TrainingDuration& limit) {
  return IsCounted(limit.unit) ? time > limit.value : time > limit.value * (1 + kRelativeTolerance);
}

// The clock that a rule's elapsed time and age are read from.
Clock RuleClock(const Schedule::Options& options, const TrainingDuration& update_interval) {
  const auto* half_life = std::get_if<HalfLifeRule>(&options.rule);
  if (half_life != nullptr && !std::isinf(half_life->half_life.value)) {
    return {"half_life", half_life->half_life};
  }
  return {"update_interval", update_interval};
}

// What a rule's weight depends on; the times in the unit of its clock.
struct Moment {
  double elapsed = 0;
  double age = 0;
  double position = 0;         // Of a warm-up, without its count_offset.
  double averaged_number = 1;  // Of this update, from 1.
};

double WeightOf(const HalfLifeRule& rule, const Moment& moment) {
  const double half_life = rule.ramp_ratio > 0
                               ? std::min(rule.half_life.value, rule.ramp_ratio * moment.age)
                               : rule.half_life.value;
  if (!(half_life > 0)) return 1;
  const double weight = -std::expm1(-kLn2 * moment.elapsed / half_life);
  if (!rule.debias) return weight;
  if (!(moment.age > 0)) return 1;
  return std::min(1.0, weight / -std::expm1(-kLn2 * moment.age / half_life));
}

double WeightOf(const ConstantDecayRule& rule, const Moment& moment) {
  const double weight = 1 - rule.smoothing;
  if (rule.zero_init != ZeroInit::kDebiased || rule.smoothing == 0) return weight;
  // 1 - d, d = s (1 - s^(n-1)) / (1 - s^n), without the difference of two numbers near 1.
  return std::min(1.0, weight / -std::expm1(moment.averaged_number * std::log(rule.smoothing)));
}

double WarmUpWeight(double decay, double min_decay, double max_decay) {
  return 1 - std::max(std::min(decay, max_decay), min_decay);
}

// The operations of the libraries in their order, so that the decays are theirs to the last bit.
double WeightOf(const InverseGammaRule& rule, const Moment& moment) {
  const double s = moment.position + rule.count_offset;
  if (!(s > 0)) return 1;
  return WarmUpWeight(1 - std::pow(1 + s / rule.inv_gamma, -rule.power), rule.min_decay,
                      rule.max_decay);
}

double WeightOf(const RampRule& rule, const Moment& moment) {
  const double s = moment.position + rule.count_offset;
  if (!(s > 0)) return 1;
  return WarmUpWeight((1 + s) / (rule.ramp + s), rule.min_decay, rule.max_decay);
}

double WeightOf(const ExponentialRampRule& rule, const Moment& moment) {
  const double s = moment.position + rule.count_offset;
  if (!(s > 0)) return 1;
  return 1 - rule.max_decay * (1 - std::exp(-s / rule.exp_ramp));
}

// `now` in the unit of the points.
double DecayAt(const DecaysRule& rule, double now) {
  const auto next =
      std::find_if(rule.points.begin(), rule.points.end(),
                   [now](const DecaysRule::Point& point) { return point.time.value > now; });
  if (next == rule.points.begin()) return next->decay;
  const DecaysRule::Point& last = *std::prev(next);
  if (next == rule.points.end()) return last.decay;
  const double share = (now - last.time.value) / (next->time.value - last.time.value);
  if (rule.shape == DecaysRule::Shape::kLinear) {
    return last.decay + share * (next->decay - last.decay);
  }
  // As BYOL: 1 - (1 - d) * (cos(pi * k / K) + 1) / 2.
  return next->decay - (next->decay - last.decay) * (std::cos(kPi * share) + 1) / 2;
}

double PowerFunctionWeight(double gamma, double age_offset, const Moment& moment) {
  const double age = moment.age + age_offset;
  if (!(age > 0)) return 1;
  const double share = std::min(1.0, moment.elapsed / age);
  // With an infinite gamma, 0 times it is NaN.
  return share > 0 ? -std::expm1((gamma + 1) * std::log1p(-share)) : 0;
}

}  // namespace

double WholeIntervals(double time, const TrainingDuration& interval, int64_t phase) {
  if (IsCounted(interval.unit)) {
    return std::floor((time - static_cast<double>(phase)) / interval.value);
  }
  return std::floor(time / interval.value * (1 + kRelativeTolerance));
}

TrainingDuration DefaultInterval(const Schedule::Rule& rule) {
  const auto* half_life_rule = std::get_if<HalfLifeRule>(&rule);
  if (half_life_rule == nullptr || std::isinf(half_life_rule->half_life.value)) {
    return {1, TimeUnit::kBatch};
  }
  const TimeUnit unit = half_life_rule->half_life.unit;
  return {IsCounted(unit) ? 1.0 : 0.0, unit};
}

double GammaOfSigmaRel(double sigma_rel) {
  // Here the root is 1 / sigma_rel - 3 to the last bit, and its cube may overflow.
  if (sigma_rel < 1e-8) return 1 / sigma_rel - 3;
  const double t = 1 / (sigma_rel * sigma_rel);
  // Right of the largest root the cubic is above 0 and convex: Newton's method comes down to it.
  double gamma = 1 / sigma_rel;
  for (;;) {
    const double value = ((gamma + 7) * gamma + (16 - t)) * gamma + (12 - t);
    const double slope = (3 * gamma + 14) * gamma + (16 - t);
    const double next = gamma - value / slope;
    if (!(next < gamma)) return std::max(0.0, gamma);
    gamma = next;
  }
}

Schedule::Schedule(const Options& options)
    : options_(options),
      update_interval_(options.update_interval.value_or(DefaultInterval(options.rule))) {
  if (const auto* rule = std::get_if<PowerFunctionRule>(&options_.rule)) {
    gamma_ = GammaOfSigmaRel(rule->sigma_rel);
  }
}

absl::StatusOr<Schedule> Schedule::Create(const Options& options) {
  EMA_RETURN_IF_ERROR(CheckOptions(options));
  return Schedule(options);
}

absl::StatusOr<bool> Schedule::HasStarted(const State& state, const TrainingTime& now) const {
  if (options_.start.value == 0 || state.started.has_value()) return true;
  EMA_ASSIGN_OR_RETURN(const double value, Read({"ema_start", options_.start}, now));
  return IsAtLeast(value, options_.start);
}

absl::StatusOr<double> Schedule::AgeOrigin(const State& state) const {
  const Clock clock = RuleClock(options_, update_interval_);
  const TrainingDuration& start = options_.start;
  if (start.value == 0) return 0;
  if (start.unit != clock.duration.unit) return ReadEarlier(clock, *state.started, "start");
  // A start that was moved behind what has begun does not take it back.
  const std::optional<double> started =
      state.started.has_value() ? state.started->Get(start.unit) : std::nullopt;
  return std::min(start.value, started.value_or(start.value));
}

absl::StatusOr<double> Schedule::Weight(const State& state, const TrainingTime& now,
                                        double elapsed) const {
  const Clock clock = RuleClock(options_, update_interval_);
  const TrainingDuration& start = options_.start;
  EMA_ASSIGN_OR_RETURN(const double value, Read(clock, now));
  Moment moment{.elapsed = elapsed,
                .averaged_number = static_cast<double>(state.averaged_count) + 1};
  EMA_ASSIGN_OR_RETURN(const double origin, AgeOrigin(state));
  moment.age = value - origin;
  // From a start in another unit, the update that began the average is the one at position 0.
  const bool counts_from_update = start.value > 0 && start.unit != clock.duration.unit;
  moment.position = counts_from_update ? moment.age : moment.age - 1;
  double decays_now = 0;
  if (const auto* decays = std::get_if<DecaysRule>(&options_.rule)) {
    EMA_ASSIGN_OR_RETURN(decays_now, Read({"decays", decays->points.back().time}, now));
  }

  const auto weight = [&](const auto& rule) -> double {
    using OneRule = std::decay_t<decltype(rule)>;
    if constexpr (std::is_same_v<OneRule, PowerFunctionRule>) {
      return PowerFunctionWeight(gamma_, rule.age_offset, moment);
    } else if constexpr (std::is_same_v<OneRule, DecaysRule>) {
      return 1 - DecayAt(rule, decays_now);
    } else if constexpr (std::is_same_v<OneRule, UniformRule>) {
      return 1 / moment.averaged_number;
    } else if constexpr (std::is_same_v<OneRule, MeanOfLastRule>) {
      return 1 / std::min(moment.averaged_number, static_cast<double>(rule.count));
    } else if constexpr (std::is_same_v<OneRule, CopyRule>) {
      return 1;
    } else {
      return WeightOf(rule, moment);
    }
  };
  return std::visit(weight, options_.rule);
}

absl::StatusOr<Schedule::Update> Schedule::Plan(const State& state, const TrainingTime& now) const {
  EMA_ASSIGN_OR_RETURN(const Passage passage,
                       Measure(RuleClock(options_, update_interval_), state, now));
  EMA_ASSIGN_OR_RETURN(const Passage intervals,
                       Measure({"update_interval", update_interval_}, state, now));
  if (const auto* decays = std::get_if<DecaysRule>(&options_.rule)) {
    // Before any update needs it: attach() asks whether the trainer counts all units.
    EMA_RETURN_IF_ERROR(Read({"decays", decays->points.back().time}, now).status());
  }
  EMA_ASSIGN_OR_RETURN(const bool has_started, HasStarted(state, now));
  bool has_ended = false;
  if (options_.end.has_value()) {
    EMA_ASSIGN_OR_RETURN(const double value, Read({"ema_end", *options_.end}, now));
    has_ended = IsAfter(value, *options_.end);
  }

  Update update{.elapsed = passage.now - passage.last};
  const auto* constant = std::get_if<ConstantDecayRule>(&options_.rule);
  const auto due_with_first_value = [&] {
    update.due = true;
    update.from_zero = has_started && constant != nullptr &&
                       constant->zero_init == ZeroInit::kPlain && state.averaged_count == 0;
    update.update_weight = update.from_zero ? 1 - constant->smoothing : 1;
    return update;
  };
  if (!state.last_update.has_value()) return due_with_first_value();
  if (has_ended) return update;

  const bool is_interval_over =
      update_interval_.value == 0 ||
      WholeIntervals(intervals.now, update_interval_, options_.interval_phase) >
          WholeIntervals(intervals.last, update_interval_, options_.interval_phase);
  // The position of a warm-up decides which update is the last copy, as in the libraries.
  const bool needs_no_last_copy = IsWarmUp(options_.rule) &&
                                  options_.before_start == BeforeStart::kCopy &&
                                  options_.start.unit == update_interval_.unit;
  if (has_started && (state.started.has_value() || needs_no_last_copy)) {
    update.due = is_interval_over;
    if (update.due) {
      EMA_ASSIGN_OR_RETURN(update.update_weight, Weight(state, now, update.elapsed));
    }
    return update;
  }
  switch (options_.before_start) {
    case BeforeStart::kReinit:
      if (has_started) return due_with_first_value();
      break;
    case BeforeStart::kCopy:
      update.due = is_interval_over;
      update.update_weight = update.due ? 1 : 0;
      break;
    case BeforeStart::kHold:
      // The values stay; the state moves to the start.
      update.due = has_started;
      break;
  }
  return update;
}

Schedule::State Schedule::Next(const State& state, const Update& update,
                               const TrainingTime& now) const {
  if (!update.due) return state;
  State next = state;
  ++next.update_count;
  next.last_update = now;
  if (!HasStarted(state, now).value_or(false)) return next;
  // What the track has at its start is its first sample, also where it was held.
  ++next.averaged_count;
  if (!next.started.has_value()) next.started = now;
  return next;
}

}  // namespace ema
