// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/import_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TrackConfig Track(const char* schedule) {
  return {.name = "t", .schedule = *Schedule::Parse(schedule)};
}

// What a push at `batch` does, and `state` after it.
Schedule::Update Push(const Schedule& schedule, int64_t batch, Schedule::State& state) {
  const absl::StatusOr<Schedule::Update> update =
      schedule.Plan(state, TrainingTime::AtBatch(batch));
  EXPECT_THAT(update, IsOk()) << batch;
  state = schedule.Next(state, *update, TrainingTime::AtBatch(batch));
  return *update;
}

auto IsLost(const char* why) {
  return AllOf(StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)),
               ReasonIs(ErrorReason::kBadSchedule));
}

TEST(FirstValueTest, AnImportGoesOnAsTheAverageItselfWould) {
  for (const char* text :
       {"100ba", "smoothing=0.99", "half_life=100ba, update_interval=3ba",
        "half_life=100ba, ema_start=40ba, before_start=hold", "half_life=100ba, ema_start=5ba",
        "half_life=100ba, ema_start=5ba, before_start=copy", "inv_gamma=1", "ramp=10",
        "inv_gamma=2, power=0.75, update_interval=10ba, interval_phase=1, ema_start=7ba, "
        "before_start=copy",
        "sigma_rel=0.1", "sigma_rel=0.05, update_interval=4ba, age_offset=1",
        "half_life=100ba, ramp_ratio=0.09", "half_life=100ba, debias=true",
        "smoothing=0.9, zero_init=plain", "smoothing=0.9, zero_init=debias", "uniform=true",
        "uniform=true, update_interval=5ba"}) {
    SCOPED_TRACE(text);
    const Schedule schedule = *Schedule::Parse(text);
    Schedule::State whole;
    for (int64_t batch = 1; batch <= 120; ++batch) {
      const Schedule::Update update = Push(schedule, batch, whole);
      if (!update.due || batch < 30) continue;
      // The state as the model makes it of a first push with imported_updates.
      ASSERT_THAT(
          CheckCanContinueImport(Track(text), TrainingTime::AtBatch(batch), whole.update_count),
          IsOk());
      Schedule::State imported{.update_count = whole.averaged_count - 1,
                               .averaged_count = whole.averaged_count - 1};
      const Schedule::Update first = Push(schedule, batch, imported);
      EXPECT_EQ(first.update_weight, 1);
      EXPECT_FALSE(first.from_zero);
      Schedule::State other = whole;
      for (int64_t next = batch + 1; next < batch + 40; ++next) {
        const Schedule::Update expected = Push(schedule, next, other);
        const Schedule::Update got = Push(schedule, next, imported);
        ASSERT_EQ(got.due, expected.due) << batch << ", then " << next;
        ASSERT_EQ(got.update_weight, expected.update_weight) << batch << ", then " << next;
      }
    }
  }
}

TEST(FirstValueTest, ACopyKeepsNothing) {
  EXPECT_THAT(CheckCanContinueImport(Track("copy"), TrainingTime(), 0), IsOk());
}

TEST(FirstValueTest, WhatDependsOnItsAgeNeedsTheStep) {
  for (const char* schedule :
       {"inv_gamma=1", "ramp=10", "sigma_rel=0.1", "half_life=100ba, ramp_ratio=0.09",
        "half_life=100ba, debias=true"}) {
    EXPECT_THAT(CheckCanContinueImport(Track(schedule), TrainingTime::AtBatch(0), 50),
                IsLost("depends on the average's age in ba"))
        << schedule;
  }
  EXPECT_THAT(CheckCanContinueImport(Track("sigma_rel=0.1, update_interval=1ep"),
                                     TrainingTime::AtBatch(100), 0),
              IsLost("depends on the average's age in ep"));
  EXPECT_THAT(
      CheckCanContinueImport(Track("inv_gamma=1, ema_start=0.1dur"), TrainingTime::AtBatch(100), 0),
      IsLost("ema_start 0.1dur"));
}

TEST(FirstValueTest, WhatCountsUpdatesNeedsTheirNumber) {
  for (const char* schedule :
       {"uniform=true", "smoothing=0.9, zero_init=plain", "smoothing=0.9, zero_init=debias"}) {
    EXPECT_THAT(CheckCanContinueImport(Track(schedule), TrainingTime::AtBatch(100), 0),
                IsLost("counts updates"))
        << schedule;
  }
}

TEST(FirstValueTest, IsLostByAMeanOfTheLast) {
  EXPECT_THAT(CheckCanContinueImport(Track("mean_of_last=3"), TrainingTime::AtBatch(100), 100),
              IsLost("needs the weights of each"));
}

TEST(FirstValueTest, IsLostByWhatBeginsLater) {
  for (const char* schedule :
       {"half_life=100ba, ema_start=50ba", "half_life=100ba, ema_start=50ba, before_start=copy",
        "inv_gamma=1, ema_start=50ba, before_start=hold"}) {
    EXPECT_THAT(CheckCanContinueImport(Track(schedule), TrainingTime::AtBatch(49), 49),
                IsLost("ema_start 50ba"))
        << schedule;
  }
}

TEST(FirstValueTest, IsLostByOneRuleOfATrack) {
  TrackConfig track = Track("100ba");
  track.tensor_rules.push_back({.pattern = "head.*", .schedule = *Schedule::Parse("uniform=true")});
  EXPECT_THAT(CheckCanContinueImport(track, TrainingTime::AtBatch(100), 0), IsLost("uniform"));
}

}  // namespace
}  // namespace ema
