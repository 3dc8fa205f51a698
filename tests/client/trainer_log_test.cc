// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/trainer_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/cpp/trainer/outage_timer.h"
#include "ema/error_reason.h"

namespace ema::client_internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

absl::Status NonFinite() {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite, "NaN");
}

class TrainerLogTest : public testing::Test {
 protected:
  std::vector<std::string> warnings_;
  std::vector<std::string> infos_;
  TrainerLog log_{"m", /*warns_of_all=*/false, [this](LogLevel level, const std::string& text) {
                    if (level == LogLevel::kWarning) warnings_.push_back(text);
                    if (level == LogLevel::kInfo) infos_.push_back(text);
                  }};
};

TEST_F(TrainerLogTest, RepeatedCauseIsWarnedOfAtPowersOfTwo) {
  for (int step = 1; step <= 9; ++step) log_.SkippedStep(step, NonFinite());
  EXPECT_THAT(
      warnings_,
      ElementsAre(HasSubstr("push of step 1 skipped"), HasSubstr("push of step 2"),
                  HasSubstr("push of step 4"),
                  HasSubstr("NaN [NON_FINITE] (8 steps by now; the next warning is at 16)")));
}

TEST_F(TrainerLogTest, SuccessfulPushEndsACauseOfOtherRanksOnly) {
  const absl::Status abandoned =
      MakeError(absl::StatusCode::kAborted, ErrorReason::kStepSkipped, "rank 1");
  for (int i = 0; i < 3; ++i) {
    log_.SkippedStep(1, NonFinite());
    log_.SkippedStep(1, abandoned);
    log_.PushSucceeded();
  }
  EXPECT_THAT(warnings_, SizeIs(2 + 3));
}

TEST_F(TrainerLogTest, EveryOutageIsWarnedOf) {
  for (int i = 0; i < 3; ++i) log_.SkippedStep(i, absl::UnavailableError("away"));
  EXPECT_THAT(warnings_, SizeIs(3));
}

TEST_F(TrainerLogTest, TheLaneIsNamedWhenItChanges) {
  PendingPush::Stats stats = {.lane_reason = "the server is not on this host"};
  log_.LaneUsed(stats);  // Nothing was sent.
  EXPECT_THAT(infos_, IsEmpty());
  stats.stream_count = 1;
  for (int i = 0; i < 2; ++i) log_.LaneUsed(stats);
  stats.lane = Lane::kSharedMemory;
  stats.lane_reason.clear();
  for (int i = 0; i < 2; ++i) log_.LaneUsed(stats);
  EXPECT_THAT(infos_,
              ElementsAre("model \"m\": transport of pushes: grpc (the server is not on this host)",
                          "model \"m\": transport of pushes: shared memory"));
}

TEST_F(TrainerLogTest, StalledScheduleIsWarnedOfOnce) {
  Version version;
  version.tracks = {{.track = "ema", .config = "half_life=1e6ba", .stall_gap = 1e-3}};
  log_.WarnOfStalledTracks(version);
  log_.WarnOfStalledTracks(version);
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("model \"m\": track \"ema\": an update has")));
  version.tracks[0].stall_gap = 1e-5;
  version.tracks[0].config = "half_life=10ba";
  log_.WarnOfStalledTracks(version);
  EXPECT_THAT(warnings_, SizeIs(1));
}

TEST(OutlookTest, SaysWhetherTheNextStepIsAnyBetter) {
  const auto outlook = [](ErrorReason reason, const char* message) {
    return std::string(
        ConsequenceText(MakeError(absl::StatusCode::kFailedPrecondition, reason, message)));
  };
  EXPECT_EQ(ConsequenceText(absl::UnavailableError("away")),
            std::string("the average continues with the next"));
  EXPECT_THAT(outlook(ErrorReason::kPlanMismatch, "time"),
              HasSubstr("all ranks give the same training time"));
  EXPECT_THAT(outlook(ErrorReason::kBadLayout, "shape"), HasSubstr("no step can be pushed until"));
}

TEST(OutageTest, OwnGpuThatHangsIsNone) {
  EXPECT_TRUE(IsOutage(absl::DeadlineExceededError("late")));
  EXPECT_TRUE(IsOutage(absl::UnavailableError("away")));
  EXPECT_TRUE(IsOutage(MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced, "restarted")));
  for (const auto code : {absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kUnavailable}) {
    EXPECT_FALSE(IsOutage(MakeError(code, ErrorReason::kDevice, "copy")));
  }
}

}  // namespace
}  // namespace ema::client_internal
