// SPDX-License-Identifier: Apache-2.0
#include "server/ops/logging.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

constexpr char kTime[] = "20[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+\\.[0-9]{6}Z";
// What names from outside may try.
constexpr char kHostile[] = "a b\n{\"c\"}\r\t\x1b[2J\x7f\\\xc3\xa9\xff=";

class LoggingTest : public testing::Test {
 protected:
  ~LoggingTest() override {
    SetLogLevel(LogLevel::kInfo);
    SetLogFormat(LogFormat::kText);
  }

  static std::string Logged(LogLevel level, const std::string& name,
                            std::vector<LogField> fields = {}) {
    testing::internal::CaptureStderr();
    Log(level, name, std::move(fields));
    FlushLog();
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(LoggingTest, AnEventIsOneLineWithTimeLevelAndFields) {
  EXPECT_THAT(Logged(LogLevel::kInfo, "committed", {{"model", "gpt"}, {"step", int64_t{5}}}),
              MatchesRegex(std::string(kTime) + " info committed model=gpt step=5\n"));
  EXPECT_THAT(Logged(LogLevel::kWarning, "w {}"),
              MatchesRegex(std::string(kTime) + " warn w \\{\\}\n"));
  EXPECT_THAT(Logged(LogLevel::kError, "e"), MatchesRegex(std::string(kTime) + " error e\n"));
  EXPECT_THAT(Logged(LogLevel::kDebug, "d"), IsEmpty());
}

TEST_F(LoggingTest, FieldsHaveTypes) {
  const LogEvent event{LogLevel::kInfo,
                       "e",
                       {{"yes", true},
                        {"n", size_t{7}},
                        {"x", 0.5},
                        {"time", absl::Seconds(90)},
                        {"error", absl::AbortedError("no \"x\"")},
                        {"empty", ""}}};
  EXPECT_EQ(ToText(event),
            "e yes=true n=7 x=0.5 time=1m30s error=\"ABORTED: no \\\"x\\\"\" empty=\"\"");
}

TEST_F(LoggingTest, LongTextIsClipped) {
  const std::string text(LogField::kMaxTextBytes, 'x');
  EXPECT_EQ(ToText({LogLevel::kInfo, "e", {{"name", text}}}), "e name=" + text);
  EXPECT_EQ(ToText({LogLevel::kInfo, "e", {{"name", text + "y"}}}), "e name=" + text + "...");
  EXPECT_EQ(ToText({LogLevel::kInfo, "e", {{"error", absl::AbortedError(text)}}}).size(),
            text.size() + std::string_view("e error=\"...\"").size());
}

TEST_F(LoggingTest, NoTextEndsTheLineOrTheQuotes) {
  const std::string line = ToText({LogLevel::kInfo, "e", {{"name", kHostile}, {"b", "it's"}}});
  EXPECT_EQ(line, R"(e name="a b\n{\"c\"}\r\t\x1b[2J\x7f\\\xc3\xa9\xff=" b=it's)");
}

TEST_F(LoggingTest, JsonHoldsTheSameAndIsOneLine) {
  SetLogFormat(LogFormat::kJson);
  const std::string line = Logged(LogLevel::kWarning, "e",
                                  {{"name", kHostile}, {"step", 5}, {"yes", false}, {"x", 0.25}});
  ASSERT_THAT(line, MatchesRegex("[ -~]*\n"));  // ASCII, without control characters.
  const nlohmann::json read = nlohmann::json::parse(line);
  EXPECT_THAT(read["ts"].get<std::string>(), MatchesRegex(kTime));
  EXPECT_EQ(read["level"], "warn");
  EXPECT_EQ(read["event"], "e");
  EXPECT_EQ(read["name"], "a b\n{\"c\"}\r\t\x1b[2J\x7f\\\xc3\xa9\xef\xbf\xbd=");
  EXPECT_EQ(read["step"], 5);
  EXPECT_EQ(read["yes"], false);
  EXPECT_EQ(read["x"], 0.25);
}

TEST_F(LoggingTest, TheLevelIsSetAtAnyTime) {
  SetLogLevel(LogLevel::kError);
  EXPECT_EQ(log_level(), LogLevel::kError);
  EXPECT_THAT(Logged(LogLevel::kWarning, "w"), IsEmpty());
  SetLogLevel(LogLevel::kDebug);
  EXPECT_THAT(Logged(LogLevel::kDebug, "d"), MatchesRegex(std::string(kTime) + " debug d\n"));
}

TEST_F(LoggingTest, LevelsHaveTheNamesOfTheOption) {
  for (const LogLevel level :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    EXPECT_EQ(ParseLogLevel(LogLevelName(level)), level);
  }
  EXPECT_EQ(ParseLogLevel("loud"), std::nullopt);
}

TEST_F(LoggingTest, LinesOfManyThreadsAreWhole) {
  constexpr int kThreads = 4;
  constexpr int kLines = 200;
  SetLogFormat(LogFormat::kJson);
  testing::internal::CaptureStderr();
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([i] {
        for (int line = 0; line < kLines; ++line) {
          Log(LogLevel::kInfo, "e", {{"thread", i}, {"line", line}});
          SetLogLevel(line % 2 == 0 ? LogLevel::kDebug : LogLevel::kInfo);
        }
      });
    }
  }
  FlushLog();
  const std::string output = testing::internal::GetCapturedStderr();
  const std::vector<std::string> lines = absl::StrSplit(output, '\n', absl::SkipEmpty());
  EXPECT_THAT(lines, SizeIs(kThreads * kLines));
  for (const std::string& line : lines) {
    EXPECT_TRUE(nlohmann::json::accept(line)) << line;
  }
}

}  // namespace
}  // namespace ema
