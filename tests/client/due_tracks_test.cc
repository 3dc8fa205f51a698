// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/due_tracks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/testutil/status_matchers.h"

namespace ema::client_internal {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

RunPlan::Entry Entry(const std::string& name, const char* schedule, int64_t track_id,
                     bool paused = false) {
  return {.track = {.name = name, .schedule = *Schedule::Parse(schedule), .paused = paused},
          .state = {},
          .track_id = track_id};
}

// Tries a push at each of the steps (first, last]; those that are due.
std::vector<int64_t> DueSteps(DueTracks& tracks, int64_t first, int64_t last) {
  std::vector<int64_t> steps;
  for (int64_t step = first + 1; step <= last; ++step) {
    const absl::StatusOr<std::vector<DueTracks::Due>> due = tracks.At(TrainingTime::AtBatch(step));
    EXPECT_THAT(due, IsOk());
    if (due->empty()) continue;
    steps.push_back(step);
    tracks.Count(*due, TrainingTime::AtBatch(step));
  }
  return steps;
}

TEST(DueTracksTest, CountsWhatIsTriedWhateverTheServerSays) {
  DueTracks tracks;
  EXPECT_TRUE(tracks.Adopt({.revision = 1, .tracks = {Entry("ema", "4ba", 1)}}));
  EXPECT_THAT(DueSteps(tracks, 0, 3), ElementsAre(1, 2, 3));
}

TEST(DueTracksTest, APlanThatIsKnownChangesNothing) {
  DueTracks tracks;
  const char* const every_5 = "half_life=10ba, update_interval=5ba";
  tracks.Adopt({.revision = 1, .tracks = {Entry("ema", every_5, 1)}});
  EXPECT_THAT(DueSteps(tracks, 0, 7), ElementsAre(1, 5));
  EXPECT_FALSE(tracks.Adopt({.revision = 1, .tracks = {}}));
  // Its state there is older, as pushes were lost.
  EXPECT_TRUE(
      tracks.Adopt({.revision = 2, .tracks = {Entry("ema", every_5, 1), Entry("b", "7ba", 2)}}));
  EXPECT_THAT(DueSteps(tracks, 7, 7), IsEmpty());
  EMA_ASSERT_OK_AND_ASSIGN(const auto due, tracks.At(TrainingTime::AtBatch(8)));
  ASSERT_EQ(due.size(), 1);
  EXPECT_EQ(due[0].index, 1);
  // Another track of that name.
  tracks.Adopt({.revision = 3, .tracks = {Entry("ema", every_5, 3)}});
  EXPECT_THAT(DueSteps(tracks, 8, 9), ElementsAre(9));
  // A server that was restarted counts anew.
  EXPECT_FALSE(tracks.Adopt({.revision = 3, .tracks = {}}));
  tracks.OnRejoined();
  EXPECT_TRUE(tracks.Adopt({.revision = 3, .tracks = {}}));
}

TEST(DueTracksTest, PausedTracksAreDueOnlyWhereAllArePaused) {
  DueTracks tracks;
  tracks.Adopt({.revision = 1, .tracks = {Entry("a", "4ba", 1, true), Entry("b", "4ba", 2)}});
  EMA_ASSERT_OK_AND_ASSIGN(auto due, tracks.At(TrainingTime::AtBatch(1)));
  ASSERT_EQ(due.size(), 1);
  EXPECT_EQ(due[0].index, 1);
  EXPECT_FALSE(tracks.ArePaused(due));
  tracks.Adopt({.revision = 2, .tracks = {Entry("a", "4ba", 1, true), Entry("b", "4ba", 2, true)}});
  EMA_ASSERT_OK_AND_ASSIGN(due, tracks.At(TrainingTime::AtBatch(1)));
  EXPECT_EQ(due.size(), 2);
  EXPECT_TRUE(tracks.ArePaused(due));
}

TEST(DueTracksTest, AUnitThatIsNotCountedIsAnError) {
  DueTracks tracks;
  tracks.Adopt({.revision = 1, .tracks = {Entry("ema", "5sp", 1)}});
  EXPECT_THAT(tracks.At(TrainingTime::AtBatch(1)), ReasonIs(ErrorReason::kBadTime));
}

}  // namespace
}  // namespace ema::client_internal
