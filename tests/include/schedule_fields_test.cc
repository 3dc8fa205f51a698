// SPDX-License-Identifier: Apache-2.0
//
// Schedules as text, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <ostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "ema/schedule.h"
#include "tests/include/schedule_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;
using testing::StartsWith;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

class FieldsRefusalTest : public testing::TestWithParam<RefusalCase> {};

TEST_P(FieldsRefusalTest, NamesTheFieldTheValueAndARightOne) {
  const absl::StatusOr<Schedule> schedule = Schedule::Parse(GetParam().text);
  EXPECT_THAT(
      schedule,
      StatusIs(kInvalid, AllOf(StartsWith(GetParam().message),
                               AnyOf(HasSubstr("such as "), HasSubstr("a right one is ")))));
  EXPECT_THAT(schedule, ReasonIs(ErrorReason::kBadSchedule));
}

INSTANTIATE_TEST_SUITE_P(
    All, FieldsRefusalTest,
    testing::Values(
        RefusalCase{"NoUnit", "half_life=1000", "half_life \"1000\": a time needs a unit"},
        RefusalCase{"NoValue", "half_life=", "half_life \"\": a time is needed"},
        RefusalCase{"NotAField", "half_life=1ba, copy", "field \"copy\": must be name=value"},
        RefusalCase{"EmptyField", "half_life=1ba,", "field \"\": must be name=value"},
        RefusalCase{"Twice", "half_life=1ba, half_life=2ba",
                    "half_life is given twice, \"1ba\" and \"2ba\""},
        RefusalCase{"Misspelled", "halflife=1000ba",
                    "unknown field \"halflife\"; did you mean \"half_life\", such as "
                    "half_life=1000ba?"},
        RefusalCase{"Smothing", "smothing=0.9",
                    "unknown field \"smothing\"; did you mean "
                    "\"smoothing\""},
        RefusalCase{"Start", "copy=true, start=1ba",
                    "unknown field \"start\"; did you mean "
                    "\"ema_start\""},
        RefusalCase{"NoName", "=1ba", "unknown field \"\"; did you mean "},
        RefusalCase{"HalfLifeAndSmoothing", "smoothing=0.9, half_life=1000ba",
                    "half_life and smoothing cannot both be given: half_life \"1000ba\" and "
                    "smoothing \"0.9\" are two rules"},
        RefusalCase{"RampRatioAndUniform", "uniform=true, ramp_ratio=0.1",
                    "ramp_ratio and uniform cannot both be given: "},
        RefusalCase{"InvGammaAndRamp", "inv_gamma=1, ramp=10", "inv_gamma and ramp cannot both"},
        RefusalCase{"NoRule", "update_interval=5ba", "a schedule needs one of half_life or "},
        RefusalCase{"FalseIsNoRule", "copy=false", "a schedule needs one of half_life or "},
        RefusalCase{"PowerAlone", "power=0.75",
                    "power \"0.75\": has no use alone; it belongs to inv_gamma, such as "
                    "inv_gamma=1, power=0.75"},
        RefusalCase{"PowerOfRamp", "ramp=10, power=0.75",
                    "power \"0.75\": has no use with ramp; it belongs to inv_gamma"},
        RefusalCase{"LimitOfSmoothing", "smoothing=0.9, max_decay=0.9",
                    "max_decay \"0.9\": has no use with smoothing; it belongs to inv_gamma or "
                    "ramp"},
        RefusalCase{"DebiasOfSmoothing", "smoothing=0.9, debias=true",
                    "debias \"true\": has no use with smoothing; it belongs to half_life"},
        RefusalCase{"Flag", "uniform=yes", "uniform \"yes\": must be \"true\" or \"false\""},
        RefusalCase{"DebiasFlag", "half_life=1ba, debias=1", "debias \"1\": must be \"true\" or"},
        RefusalCase{"TrailingText", "smoothing=0.9x", "smoothing \"0.9x\": must be a finite"},
        RefusalCase{"Comma", "smoothing=0,9", "field \"9\": must be name=value"},
        RefusalCase{"NotANumber", "smoothing=nan", "smoothing \"nan\": must be a finite number"},
        RefusalCase{"InfiniteNumber", "ramp=inf", "ramp \"inf\": must be a finite number"},
        RefusalCase{"HugeNumber", "ramp=1e999", "ramp \"1e999\": must be a finite number"},
        RefusalCase{"Plus", "ramp=+10", "ramp \"+10\": must be a finite number"},
        RefusalCase{"ZeroInit", "smoothing=0.9, zero_init=true",
                    "zero_init \"true\": must be off or plain or debias"},
        RefusalCase{"BeforeStart", "half_life=1ba, before_start=stale",
                    "before_start \"stale\": must be reinit or copy or hold"},
        RefusalCase{"SmoothingOne", "smoothing=1", "smoothing 1: must be 0 or more and below 1"},
        RefusalCase{"SmoothingNegative", "smoothing=-0.1", "smoothing -0.1: must be 0 or more"},
        RefusalCase{"RampRatio", "half_life=5ba, ramp_ratio=-1", "ramp_ratio -1: must be finite"},
        RefusalCase{"RampRatioZeroAlone", "ramp_ratio=0", "ramp_ratio 0: without a half_life"},
        RefusalCase{"DebiasOfRampRatio", "half_life=5ba, ramp_ratio=0.1, debias=true",
                    "debias \"true\": has no use with ramp_ratio 0.1"},
        RefusalCase{"CountOffset", "ramp=10, count_offset=-1", "count_offset -1: must be finite"},
        RefusalCase{"ExpRamp", "exp_ramp=0", "exp_ramp 0: must be finite and above 0"},
        RefusalCase{"MeanOfOne", "mean_of_last=1", "mean_of_last 1: must be 2 to 16"},
        RefusalCase{"MeanOfMany", "mean_of_last=17", "mean_of_last 17: must be 2 to 16"},
        RefusalCase{"MeanOfHalf", "mean_of_last=2.5",
                    "mean_of_last \"2.5\": must be a whole number"},
        RefusalCase{"MeanAndHalfLife", "half_life=5ba, mean_of_last=5",
                    "half_life and mean_of_last cannot both be given: "},
        RefusalCase{"NoDecays", "decays=", "decays \"\": must have a point"},
        RefusalCase{"NoPoint", "decays=0.9", "decays \"0.9\": must be times with decays"},
        RefusalCase{"PointsBack", "decays=9ba:0.1 5ba:0.2", "decays: 5ba after 9ba: the times"},
        RefusalCase{"PointsOfTwoUnits", "decays=1ba:0.1 5ep:0.2", "decays: 5ep after 1ba: the"},
        RefusalCase{"PointOutOfRange", "decays=1ba:1.5", "decays: 1ba 1.5: must be 0 to 1"},
        RefusalCase{"InvGamma", "inv_gamma=0", "inv_gamma 0: must be finite and above 0"},
        RefusalCase{"Power", "inv_gamma=1, power=-1", "power -1: must be finite and above 0"},
        RefusalCase{"Ramp", "ramp=0.5", "ramp 0.5: must be finite and 1 or more"},
        RefusalCase{"MaxDecay", "ramp=10, max_decay=1.1", "max_decay 1.1: must be 0 to 1"},
        RefusalCase{"MinDecay", "ramp=10, min_decay=0.9, max_decay=0.5",
                    "min_decay 0.9: must be 0 to max_decay 0.5"},
        RefusalCase{"SigmaRelZero", "sigma_rel=0", "sigma_rel 0: must be above 0 and at most 0.28"},
        RefusalCase{"SigmaRelWide", "sigma_rel=0.289", "sigma_rel 0.289: must be above 0 and at"},
        RefusalCase{"AgeOffsetNegative", "sigma_rel=0.1, age_offset=-1",
                    "age_offset -1: must be finite and 0 or more"},
        RefusalCase{"AgeOffsetOfAnother", "uniform=true, age_offset=1", "age_offset"},
        RefusalCase{"SigmaRelNegative", "sigma_rel=-0.1", "sigma_rel -0.1: must be above 0"},
        RefusalCase{"WarmUpInShares", "inv_gamma=1, update_interval=0.1dur",
                    "update_interval \"0.1dur\": a warm-up goes by a count of ba"},
        RefusalCase{"WarmUpInSeconds", "ramp=10, update_interval=30sec",
                    "update_interval \"30sec\": a warm-up goes by a count of ba"},
        RefusalCase{"Interval", "copy=true, update_interval=0ba",
                    "update_interval \"0ba\": must be finite and above 0"},
        RefusalCase{"HalfInterval", "copy=true, update_interval=1.5ba",
                    "update_interval \"1.5ba\": must be a whole number of ba"},
        RefusalCase{"PhaseNegative", "half_life=5ba, interval_phase=-1",
                    "interval_phase -1: must be 0 to 2^53"},
        RefusalCase{"PhaseUnit", "half_life=5ba, interval_phase=1ba",
                    "interval_phase \"1ba\": must be a whole number"},
        RefusalCase{"PhaseHuge", "half_life=5ba, interval_phase=9007199254740993",
                    "interval_phase 9007199254740993: must be 0 to 2^53"},
        RefusalCase{"PhaseOfShares", "half_life=0.5dur, interval_phase=1",
                    "interval_phase 1: has no use with an interval in dur"},
        RefusalCase{"StartNegative", "half_life=5ba, ema_start=-1ba",
                    "ema_start \"-1ba\": a time must not be negative"},
        RefusalCase{"StartAfterTheEnd", "half_life=5ba, ema_start=1.5dur",
                    "ema_start \"1.5dur\": dur is a share of the whole training"},
        RefusalCase{"EndZero", "half_life=5ba, ema_end=0ba", "ema_end \"0ba\": must be finite"},
        RefusalCase{"EndAtTheStart", "half_life=5ba, ema_start=9ba, ema_end=9ba",
                    "ema_end \"9ba\": must be after ema_start \"9ba\""},
        RefusalCase{"CopyStart", "copy=true, ema_start=9ba",
                    "ema_start \"9ba\": has no use with copy"},
        RefusalCase{"CopyEnd", "copy=true, ema_end=9ba", "ema_end \"9ba\": has no use with copy"},
        RefusalCase{"CopyBeforeStart", "copy=true, before_start=hold",
                    "before_start \"hold\": has no use with copy"},
        RefusalCase{"ZerosAfterCopies",
                    "smoothing=0.9, zero_init=plain, ema_start=9ba, before_start=copy",
                    "zero_init \"plain\": begins with zeros at the start, where before_start "
                    "\"copy\""}),
    [](const auto& test) { return test.param.name; });

TEST(ScheduleTest, CreateRefusesBadOptions) {
  const auto create = [](const Schedule::Rule& rule) { return Schedule::Create({.rule = rule}); };
  EXPECT_THAT(create(ConstantDecayRule{1}),
              StatusIs(kInvalid, "smoothing 1: must be 0 or more and below 1, such as 0.999"));
  EXPECT_THAT(create(ConstantDecayRule{-0.5}), StatusIs(kInvalid, HasSubstr("-0.5")));
  EXPECT_THAT(create(ConstantDecayRule{0}), IsOk());
  EXPECT_THAT(create(HalfLifeRule{{kInfinity, TimeUnit::kBatch}}),
              StatusIs(kInvalid, StartsWith("half_life \"infba\": must be finite")));
  EXPECT_THAT(create(HalfLifeRule{{0.5, TimeUnit::kBatch}}),
              StatusIs(kInvalid, StartsWith("half_life \"0.5ba\": must be a whole number")));
  EXPECT_THAT(Schedule::Create({.update_interval = TrainingDuration{0, TimeUnit::kBatch}}),
              StatusIs(kInvalid, StartsWith("update_interval \"0ba\": must be finite and above")));
  const double nan = std::nan("");
  for (const Schedule::Rule& rule : std::initializer_list<Schedule::Rule>{
           HalfLifeRule{{nan, TimeUnit::kBatch}}, HalfLifeRule{{5, TimeUnit::kBatch}, nan},
           ConstantDecayRule{nan}, InverseGammaRule{nan}, InverseGammaRule{1, nan},
           InverseGammaRule{1, 1, nan}, RampRule{10, 0, nan}, RampRule{nan},
           PowerFunctionRule{nan}}) {
    EXPECT_THAT(create(rule), ReasonIs(ErrorReason::kBadSchedule)) << rule.index();
  }
  for (const double value : {nan, kInfinity, -1.0, 0.5}) {
    EXPECT_THAT(Schedule::Create({.rule = UniformRule{}, .start = {value, TimeUnit::kBatch}}),
                ReasonIs(ErrorReason::kBadSchedule));
    EXPECT_THAT(
        Schedule::Create({.rule = UniformRule{}, .end = TrainingDuration{value, TimeUnit::kBatch}}),
        ReasonIs(ErrorReason::kBadSchedule));
  }
}

TEST(ScheduleTest, ParseReadsTheShortForms) {
  for (const char* text : {"copy", " copy ", "copy=true", "copy=true,update_interval=1ba"}) {
    EMA_ASSERT_OK_AND_ASSIGN(const Schedule copy, Schedule::Parse(text));
    EXPECT_TRUE(copy.is_copy());
    EXPECT_EQ(copy.ToString(), "copy");
  }
  EMA_ASSERT_OK_AND_ASSIGN(const Schedule half_life, Schedule::Parse("200ba"));
  EXPECT_EQ(half_life.rule(), Schedule::Rule(HalfLifeRule{{200, TimeUnit::kBatch}}));
  EXPECT_THAT(Schedule::Parse(" half_life =200ba"), IsOkAndHolds(half_life));
}

// What is written is what is read, in the fixed order and without defaults.
TEST(ScheduleTest, PrintsItself) {
  const std::pair<const char*, const char*> cases[] = {
      {"update_interval=5ba, half_life=200ba", "half_life=200ba, update_interval=5ba"},
      {"half_life=200ba, update_interval=1ba, debias=false", "half_life=200ba"},
      {"half_life=0.1dur, update_interval=0.01dur", "half_life=0.1dur, update_interval=0.01dur"},
      {"half_life=1h30m", "half_life=5400sec"},
      {"half_life=2ep, update_interval=1ep", "half_life=2ep"},
      {"half_life=2ep, update_interval=1ba", "half_life=2ep, update_interval=1ba"},
      {"ramp_ratio=0.09", "ramp_ratio=0.09"},
      {"ramp_ratio=0.09, update_interval=8sp, half_life=500ba",
       "half_life=500ba, ramp_ratio=0.09, update_interval=8sp"},
      {"smoothing=0.999, zero_init=off", "smoothing=0.999"},
      {"smoothing=1e-3, zero_init=debias", "smoothing=0.001, zero_init=debias"},
      {"max_decay=0.9999, min_decay=0.5, power=0.6666666666666666, inv_gamma=1",
       "inv_gamma=1, min_decay=0.5"},
      {"ramp=10, max_decay=0.99", "ramp=10, max_decay=0.99"},
      {"sigma_rel=0.05, uniform=false", "sigma_rel=0.05"},
      {"uniform=true, ema_end=0.9dur, ema_start=0.7dur, before_start=hold, interval_phase=0",
       "uniform=true, ema_start=0.7dur, before_start=hold, ema_end=0.9dur"},
      {"uniform=true, ema_start=0tok, before_start=reinit", "uniform=true"},
      {"copy=true, interval_phase=1, update_interval=10ba",
       "copy=true, update_interval=10ba, interval_phase=1"}};
  for (const auto& [text, printed] : cases) {
    EMA_ASSERT_OK_AND_ASSIGN(const Schedule schedule, Schedule::Parse(text));
    EXPECT_EQ(schedule.ToString(), printed) << text;
  }
  EXPECT_THAT(Schedule::Parse("200ba")->ToFields(), ElementsAre(Pair("half_life", "200ba")));
}

TEST(ScheduleTest, EqualSchedulesSayTheSame) {
  EXPECT_EQ(*Schedule::Parse("half_life=200ba, ema_start=0ba"), *Schedule::Parse("200ba"));
  EXPECT_FALSE(*Schedule::Parse("half_life=200ba, interval_phase=1") == *Schedule::Parse("200ba"));
}

TEST(SchedulePropertyTest, FieldsAndTextReadBackToTheSame) {
  constexpr uint64_t kSeed = 20240403;
  std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  Random random(kSeed);
  for (int round = 0; round < 12'000; ++round) {
    const Schedule schedule = RandomSchedule(random);
    SCOPED_TRACE(absl::StrCat("round ", round, ": ", schedule.ToString()));
    EMA_ASSERT_OK_AND_ASSIGN(const Schedule from_fields, Schedule::FromFields(schedule.ToFields()));
    ASSERT_EQ(from_fields, schedule);
    ASSERT_THAT(Schedule::Parse(schedule.ToString()), IsOkAndHolds(schedule));
    // Not only the text: the numbers too.
    ASSERT_EQ(from_fields.update_interval(), schedule.update_interval());
    const Schedule::Options& a = from_fields.options();
    const Schedule::Options& b = schedule.options();
    ASSERT_EQ(a.rule, b.rule);
    ASSERT_EQ(a.interval_phase, b.interval_phase);
    ASSERT_EQ(a.start, b.start);
    ASSERT_EQ(a.before_start, b.before_start);
    ASSERT_EQ(a.end, b.end);
  }
}

// Neither a crash nor an OK without a schedule, whatever the text.
TEST(SchedulePropertyTest, MangledTextIsReadOrRefused) {
  constexpr uint64_t kSeed = 20240404;
  std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  Random random(kSeed);
  int refused_count = 0;
  for (int round = 0; round < 12'000; ++round) {
    std::string text = RandomSchedule(random).ToString();
    for (int64_t i = RandomInt(random, 1, 3); i > 0; --i) {
      const size_t place = RandomInt(random, 0, static_cast<int64_t>(text.size()) - 1);
      text[place] = static_cast<char>(OneIn(random, 2) ? RandomInt(random, 0, 255)
                                                       : text[text.size() - 1 - place]);
    }
    const absl::StatusOr<Schedule> schedule = Schedule::Parse(text);
    if (schedule.ok()) {
      ASSERT_THAT(Schedule::Parse(schedule->ToString()), IsOkAndHolds(*schedule)) << text;
    } else {
      ++refused_count;
      ASSERT_THAT(schedule, ReasonIs(ErrorReason::kBadSchedule)) << text;
    }
  }
  EXPECT_GT(refused_count, 6'000);
}

}  // namespace
}  // namespace ema
