// SPDX-License-Identifier: Apache-2.0
#include "server/base/heartbeat.h"

#include <chrono>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ema {
namespace {

using std::chrono::seconds;

class HeartbeatTest : public testing::Test {
 protected:
  // Of the worker that was added first.
  seconds SilentTime() const {
    return std::chrono::duration_cast<seconds>(workers_.Ages(now_).at(1).silent_time);
  }
  void LookAfter(seconds time) {
    now_ += time;
    workers_.Poll(now_);
  }

  Heartbeats workers_;
  Heartbeats::Clock::time_point now_ = Heartbeats::Clock::now();
};

TEST_F(HeartbeatTest, NobodyIsKnownBeforeSomebodyHasLooked) {
  workers_.Add("a", Heartbeats::NeededFor::kServing);
  EXPECT_THAT(workers_.Ages(now_), testing::IsEmpty());
}

TEST_F(HeartbeatTest, WorkWithoutProgressIsSilent) {
  Heartbeat* const worker = workers_.Add("a", Heartbeats::NeededFor::kServing);
  LookAfter(seconds(1));
  EXPECT_EQ(SilentTime(), seconds(0));
  worker->Begin();
  LookAfter(seconds(1));
  EXPECT_EQ(SilentTime(), seconds(0));
  LookAfter(seconds(7));
  EXPECT_EQ(SilentTime(), seconds(7));
  EXPECT_EQ(workers_.Ages(now_)[1].name, "a");
  EXPECT_EQ(workers_.Ages(now_)[1].needed_for, Heartbeats::NeededFor::kServing);
}

TEST_F(HeartbeatTest, TheEndOfWorkEndsTheSilenceAtOnce) {
  Heartbeat* const worker = workers_.Add("a", Heartbeats::NeededFor::kServing);
  worker->Begin();
  LookAfter(seconds(1));
  LookAfter(seconds(9));
  worker->End();
  EXPECT_EQ(SilentTime(), seconds(0));
}

TEST_F(HeartbeatTest, ABeatOfTheThreadAtWorkIsProgress) {
  Heartbeat* const worker = workers_.Add("a", Heartbeats::NeededFor::kCheckpoints);
  const Heartbeat::Work work(worker);
  LookAfter(seconds(1));
  LookAfter(seconds(9));
  EXPECT_EQ(SilentTime(), seconds(9));
  Heartbeat::Beat();
  LookAfter(seconds(1));
  EXPECT_EQ(SilentTime(), seconds(0));
  LookAfter(seconds(2));
  EXPECT_EQ(SilentTime(), seconds(2));
}

TEST_F(HeartbeatTest, ABeatOfAThreadWithoutWorkIsNobodys) {
  workers_.Add("a", Heartbeats::NeededFor::kServing)->Begin();
  LookAfter(seconds(1));
  Heartbeat::Beat();
  LookAfter(seconds(5));
  EXPECT_EQ(SilentTime(), seconds(5));
}

TEST_F(HeartbeatTest, WhoeverLooksIsAWorkerToo) {
  LookAfter(seconds(1));
  now_ += seconds(40);
  EXPECT_EQ(workers_.Ages(now_).at(0).silent_time, seconds(40));
  EXPECT_EQ(workers_.Ages(now_).at(0).needed_for, Heartbeats::NeededFor::kServing);
}

}  // namespace
}  // namespace ema
