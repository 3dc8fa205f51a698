// SPDX-License-Identifier: Apache-2.0
#include "server/base/steady_wait.h"

#include <gtest/gtest.h>

#include <thread>

namespace ema {
namespace {

TEST(SteadyWaitTest, EndsWhenWhatItWaitsForHasCome) {
  absl::Mutex mu;
  SteadyWait wait;
  bool predicate = false;
  std::jthread other([&] {
    absl::MutexLock lock(&mu);
    predicate = true;
    wait.WakeAll();
  });
  absl::MutexLock lock(&mu);
  EXPECT_TRUE(wait.AwaitUntil(mu, SteadyTime::max(), [&] { return predicate; }));
}

TEST(SteadyWaitTest, EndsAtItsTime) {
  absl::Mutex mu;
  SteadyWait wait;
  absl::MutexLock lock(&mu);
  const SteadyTime deadline = After(SteadyNow(), absl::Milliseconds(5));
  EXPECT_FALSE(wait.AwaitUntil(mu, deadline, [] { return false; }));
  EXPECT_GE(SteadyNow(), deadline);
}

TEST(SteadyWaitTest, NoTimeIsAfterTheLast) {
  EXPECT_EQ(After(SteadyNow(), absl::InfiniteDuration()), SteadyTime::max());
  EXPECT_EQ(After(SteadyNow(), absl::Hours(24 * 365 * 300)), SteadyTime::max());
  EXPECT_EQ(After(SteadyTime(), absl::Seconds(1)), SteadyTime(std::chrono::seconds(1)));
}

}  // namespace
}  // namespace ema
