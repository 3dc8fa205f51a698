// SPDX-License-Identifier: Apache-2.0
#include "server/ops/logging.h"

#include <string>

#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::IsEmpty;
using ::testing::MatchesRegex;

std::string Logged(LogLevel level, std::string_view message) {
  testing::internal::CaptureStderr();
  Log(level, message);
  return testing::internal::GetCapturedStderr();
}

constexpr char kTime[] = "20[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+\\.[0-9]+Z ";

TEST(LoggingTest, AnEventIsOneLineWithTimeAndLevel) {
  InitLogging("info");
  EXPECT_THAT(Logged(LogLevel::kInfo, "a {} b\nc\r"),
              MatchesRegex(std::string(kTime) + "info a \\{\\} b c \n"));
  EXPECT_THAT(Logged(LogLevel::kWarning, "w"), MatchesRegex(std::string(kTime) + "warning w\n"));
  EXPECT_THAT(Logged(LogLevel::kError, "e"), MatchesRegex(std::string(kTime) + "error e\n"));
  EXPECT_THAT(Logged(LogLevel::kDebug, "d"), IsEmpty());
}

TEST(LoggingTest, TheLevelIsSet) {
  InitLogging("error");
  EXPECT_THAT(Logged(LogLevel::kWarning, "w"), IsEmpty());
  InitLogging("debug");
  EXPECT_THAT(Logged(LogLevel::kDebug, "d"), MatchesRegex(std::string(kTime) + "debug d\n"));
  InitLogging("nonsense");
  EXPECT_THAT(Logged(LogLevel::kDebug, "d"), IsEmpty());
}

}  // namespace
}  // namespace ema
