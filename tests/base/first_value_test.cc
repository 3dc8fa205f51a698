// SPDX-License-Identifier: Apache-2.0
#include "server/base/first_value.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

TrackConfig Track(const char* schedule) {
  return {.name = "t", .schedule = *Schedule::Parse(schedule)};
}

// The weight of the update after an import: what is left of the imported average is one less this.
double NextWeight(const TrackConfig& track, double first) {
  TrainingTime time;
  TrackState state;
  double weight = 0;
  for (const double batch : {first, first + 1}) {
    time.Set(TimeUnit::kBatch, batch);
    const auto updates = PlanTrack(track, state, time);
    EXPECT_THAT(updates, IsOk());
    EXPECT_FALSE(updates->at(0).from_zero);
    weight = updates->at(0).update_weight;
    state = NextState(track, state, *updates, time);
  }
  return weight;
}

TEST(FirstValueTest, IsKeptByHalfLivesAndConstantDecays) {
  for (const char* schedule :
       {"100ba", "smoothing=0.99", "half_life=100ba, ema_start=2000ba, before_start=hold"}) {
    EXPECT_THAT(CheckKeepsFirstValue(Track(schedule)), IsOk()) << schedule;
    EXPECT_LT(NextWeight(Track(schedule), 1000), 0.011) << schedule;
  }
  EXPECT_THAT(CheckKeepsFirstValue(Track("copy")), IsOk());
}

TEST(FirstValueTest, IsLostByWhatCountsFromTheStart) {
  for (const char* schedule : {"inv_gamma=1", "ramp=10", "sigma_rel=0.1", "uniform=true",
                               "half_life=100ba, ramp_ratio=0.09"}) {
    EXPECT_THAT(CheckKeepsFirstValue(Track(schedule)),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("track \"t\"")))
        << schedule;
    EXPECT_GE(NextWeight(Track(schedule), 0), 0.1) << schedule;
  }
}

TEST(FirstValueTest, IsLostByWhatBeginsFromZeroOrAnew) {
  for (const char* schedule : {"half_life=100ba, debias=true", "smoothing=0.9, zero_init=plain",
                               "smoothing=0.9, zero_init=debias", "half_life=100ba, ema_start=50ba",
                               "half_life=100ba, ema_start=50ba, before_start=copy"}) {
    EXPECT_THAT(CheckKeepsFirstValue(Track(schedule)), ReasonIs(ErrorReason::kBadSchedule))
        << schedule;
  }
}

TEST(FirstValueTest, IsLostByOneRuleOfATrack) {
  TrackConfig track = Track("100ba");
  track.tensor_rules.push_back({.pattern = "head.*", .schedule = *Schedule::Parse("uniform=true")});
  EXPECT_THAT(CheckKeepsFirstValue(track),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("uniform")));
}

}  // namespace
}  // namespace ema
