// SPDX-License-Identifier: Apache-2.0
#include "ema/track.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "include/ema/internal/tensor_pattern.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr TensorAction kAverage = TensorAction::kAverage;
constexpr TensorAction kCopy = TensorAction::kCopy;
constexpr TensorAction kIgnore = TensorAction::kIgnore;

Manifest TestManifest() {
  return *Manifest::Create({{"body.0.weight", Dtype::kBFloat16, {2, 3}},
                            {"body.0.mean", Dtype::kFloat32, {3}, /*is_buffer=*/true},
                            {"body.0.count", Dtype::kInt64, {}, /*is_buffer=*/true},
                            {"head.weight", Dtype::kFloat32, {3}},
                            {"head[0]", Dtype::kFloat32, {3}},
                            {"mask", Dtype::kBool, {3}}});
}

TrackConfig Track(const char* schedule, std::vector<TensorRule> rules = {}) {
  return {.name = "t", .schedule = *Schedule::Parse(schedule), .tensor_rules = std::move(rules)};
}

TEST(ActionsOfTest, FloatsAreAveragedAndOthersCopied) {
  TrackConfig track = Track("200ba");
  EXPECT_THAT(ActionsOf(track, TestManifest()),
              ElementsAre(kAverage, kAverage, kCopy, kAverage, kAverage, kCopy));
  track.buffers = kCopy;
  EXPECT_THAT(ActionsOf(track, TestManifest()),
              ElementsAre(kAverage, kCopy, kCopy, kAverage, kAverage, kCopy));
}

TEST(ActionsOfTest, FirstRuleThatMatchesDecides) {
  EXPECT_THAT(
      ActionsOf(Track("200ba", {{"head.weight", kCopy}, {"head*", kIgnore}}), TestManifest()),
      ElementsAre(kAverage, kAverage, kCopy, kCopy, kIgnore, kCopy));
  EXPECT_THAT(
      ActionsOf(Track("200ba", {{"head*", kIgnore}, {"head.weight", kCopy}}), TestManifest()),
      ElementsAre(kAverage, kAverage, kCopy, kIgnore, kIgnore, kCopy));
}

TEST(ActionsOfTest, RulesGoBeforeBuffers) {
  TrackConfig track = Track("200ba", {{"*.mean", kAverage}});
  track.buffers = kCopy;
  EXPECT_EQ(ActionsOf(track, TestManifest())[1], kAverage);
}

TEST(ActionsOfTest, PatternsAreNamesOrGlobs) {
  const auto ignored = [](const char* pattern) {
    std::vector<std::string> names;
    const Manifest manifest = TestManifest();
    const std::vector<TensorAction> actions =
        ActionsOf(Track("200ba", {{pattern, kIgnore}}), manifest);
    for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
      if (actions[i] == kIgnore) names.push_back(manifest.tensor(i).name);
    }
    return names;
  };
  EXPECT_THAT(ignored("mask"), ElementsAre("mask"));
  EXPECT_THAT(ignored("body.?.m*"), ElementsAre("body.0.mean"));
  EXPECT_THAT(ignored("*weight"), ElementsAre("body.0.weight", "head.weight"));
  // A name that would be a glob of something else is itself.
  EXPECT_THAT(ignored("head[0]"), ElementsAre("head[0]"));
  EXPECT_THAT(ignored("[bm]*"),
              ElementsAre("body.0.weight", "body.0.mean", "body.0.count", "mask"));
  EXPECT_THAT(ignored("MASK"), ElementsAre());
  EXPECT_THAT(ignored("mas"), ElementsAre());
}

TEST(ActionsOfTest, WhatCannotBeAveragedIsCopied) {
  EXPECT_THAT(ActionsOf(Track("200ba", {{"*", kAverage}}), TestManifest()),
              ElementsAre(kAverage, kAverage, kCopy, kAverage, kAverage, kCopy));
  EXPECT_THAT(ActionsOf(Track("200ba", {{"mask", kIgnore}}), TestManifest())[5], kIgnore);
  EXPECT_THAT(ActionsOf(Track("copy", {{"head.weight", kIgnore}, {"*", kAverage}}), TestManifest()),
              ElementsAre(kCopy, kCopy, kCopy, kIgnore, kCopy, kCopy));
}

TEST(SchedulesOfTest, ARuleMayHaveAScheduleOfItsOwn) {
  const TrackConfig track =
      Track("200ba", {{"mask", kAverage, *Schedule::Parse("10ba")},
                      {"body.*", kCopy},
                      {"*.weight", kAverage, *Schedule::Parse("smoothing=0.5")}});
  ASSERT_THAT(ValidateTrack(track, TestManifest()), IsOk());
  const std::vector<const Schedule*> schedules = SchedulesOf(track);
  ASSERT_EQ(schedules.size(), 3);
  EXPECT_EQ(schedules[0]->ToString(), "half_life=200ba");
  EXPECT_EQ(schedules[1]->ToString(), "half_life=10ba");
  EXPECT_EQ(schedules[2]->ToString(), "smoothing=0.5");
  EXPECT_THAT(ScheduleIndicesOf(track, TestManifest()), ElementsAre(0, 0, 0, 2, 0, 1));
  EXPECT_EQ(TrackText(track),
            "half_life=200ba; mask (half_life=10ba); body.* copy; *.weight (smoothing=0.5)");
}

TEST(RuleScheduleTest, WithoutAnIntervalItHasTheTracks) {
  const Schedule track = *Schedule::Parse("half_life=200ba, update_interval=10ba");
  EXPECT_EQ(RuleSchedule(*Schedule::Parse("50ba"), track)->ToString(),
            "half_life=50ba, update_interval=10ba");
  EXPECT_EQ(
      RuleSchedule(*Schedule::Parse("half_life=50ba, update_interval=2ba"), track)->ToString(),
      "half_life=50ba, update_interval=2ba");
  EXPECT_EQ(RuleSchedule(*Schedule::Parse("50ba"), *Schedule::Parse("9sec"))->ToString(),
            "half_life=50ba");  // Such a track is updated by every push.
}

TEST(ValidateTrackTest, RefusesAScheduleThatHasNoUse) {
  const Schedule half_life = *Schedule::Parse("10ba");
  const auto refused = [](const TrackConfig& track) {
    return std::string(ValidateTrack(track, TestManifest()).message());
  };
  EXPECT_THAT(refused(Track("copy", {{"mask", kAverage, half_life}})),
              HasSubstr("where nothing is averaged"));
  EXPECT_THAT(refused(Track("200ba", {{"mask", kIgnore, half_life}})),
              HasSubstr("where nothing is averaged"));
  EXPECT_THAT(refused(Track("200ba", {{"mask", kAverage, *Schedule::Parse("copy")}})),
              HasSubstr("give the action \"copy\""));
  const Schedule mean = *Schedule::Parse("mean_of_last=5");
  EXPECT_THAT(refused(Track("mean_of_last=5", {{"mask", kAverage, half_life}})),
              HasSubstr("mean_of_last 5: must be the only schedule of its track"));
  EXPECT_THAT(refused(Track("200ba", {{"mask", kAverage, mean}})),
              HasSubstr("mean_of_last 5: must be the only schedule of its track"));
  EXPECT_THAT(RuleSchedule(mean, half_life), ReasonIs(ErrorReason::kBadSchedule));
  EXPECT_THAT(ValidateTrack(Track("mean_of_last=5", {{"mask", kCopy}}), TestManifest()), IsOk());
  EXPECT_THAT(refused(Track("200ba", std::vector<TensorRule>(17, {"mask", kAverage, half_life}))),
              HasSubstr("17 have a schedule; at most 16"));
}

TEST(PlanTrackTest, EachScheduleCountsByItself) {
  const TrackConfig track =
      Track("smoothing=0.5, update_interval=2ba",
            {{"mask", kAverage, *Schedule::Parse("smoothing=0.25, update_interval=3ba")}});
  TrackState state;
  std::string due;
  for (int batch = 1; batch <= 6; ++batch) {
    const TrainingTime now = TrainingTime::AtBatch(batch);
    EMA_ASSERT_OK_AND_ASSIGN(const std::vector<Schedule::Update> updates,
                             PlanTrack(track, state, now));
    ASSERT_EQ(updates.size(), 2);
    due += updates[0].due ? 'a' : '-';
    due += updates[1].due ? 'b' : '-';
    due += ' ';
    EXPECT_EQ(IsDue(updates), updates[0].due || updates[1].due);
    state = NextState(track, state, updates, now);
  }
  EXPECT_EQ(due, "ab a- -b a- -- ab ");
  EXPECT_EQ(state[0].update_count, 4);
  EXPECT_EQ(state[1].update_count, 3);
}

TEST(ValidateTrackTest, AcceptsWhatTheHeaderSays) {
  for (TrackConfig track :
       {Track("copy"), Track("200ba"), Track("200ba", {{"head.*", kIgnore}, {"mask", kAverage}}),
        Track("copy", {{"[!h]*", kIgnore}})}) {
    EXPECT_THAT(ValidateTrack(track, TestManifest()), IsOk()) << TrackText(track);
    track.paused = true;
    track.buffers = kCopy;
    EXPECT_THAT(ValidateTrack(track, TestManifest()), IsOk());
  }
}

TEST(ValidateTrackTest, RefusesBadNames) {
  TrackConfig track = Track("copy");
  track.name = "../x";
  EXPECT_THAT(ValidateTrack(track, TestManifest()), ReasonIs(ErrorReason::kBadName));
}

TEST(ValidateTrackTest, NamesTheNearestTensor) {
  const std::pair<const char*, const char*> cases[] = {{"haed.weight", "head.weight"},
                                                       {"head.*.weight", "head.weight"},
                                                       {"body.0.means", "body.0.mean"},
                                                       {"body.0.Weight", "body.0.weight"},
                                                       {"model.mask", "mask"}};
  for (const auto& [pattern, nearest] : cases) {
    const absl::Status status =
        ValidateTrack(Track("200ba", {{"*", kAverage}, {pattern, kCopy}}), TestManifest());
    EXPECT_THAT(status,
                StatusIs(kInvalid, absl::StrCat("track \"t\": tensor_rules: pattern \"", pattern,
                                                "\" matches no tensor; the nearest name "
                                                "is \"",
                                                nearest, "\"")));
    EXPECT_THAT(status, ReasonIs(ErrorReason::kBadSchedule));
  }
}

TEST(ValidateTrackTest, RefusesPatternsThatAreNone) {
  for (const std::string& pattern :
       {std::string(), std::string("*\0x", 3), std::string(1025, '*')}) {
    for (const TensorAction action : {kCopy, kIgnore}) {
      EXPECT_THAT(ValidateTrack(Track("200ba", {{pattern, action}}), TestManifest()),
                  StatusIs(kInvalid, AllOf(HasSubstr("tensor_rules: pattern \""),
                                           HasSubstr("such as \"head.*\""))));
    }
  }
  EXPECT_THAT(ValidateTrack(Track("200ba", {{std::string(1024, '*'), kCopy}}), TestManifest()),
              IsOk());
}

TEST(ValidateTrackTest, TracksShareABudgetForPatterns) {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 1000; ++i) {
    tensors.push_back({absl::StrCat("layers.", i, ".weight"), Dtype::kFloat32, {1}});
  }
  const Manifest manifest = *Manifest::Create(std::move(tensors));
  const auto rules = [](const std::string& pattern) {
    return std::vector<TensorRule>(256, {pattern, kIgnore});
  };
  const TrackConfig ordinary = Track("200ba", rules("layers.*.bias"));
  GlobBudget budget;
  for (int track = 0; track < 8; ++track) {
    EXPECT_THAT(ValidateTrack(ordinary, manifest, budget), IsOk());
  }
  EXPECT_THAT(ValidateTrack(Track("200ba", rules("*" + std::string(400, 'a') + "?")), manifest),
              StatusIs(kInvalid, HasSubstr("takes too long")));
  budget.steps = 1000;
  EXPECT_THAT(ValidateTrack(ordinary, manifest, budget),
              StatusIs(kInvalid, HasSubstr("takes too long")));
}

TEST(ValidateTrackTest, RefusesOptionsWithoutUse) {
  TrackConfig track = Track("200ba");
  track.buffers = kIgnore;
  EXPECT_THAT(ValidateTrack(track, TestManifest()),
              StatusIs(kInvalid, HasSubstr("buffers \"ignore\": must be \"average\" or \"copy\"")));
  track = Track("copy");
  track.dtype = Dtype::kFloat64;
  EXPECT_THAT(ValidateTrack(track, TestManifest()),
              StatusIs(kInvalid, HasSubstr("dtype \"float64\": has no use with copy")));
  track = Track("200ba");
  for (const auto& [dtype, name] :
       {std::pair(Dtype::kBFloat16, "bfloat16"), std::pair(static_cast<Dtype>(99), "unknown")}) {
    track.dtype = dtype;
    EXPECT_THAT(
        ValidateTrack(track, TestManifest()),
        StatusIs(kInvalid, HasSubstr(absl::StrCat("dtype \"", name,
                                                  "\": must be \"float32\" or \"float64\""))));
  }
  EXPECT_THAT(ValidateTrack(Track("200ba", {{"*", kIgnore}}), TestManifest()),
              StatusIs(kInvalid, HasSubstr("every tensor is ignored")));
}

TEST(ValidateTrackTest, SnapshotsAreOfPowerFunctions) {
  TrackConfig track = Track("sigma_rel=0.05");
  track.snapshot_interval = TrainingDuration{50, TimeUnit::kEpoch};
  EXPECT_THAT(ValidateTrack(track, TestManifest()), IsOk());
  TrainingTime now = TrainingTime::AtBatch(1);
  EXPECT_THAT(PlanTrack(track, {}, now).status(),
              StatusIs(kInvalid, HasSubstr("lacks \"ep\", which snapshot_interval 50ep needs")));
  now.Set(TimeUnit::kEpoch, 0);
  EXPECT_THAT(PlanTrack(track, {}, now).status(), IsOk());
  track.tensor_rules = {{"mask", kAverage, *Schedule::Parse("10ba")}};
  EXPECT_THAT(ValidateTrack(track, TestManifest()),
              StatusIs(kInvalid, HasSubstr("snapshots are of one profile; use two tracks")));
  track.tensor_rules.clear();
  for (const char* schedule : {"200ba", "copy", "uniform=true"}) {
    track.schedule = *Schedule::Parse(schedule);
    const absl::Status status = ValidateTrack(track, TestManifest());
    EXPECT_THAT(status, StatusIs(kInvalid, AllOf(HasSubstr("snapshot_interval \"50ep\""),
                                                 HasSubstr("sigma_rel=0.05"))));
    EXPECT_THAT(status, ReasonIs(ErrorReason::kBadSchedule));
  }
  track.schedule = *Schedule::Parse("sigma_rel=0.05");
  for (const double value : {0.0, -1.0, 1.5, 1e300, std::nan("")}) {
    track.snapshot_interval->value = value;
    EXPECT_THAT(ValidateTrack(track, TestManifest()),
                StatusIs(kInvalid, HasSubstr("snapshot_interval")))
        << value;
  }
}

// Long lists of names, and patterns that make a backtracking matcher slow.
TEST(ValidateTrackTest, ManyRulesAndHardPatternsAreQuick) {
  std::vector<TensorSpec> tensors;
  std::vector<TensorRule> rules;
  for (int i = 0; i < 50'000; ++i) {
    tensors.push_back({absl::StrCat("layers.", i, ".weight"), Dtype::kFloat32, {1}});
    if (i > 0) rules.push_back({tensors.back().name, kIgnore});
  }
  tensors.push_back({std::string(1000, 'a'), Dtype::kFloat32, {1}});
  const Manifest manifest = *Manifest::Create(tensors);
  EXPECT_THAT(ValidateTrack(Track("200ba", rules), manifest), IsOk());
  EXPECT_THAT(
      ValidateTrack(Track("200ba", {{"*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*b", kCopy}}), manifest),
      StatusIs(kInvalid, HasSubstr("matches no tensor")));
  // What the model has not.
  for (TensorRule& rule : rules) rule.pattern += ".gone";
  EXPECT_THAT(ValidateTrack(Track("200ba", rules), manifest), IsOk());
}

TEST(TrackTextTest, SaysTheScheduleAndWhatIsNotAtItsDefault) {
  TrackConfig track = Track("half_life=200ba, update_interval=5ba");
  EXPECT_EQ(TrackText(track), "half_life=200ba, update_interval=5ba");
  track.dtype = Dtype::kFloat64;
  track.tensor_rules = {{"head.*", kIgnore}};
  EXPECT_EQ(TrackText(track), "half_life=200ba, update_interval=5ba; dtype float64; head.* ignore");
  track.buffers = kCopy;
  track.paused = true;
  track.tensor_rules.push_back({"*", kAverage});
  EXPECT_EQ(TrackText(track),
            "half_life=200ba, update_interval=5ba; buffers copy; dtype float64; paused; head.* "
            "ignore; * average");
  track = Track("sigma_rel=0.05");
  track.snapshot_interval = TrainingDuration{50, TimeUnit::kEpoch};
  EXPECT_EQ(TrackText(track), "sigma_rel=0.05; snapshot_interval 50ep");
}

TEST(TrackTest, RulesThatMatchNothingCanBeDroppedIfTheyDoNotIgnore) {
  const Manifest manifest = *Manifest::Create({{.name = "a", .shape = {1}}});
  const TrackConfig track = Track("200ba", {{"b*", kIgnore}, {"c", kAverage}, {"a", kCopy}});
  EXPECT_FALSE(ValidateTrack(track, manifest).ok());
  const TrackConfig kept = WithoutUnmatchedRules(track, manifest);
  EXPECT_EQ(kept.tensor_rules, (std::vector<TensorRule>{{"b*", kIgnore}, {"a", kCopy}}));
  EXPECT_THAT(ValidateTrack(kept, manifest), IsOk());
}

TEST(CheckRulesMatchTest, NamesARuleThatIgnoresNothing) {
  EXPECT_THAT(CheckRulesMatch(Track("200ba", {{"head.*", kIgnore}}), TestManifest()), IsOk());
  const TrackConfig misspelled = Track("200ba", {{"head.*", kIgnore}, {"haed.*", kIgnore}});
  EXPECT_THAT(ValidateTrack(misspelled, TestManifest()), IsOk());
  const absl::Status status = CheckRulesMatch(misspelled, TestManifest());
  EXPECT_THAT(status, StatusIs(kInvalid, HasSubstr("track \"t\": tensor_rules: pattern \"haed.*\" "
                                                   "matches no tensor; the nearest name")));
  EXPECT_THAT(status, ReasonIs(ErrorReason::kBadSchedule));
}

TEST(TrackTest, OfManyRulesTheTextSaysHowMany) {
  TrackConfig track{.name = "t", .schedule = *Schedule::Parse("200ba")};
  track.tensor_rules.assign(1000, {"a", TensorAction::kCopy});
  EXPECT_EQ(TrackText(track), "half_life=200ba; 1000 tensor rules");
}

}  // namespace
}  // namespace ema
