// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <variant>

#include "absl/strings/str_cat.h"
#include "ema/schedule.h"
#include "tests/include/schedule_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using BeforeStart = Schedule::BeforeStart;
using ZeroInit = ConstantDecayRule::ZeroInit;

// What section 3 of ema-semantics.md says, in the plainest form.
struct PlainDecay {
  // The times in the rule's unit; `n` is the number of this update.
  long double age = 0;
  long double position = 0;
  const TrainingTime& now;
  long double elapsed = 0;
  long double n = 1;

  long double operator()(const HalfLifeRule& r) const {
    long double h = r.half_life.value;
    if (r.ramp_ratio > 0) h = std::min(h, r.ramp_ratio * age);
    const long double d = h > 0 ? std::pow(2.0L, -elapsed / h) : 0;
    if (!r.debias) return d;
    return age > 0 ? 1 - (1 - d) / (1 - std::pow(2.0L, -age / h)) : 0;
  }
  long double operator()(const ConstantDecayRule& r) const {
    const long double s = r.smoothing;
    if (r.zero_init != ZeroInit::kDebiased) return s;
    return s * (1 - std::pow(s, n - 1)) / (1 - std::pow(s, n));
  }
  long double operator()(const InverseGammaRule& r) const {
    const long double power = r.power;
    const long double s = position + r.count_offset;
    return s > 0 ? Within(r, 1 - std::pow(1 + s / r.inv_gamma, -power)) : 0;
  }
  long double operator()(const RampRule& r) const {
    const long double s = position + r.count_offset;
    return s > 0 ? Within(r, (1 + s) / (r.ramp + s)) : 0;
  }
  long double operator()(const ExponentialRampRule& r) const {
    const long double s = position + r.count_offset;
    return s > 0 ? r.max_decay * (1 - std::exp(-s / r.exp_ramp)) : 0;
  }
  long double operator()(const DecaysRule& r) const {
    const long double time = *now.Get(r.points[0].time.unit);
    if (time <= r.points[0].time.value) return r.points[0].decay;
    for (size_t i = 1; i < r.points.size(); ++i) {
      const long double a = r.points[i - 1].time.value;
      const long double b = r.points[i].time.value;
      if (time > b) continue;
      const long double share = (time - a) / (b - a);
      const bool is_cosine = r.shape == DecaysRule::Shape::kCosine;
      const long double part = is_cosine ? (1 - std::cos(std::acos(-1.0L) * share)) / 2 : share;
      return (1 - part) * r.points[i - 1].decay + part * r.points[i].decay;
    }
    return r.points.back().decay;
  }
  long double operator()(const PowerFunctionRule& r) const {
    const long double total = age + r.age_offset;
    return total > 0 ? std::pow(1 - elapsed / total, GammaOfSigmaRel(r.sigma_rel) + 1.0L) : 0;
  }
  long double operator()(const UniformRule& /*r*/) const { return 1 - 1 / n; }
  long double operator()(const MeanOfLastRule& r) const {
    return 1 - 1 / std::min(n, static_cast<long double>(r.count));
  }
  long double operator()(const CopyRule& /*r*/) const { return 0; }

  template <typename Rule>
  long double Within(const Rule& r, long double d) const {
    return std::clamp<long double>(d, r.min_decay, r.max_decay);
  }
};

// True if there is a phase + k * interval in (last, now].
bool HasIntervalEnd(const Schedule& schedule, double last, double now) {
  const int64_t length = static_cast<int64_t>(schedule.update_interval().value);
  const int64_t since_phase = static_cast<int64_t>(now) - schedule.options().interval_phase;
  const int64_t past_the_end = (since_phase % length + length) % length;
  return now - static_cast<double>(past_the_end) > last;
}

// One push, seen plainly.
struct Situation {
  bool is_first = false;
  bool has_started = false;
  bool reaches_start = false;  // Of a track that had not.
  bool has_ended = false;
  bool is_interval_over = false;
};

bool IsDue(const Situation& situation, BeforeStart before_start) {
  if (situation.is_first) return true;
  if (situation.has_ended) return false;
  if (before_start != BeforeStart::kCopy) {
    if (!situation.has_started) return false;
    if (situation.reaches_start) return true;
  }
  return situation.is_interval_over;
}

double ExpectedWeight(const Schedule& schedule, const Schedule::State& state,
                      const Situation& situation, const TrainingTime& now, TimeUnit unit) {
  const Schedule::Options& options = schedule.options();
  const auto* constant = std::get_if<ConstantDecayRule>(&options.rule);
  if (constant != nullptr && constant->zero_init == ZeroInit::kPlain && situation.reaches_start) {
    return 1 - constant->smoothing;
  }
  if (situation.is_first || !situation.has_started) return 1;
  const bool is_same_unit = options.start.value == 0 || options.start.unit == unit;
  const bool is_warm_up = std::holds_alternative<InverseGammaRule>(options.rule) ||
                          std::holds_alternative<RampRule>(options.rule) ||
                          std::holds_alternative<ExponentialRampRule>(options.rule);
  // The position of a warm-up says by itself when copies end.
  const bool has_no_last_copy =
      is_warm_up && options.before_start == BeforeStart::kCopy && options.start.unit == unit;
  if (situation.reaches_start && !has_no_last_copy) {
    return options.before_start == BeforeStart::kHold ? 0 : 1;
  }
  const double began = is_same_unit ? options.start.value : *state.started->Get(unit);
  const double age = *now.Get(unit) - began;
  const PlainDecay decay{.age = age,
                         .position = is_same_unit ? age - 1 : age,
                         .now = now,
                         .elapsed = *now.Get(unit) - *state.last_update->Get(unit),
                         .n = static_cast<long double>(state.averaged_count + 1)};
  return static_cast<double>(1 - std::visit(decay, options.rule));
}

// 12'000 schedules, each over some pushes: due, weight and state against the plain rules.
TEST(SchedulePropertyTest, PlanIsWhatTheRulesSay) {
  constexpr uint64_t kSeed = 20240401;
  std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  Random random(kSeed);
  for (int round = 0; round < 12'000; ++round) {
    const Schedule schedule = RandomSchedule(random);
    SCOPED_TRACE(absl::StrCat("round ", round, ": ", schedule.ToString()));
    const Schedule::Options& options = schedule.options();
    const TrainingDuration& interval = schedule.update_interval();
    const auto* half_life = std::get_if<HalfLifeRule>(&options.rule);
    const TimeUnit unit = half_life != nullptr && std::isfinite(half_life->half_life.value)
                              ? half_life->half_life.unit
                              : interval.unit;
    RandomTraining training(random);
    Schedule::State state;
    for (int push = 0; push < 12; ++push, training.Advance()) {
      const TrainingTime now = training.time();
      SCOPED_TRACE(now.ToString());
      EMA_ASSERT_OK_AND_ASSIGN(const Schedule::Update update, schedule.Plan(state, now));

      Situation situation;
      situation.is_first = !state.last_update.has_value();
      situation.has_started = options.start.value == 0 || state.started.has_value() ||
                              *now.Get(options.start.unit) * (1 + 1e-12) >= options.start.value;
      situation.reaches_start = situation.has_started && !state.started.has_value();
      situation.has_ended =
          options.end.has_value() && *now.Get(options.end->unit) > options.end->value * (1 + 1e-12);
      if (situation.is_first || interval.value == 0) {
        situation.is_interval_over = true;
      } else if (IsCounted(interval.unit)) {
        situation.is_interval_over = HasIntervalEnd(
            schedule, *state.last_update->Get(interval.unit), *now.Get(interval.unit));
      } else {
        // Where one ends to the last bit is another test's matter.
        situation.is_interval_over = update.due;
      }

      const bool due = IsDue(situation, options.before_start);
      ASSERT_EQ(update.due, due);
      const Schedule::State next = schedule.Next(state, update, now);
      if (!due) {
        ASSERT_EQ(update.update_weight, 0);
        ASSERT_EQ(next, state);
        continue;
      }
      const double expected = ExpectedWeight(schedule, state, situation, now, unit);
      ASSERT_NEAR(update.update_weight, expected, 1e-9 * expected + 1e-13);
      ASSERT_GE(update.update_weight, 0);
      ASSERT_LE(update.update_weight, 1);
      ASSERT_EQ(update.elapsed,
                situation.is_first ? 0 : *now.Get(unit) - *state.last_update->Get(unit));
      const auto* constant = std::get_if<ConstantDecayRule>(&options.rule);
      ASSERT_EQ(update.from_zero, constant != nullptr && situation.reaches_start &&
                                      constant->zero_init == ZeroInit::kPlain);

      ASSERT_EQ(next.update_count, state.update_count + 1);
      ASSERT_EQ(next.averaged_count, situation.has_started ? state.averaged_count + 1 : 0);
      ASSERT_EQ(next.last_update, now);
      ASSERT_EQ(next.started, situation.reaches_start ? now : state.started);
      state = next;
    }
  }
}

// Of the rules that have it: two updates of half the elapsed time with the same input equal one of
// the whole.
TEST(SchedulePropertyTest, HalfTheTimeTwiceIsTheWhole) {
  constexpr uint64_t kSeed = 20240402;
  std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  Random random(kSeed);
  for (int round = 0; round < 12'000; ++round) {
    Schedule::Options options;
    if (OneIn(random, 2)) {
      const TrainingDuration half_life{std::exp(RandomReal(random, 0, 15)), TimeUnit::kSecond};
      options.rule = HalfLifeRule{half_life, 0, OneIn(random, 2)};
    } else {
      options.rule = PowerFunctionRule{RandomReal(random, 0.01, kMaxSigmaRel)};
      options.update_interval = {1e-6, TimeUnit::kSecond};
    }
    if (OneIn(random, 2)) options.start = {RandomReal(random, 1, 100), TimeUnit::kSecond};
    EMA_ASSERT_OK_AND_ASSIGN(const Schedule schedule, Schedule::Create(options));
    SCOPED_TRACE(absl::StrCat("round ", round, ": ", schedule.ToString()));

    const double last = options.start.value + std::exp(RandomReal(random, 0, 12));
    const double elapsed = std::exp(RandomReal(random, 0, 12));
    const double before = RandomReal(random, -1, 1);
    const double param = RandomReal(random, -1, 1);
    ScalarTrack whole(schedule);
    ScalarTrack halves(schedule);
    const auto push = [](ScalarTrack& track, double seconds, double value) {
      const Schedule::Update update = track.Push(At(seconds, TimeUnit::kSecond), value);
      EXPECT_TRUE(update.due);
    };
    for (ScalarTrack* track : {&whole, &halves}) {
      push(*track, options.start.value, before);
      push(*track, last, before);
    }
    push(whole, last + elapsed, param);
    push(halves, last + elapsed / 2, param);
    push(halves, last + elapsed, param);
    ASSERT_NEAR(whole.average(), halves.average(), 1e-12);
  }
}

}  // namespace
}  // namespace ema
