// SPDX-License-Identifier: Apache-2.0
#include "client/cli/explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tests/testutil/status_matchers.h"

namespace ema::cli {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

absl::StatusOr<Explanation> TryExplain(const char* schedule, const char* total = nullptr) {
  std::optional<TrainingDuration> parsed;
  if (total != nullptr) parsed = *TrainingDuration::Parse(total);
  return ExplainSchedule(*Schedule::Parse(schedule), parsed);
}

std::vector<int64_t> Numbers(const Explanation& explanation) {
  std::vector<int64_t> numbers;
  for (const ExplainedUpdate& update : explanation.updates) numbers.push_back(update.number);
  return numbers;
}

TEST(ExplainTest, HalfLifeHasItsDecayWindowAndShares) {
  EMA_ASSERT_OK_AND_ASSIGN(const Explanation explanation,
                           TryExplain("half_life=1000ba, update_interval=10ba"));
  EXPECT_THAT(Numbers(explanation), ElementsAre(1, 2, 10, 100, 1000, 10'000, 100'000, 1'000'000));
  EXPECT_THAT(explanation.warnings, IsEmpty());
  const ExplainedUpdate& first = explanation.updates[0];
  EXPECT_EQ(first.time, 10);
  EXPECT_EQ(first.weight, 1);
  EXPECT_THAT(first.shares, ElementsAre(1));
  const ExplainedUpdate& update = explanation.updates[5];
  EXPECT_EQ(update.time, 100'000);
  EXPECT_DOUBLE_EQ(update.weight, 6.907504562964099e-3);
  EXPECT_NEAR(*update.window, 10 / 6.907504562964099e-3, 1e-9);
  EXPECT_NEAR(*update.half_life, 1000, 1e-9);
  ASSERT_THAT(update.shares, SizeIs(4));
  EXPECT_NEAR(update.shares[0], 6.907504562964099e-3, 1e-15);
  EXPECT_NEAR(update.shares[1], 6.6967008463192576e-2, 1e-14);
  EXPECT_NEAR(update.shares[2], 0.5, 1e-13);
  EXPECT_NEAR(update.shares[3], 1 - std::exp2(-10), 1e-13);
}

TEST(ExplainTest, MeanGivesEachUpdateTheSame) {
  EMA_ASSERT_OK_AND_ASSIGN(const Explanation explanation, TryExplain("uniform=true"));
  const ExplainedUpdate& update = explanation.updates[4];
  EXPECT_EQ(update.number, 1000);
  EXPECT_DOUBLE_EQ(update.weight, 1e-3);
  EXPECT_NEAR(update.shares[1], 0.01, 1e-14);
  EXPECT_EQ(update.shares[3], 1);
}

TEST(ExplainTest, MeanOfTheLastHasNothingOlder) {
  EMA_ASSERT_OK_AND_ASSIGN(const Explanation explanation, TryExplain("mean_of_last=4"));
  const ExplainedUpdate& second = explanation.updates[1];
  EXPECT_EQ(second.number, 2);
  EXPECT_EQ(second.weight, 0.5);
  const ExplainedUpdate& update = explanation.updates[3];
  EXPECT_EQ(update.number, 100);
  EXPECT_EQ(update.weight, 0.25);
  EXPECT_EQ(*update.window, 4);
  EXPECT_EQ(update.half_life, std::nullopt);
  EXPECT_THAT(update.shares, ElementsAre(0.25, 1, 1));
}

TEST(ExplainTest, CountsFromTheStart) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const Explanation explanation,
      TryExplain("inv_gamma=1, update_interval=10ba, interval_phase=1, ema_start=100ba, "
                 "before_start=copy"));
  EXPECT_EQ(explanation.updates[0].time, 101);
  EXPECT_EQ(explanation.updates[0].weight, 1);
  EXPECT_EQ(explanation.updates[1].time, 111);
  EXPECT_NEAR(1 - explanation.updates[1].weight, .797819992, 6e-10);

  // However far the start is.
  EMA_ASSERT_OK_AND_ASSIGN(const Explanation late,
                           TryExplain("half_life=10tok, ema_start=5e15tok"));
  EXPECT_EQ(late.updates[0].time, 5e15);
  EMA_ASSERT_OK_AND_ASSIGN(const Explanation held,
                           TryExplain("smoothing=0.5, ema_start=7ba, before_start=hold"));
  EXPECT_EQ(held.updates[0].weight, 0);
  EXPECT_EQ(held.updates[0].window, std::nullopt);
  EXPECT_EQ(held.updates[1].weight, 0.5);
}

TEST(ExplainTest, EndsWithTheTraining) {
  EMA_ASSERT_OK_AND_ASSIGN(const Explanation shares,
                           TryExplain("half_life=0.1dur, update_interval=0.001dur"));
  EXPECT_THAT(Numbers(shares), ElementsAre(1, 2, 10, 100, 1000));
  EXPECT_NEAR(*shares.updates[4].half_life, 0.1, 1e-12);
  EMA_ASSERT_OK_AND_ASSIGN(
      const Explanation both,
      TryExplain("uniform=true, update_interval=1ep, ema_start=0.75dur, ema_end=0.97dur", "40ep"));
  EXPECT_THAT(Numbers(both), ElementsAre(1, 2));
  EXPECT_EQ(both.updates[0].time, 30);
}

TEST(ExplainTest, WarnsOfWeightsThatFloat32DoesNotResolve) {
  EMA_ASSERT_OK_AND_ASSIGN(const Explanation explanation, TryExplain("smoothing=0.99999"));
  EXPECT_THAT(explanation.warnings,
              ElementsAre(AllOf(HasSubstr("from update 2 on"), HasSubstr("weight = 0.006;"),
                                HasSubstr("dtype=float64"))));
  EXPECT_THAT(ExplanationText(explanation), HasSubstr("\nwarning: from update 2 on"));
  EMA_ASSERT_OK_AND_ASSIGN(const Explanation short_one, TryExplain("smoothing=0.999"));
  EXPECT_THAT(short_one.warnings, IsEmpty());
}

TEST(ExplainTest, RefusesWhatItCannotCompare) {
  EXPECT_THAT(TryExplain("half_life=2ep, update_interval=10ba"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "half_life \"2ep\": cannot be compared with update_interval \"10ba\"; give "
                       "both in one unit, such as 1000ba"));
  EXPECT_THAT(TryExplain("half_life=10ba, ema_start=0.1dur"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("such as --total 100000ba")));
  EXPECT_THAT(TryExplain("half_life=10ba, ema_start=0.1dur", "10000ba"), IsOk());
  EXPECT_THAT(TryExplain("half_life=10ba", "10ep"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("total \"10ep\"")));
  EXPECT_THAT(TryExplain("half_life=0.1dur"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("such as --update-interval 0.001dur")));
  EXPECT_THAT(TryExplain("half_life=10ba, ema_start=100ba", "50ba"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ends before ema_start")));
  EXPECT_THAT(TryExplain("half_life=10ba, ema_start=0.9dur, ema_end=50ba", "1000ba"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ends before ema_start")));
}

TEST(ExplainTest, HasAnOptionForEveryField) {
  for (const ScheduleOption& option : ScheduleOptions()) {
    // Known, whatever else is wrong with it.
    const absl::StatusOr<Schedule> schedule = Schedule::FromFields({{option.field, "?"}});
    EXPECT_THAT(schedule, StatusIs(absl::StatusCode::kInvalidArgument,
                                   testing::Not(HasSubstr("unknown field"))));
  }
  EXPECT_THAT(ScheduleOptions(), SizeIs(24));
}

TEST(ExplainTest, PrintsTablesAndJson) {
  EMA_ASSERT_OK_AND_ASSIGN(const Explanation explanation,
                           TryExplain("half_life=1000ba, update_interval=10ba"));
  const std::string text = ExplanationText(explanation);
  EXPECT_THAT(text, HasSubstr("half_life=1000ba, update_interval=10ba, pushed every 10ba\n"));
  EXPECT_THAT(text, HasSubstr("0.993092495"));
  EXPECT_THAT(text, HasSubstr("0.0069075"));
  EXPECT_THAT(text, HasSubstr("1447.7ba"));
  EXPECT_THAT(text, HasSubstr("50 %"));
  const Json json = ToJson(explanation);
  EXPECT_EQ(json["schedule"]["half_life"], "1000ba");
  EXPECT_EQ(json["unit"], "ba");
  EXPECT_EQ(json["updates"][2]["update"], 10);
  EXPECT_NEAR(json["updates"][3]["shares_of_last"]["10"].get<double>(), 6.6967008463192576e-2,
              1e-14);
  EXPECT_EQ(json["warnings"].size(), 0U);
}

}  // namespace
}  // namespace ema::cli
