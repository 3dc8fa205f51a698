// SPDX-License-Identifier: Apache-2.0
#include "ema/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/include/schedule_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::DoubleNear;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pointwise;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

TEST(DecaysTest, TheUnitOfThePointsIsNeededFromTheFirstPushOn) {
  EMA_ASSERT_OK_AND_ASSIGN(const Schedule schedule, Schedule::Parse("decays=0dur:0.9 1dur:1"));
  EXPECT_THAT(schedule.Plan({}, TrainingTime::AtBatch(1)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"dur\"")));
}

// An average that has begun, with its last update at `time`.
Schedule::State After(const TrainingTime& time) { return {1, 1, time, time}; }

Schedule Parse(const std::string& text) {
  const absl::StatusOr<Schedule> schedule = Schedule::Parse(text);
  EXPECT_THAT(schedule, IsOk()) << text;
  return schedule.ok() ? *schedule : *Schedule::Create({});
}

// Plans `now` after an update at `last`, both in the schedule's unit.
Schedule::Update PlanAt(const Schedule& schedule, double last, double now) {
  const TimeUnit unit = schedule.update_interval().unit;
  const absl::StatusOr<Schedule::Update> update =
      schedule.Plan(After(At(last, unit)), At(now, unit));
  EXPECT_THAT(update, IsOk());
  return update.value_or(Schedule::Update{});
}

// The average after each batch n = 1, 2, ... of which the weights are n. With `from_zero` the
// first push is the 0 before them.
std::vector<double> Trace(const std::string& schedule, int count, bool from_zero) {
  ScalarTrack track(Parse(schedule));
  if (from_zero) track.Push(At(0), 0);
  std::vector<double> averages;
  for (int n = 1; n <= count; ++n) {
    track.Push(At(n), n);
    averages.push_back(track.average());
  }
  return averages;
}

TEST(ScheduleTest, AMeanOfTheLastWeighsTheUpdatesThatThereAre) {
  const Schedule schedule = Parse("mean_of_last=3, ema_start=2ba");
  EXPECT_EQ(schedule.kept_weights_count(), 2);
  EXPECT_EQ(Parse("uniform=true").kept_weights_count(), 0);
  Schedule::State state;
  std::vector<double> weights;
  for (int n = 1; n <= 6; ++n) {
    const Schedule::Update update = *schedule.Plan(state, At(n));
    state = schedule.Next(state, update, At(n));
    weights.push_back(update.update_weight);
  }
  EXPECT_THAT(weights, ElementsAre(1, 1, 1 / 2.0, 1 / 3.0, 1 / 3.0, 1 / 3.0));
}

TEST(ScheduleTest, IntervalDefaultsToOneUnitOrEveryPush) {
  EXPECT_EQ(Parse("200ba").update_interval(), (TrainingDuration{1, TimeUnit::kBatch}));
  EXPECT_EQ(Parse("2ep").update_interval(), (TrainingDuration{1, TimeUnit::kEpoch}));
  EXPECT_EQ(Parse("3e9tok").update_interval(), (TrainingDuration{1, TimeUnit::kToken}));
  EXPECT_EQ(Parse("0.1dur").update_interval(), (TrainingDuration{0, TimeUnit::kProgress}));
  EXPECT_EQ(Parse("1h").update_interval(), (TrainingDuration{0, TimeUnit::kSecond}));
  for (const char* text : {"copy", "smoothing=0.9", "ramp_ratio=0.09", "sigma_rel=0.1", "ramp=10",
                           "inv_gamma=1", "uniform=true", "mean_of_last=5"}) {
    EXPECT_EQ(Parse(text).update_interval(), (TrainingDuration{1, TimeUnit::kBatch})) << text;
  }
}

struct WeightCase {
  const char* name;
  const char* half_life;
  double elapsed;
  double weight;
};
void PrintTo(const WeightCase& c, std::ostream* os) { *os << c.half_life << " " << c.elapsed; }

class WeightTest : public testing::TestWithParam<WeightCase> {};

TEST_P(WeightTest, IsTheReference) {
  const Schedule::Update update =
      PlanAt(Parse(GetParam().half_life), 500, 500 + GetParam().elapsed);
  EXPECT_TRUE(update.due);
  EXPECT_EQ(update.elapsed, GetParam().elapsed);
  EXPECT_DOUBLE_EQ(update.update_weight, GetParam().weight);
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

// The half-lives of decays in ema-semantics.md, section 3.2: the decays come back.
TEST(HalfLifeTest, DecaysHaveTheirHalfLives) {
  const std::pair<double, const char*> cases[] = {{0.99, "68.967564sec"},
                                                  {0.999, "692.800549sec"},
                                                  {0.9998, "3465.389318sec"},
                                                  {0.9999, "6931.125226sec"},
                                                  {0.99999, "69314.371482sec"}};
  for (const auto& [decay, half_life] : cases) {
    EXPECT_NEAR(PlanAt(Parse(half_life), 7, 8).update_weight / (1 - decay), 1, 1e-8) << half_life;
  }
  // An interval of k has the k-th power.
  const Schedule schedule = Parse("692.8005491785463sec");
  EXPECT_NEAR(1 - PlanAt(schedule, 0, 10).update_weight, .9900448802097482, 1e-13);
  EXPECT_NEAR(1 - PlanAt(schedule, 0, 100).update_weight, .9047921471137089, 1e-13);
}

// The trace of ema-semantics.md, section 3.2: half-life 1000, an update each 10, e0 = 0, p = 10 k.
TEST(HalfLifeTest, TraceOfEvenUpdates) {
  ScalarTrack track(Parse("half_life=1000ba, update_interval=10ba"));
  track.Push(At(0), 0);
  const double expected[] = {0.06907504562964073, 0.20674800069604848, 0.412545024826779,
                             0.6859955507039228, 1.0266322614554662};
  for (int k = 1; k <= 5; ++k) {
    EXPECT_TRUE(track.Push(At(10 * k), 10 * k).due);
    EXPECT_NEAR(track.average(), expected[k - 1], 1e-14);
  }
}

TEST(HalfLifeTest, IrregularUpdatesKeepIt) {
  ScalarTrack track(Parse("100ba"));
  track.Push(At(10), 10);
  const double expected[][2] = {
      {20, 10.669670084631925}, {50, 18.05384527676094}, {55, 19.312366938745114}};
  for (const auto& [time, average] : expected) {
    track.Push(At(time), time);
    EXPECT_NEAR(track.average(), average, 1e-13);
  }
}

TEST(HalfLifeTest, MayCountAnotherUnitThanTheInterval) {
  const Schedule schedule = Parse("half_life=2ep, update_interval=10ba");
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
  EXPECT_DOUBLE_EQ(update.update_weight, 0.5);
}

TEST(HalfLifeTest, SharesCountDifferencesOfProgress) {
  const Schedule::Update update = PlanAt(Parse("0.25dur"), 0.5, 0.75);
  EXPECT_TRUE(update.due);
  EXPECT_EQ(update.elapsed, 0.25);
  EXPECT_DOUBLE_EQ(update.update_weight, 0.5);
}

// EDM2's TraditionalEMA: beta = .5^(elapsed / min(halflife, age * rampup_ratio)).
TEST(HalfLifeTest, RampRatioShortensItWhileTrainingIsYoung) {
  const Schedule both = Parse("half_life=1000ba, ramp_ratio=0.09");
  EXPECT_DOUBLE_EQ(PlanAt(both, 99, 100).update_weight, 1 - std::pow(.5, 1 / 9.0));
  EXPECT_DOUBLE_EQ(PlanAt(both, 19990, 20000).update_weight, 6.907504562964099e-3);
  const Schedule ramp_only = Parse("ramp_ratio=0.09, update_interval=100sp");
  EXPECT_DOUBLE_EQ(PlanAt(ramp_only, 99'900, 100'000).update_weight,
                   -std::expm1(std::log(.5) * 100 / 9000));
  // Young is counted from the start.
  EXPECT_DOUBLE_EQ(PlanAt(Parse("half_life=1000ba, ramp_ratio=0.09, ema_start=1000ba"), 1099, 1100)
                       .update_weight,
                   1 - std::pow(.5, 1 / 9.0));
}

struct TraceCase {
  const char* name;
  const char* schedule;
  bool from_zero;
  std::vector<double> averages;
};
void PrintTo(const TraceCase& c, std::ostream* os) { *os << c.schedule; }

class TraceTest : public testing::TestWithParam<TraceCase> {};

TEST_P(TraceTest, IsTheReference) {
  const std::vector<double>& expected = GetParam().averages;
  EXPECT_THAT(Trace(GetParam().schedule, static_cast<int>(expected.size()), GetParam().from_zero),
              Pointwise(DoubleNear(1e-6), expected));
}

const std::vector<double> kWarmUp = {1,        1.629961, 2.288607, 2.967774,
                                     3.662785, 4.370619, 5.089165, 5.816874};
const std::vector<double> kRampTrace = {1,      1.818182, 2.704545, 3.601399,
                                        4.5005, 5.4002,   6.300087, 7.200041};

// ema-semantics.md, section 3.4. Half-life 10ba as Composer takes it: 2^-0.1 for each batch.
INSTANTIATE_TEST_SUITE_P(
    Libraries, TraceTest,
    testing::Values(
        TraceCase{"FirstIsACopy",
                  "smoothing=0.9",
                  false,
                  {1, 1.1, 1.29, 1.561, 1.9049, 2.31441, 2.782969, 3.304672}},
        TraceCase{"FromConstructionWeights",
                  "smoothing=0.9",
                  true,
                  {.1, .29, .561, .9049, 1.31441, 1.782969, 2.304672, 2.874205}},
        TraceCase{"FromZeros",
                  "smoothing=0.9, zero_init=plain",
                  false,
                  {.1, .29, .561, .9049, 1.31441, 1.782969, 2.304672, 2.874205}},
        TraceCase{"Debiased",
                  "smoothing=0.9, zero_init=debias",
                  false,
                  {1, 1.526316, 2.070111, 2.631288, 3.209714, 3.805218, 4.417593, 5.046601}},
        TraceCase{"EmaPytorchEvery1", "inv_gamma=1, interval_phase=1, before_start=copy", false,
                  kWarmUp},
        TraceCase{"DiffusersWarmUp", "inv_gamma=1, before_start=copy", false, kWarmUp},
        TraceCase{"DiffusersWarmUpFromZero", "inv_gamma=1, before_start=copy", true, kWarmUp},
        TraceCase{"EmaPytorchAfter3",
                  "inv_gamma=1, interval_phase=1, ema_start=3ba, before_start=copy",
                  false,
                  {1, 2, 3, 4, 4.629961, 5.288607, 5.967774, 6.662785}},
        TraceCase{"EmaPytorchEvery2After3",
                  "inv_gamma=1, update_interval=2ba, interval_phase=1, ema_start=3ba, "
                  "before_start=copy",
                  false,
                  {1, 1, 3, 3, 4.259921, 4.259921, 5.347322, 5.347322}},
        TraceCase{"Diffusers", "ramp=10, before_start=copy", false, kRampTrace},
        TraceCase{"DiffusersFromZero", "ramp=10, before_start=copy", true, kRampTrace},
        TraceCase{"DiffusersAfter3",
                  "ramp=10, ema_start=3ba, before_start=copy",
                  false,
                  {1, 2, 3, 4, 4.818182, 5.704545, 6.601399, 7.5005}},
        TraceCase{"Composer",
                  "smoothing=0.9330329915368074, ema_start=1ba",
                  true,
                  {1, 1.066967, 1.196416, 1.384164, 1.626306, 1.919199, 2.259445, 2.643873}},
        TraceCase{"ComposerEvery3",
                  "smoothing=0.8122523963562356, update_interval=3ba, ema_start=1ba",
                  true,
                  {1, 1, 1.375495, 1.375495, 1.375495, 2.243735}},
        TraceCase{"ComposerEvery3Start5",
                  "smoothing=0.8122523963562356, update_interval=3ba, ema_start=5ba",
                  true,
                  {0, 0, 0, 0, 5, 5.187748, 5.187748, 5.187748}},
        TraceCase{"Edm2",
                  "sigma_rel=0.1",
                  false,
                  {1, 1.99592, 2.959812, 3.893965, 4.81182, 5.720485, 6.623578, 7.523067}},
        TraceCase{"Edm2FromZero",
                  "sigma_rel=0.1",
                  true,
                  {1, 1.99592, 2.959812, 3.893965, 4.81182, 5.720485, 6.623578, 7.523067}},
        TraceCase{"Swa", "uniform=true", false, {1, 1.5, 2, 2.5}},
        TraceCase{"UniformProfile", "sigma_rel=0.28867513459481287", false, {1, 1.5, 2, 2.5}}),
    [](const auto& test) { return test.param.name; });

// What a track is before its start, and what it begins with.
INSTANTIATE_TEST_SUITE_P(
    BeforeStart, TraceTest,
    testing::Values(
        TraceCase{"Reinit", "smoothing=0.5, ema_start=5ba", false, {1, 1, 1, 1, 5, 5.5, 6.25}},
        TraceCase{"Copy",
                  "smoothing=0.5, ema_start=5ba, before_start=copy",
                  false,
                  {1, 2, 3, 4, 5, 5.5, 6.25}},
        TraceCase{"Hold",
                  "smoothing=0.5, ema_start=5ba, before_start=hold",
                  false,
                  {1, 1, 1, 1, 1, 3.5, 5.25}},
        TraceCase{"ReinitBetweenIntervals",
                  "smoothing=0.5, update_interval=4ba, ema_start=5ba",
                  false,
                  {1, 1, 1, 1, 5, 5, 5, 6.5}},
        TraceCase{"CopyOnlyAtIntervals",
                  "smoothing=0.5, update_interval=2ba, ema_start=5ba, before_start=copy",
                  false,
                  {1, 2, 2, 4, 4, 6, 6, 7}},
        TraceCase{"HoldBetweenIntervals",
                  "smoothing=0.5, update_interval=4ba, ema_start=5ba, before_start=hold",
                  false,
                  {1, 1, 1, 1, 1, 1, 1, 4.5}},
        TraceCase{"ReinitWithZeros",
                  "smoothing=0.5, zero_init=plain, ema_start=3ba",
                  false,
                  {1, 1, 1.5, 2.75}},
        TraceCase{"ReinitDebiased",
                  "smoothing=0.5, zero_init=debias, ema_start=3ba",
                  false,
                  {1, 1, 3, 3 + 2 / 3.0}},
        TraceCase{"UniformReinit", "uniform=true, ema_start=3ba", false, {1, 1, 3, 3.5, 4}},
        TraceCase{"UniformCopy",
                  "uniform=true, ema_start=3ba, before_start=copy",
                  false,
                  {1, 2, 3, 3.5, 4}},
        TraceCase{"UniformHold",
                  "uniform=true, ema_start=3ba, before_start=hold",
                  false,
                  {1, 1, 1, 2.5, 10 / 3.0}},
        TraceCase{"FirstPushIsTheStart", "uniform=true, ema_start=1ba", false, {1, 1.5, 2}},
        TraceCase{"End", "smoothing=0.5, ema_end=3ba", false, {1, 1.5, 2.25, 2.25, 2.25}},
        TraceCase{"StartAndEnd",
                  "uniform=true, ema_start=3ba, ema_end=4ba",
                  false,
                  {1, 1, 3, 3.5, 3.5, 3.5}}),
    [](const auto& test) { return test.param.name; });

// The same rule by count and by time: 0.9 a second is a half-life of ln 2 / -ln 0.9.
TEST(HalfLifeTest, DebiasIsZeroInitWithoutTheZerosShare) {
  ScalarTrack track(Parse("half_life=6.578813478960585sec, debias=true"));
  const double expected[] = {1, 1.526316, 2.070111, 2.631288, 3.209714, 3.805218};
  for (int n = 1; n <= 6; ++n) {
    track.Push(At(n, TimeUnit::kSecond), n);
    EXPECT_NEAR(track.average(), expected[n - 1], 1e-6);
  }
}

// With power=1 and no limit, inverse gamma is the running mean.
TEST(WarmUpTest, PowerOneIsTheMean) {
  const std::vector<double> trace = Trace("inv_gamma=1, power=1, max_decay=1", 1000, false);
  for (int n = 1; n <= 1000; ++n) EXPECT_NEAR(trace[n - 1], (n + 1) / 2.0, 1e-9);
}

struct DecayCase {
  const char* name;
  const char* schedule;
  std::vector<double> decays;  // At kDecayUpdates.
};
void PrintTo(const DecayCase& c, std::ostream* os) { *os << c.schedule; }

constexpr int kDecayUpdates[] = {1, 2, 3, 5, 10, 100, 1000, 10000, 100000};

class DecayTest : public testing::TestWithParam<DecayCase> {};

TEST_P(DecayTest, IsTheReference) {
  ScalarTrack track(Parse(GetParam().schedule));
  size_t next = 0;
  for (int n = 1; n <= 100000; ++n) {
    const double weight = track.Push(At(n), 0).update_weight;
    if (n != kDecayUpdates[next]) continue;
    EXPECT_NEAR(1 - weight, GetParam().decays[next], 6e-10) << "update " << n;
    ++next;
  }
}

// ema-semantics.md, section 3.3.
INSTANTIATE_TEST_SUITE_P(
    All, DecayTest,
    testing::Values(DecayCase{"PowerTwoThirds",
                              "inv_gamma=1",
                              {0, .370039475, .519250143, .658004811, .784556531, .953584112, .99,
                               .997845565, .999535841}},
                    DecayCase{"PowerThreeQuarters",
                              "inv_gamma=1, power=0.75",
                              {0, .405396442, .561308662, .700930244, .822172059, .968377223,
                               .994376587, .999, .999822172}},
                    DecayCase{"Ramp",
                              "ramp=10",
                              {0, .181818182, .25, .357142857, .526315789, .917431193, .991080278,
                               .999100809, .9999}},
                    DecayCase{"Edm2Sigma05",
                              "sigma_rel=0.05",
                              {0, .000003889, .000684310, .018126502, .150534932, .834746968,
                               .982179506, .998204304, .999820293}},
                    DecayCase{"Edm2Sigma10",
                              "sigma_rel=0.1",
                              {0, .004080032, .040024670, .170139622, .433324721, .923327242,
                               .992090273, .999206555, .999920631}},
                    DecayCase{"Limits",
                              "inv_gamma=1, min_decay=0.6, max_decay=0.9",
                              {0, .6, .6, .658004811, .784556531, .9, .9, .9, .9}}),
    [](const auto& test) { return test.param.name; });

// The library's own expression, to the last bit.
TEST(WarmUpTest, WeightsAreOneLessTheLibrariesDecays) {
  const Schedule power = Parse("inv_gamma=1.5, power=0.75");
  const Schedule ramp = Parse("ramp=10");
  for (int step = 1; step < 5000; ++step) {
    const double n = step;
    EXPECT_EQ(PlanAt(power, n, n + 1).update_weight, 1.0 - (1 - std::pow(1 + n / 1.5, -0.75)));
    EXPECT_EQ(PlanAt(ramp, n, n + 1).update_weight, 1.0 - (1 + n) / (10 + n));
  }
}

// EMA() of ema-pytorch: its t is one less than our batch.
TEST(WarmUpTest, DefaultsOfEmaPytorch) {
  ScalarTrack track(Parse(
      "inv_gamma=1, update_interval=10ba, interval_phase=1, ema_start=100ba, before_start=copy"));
  const std::pair<int, double> decays[] = {{100, 0},           {110, .797819992},
                                           {120, .868622658},  {200, .953890995},
                                           {1000, .989280279}, {10000, .997831228}};
  size_t next = 0;
  for (int t = 0; t <= 10000; ++t) {
    const Schedule::Update update = track.Push(At(t + 1), t);
    EXPECT_EQ(update.due, t % 10 == 0) << t;
    if (t <= 100 && update.due) {
      EXPECT_EQ(update.update_weight, 1) << t;
    }
    if (t != decays[next].first) continue;
    EXPECT_NEAR(1 - update.update_weight, decays[next].second, 6e-10) << t;
    ++next;
  }
  EXPECT_EQ(track.state().update_count, 1001);
  EXPECT_EQ(track.state().averaged_count, 991);  // From t = 100 on.
}

// A start in another unit is at the update that reaches it: (1 + n) / (10 + n), n batches later.
TEST(WarmUpTest, StartInAnotherUnitCountsFromItsUpdate) {
  ScalarTrack track(Parse("ramp=10, ema_start=2ep"));
  TrainingTime time;
  for (int n = -3; n <= 5; ++n) {
    time.Set(TimeUnit::kBatch, 100 + n);
    time.Set(TimeUnit::kEpoch, n < 0 ? 1 : 2);
    const Schedule::Update update = track.Push(time, 0);
    if (n < 0) {
      EXPECT_EQ(update.due, n == -3);
    } else {
      EXPECT_DOUBLE_EQ(update.update_weight, n == 0 ? 1 : 9.0 / (10 + n)) << n;
    }
  }
}

TEST(PowerFunctionTest, GammasAreTheReference) {
  const std::pair<double, double> cases[] = {
      {.01, 96.994897823710}, {.02, 46.989582157567}, {.05, 16.972198602303},
      {.07, 11.244939447858}, {.10, 6.937203937602},  {.15, 3.557868774899},
      {.20, 1.826213779896},  {.25, .719823958001},   {.28, .169343993769}};
  for (const auto& [sigma_rel, gamma] : cases) {
    EXPECT_NEAR(GammaOfSigmaRel(sigma_rel), gamma, 6e-13) << sigma_rel;
  }
  EXPECT_NEAR(GammaOfSigmaRel(kMaxSigmaRel), 0, 1e-14);
}

TEST(PowerFunctionTest, GammaHasItsSigmaRel) {
  for (double sigma_rel = 1e-12; sigma_rel < kMaxSigmaRel; sigma_rel *= 1.01) {
    const double g = GammaOfSigmaRel(sigma_rel);
    ASSERT_NEAR(std::sqrt((g + 1) / (g + 3)) / (g + 2) / sigma_rel, 1, 1e-13) << sigma_rel;
  }
  EXPECT_GT(GammaOfSigmaRel(5e-324), 0);
}

TEST(PowerFunctionTest, WeightsAreTheReference) {
  const auto decay = [](const char* schedule, double last, double now) {
    return 1 - PlanAt(Parse(schedule), last, now).update_weight;
  };
  EXPECT_NEAR(decay("sigma_rel=0.05", 999, 1000), .982179506296657, 1e-14);
  EXPECT_NEAR(decay("sigma_rel=0.05, age_offset=1", 998, 999), .982179506296657, 1e-14);
  EXPECT_NEAR(decay("sigma_rel=0.1", 999, 1000), .992090272645079, 1e-14);
  EXPECT_NEAR(decay("sigma_rel=0.05", 990, 1000), .834746968343254, 1e-14);
  EXPECT_NEAR(decay("sigma_rel=0.1", 990, 1000), .923327242269523, 1e-14);
}

TEST(PowerFunctionTest, IrregularUpdatesKeepTheProfile) {
  ScalarTrack track(Parse("sigma_rel=0.1"));
  track.Push(At(10), 10);
  const double expected[][3] = {{20, .004080031659650188, 19.959199683403497},
                                {50, .0006941750436233022, 49.979146426129745},
                                {55, .46930784758070104, 52.64367401622907}};
  for (const auto& [time, decay, average] : expected) {
    EXPECT_NEAR(1 - track.Push(At(time), time).update_weight, decay, 1e-14);
    EXPECT_NEAR(track.average(), average, 1e-12);
  }
}

// The profile begins at the start, in whatever unit that is.
TEST(PowerFunctionTest, AgeIsThatSinceTheStart) {
  EXPECT_NEAR(1 - PlanAt(Parse("sigma_rel=0.1, ema_start=5000ba"), 5990, 6000).update_weight,
              .923327242269523, 1e-14);
  ScalarTrack track(Parse("sigma_rel=0.1, ema_start=2ep"));
  TrainingTime time;
  for (const double age : {0.0, 990.0, 1000.0}) {
    time.Set(TimeUnit::kBatch, 5000 + age);
    time.Set(TimeUnit::kEpoch, 2);
    const double weight = track.Push(time, 0).update_weight;
    EXPECT_NEAR(weight, age == 1000 ? 1 - .923327242269523 : 1, 1e-14) << age;
  }
}

TEST(ConstantDecayTest, IsNeverRescaled) {
  const Schedule schedule = Parse("smoothing=0.999, update_interval=5ba");
  EXPECT_EQ(PlanAt(schedule, 5, 10).update_weight, 1 - 0.999);
  const Schedule::Update late = PlanAt(schedule, 5, 100);
  EXPECT_EQ(late.update_weight, 1 - 0.999);
  EXPECT_EQ(late.elapsed, 95);
}

TEST(ConstantDecayTest, DebiasedWeightsAreAccurate) {
  const Schedule schedule = Parse("smoothing=0.9999999, zero_init=debias");
  for (const int64_t n : {2, 3, 1000, 100'000'000}) {
    const Schedule::State state{n - 1, n - 1, At(5), At(1)};
    EMA_ASSERT_OK_AND_ASSIGN(const Schedule::Update update, schedule.Plan(state, At(6)));
    const long double s = 0.9999999;
    const long double expected = (1 - s) / (1 - std::pow(s, static_cast<long double>(n)));
    EXPECT_NEAR(update.update_weight / static_cast<double>(expected), 1, 1e-12) << n;
  }
  EXPECT_EQ(PlanAt(Parse("smoothing=0, zero_init=debias"), 5, 6).update_weight, 1);
}

TEST(SchedulePlanTest, FirstPushIsDueWithWeightOne) {
  for (const char* text :
       {"half_life=1000ba, update_interval=10ba", "copy", "smoothing=0.9", "sigma_rel=0.1",
        "ramp=10, ema_start=100ba, before_start=hold", "half_life=10ba, ema_end=5ba",
        "smoothing=0.9, zero_init=plain, ema_start=100ba"}) {
    EMA_ASSERT_OK_AND_ASSIGN(const Schedule::Update update, Parse(text).Plan({}, At(7)));
    EXPECT_TRUE(update.due) << text;
    EXPECT_EQ(update.update_weight, 1) << text;
    EXPECT_FALSE(update.from_zero) << text;
    EXPECT_EQ(update.elapsed, 0);
  }
}

TEST(SchedulePlanTest, ZerosAreWhatPlainBeginsWith) {
  EMA_ASSERT_OK_AND_ASSIGN(const Schedule::Update update,
                           Parse("smoothing=0.9, zero_init=plain").Plan({}, At(7)));
  EXPECT_TRUE(update.due && update.from_zero);
  EXPECT_EQ(update.update_weight, 1 - 0.9);
}

TEST(SchedulePlanTest, CopyHasWeightOneAtEveryInterval) {
  const Schedule schedule = Parse("copy=true, update_interval=10ba");
  EXPECT_FALSE(PlanAt(schedule, 10, 19).due);
  EXPECT_EQ(PlanAt(schedule, 10, 20).update_weight, 1);
}

TEST(SchedulePlanTest, IsDueWhenAnIntervalHasEnded) {
  const Schedule schedule = Parse("half_life=1000ba, update_interval=10ba");
  EXPECT_FALSE(PlanAt(schedule, 10, 10).due);
  EXPECT_FALSE(PlanAt(schedule, 10, 19).due);
  EXPECT_EQ(PlanAt(schedule, 10, 19).update_weight, 0);
  EXPECT_TRUE(PlanAt(schedule, 10, 20).due);
  EXPECT_TRUE(PlanAt(schedule, 19, 20).due);
  EXPECT_TRUE(PlanAt(schedule, 12, 45).due);
  EXPECT_FALSE(PlanAt(schedule, 45, 49).due);
  EXPECT_TRUE(PlanAt(schedule, 45, 50).due);
}

TEST(SchedulePlanTest, PhaseMovesTheIntervals) {
  const Schedule schedule = Parse("half_life=1000ba, update_interval=10ba, interval_phase=13");
  EXPECT_FALSE(PlanAt(schedule, 3, 12).due);
  EXPECT_TRUE(PlanAt(schedule, 12, 13).due);
  EXPECT_TRUE(PlanAt(schedule, 2, 3).due);  // Below the phase too.
  EXPECT_FALSE(PlanAt(schedule, 13, 22).due);
  EXPECT_TRUE(PlanAt(schedule, 13, 23).due);
}

TEST(SchedulePlanTest, CountsAreExactUpToTheLargest) {
  const Schedule schedule = Parse("half_life=3e9tok, update_interval=3tok");
  const double k = 3002399751580330;  // 3 k is just below 2^53.
  EXPECT_FALSE(PlanAt(schedule, 3 * k - 3, 3 * k - 1).due);
  EXPECT_TRUE(PlanAt(schedule, 3 * k - 1, 3 * k).due);
}

// The n-th part of training, however it was summed up, is the end of the n-th interval.
TEST(SchedulePlanTest, SharesAreDueInSpiteOfRounding) {
  for (const char* interval : {"0.1dur", "0.01dur", "0.001dur", "0.3dur", "0.7dur"}) {
    const Schedule schedule = Parse(absl::StrCat("half_life=0.5dur, update_interval=", interval));
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
  const Schedule schedule = Parse("half_life=0.5dur, update_interval=0.01dur");
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

// Composer's SWA, of ten epochs whose shares are summed up: that makes 0.8 less and 0.3 more.
TEST(SchedulePlanTest, StartAndEndInSharesHoldInSpiteOfRounding) {
  const auto due_epochs = [](const char* schedule) {
    ScalarTrack track(Parse(schedule));
    std::vector<int> due;
    double progress = 0;
    for (int epoch = 0; epoch < 10; ++epoch, progress += 0.1) {
      TrainingTime time;
      time.Set(TimeUnit::kEpoch, epoch);
      time.Set(TimeUnit::kProgress, progress);
      if (track.Push(time, epoch).due) due.push_back(epoch);
    }
    return due;
  };
  EXPECT_THAT(due_epochs("uniform=true, update_interval=1ep, ema_start=0.8dur, ema_end=0.97dur"),
              ElementsAre(0, 8, 9));
  EXPECT_THAT(due_epochs("uniform=true, update_interval=1ep, ema_end=0.3dur"),
              ElementsAre(0, 1, 2, 3));
}

TEST(SchedulePlanTest, ZeroIntervalIsDueEvenWithoutElapsedTime) {
  const Schedule::Update update = PlanAt(Parse("30sec"), 12.5, 12.5);
  EXPECT_TRUE(update.due);
  EXPECT_EQ(update.update_weight, 0);
}

TEST(SchedulePlanTest, StateSaysWhereTheTrackStands) {
  const Schedule schedule = Parse("half_life=10ba, ema_start=3ba, before_start=hold");
  ScalarTrack track(schedule);
  track.Push(At(1), 1);
  EXPECT_EQ(track.state(), (Schedule::State{1, 0, At(1), std::nullopt}));
  track.Push(At(2), 2);
  EXPECT_EQ(track.state(), (Schedule::State{1, 0, At(1), std::nullopt}));
  const Schedule::Update start = track.Push(At(4), 4);
  EXPECT_TRUE(start.due);
  EXPECT_EQ(start.update_weight, 0);
  EXPECT_EQ(track.state(), (Schedule::State{2, 1, At(4), At(4)}));
  EXPECT_EQ(track.Push(At(5), 5).elapsed, 1);
  EXPECT_EQ(track.state(), (Schedule::State{3, 2, At(5), At(4)}));
}

// UpdateModel may move the start of a track that has begun: that does not take its age back.
TEST(SchedulePlanTest, LaterStartDoesNotEndWhatHasBegun) {
  const Schedule schedule = Parse("sigma_rel=0.1, ema_start=1000000ba");
  const Schedule::State state{100, 100, At(5990), At(5000)};
  EMA_ASSERT_OK_AND_ASSIGN(const Schedule::Update update, schedule.Plan(state, At(6000)));
  EXPECT_TRUE(update.due);
  EXPECT_NEAR(update.update_weight, 1 - .923327242269523, 1e-14);
}

TEST(SchedulePlanTest, LackingUnitIsNamed) {
  const Schedule schedule = Parse("half_life=2ep, update_interval=10ba");
  EXPECT_THAT(schedule.Plan({}, At(20)),
              StatusIs(kInvalid, "training time lacks \"ep\", which half_life 2ep needs"));
  EXPECT_THAT(schedule.Plan({}, At(2, TimeUnit::kEpoch)),
              StatusIs(kInvalid, "training time lacks \"ba\", which update_interval 10ba needs"));
  EXPECT_THAT(Parse("2ep").Plan({}, At(20)), StatusIs(kInvalid, HasSubstr("half_life 2ep")));
  EXPECT_THAT(schedule.Plan({}, At(20)), ReasonIs(ErrorReason::kBadTime));
  EXPECT_THAT(Parse("5ba").Plan(After(At(1, TimeUnit::kEpoch)), At(20)),
              StatusIs(kInvalid, HasSubstr("of the last update lacks \"ba\"")));
  EXPECT_THAT(Parse("half_life=5ba, ema_start=0.1dur").Plan({}, At(20)),
              StatusIs(kInvalid, "training time lacks \"dur\", which ema_start 0.1dur needs"));
  EXPECT_THAT(Parse("half_life=5ba, ema_end=0.1dur").Plan({}, At(20)),
              StatusIs(kInvalid, "training time lacks \"dur\", which ema_end 0.1dur needs"));
  const Schedule::State no_batch{1, 1, At(20), At(2, TimeUnit::kEpoch)};
  EXPECT_THAT(Parse("sigma_rel=0.1, ema_start=2ep").Plan(no_batch, At(30)),
              AllOf(StatusIs(kInvalid, HasSubstr("of the start lacks \"ba\"")),
                    ReasonIs(ErrorReason::kBadTime)));
}

TEST(SchedulePlanTest, NoUnitIsNeededForAStartAtOnce) {
  for (const char* text : {"half_life=5ba, ema_start=0dur", "half_life=5ba, ema_start=0tok"}) {
    EXPECT_THAT(Parse(text).Plan({}, At(20)), IsOk()) << text;
  }
}

TEST(SchedulePlanTest, TimeMustNotGoBack) {
  const absl::StatusOr<Schedule::Update> update = Parse("5ba").Plan(After(At(41)), At(40));
  EXPECT_THAT(update, StatusIs(kInvalid, HasSubstr("40ba is before")));
  EXPECT_THAT(update, ReasonIs(ErrorReason::kBadTime));
  TrainingTime last = At(41);
  last.Set(TimeUnit::kEpoch, 2);
  TrainingTime now = At(42);
  now.Set(TimeUnit::kEpoch, 1);
  EXPECT_THAT(Parse("half_life=5ba, update_interval=1ep").Plan({1, 1, last, last}, now),
              StatusIs(kInvalid, HasSubstr("1ep is before")));
}

// A training is made longer: what was three quarters of it is a third.
TEST(SchedulePlanTest, ProgressMayGoBackWhereItIsOnlyOfTheStartOrTheEnd) {
  TrainingTime last = At(30);
  last.Set(TimeUnit::kProgress, 0.75);
  TrainingTime now = At(31);
  now.Set(TimeUnit::kProgress, 0.34);
  const Schedule::State started{3, 2, last, last};
  for (const char* text : {"half_life=5ba, ema_start=0.5dur", "half_life=5ba, ema_end=0.7dur"}) {
    const absl::StatusOr<Schedule::Update> update = Parse(text).Plan(started, now);
    ASSERT_THAT(update, IsOk()) << text;
    EXPECT_TRUE(update->due) << text;
    EXPECT_DOUBLE_EQ(update->update_weight, 1 - std::exp2(-1.0 / 5)) << text;
  }
  const absl::StatusOr<Schedule::Update> before =
      Parse("half_life=5ba, ema_start=0.8dur").Plan({1, 0, last, std::nullopt}, now);
  ASSERT_THAT(before, IsOk());
  EXPECT_FALSE(before->due);
  EXPECT_THAT(Parse("half_life=0.5dur").Plan(started, now), ReasonIs(ErrorReason::kBadTime));
}

}  // namespace
}  // namespace ema
