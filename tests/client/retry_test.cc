// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/retry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "absl/time/clock.h"
#include "ema/error_reason.h"

namespace ema::client_internal {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::Le;
using ::testing::SizeIs;

constexpr absl::Duration kFirst = absl::Milliseconds(250);
constexpr absl::Duration kLongest = absl::Seconds(4);

TEST(BackoffTest, GrowsToTheLongest) {
  Backoff backoff(kFirst, kLongest);
  absl::Duration expected = kFirst;
  for (int i = 0; i < 20; ++i) {
    EXPECT_THAT(backoff.Next(absl::OkStatus()), AllOf(Ge(expected * 0.8), Le(expected * 1.2))) << i;
    expected = std::min(expected * 1.6, kLongest);
  }
  EXPECT_EQ(expected, kLongest);
  backoff.Reset();
  EXPECT_THAT(backoff.Next(absl::OkStatus()), Le(kFirst * 1.2));
}

TEST(BackoffTest, ItShouldLogOnceAfterTwoSeconds) {
  Backoff backoff;
  EXPECT_FALSE(backoff.ShouldLog());
  const SteadyTime start = SteadyNow();
  backoff.Next(absl::OkStatus());
  while (!backoff.ShouldLog()) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_GE(SteadyNow() - start, std::chrono::seconds(2));
  EXPECT_FALSE(backoff.ShouldLog());
  backoff.Reset();
  EXPECT_FALSE(backoff.ShouldLog());
}

TEST(BackoffTest, RanksDoNotComeInStep) {
  std::set<absl::Duration> delays;
  for (int rank = 0; rank < 100; ++rank) {
    delays.insert(Backoff(kFirst, kLongest).Next(absl::OkStatus()));
  }
  EXPECT_THAT(delays, SizeIs(Ge(90u)));
}

TEST(BackoffTest, WaitsAsLongAsTheServerAsks) {
  absl::Status asks = absl::UnavailableError("busy");
  SetRetryDelay(asks, absl::Seconds(10));
  Backoff backoff(kFirst, kLongest);
  EXPECT_THAT(backoff.Next(asks), AllOf(Ge(absl::Seconds(8)), Le(absl::Seconds(12))));
}

}  // namespace
}  // namespace ema::client_internal
