// SPDX-License-Identifier: Apache-2.0
#include "server/base/log_throttle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ema {
namespace {

TEST(LogThrottleTest, ALineASecondAndTenAtOnce) {
  LogThrottle throttle;
  const LogThrottle::Time begin = LogThrottle::Time() + std::chrono::hours(1);
  for (int i = 0; i < 10; ++i) ASSERT_EQ(throttle.Take(begin), 0);
  for (int i = 0; i < 5; ++i) ASSERT_EQ(throttle.Take(begin), std::nullopt);
  const LogThrottle::Time later = begin + std::chrono::seconds(1);
  EXPECT_EQ(throttle.Take(later), 5);  // That had none.
  EXPECT_EQ(throttle.Take(later), std::nullopt);
  const LogThrottle::Time much_later = begin + std::chrono::hours(1);
  EXPECT_EQ(throttle.Take(much_later), 1);
  for (int i = 0; i < 9; ++i) ASSERT_EQ(throttle.Take(much_later), 0);
  EXPECT_EQ(throttle.Take(much_later), std::nullopt);
}

TEST(LogThrottleTest, WhatItTellsEndsWithHowManyWereNotTold) {
  LogThrottle throttle;
  std::vector<std::string> lines;
  const LogSink sink = [&](const LogEvent& event) {
    EXPECT_EQ(event.level, LogLevel::kWarning);
    lines.push_back(ToText(event));
  };
  for (int i = 0; i < 1000; ++i) throttle.Log(sink, LogLevel::kWarning, "refused", {{"peer", "x"}});
  ASSERT_GE(lines.size(), 10);
  EXPECT_LT(lines.size(), 1000);
  EXPECT_EQ(lines[0], "refused peer=x more_before=0");
  EXPECT_THAT(throttle.Take(std::chrono::steady_clock::now() + std::chrono::seconds(1)),
              testing::Optional(1000 - static_cast<int64_t>(lines.size())));
}

}  // namespace
}  // namespace ema
