// SPDX-License-Identifier: Apache-2.0
//
// For the tests of schedules: a track of one number, random schedules and random training.
#ifndef EMA_TESTS_INCLUDE_SCHEDULE_TESTING_H_
#define EMA_TESTS_INCLUDE_SCHEDULE_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "ema/schedule.h"
#include "tests/testutil/status_matchers.h"

namespace ema {

inline TrainingTime At(double value, TimeUnit unit = TimeUnit::kBatch) {
  TrainingTime time;
  time.Set(unit, value);
  return time;
}

// A track of one float64.
class ScalarTrack {
 public:
  explicit ScalarTrack(Schedule schedule) : schedule_(std::move(schedule)) {}

  Schedule::Update Push(const TrainingTime& now, double param) {
    const absl::StatusOr<Schedule::Update> update = schedule_.Plan(state_, now);
    EXPECT_THAT(update, IsOk());
    if (!update.ok()) return {};
    state_ = schedule_.Next(state_, *update, now);
    if (update->due) {
      const double old = update->from_zero ? 0 : average_;
      average_ = update->update_weight == 1 ? param : old + update->update_weight * (param - old);
    }
    return *update;
  }

  double average() const { return average_; }
  const Schedule::State& state() const { return state_; }

 private:
  const Schedule schedule_;
  Schedule::State state_;
  double average_ = 0;
};

using Random = std::mt19937_64;

inline int64_t RandomInt(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}
inline double RandomReal(Random& random, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random);
}
inline bool OneIn(Random& random, int n) { return RandomInt(random, 1, n) == 1; }

// Up to `most_batches` batches of training in any unit, as RandomTraining counts it.
inline TrainingDuration RandomDuration(Random& random, int64_t most_batches) {
  const double batches = static_cast<double>(RandomInt(random, 1, most_batches));
  switch (RandomInt(random, 0, 6)) {
    case 0:
      return {std::ceil(batches / 50), TimeUnit::kEpoch};
    case 1:
      return {batches * 16, TimeUnit::kSample};
    case 2:
      return {batches * 1000, TimeUnit::kToken};
    case 3:
      return {batches, TimeUnit::kIteration};
    case 4:
      return {batches / 5000, TimeUnit::kProgress};
    case 5:
      return {batches * RandomReal(random, 0.2, 0.3), TimeUnit::kSecond};
    default:
      return {batches, TimeUnit::kBatch};
  }
}

inline Schedule::Rule RandomRule(Random& random) {
  const double low = OneIn(random, 2) ? 0 : RandomReal(random, 0, 0.5);
  const double high = OneIn(random, 2) ? 0.9999 : RandomReal(random, 0.5, 1);
  const double offset = OneIn(random, 2) ? 0 : static_cast<double>(RandomInt(random, 1, 5));
  switch (RandomInt(random, 0, 9)) {
    case 0: {
      HalfLifeRule rule{RandomDuration(random, 2000)};
      if (OneIn(random, 3)) rule.ramp_ratio = RandomReal(random, 0.01, 2);
      if (rule.ramp_ratio > 0 && OneIn(random, 2)) {
        rule.half_life = {std::numeric_limits<double>::infinity(), TimeUnit::kBatch};
      }
      rule.debias = rule.ramp_ratio == 0 && OneIn(random, 2);
      return rule;
    }
    case 1:
      return ConstantDecayRule{OneIn(random, 5) ? 0 : RandomReal(random, 0, 1),
                               static_cast<ConstantDecayRule::ZeroInit>(RandomInt(random, 0, 2))};
    case 2:
      return InverseGammaRule{RandomReal(random, 0.1, 10), RandomReal(random, 0.3, 2), low, high,
                              offset};
    case 3:
      return RampRule{RandomReal(random, 1, 20), low, high, offset};
    case 7:
      return ExponentialRampRule{RandomReal(random, 1, 50), high, offset};
    case 8: {
      DecaysRule rule{.shape = static_cast<DecaysRule::Shape>(RandomInt(random, 0, 1))};
      TrainingDuration time = RandomDuration(random, 500);
      for (int64_t left = RandomInt(random, 1, 4); left > 0; --left) {
        rule.points.push_back({time, RandomReal(random, 0, 1)});
        time.value *= 2;
      }
      return rule;
    }
    case 4:
      return PowerFunctionRule{std::min(kMaxSigmaRel, RandomReal(random, 0.005, 0.3))};
    case 5:
      return UniformRule{};
    case 9:
      return MeanOfLastRule{RandomInt(random, 2, 16)};
    default:
      return CopyRule{};
  }
}

// Any that Create() takes.
inline Schedule RandomSchedule(Random& random) {
  for (;;) {
    Schedule::Options options;
    options.rule = RandomRule(random);
    if (OneIn(random, 2)) options.update_interval = RandomDuration(random, 100);
    if (OneIn(random, 3)) options.interval_phase = RandomInt(random, 0, 120);
    if (OneIn(random, 2)) options.start = RandomDuration(random, 400);
    options.before_start = static_cast<Schedule::BeforeStart>(RandomInt(random, 0, 2));
    if (OneIn(random, 4)) options.end = RandomDuration(random, 800);
    const absl::StatusOr<Schedule> schedule = Schedule::Create(options);
    if (schedule.ok()) return *schedule;
  }
}

// A trainer that reports every unit; some pushes are of the same time, some far apart.
class RandomTraining {
 public:
  explicit RandomTraining(Random& random) : random_(random) {
    if (OneIn(random_, 2)) Advance();
  }

  TrainingTime time() const {
    TrainingTime time;
    time.Set(TimeUnit::kBatch, batch_);
    time.Set(TimeUnit::kEpoch, std::floor(batch_ / 50));
    time.Set(TimeUnit::kSample, batch_ * 16);
    time.Set(TimeUnit::kToken, batch_ * 1000);
    time.Set(TimeUnit::kIteration, batch_);
    time.Set(TimeUnit::kProgress, std::min(1.0, batch_ / 5000));
    time.Set(TimeUnit::kSecond, seconds_);
    return time;
  }
  void Advance() {
    const int64_t batches =
        OneIn(random_, 10) ? 0 : RandomInt(random_, 1, OneIn(random_, 5) ? 300 : 9);
    batch_ += static_cast<double>(batches);
    seconds_ += static_cast<double>(batches) * RandomReal(random_, 0.2, 0.3);
  }

 private:
  Random& random_;
  double batch_ = 0;
  double seconds_ = 0;
};

}  // namespace ema

#endif  // EMA_TESTS_INCLUDE_SCHEDULE_TESTING_H_
