// SPDX-License-Identifier: Apache-2.0
#include "server/ops/log_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

LogWriter& NewWriter() {
  // As they are never destroyed: so that no leak is seen.
  static auto* const writers = new std::vector<LogWriter*>();
  writers->push_back(new LogWriter([](int64_t count) { return absl::StrCat("dropped ", count); }));
  return *writers->back();
}

// While it lives, stderr is a pipe of 4 KiB that somebody else reads.
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
  // All that comes until nobody has the other end.
  std::string ReadAll() const {
    std::string text;
    char piece[4096];
    while (true) {
      const ssize_t size = read(read_end_, piece, sizeof(piece));
      if (size <= 0) return text;
      text.append(piece, static_cast<size_t>(size));
    }
  }

 private:
  int stderr_before_;
  int read_end_ = -1;
};

TEST(LogWriterTest, LinesComeInOrder) {
  LogWriter& writer = NewWriter();
  testing::internal::CaptureStderr();
  writer.Write("a");
  writer.Write("{} %s");
  writer.Write("");
  writer.Flush(kPatience);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "a\n{} %s\n\n");
  EXPECT_EQ(writer.dropped_count(), 0);
}

TEST(LogWriterTest, AReaderThatStopsHoldsNobodyUpAndLearnsWhatItHasMissed) {
  LogWriter& writer = NewWriter();
  StderrPipe pipe;
  const std::string padding(100, ' ');
  constexpr int64_t kLines = LogWriter::kQueuedLines + 500;
  for (int64_t i = 0; i < kLines; ++i) writer.Write(absl::StrCat(i, padding));
  // Nobody reads: it waits in vain, but not for long.
  writer.Flush(absl::Milliseconds(1));
  const int64_t dropped = writer.dropped_count();
  EXPECT_GT(dropped, 0);
  EXPECT_LE(dropped, 500);

  std::string text;
  std::jthread reader([&] { text = pipe.ReadAll(); });
  writer.Flush(kPatience);
  pipe.Restore();
  reader.join();
  int64_t next = 0;
  int64_t told = 0;
  int64_t missing = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    int64_t number = 0;
    if (absl::ConsumePrefix(&line, "dropped ")) {
      ASSERT_TRUE(absl::SimpleAtoi(line, &number)) << line;
      told += number;
    } else {
      ASSERT_TRUE(absl::SimpleAtoi(line, &number)) << line;
      ASSERT_GE(number, next) << line;
      missing += number - next;
      ASSERT_LE(missing, told) << line;
      next = number + 1;
    }
  }
  EXPECT_EQ(next, kLines);
  EXPECT_EQ(told, dropped);
  EXPECT_EQ(missing, dropped);
}

TEST(LogWriterTest, WhatStderrRefusesIsCounted) {
  LogWriter& writer = NewWriter();
  {
    StderrPipe pipe;
    const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    ASSERT_GE(full, 0);
    dup2(full, STDERR_FILENO);
    close(full);
    writer.Write("lost");
    writer.Flush(kPatience);
  }
  EXPECT_EQ(writer.dropped_count(), 1);
  testing::internal::CaptureStderr();
  writer.Write("next");
  writer.Flush(kPatience);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "dropped 1\nnext\n");
}

TEST(LogWriterTest, AStderrThatDoesNotBlockIsWaitedFor) {
  LogWriter& writer = NewWriter();
  StderrPipe pipe;
  ASSERT_EQ(fcntl(STDERR_FILENO, F_SETFL, O_NONBLOCK), 0);
  const std::string line(3000, 'x');
  for (int i = 0; i < 3; ++i) writer.Write(line);
  std::string text;
  std::jthread reader([&] { text = pipe.ReadAll(); });
  writer.Flush(kPatience);
  pipe.Restore();
  reader.join();
  EXPECT_EQ(text, absl::StrCat(line, "\n", line, "\n", line, "\n"));
  EXPECT_EQ(writer.dropped_count(), 0);
}

}  // namespace
}  // namespace ema
