// SPDX-License-Identifier: Apache-2.0
#include "server/group/missing_timer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <set>

namespace ema::group {
namespace {

using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

class MissingTimerTest : public testing::Test {
 protected:
  // The lost processes, after so many seconds in which `missing_` was missing. The registry
  // answers.
  auto After(int seconds) {
    std::map<MissingTimer::Process, absl::Duration> lost;
    for (int i = 0; i < seconds; ++i) {
      now_ += std::chrono::seconds(1);
      lost = timer_.Update(missing_, /*last_contact=*/now_, now_);
    }
    return lost;
  }

  const MissingTimer::Process first_{"ema-0", "a"};
  const MissingTimer::Process second_{"ema-1", "b"};
  std::set<MissingTimer::Process> missing_;
  MissingTimer timer_{absl::Seconds(30)};
  SteadyTime now_ = SteadyNow();
};

TEST_F(MissingTimerTest, AProcessIsLostWhenItHasBeenMissingForTheLimit) {
  missing_ = {first_};
  EXPECT_THAT(After(20), IsEmpty());
  missing_.insert(second_);
  EXPECT_THAT(After(10), IsEmpty());
  EXPECT_THAT(After(1), UnorderedElementsAre(Pair(first_, absl::Seconds(30))));
  EXPECT_THAT(After(20), UnorderedElementsAre(Pair(first_, absl::Seconds(50)),
                                              Pair(second_, absl::Seconds(30))));
}

TEST_F(MissingTimerTest, AProcessThatWasBackHasTheWholeLimitAgain) {
  missing_ = {first_};
  EXPECT_THAT(After(30), IsEmpty());
  missing_.clear();
  EXPECT_THAT(After(1), IsEmpty());
  missing_ = {first_};
  EXPECT_THAT(After(30), IsEmpty());
  EXPECT_THAT(After(1), UnorderedElementsAre(Pair(first_, absl::Seconds(30))));
}

// It may have tried to join all the time.
TEST_F(MissingTimerTest, ATimeWithoutTheRegistryDoesNotCount) {
  missing_ = {first_};
  EXPECT_THAT(After(30), IsEmpty());
  const SteadyTime last_contact = now_;
  for (int i = 0; i < 60; ++i) {
    now_ += std::chrono::seconds(1);
    const auto lost = timer_.Update(missing_, last_contact, now_);
    if (i >= 10) {
      EXPECT_THAT(lost, IsEmpty()) << i;
    }
  }
  EXPECT_THAT(After(29), IsEmpty());
  EXPECT_THAT(After(1), UnorderedElementsAre(Pair(first_, absl::Seconds(30))));
}

TEST_F(MissingTimerTest, ATimeInWhichThisProcessWasStoppedDoesNotCount) {
  missing_ = {first_};
  EXPECT_THAT(After(20), IsEmpty());
  now_ += std::chrono::hours(1);
  EXPECT_THAT(After(30), IsEmpty());
  EXPECT_THAT(After(1), UnorderedElementsAre(Pair(first_, absl::Seconds(30))));
}

}  // namespace
}  // namespace ema::group
