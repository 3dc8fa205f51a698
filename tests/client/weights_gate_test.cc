// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/weights_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/time/time.h"

namespace ema::client_internal {
namespace {

TEST(WeightsGateTest, IsClosedUntilEverythingHasBeenReadAndDropped) {
  WeightsGate gate;
  EXPECT_FALSE(gate.TryRelease(absl::ZeroDuration()));
  ASSERT_TRUE(gate.BeginRead());
  gate.AddSlice();
  gate.EndRead();
  gate.FinishReading();
  EXPECT_FALSE(gate.TryRelease(absl::ZeroDuration()));
  EXPECT_EQ(gate.left_time(), SteadyTime::max());
  WeightsGate::DropSlice(&gate);
  EXPECT_TRUE(gate.TryRelease(absl::ZeroDuration()));
  EXPECT_LE(gate.left_time(), SteadyNow());
}

TEST(WeightsGateTest, NothingIsReadOnceReleased) {
  WeightsGate gate;
  gate.FinishReading();
  ASSERT_TRUE(gate.TryRelease(absl::ZeroDuration()));
  EXPECT_FALSE(gate.BeginReading());
  EXPECT_FALSE(gate.BeginRead());
}

TEST(WeightsGateTest, MayBeReadAgainBeforeTheRelease) {
  WeightsGate gate;
  gate.FinishReading();
  EXPECT_TRUE(gate.BeginReading());
  EXPECT_FALSE(gate.TryRelease(absl::ZeroDuration()));
  EXPECT_TRUE(gate.BeginRead());
  gate.EndRead();
}

TEST(WeightsGateTest, AForcedReleaseWaitsForTheReadUnderWay) {
  WeightsGate gate;
  ASSERT_TRUE(gate.BeginRead());
  gate.AddSlice();
  gate.ForceRelease();
  EXPECT_FALSE(gate.BeginRead());
  std::atomic<bool> is_unread = false;
  std::thread trainer([&] {
    gate.AwaitNoReader();
    is_unread = true;
  });
  gate.EndRead();
  EXPECT_FALSE(is_unread);
  WeightsGate::DropSlice(&gate);
  trainer.join();
  EXPECT_TRUE(is_unread);
}

TEST(WeightsGateTest, WaitsNoLongerThanAsked) {
  WeightsGate gate;
  const SteadyTime start = SteadyNow();
  EXPECT_FALSE(gate.TryRelease(absl::Milliseconds(20)));
  EXPECT_GE(Since(start), absl::Milliseconds(20));
}

}  // namespace
}  // namespace ema::client_internal
