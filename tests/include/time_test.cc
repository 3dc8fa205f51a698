// SPDX-License-Identifier: Apache-2.0
#include "ema/time.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <ostream>
#include <random>
#include <string>

#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

struct GoodCase {
  const char* name;
  const char* text;
  double value;
  TimeUnit unit;
  const char* printed;
};
void PrintTo(const GoodCase& c, std::ostream* os) { *os << '"' << c.text << '"'; }

class DurationParseTest : public testing::TestWithParam<GoodCase> {};

TEST_P(DurationParseTest, IsReadAndPrinted) {
  EMA_ASSERT_OK_AND_ASSIGN(const TrainingDuration parsed, TrainingDuration::Parse(GetParam().text));
  EXPECT_EQ(parsed, (TrainingDuration{GetParam().value, GetParam().unit}));
  EXPECT_EQ(parsed.ToString(), GetParam().printed);
  EXPECT_THAT(TrainingDuration::Parse(parsed.ToString()), IsOkAndHolds(parsed));
}

INSTANTIATE_TEST_SUITE_P(
    All, DurationParseTest,
    testing::Values(GoodCase{"Batches", "200ba", 200, TimeUnit::kBatch, "200ba"},
                    GoodCase{"Epochs", "2ep", 2, TimeUnit::kEpoch, "2ep"},
                    GoodCase{"Samples", "5000sp", 5000, TimeUnit::kSample, "5000sp"},
                    GoodCase{"Tokens", "3e9tok", 3e9, TimeUnit::kToken, "3e9tok"},
                    GoodCase{"Underscores", "1_0_000ba", 10000, TimeUnit::kBatch, "10000ba"},
                    GoodCase{"SignedExponent", "3E+09tok", 3e9, TimeUnit::kToken, "3e9tok"},
                    GoodCase{"ExponentBeforeEpochs", "1e2ep", 100, TimeUnit::kEpoch, "100ep"},
                    GoodCase{"WholeFraction", "1.0ba", 1, TimeUnit::kBatch, "1ba"},
                    GoodCase{"Iterations", "7iter", 7, TimeUnit::kIteration, "7iter"},
                    GoodCase{"Progress", "0.1dur", 0.1, TimeUnit::kProgress, "0.1dur"},
                    GoodCase{"NoLeadingDigit", ".5dur", 0.5, TimeUnit::kProgress, "0.5dur"},
                    GoodCase{"AllProgress", "1dur", 1, TimeUnit::kProgress, "1dur"},
                    GoodCase{"SmallProgress", "1e-7dur", 1e-7, TimeUnit::kProgress, "1e-7dur"},
                    GoodCase{"Seconds", "30sec", 30, TimeUnit::kSecond, "30sec"},
                    GoodCase{"PartOfASecond", "2.5sec", 2.5, TimeUnit::kSecond, "2.5sec"},
                    GoodCase{"HoursMinutes", "1h30m", 5400, TimeUnit::kSecond, "5400sec"},
                    GoodCase{"AllClockParts", "1h2m3s", 3723, TimeUnit::kSecond, "3723sec"},
                    GoodCase{"Hours", "24h", 86400, TimeUnit::kSecond, "86400sec"},
                    GoodCase{"Minutes", "90m", 5400, TimeUnit::kSecond, "5400sec"},
                    GoodCase{"ShortSeconds", "90s", 90, TimeUnit::kSecond, "90sec"},
                    GoodCase{"HoursSeconds", "2H5S", 7205, TimeUnit::kSecond, "7205sec"},
                    GoodCase{"UpperCase", "200BA", 200, TimeUnit::kBatch, "200ba"},
                    GoodCase{"Spaces", "\t 200ba\n", 200, TimeUnit::kBatch, "200ba"},
                    GoodCase{"Zero", "0ba", 0, TimeUnit::kBatch, "0ba"},
                    GoodCase{"Largest", "9007199254740992ba", 9007199254740992.0, TimeUnit::kBatch,
                             "9007199254740992ba"}),
    [](const auto& test) { return test.param.name; });

struct BadCase {
  const char* name;
  const char* text;
  const char* message;
};
void PrintTo(const BadCase& c, std::ostream* os) { *os << '"' << c.text << '"'; }

class DurationRefusalTest : public testing::TestWithParam<BadCase> {};

TEST_P(DurationRefusalTest, QuotesTheTextAndShowsARightOne) {
  const absl::StatusOr<TrainingDuration> parsed = TrainingDuration::Parse(GetParam().text);
  ASSERT_THAT(parsed, StatusIs(kInvalid, AllOf(HasSubstr(GetParam().message), HasSubstr("\": "))));
  EXPECT_THAT(parsed, ReasonIs(ErrorReason::kBadSchedule));
}

INSTANTIATE_TEST_SUITE_P(
    All, DurationRefusalTest,
    testing::Values(
        BadCase{"BareNumber", "1000", "\"1000\": a time needs a unit, such as \"1000ba\""},
        BadCase{"BareShare", "0.999",
                "\"0.999\": a time needs a unit, such as \"1000ba\"; a decay is smoothing=0.999, "
                "a share of the whole training \"0.999dur\""},
        BadCase{"BareMixed", "1.5", "\"1.5\": a time needs a unit, such as \"1000ba\""},
        BadCase{"BareZero", "0", "a time needs a unit, such as \"1000ba\""},
        BadCase{"Five", "5", "a time needs a unit, such as \"5ba\""},
        BadCase{"Empty", "", "a time is needed"}, BadCase{"Blank", "  ", "a time is needed"},
        BadCase{"Infinity", "inf", "\"inf\": a time is a finite number and a unit"},
        BadCase{"InfiniteBatches", "infba", "a finite number"},
        BadCase{"NotANumber", "nanba", "a finite number"},
        BadCase{"Negative", "-1ba", "\"-1ba\": a time must not be negative"},
        BadCase{"Plus", "+1ba", "without a sign"}, BadCase{"UnitOnly", "ba", "a finite number"},
        BadCase{"Dot", ".ba", "begins with a number"},
        BadCase{"TwoUnderscores", "1__000ba", "\"1__000ba\": unknown unit"},
        BadCase{"UnderscoreAtTheEnd", "1000_ba", "unknown unit"},
        BadCase{"SpaceInside", "5 ba", "unknown unit"},
        BadCase{"Hexadecimal", "0x10ba", "unknown unit"},
        BadCase{"TwoPoints", "1.2.3dur", "unknown unit"},
        BadCase{"TwoUnits", "1ba2ep", "unknown unit"},
        BadCase{"UnknownUnit", "10steps", "use ba, ep, sp, tok, iter, dur or sec"},
        BadCase{"ClockOutOfOrder", "30m1h", "unknown unit"},
        BadCase{"ClockTwice", "1h1h", "unknown unit"},
        BadCase{"ClockFraction", "1.5h", "unknown unit"},
        BadCase{"ClockWithoutUnit", "1h30", "unknown unit"},
        BadCase{"ClockNegative", "1h-30m", "unknown unit"},
        BadCase{"HalfEpoch", "1.5ep", "must be a whole number of ep, such as \"2ep\""},
        BadCase{"PartOfABatch", "0.5ba", "must be a whole number of ba, such as \"1ba\""},
        BadCase{"TooManyTokens", "1e17tok", "at most 2^53"},
        BadCase{"OutOfRange", "1e400tok", "out of range"},
        BadCase{"TooMuchProgress", "2dur", "at most 1, such as \"0.1dur\""},
        BadCase{"ControlCharacter",
                "1\x01"
                "ba",
                "\"1\\x01"}),
    [](const auto& test) { return test.param.name; });

TEST(TrainingDurationTest, LongTextIsQuotedInPart) {
  const absl::StatusOr<TrainingDuration> parsed = TrainingDuration::Parse(std::string(1000, '7'));
  ASSERT_THAT(parsed, StatusIs(kInvalid, HasSubstr("777...\": ")));
  EXPECT_LT(parsed.status().message().size(), 300u);
}

TEST(TrainingDurationTest, PrintedTextReadsBackToTheSameValue) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const int exponent = static_cast<int>(random() % 54);
    const double count = static_cast<double>(random() % ((uint64_t{1} << exponent) + 1));
    const double share = std::ldexp(static_cast<double>(random() >> 11), -53 - exponent);
    for (const TrainingDuration& duration :
         {TrainingDuration{count, TimeUnit::kToken}, TrainingDuration{share, TimeUnit::kProgress},
          TrainingDuration{share * 1e6, TimeUnit::kSecond}}) {
      ASSERT_THAT(TrainingDuration::Parse(duration.ToString()), IsOkAndHolds(duration));
    }
  }
}

TrainingTime At(TimeUnit unit, double value) {
  TrainingTime time;
  time.Set(unit, value);
  return time;
}

TEST(TrainingTimeTest, ValidateRefusesWhatIsNoTime) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THAT(TrainingTime().Validate(), IsOk());
  EXPECT_THAT(At(TimeUnit::kBatch, 40).Validate(), IsOk());
  EXPECT_THAT(At(TimeUnit::kProgress, 1).Validate(), IsOk());
  EXPECT_THAT(At(TimeUnit::kSecond, 0.25).Validate(), IsOk());

  EXPECT_THAT(At(TimeUnit::kBatch, -1).Validate(),
              StatusIs(kInvalid, StartsWith("training time batch -1: must be")));
  EXPECT_THAT(At(TimeUnit::kToken, 1.5).Validate(), StatusIs(kInvalid, HasSubstr("whole number")));
  EXPECT_THAT(At(TimeUnit::kToken, 1e17).Validate(), StatusIs(kInvalid, HasSubstr("2^53")));
  EXPECT_THAT(At(TimeUnit::kProgress, 1.01).Validate(), StatusIs(kInvalid, HasSubstr("0 to 1")));
  EXPECT_THAT(At(TimeUnit::kSecond, infinity).Validate(), StatusIs(kInvalid, HasSubstr("finite")));
  EXPECT_THAT(At(TimeUnit::kSecond, std::nan("")).Validate(), ReasonIs(ErrorReason::kBadTime));
}

TEST(TrainingTimeTest, MayStandStillButNotGoBack) {
  TrainingTime earlier = At(TimeUnit::kBatch, 40);
  earlier.Set(TimeUnit::kEpoch, 2);
  TrainingTime later = earlier;
  EXPECT_THAT(later.CheckNotBefore(earlier), IsOk());
  later.Set(TimeUnit::kBatch, 41);
  later.Set(TimeUnit::kSample, 0);  // A new unit is right.
  EXPECT_THAT(later.CheckNotBefore(earlier), IsOk());

  EXPECT_THAT(earlier.CheckNotBefore(later),
              StatusIs(kInvalid, StartsWith("training time batch 40 is before 41")));
  EXPECT_THAT(At(TimeUnit::kBatch, 42).CheckNotBefore(earlier),
              StatusIs(kInvalid, StartsWith("training time lacks epoch, which was 2")));
  EXPECT_THAT(At(TimeUnit::kBatch, 42).CheckNotBefore(earlier), ReasonIs(ErrorReason::kBadTime));
}

TEST(TrainingTimeTest, PrintsWhatIsSet) {
  TrainingTime time = TrainingTime::AtBatch(40);
  EXPECT_EQ(time.ToString(), "batch 40");
  time.Set(TimeUnit::kSample, 2560);
  EXPECT_EQ(time.ToString(), "batch 40, sample 2560");
  time.Set(TimeUnit::kToken, 3e9);
  time.Set(TimeUnit::kProgress, 0.25);
  EXPECT_EQ(time.ToString(), "batch 40, sample 2560, token 3000000000, progress 0.25");
  EXPECT_EQ(TrainingTime().ToString(), "none");
}

TEST(TimeUnitTest, SuffixesAreComposers) {
  EXPECT_EQ(TimeUnitSuffix(TimeUnit::kBatch), "ba");
  EXPECT_EQ(TimeUnitSuffix(TimeUnit::kIteration), "iter");
  EXPECT_EQ(TimeUnitSuffix(TimeUnit::kSecond), "sec");
}

}  // namespace
}  // namespace ema
