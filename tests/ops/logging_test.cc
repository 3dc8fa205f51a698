// SPDX-License-Identifier: Apache-2.0
#include "server/ops/logging.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
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

// While it exists, stderr is a pipe of 4 KiB that only ReadAll() reads.
class StderrPipe {
 public:
  StderrPipe() : stderr_before_(dup(STDERR_FILENO)) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    EXPECT_GE(fcntl(ends[1], F_SETPIPE_SZ, 4096), 4096);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    read_end_ = ends[0];
  }
  ~StderrPipe() {
    Restore();
    close(read_end_);
  }
  void Restore() {
    if (stderr_before_ < 0) return;
    dup2(stderr_before_, STDERR_FILENO);
    close(stderr_before_);
    stderr_before_ = -1;
  }
  // Returns at the end of the file, which Restore() causes.
  std::string ReadAll() const {
    std::string text;
    char piece[4096];
    while (true) {
      const ssize_t size = read(read_end_, piece, sizeof(piece));
      if (size <= 0) return text;
      text.append(piece, static_cast<size_t>(size));
    }
  }
  // Waits until all queued lines are written, and returns everything.
  std::string Drain() {
    std::string text;
    std::jthread reader([&] { text = ReadAll(); });
    for (int i = 0; i < 60; ++i) FlushLog();  // Each waits for at most a second.
    Restore();
    reader.join();
    return text;
  }

 private:
  int stderr_before_;
  int read_end_ = -1;
};

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

TEST_F(LoggingTest, StalledReaderBlocksNoCallerAndDroppedLinesAreReported) {
  const int64_t dropped_before = DroppedLogLines();
  StderrPipe pipe;
  const std::string padding(100, 'x');
  constexpr int64_t kLines = kQueuedLogLines + 500;
  for (int64_t i = 0; i < kLines; ++i) {
    Log(LogLevel::kInfo, "e", {{"number", i}, {"padding", padding}});
  }
  FlushLog();  // The reader is stalled: returns after a second.
  const int64_t dropped = DroppedLogLines() - dropped_before;
  EXPECT_GT(dropped, 0);
  EXPECT_LE(dropped, 500);
  const std::string text = pipe.Drain();
  int64_t next = 0;
  int64_t reported = 0;
  int64_t missing = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, absl::ByAnyChar(" ="));
    int64_t number = 0;
    if (absl::StrContains(line, " warn log lines dropped count=")) {
      ASSERT_TRUE(absl::SimpleAtoi(words.back(), &number)) << line;
      reported += number;
    } else {
      ASSERT_TRUE(words.size() > 4 && absl::SimpleAtoi(words[4], &number)) << line;
      ASSERT_GE(number, next) << line;
      missing += number - next;
      ASSERT_LE(missing, reported) << line;
      next = number + 1;
    }
  }
  EXPECT_EQ(next, kLines);
  EXPECT_EQ(reported, dropped);
  EXPECT_EQ(missing, dropped);
}

TEST_F(LoggingTest, LinesThatStderrRejectsAreCounted) {
  const int64_t dropped_before = DroppedLogLines();
  {
    StderrPipe pipe;
    const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    ASSERT_GE(full, 0);
    dup2(full, STDERR_FILENO);
    close(full);
    Log(LogLevel::kInfo, "lost");
    FlushLog();
  }
  EXPECT_EQ(DroppedLogLines(), dropped_before + 1);
  EXPECT_THAT(Logged(LogLevel::kInfo, "next"),
              MatchesRegex(std::string(kTime) + " warn log lines dropped count=1\n" + kTime +
                           " info next\n"));
}

TEST_F(LoggingTest, NonBlockingStderrIsWaitedFor) {
  const int64_t dropped_before = DroppedLogLines();
  StderrPipe pipe;
  ASSERT_EQ(fcntl(STDERR_FILENO, F_SETFL, O_NONBLOCK), 0);
  const std::string name(3000, 'x');
  for (int i = 0; i < 3; ++i) Log(LogLevel::kInfo, name);
  const std::string line = std::string(kTime) + " info " + name + "\n";
  EXPECT_THAT(pipe.Drain(), MatchesRegex(line + line + line));
  EXPECT_EQ(DroppedLogLines(), dropped_before);
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
