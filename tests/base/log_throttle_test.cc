// SPDX-License-Identifier: Apache-2.0
#include "server/base/log_throttle.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace ema
