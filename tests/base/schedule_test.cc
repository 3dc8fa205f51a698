// SPDX-License-Identifier: Apache-2.0
#include "ema/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

TrainingTime At(double value, TimeUnit unit = TimeUnit::kBatch) {
  TrainingTime time;
  time.Set(unit, value);
  return time;
}

Schedule::State After(const TrainingTime& time) { return {1, time}; }

// Plans `now` after an update at `last`, both in the schedule's unit.
Schedule::Update PlanAt(const Schedule& schedule, double last, double now) {
  const TimeUnit unit = schedule.update_interval().unit;
  const absl::StatusOr<Schedule::Update> update =
      schedule.Plan(After(At(last, unit)), At(now, unit));
  EXPECT_THAT(update, IsOk());
  return update.value_or(Schedule::Update{});
}

Schedule HalfLife(const char* half_life, const char* interval = nullptr) {
  std::optional<TrainingDuration> update_interval;
  if (interval != nullptr) update_interval = *TrainingDuration::Parse(interval);
  return *Schedule::Create(HalfLifeRule{*TrainingDuration::Parse(half_life)}, update_interval);
}

struct RefusalCase {
  const char* name;
  const char* text;
  const char* message;
};
void PrintTo(const RefusalCase& c, std::ostream* os) { *os << '"' << c.text << '"'; }

class HalfLifeRefusalTest : public testing::TestWithParam<RefusalCase> {};

TEST_P(HalfLifeRefusalTest, NamesTheFieldTheValueAndARightOne) {
  const absl::StatusOr<Schedule> schedule = Schedule::Parse(GetParam().text);
  ASSERT_THAT(
      schedule,
      StatusIs(kInvalid, AllOf(StartsWith(absl::StrCat("half_life \"", GetParam().text, "\": ")),
                               HasSubstr(GetParam().message), HasSubstr("\"1000ba\""))));
  EXPECT_THAT(schedule, ReasonIs(ErrorReason::kBadSchedule));
}

INSTANTIATE_TEST_SUITE_P(All, HalfLifeRefusalTest,
                         testing::Values(RefusalCase{"Infinite", "inf", "a finite number"},
                                         RefusalCase{"InfiniteBatches", "infba", "a finite number"},
                                         RefusalCase{"Zero", "0ba", "must be finite and above 0"},
                                         RefusalCase{"ZeroShare", "0dur", "above 0"},
                                         RefusalCase{"Negative", "-1ba", "must not be negative"},
                                         RefusalCase{"BareNumber", "1000", "needs a unit"},
                                         RefusalCase{"Word", "copi", "a finite number"}),
                         [](const auto& test) { return test.param.name; });

TEST(ScheduleTest, ParseReadsTheShortForm) {
  EMA_ASSERT_OK_AND_ASSIGN(const Schedule copy, Schedule::Parse("copy"));
  EXPECT_TRUE(copy.is_copy());
  EXPECT_THAT(Schedule::Parse("200ba"), IsOkAndHolds(HalfLife("200ba")));
}

TEST(ScheduleTest, CreateRefusesBadFields) {
  EXPECT_THAT(Schedule::Create(ConstantDecayRule{1}),
              StatusIs(kInvalid, "smoothing 1: must be 0 or more and below 1, such as 0.999"));
  EXPECT_THAT(Schedule::Create(ConstantDecayRule{-0.5}), StatusIs(kInvalid, HasSubstr("-0.5")));
  EXPECT_THAT(Schedule::Create(ConstantDecayRule{std::nan("")}),
              ReasonIs(ErrorReason::kBadSchedule));
  EXPECT_THAT(Schedule::Create(ConstantDecayRule{0}), IsOk());

  EXPECT_THAT(
      Schedule::Create(CopyRule{}, TrainingDuration{0, TimeUnit::kBatch}),
      StatusIs(kInvalid, StartsWith("update_interval \"0ba\": must be finite and above 0")));
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THAT(Schedule::Create(HalfLifeRule{{infinity, TimeUnit::kBatch}}),
              StatusIs(kInvalid, StartsWith("half_life \"infba\": must be finite")));
}

TEST(ScheduleTest, IntervalDefaultsToOneUnitOrEveryPush) {
  EXPECT_EQ(HalfLife("200ba").update_interval(), (TrainingDuration{1, TimeUnit::kBatch}));
  EXPECT_EQ(HalfLife("2ep").update_interval(), (TrainingDuration{1, TimeUnit::kEpoch}));
  EXPECT_EQ(HalfLife("3e9tok").update_interval(), (TrainingDuration{1, TimeUnit::kToken}));
  EXPECT_EQ(HalfLife("0.1dur").update_interval(), (TrainingDuration{0, TimeUnit::kProgress}));
  EXPECT_EQ(HalfLife("1h").update_interval(), (TrainingDuration{0, TimeUnit::kSecond}));
  EXPECT_EQ(Schedule::Parse("copy")->update_interval(), (TrainingDuration{1, TimeUnit::kBatch}));
  EXPECT_EQ(Schedule::Create(ConstantDecayRule{0.9})->update_interval(),
            (TrainingDuration{1, TimeUnit::kBatch}));
}

TEST(ScheduleTest, PrintsItself) {
  EXPECT_EQ(HalfLife("200ba", "5ba").ToString(), "half_life 200ba, update_interval 5ba");
  EXPECT_EQ(HalfLife("0.1dur").ToString(), "half_life 0.1dur, every push");
  EXPECT_EQ(Schedule::Create(ConstantDecayRule{0.999})->ToString(),
            "smoothing 0.999, update_interval 1ba");
  EXPECT_EQ(Schedule::Parse("copy")->ToString(), "copy, update_interval 1ba");
}

struct WeightCase {
  const char* name;
  const char* half_life;
  double elapsed;
  double weight;
};
void PrintTo(const WeightCase& c, std::ostream* os) { *os << c.half_life << " " << c.elapsed; }

class WeightTest : public testing::TestWithParam<WeightCase> {};

TEST_P(WeightTest, IsTheReferenceRoundedOnce) {
  const Schedule::Update update =
      PlanAt(HalfLife(GetParam().half_life), 500, 500 + GetParam().elapsed);
  EXPECT_TRUE(update.due);
  EXPECT_EQ(update.elapsed, GetParam().elapsed);
  EXPECT_EQ(update.update_weight, static_cast<float>(GetParam().weight));
}

// ema-semantics.md, section 3.2.
INSTANTIATE_TEST_SUITE_P(
    All, WeightTest,
    testing::Values(WeightCase{"H1000D1", "1000ba", 1, 6.9290700954747814e-4},
                    WeightCase{"H1000D10", "1000ba", 10, 6.907504562964099e-3},
                    WeightCase{"H1000D100", "1000ba", 100, 6.6967008463192576e-2},
                    WeightCase{"H50D1", "50ep", 1, 1.3767295506640827e-2},
                    WeightCase{"H10000D1", "10000sp", 1, 6.9312315846428089e-5},
                    WeightCase{"OneHalfLife", "100ba", 100, 0.5},
                    WeightCase{"LongAgoIsACopy", "1ba", 1000, 1},
                    WeightCase{"TinyShare", "9007199254740992tok", 1, 7.695479593116620e-17}),
    [](const auto& test) { return test.param.name; });

TEST(SchedulePlanTest, FirstPushIsDueWithWeightOne) {
  const std::vector<Schedule> schedules = {HalfLife("1000ba", "10ba"), *Schedule::Parse("copy"),
                                           *Schedule::Create(ConstantDecayRule{0.9})};
  for (const Schedule& schedule : schedules) {
    EMA_ASSERT_OK_AND_ASSIGN(const Schedule::Update update, schedule.Plan({}, At(7)));
    EXPECT_TRUE(update.due) << schedule.ToString();
    EXPECT_EQ(update.update_weight, 1);
    EXPECT_EQ(update.elapsed, 0);
  }
}

// The trace of ema-semantics.md, section 3.2: half-life 1000, an update each 10, e0 = 0, p = 10 k.
TEST(SchedulePlanTest, TraceOfEvenUpdates) {
  const Schedule schedule = HalfLife("1000ba", "10ba");
  const double expected[] = {0.06907504562964073, 0.20674800069604848, 0.412545024826779,
                             0.6859955507039228, 1.0266322614554662};
  double average = 0;
  for (int k = 1; k <= 5; ++k) {
    const Schedule::Update update = PlanAt(schedule, 10 * (k - 1), 10 * k);
    ASSERT_TRUE(update.due);
    average += update.update_weight * (10.0 * k - average);
    EXPECT_NEAR(average, expected[k - 1], 1e-6);
  }
}

TEST(SchedulePlanTest, IrregularUpdatesKeepTheHalfLife) {
  const Schedule schedule = HalfLife("100ba");
  const double times[] = {20, 50, 55};
  const double expected[] = {10.669670084631925, 18.05384527676094, 19.312366938745114};
  double average = 10;
  double last = 10;
  for (int i = 0; i < 3; ++i) {
    const Schedule::Update update = PlanAt(schedule, last, times[i]);
    EXPECT_EQ(update.elapsed, times[i] - last);
    average += update.update_weight * (times[i] - average);
    EXPECT_NEAR(average, expected[i], 1e-5);
    last = times[i];
  }
}

TEST(SchedulePlanTest, ConstantDecayIsNeverRescaled) {
  const Schedule schedule =
      *Schedule::Create(ConstantDecayRule{0.999}, TrainingDuration{5, TimeUnit::kBatch});
  EXPECT_EQ(PlanAt(schedule, 5, 10).update_weight, static_cast<float>(1 - 0.999));
  const Schedule::Update late = PlanAt(schedule, 5, 100);
  EXPECT_EQ(late.update_weight, static_cast<float>(1 - 0.999));
  EXPECT_EQ(late.elapsed, 95);
}

TEST(SchedulePlanTest, CopyHasWeightOneAtEveryInterval) {
  const Schedule schedule = *Schedule::Create(CopyRule{}, TrainingDuration{10, TimeUnit::kBatch});
  EXPECT_FALSE(PlanAt(schedule, 10, 19).due);
  EXPECT_EQ(PlanAt(schedule, 10, 20).update_weight, 1);
}

TEST(SchedulePlanTest, IsDueWhenAnIntervalHasEnded) {
  const Schedule schedule = HalfLife("1000ba", "10ba");
  EXPECT_FALSE(PlanAt(schedule, 10, 10).due);
  EXPECT_FALSE(PlanAt(schedule, 10, 19).due);
  EXPECT_EQ(PlanAt(schedule, 10, 19).update_weight, 0);
  EXPECT_TRUE(PlanAt(schedule, 10, 20).due);
  EXPECT_TRUE(PlanAt(schedule, 19, 20).due);
  EXPECT_TRUE(PlanAt(schedule, 12, 45).due);
  EXPECT_FALSE(PlanAt(schedule, 45, 49).due);
  EXPECT_TRUE(PlanAt(schedule, 45, 50).due);
}

TEST(SchedulePlanTest, CountsAreExactUpToTheLargest) {
  const Schedule schedule = HalfLife("3e9tok", "3tok");
  const double k = 3002399751580330;  // 3 k is just below 2^53.
  EXPECT_FALSE(PlanAt(schedule, 3 * k - 3, 3 * k - 1).due);
  EXPECT_TRUE(PlanAt(schedule, 3 * k - 1, 3 * k).due);
}

// The n-th part of training, however it was summed up, is the end of the n-th interval.
TEST(SchedulePlanTest, SharesAreDueInSpiteOfRounding) {
  for (const char* interval : {"0.1dur", "0.01dur", "0.001dur", "0.3dur", "0.7dur"}) {
    const Schedule schedule = HalfLife("0.5dur", interval);
    const double length = schedule.update_interval().value;
    const int count = static_cast<int>(std::floor(1 / length + 1e-9));
    double sum = 0;
    for (int n = 1; n <= count; ++n) {
      EXPECT_TRUE(PlanAt(schedule, sum, sum + length).due) << interval << " sum " << n;
      sum += length;
      EXPECT_TRUE(PlanAt(schedule, length * (n - 1), length * n).due) << interval << " x " << n;
      // Not twice for the same interval.
      EXPECT_FALSE(PlanAt(schedule, std::nextafter(length * n, 0), length * n).due)
          << interval << " x " << n;
    }
  }
  // As a trainer of 1000 batches reports it: exactly 100 updates of 10 batches.
  const Schedule schedule = HalfLife("0.5dur", "0.01dur");
  int due_count = 0;
  double last = 0;
  for (int batch = 1; batch <= 1000; ++batch) {
    if (!PlanAt(schedule, last, batch / 1000.0).due) continue;
    last = batch / 1000.0;
    ++due_count;
    EXPECT_EQ(batch % 10, 0);
  }
  EXPECT_EQ(due_count, 100);
}

TEST(SchedulePlanTest, SharesCountDifferencesOfProgress) {
  const Schedule::Update update = PlanAt(HalfLife("0.25dur"), 0.5, 0.75);
  EXPECT_TRUE(update.due);
  EXPECT_EQ(update.elapsed, 0.25);
  EXPECT_EQ(update.update_weight, 0.5f);
}

TEST(SchedulePlanTest, ZeroIntervalIsDueEvenWithoutElapsedTime) {
  const Schedule::Update update = PlanAt(HalfLife("30sec"), 12.5, 12.5);
  EXPECT_TRUE(update.due);
  EXPECT_EQ(update.update_weight, 0);
}

TEST(SchedulePlanTest, IntervalMayBeInAnotherUnitThanTheHalfLife) {
  const Schedule schedule = HalfLife("2ep", "10ba");
  TrainingTime last = At(10);
  last.Set(TimeUnit::kEpoch, 1);
  TrainingTime now = At(19);
  now.Set(TimeUnit::kEpoch, 3);
  EMA_ASSERT_OK_AND_ASSIGN(Schedule::Update update, schedule.Plan(After(last), now));
  EXPECT_FALSE(update.due);
  now.Set(TimeUnit::kBatch, 20);
  EMA_ASSERT_OK_AND_ASSIGN(update, schedule.Plan(After(last), now));
  EXPECT_TRUE(update.due);
  EXPECT_EQ(update.elapsed, 2);
  EXPECT_EQ(update.update_weight, 0.5f);
}

TEST(SchedulePlanTest, LackingUnitIsNamed) {
  const Schedule schedule = HalfLife("2ep", "10ba");
  EXPECT_THAT(schedule.Plan({}, At(20)),
              StatusIs(kInvalid, "training time lacks \"ep\", which half_life 2ep needs"));
  EXPECT_THAT(schedule.Plan({}, At(2, TimeUnit::kEpoch)),
              StatusIs(kInvalid, "training time lacks \"ba\", which update_interval 10ba needs"));
  EXPECT_THAT(HalfLife("2ep").Plan({}, At(20)), StatusIs(kInvalid, HasSubstr("half_life 2ep")));
  EXPECT_THAT(schedule.Plan({}, At(20)), ReasonIs(ErrorReason::kBadTime));
  EXPECT_THAT(HalfLife("5ba").Plan(After(At(1, TimeUnit::kEpoch)), At(20)),
              StatusIs(kInvalid, HasSubstr("of the last update lacks \"ba\"")));
}

TEST(SchedulePlanTest, TimeMustNotGoBack) {
  const absl::StatusOr<Schedule::Update> update = HalfLife("5ba").Plan(After(At(41)), At(40));
  EXPECT_THAT(update, StatusIs(kInvalid, HasSubstr("40ba is before")));
  EXPECT_THAT(update, ReasonIs(ErrorReason::kBadTime));
}

}  // namespace
}  // namespace ema
