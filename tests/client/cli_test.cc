// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "client/cli/commands.h"
#include "client/cli/exit_code.h"
#include "client/cli/progress.h"
#include "client/cli/pulled_file.h"
#include "client/cli/track_option.h"
#include "server/checkpoint/safetensors.h"
#include "tests/testutil/status_matchers.h"

namespace ema::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(TrackOptionTest, ReadsEveryForm) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"raw=copy", "copy"},
      {"raw=copy,update_interval=5ba", "copy=true, update_interval=5ba"},
      {"fast=200ba", "half_life=200ba"},
      {"slow=2000ba,update_interval=10ba", "half_life=2000ba, update_interval=10ba"},
      {"slow=half_life=2000ba", "half_life=2000ba"},
      {"old=smoothing=0.99", "smoothing=0.99"},
      {"old=smoothing=0.99,update_interval=2ep", "smoothing=0.99, update_interval=2ep"}};
  for (const auto& [text, schedule] : cases) {
    SCOPED_TRACE(text);
    const absl::StatusOr<TrackConfig> track = ParseTrackOption(text);
    ASSERT_THAT(track, IsOk());
    EXPECT_EQ(track->schedule.ToString(), schedule);
  }
}

TEST(TrackOptionTest, ReadsASnapshotIntervalAnywhere) {
  for (const char* text :
       {"p=sigma_rel=0.05,snapshot_interval=50ep", "p=snapshot_interval=50ep,sigma_rel=0.05",
        "p=sigma_rel=0.05, snapshot_interval=50ep, update_interval=2ba"}) {
    EMA_ASSERT_OK_AND_ASSIGN(const TrackConfig track, ParseTrackOption(text));
    EXPECT_EQ(track.snapshot_interval, (TrainingDuration{50, TimeUnit::kEpoch})) << text;
    EXPECT_THAT(track.schedule.ToString(), HasSubstr("sigma_rel=0.05"));
  }
  for (const char* text : {"p=sigma_rel=0.05,snapshot_interval=50", "p=snapshot_interval=50ep",
                           "p=sigma_rel=0.05,snapshot_interval=5ba,snapshot_interval=5ba"}) {
    EXPECT_THAT(ParseTrackOption(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("p=")))
        << text;
  }
}

TEST(TrackOptionTest, RefusesTheRestAndShowsARightOne) {
  for (const char* text :
       {"", "fast", "=200ba", "fast=", "fast=200", "fast=-1ba", "fast=0ba", "fast=inf",
        "fast=smoothing=1", "fast=smoothing=x", "fast=200ba,10ba", "fast=200ba,update_interval=0ba",
        "fast=200ba,update_interval=", "fast=200ba,smoothing=0.9", "a b=copy", "../x=copy"}) {
    SCOPED_TRACE(text);
    EXPECT_THAT(ParseTrackOption(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("fast=200ba")));
  }
}

TEST(ProgressTest, FormatsBytes) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(int64_t{3} << 40), "3.0 TiB");
  EXPECT_EQ(FormatProgress(512, 1024, absl::Seconds(1)),
            "[###############...............]  50 %  512 B  512 B/s");
}

TEST(ExitCodeTest, FollowsTheHelp) {
  EXPECT_EQ(ExitCode(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCode(absl::DataLossError("")), 1);
  EXPECT_EQ(ExitCode(absl::NotFoundError("")), 3);
  EXPECT_EQ(ExitCode(absl::OutOfRangeError("")), 3);
  EXPECT_EQ(ExitCode(absl::AlreadyExistsError("")), 4);
  EXPECT_EQ(ExitCode(absl::InvalidArgumentError("")), 4);
  EXPECT_EQ(ExitCode(absl::UnavailableError("")), 5);
  EXPECT_EQ(ExitCode(absl::DeadlineExceededError("")), 5);
}

class PulledFileTest : public testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/ema_cli_test.XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    folder_ = path;
    // As a pull lays it out: a gap before "wide".
    info_.tensors = {{.spec = {.name = "odd", .dtype = Dtype::kFloat32, .shape = {3}},
                      .offset = 0,
                      .length_bytes = 12},
                     {.spec = {.name = "wide", .dtype = Dtype::kInt64, .shape = {2}},
                      .offset = 16,
                      .length_bytes = 16},
                     {.spec = {.name = "none", .dtype = Dtype::kBool, .shape = {0}},
                      .offset = 32,
                      .length_bytes = 0},
                     {.spec = {.name = "byte", .dtype = Dtype::kUInt8, .shape = {}},
                      .offset = 32,
                      .length_bytes = 1}};
    info_.total_bytes = 33;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  static std::string Read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }
  size_t FileCount() const {
    return std::distance(std::filesystem::directory_iterator(folder_),
                         std::filesystem::directory_iterator());
  }

  std::string folder_;
  PullInfo info_;
};

TEST_F(PulledFileTest, WritesWhatOthersRead) {
  PulledFile file(Path("out.safetensors"));
  absl::StatusOr<std::span<std::byte>> memory = file.Reserve(info_, {{"step", "7"}});
  ASSERT_THAT(memory, IsOk());
  ASSERT_EQ(memory->size(), 33U);
  for (size_t i = 0; i < memory->size(); ++i) (*memory)[i] = static_cast<std::byte>(i);
  ASSERT_THAT(file.Commit(), IsOk());
  EXPECT_EQ(FileCount(), 1U);

  const std::string bytes = Read(Path("out.safetensors"));
  const absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(bytes, static_cast<int64_t>(bytes.size()));
  ASSERT_THAT(header, IsOk());
  EXPECT_EQ(header->metadata.at("step"), "7");
  ASSERT_THAT(header->tensors, SizeIs(4));
  for (const SafetensorsTensor& tensor : header->tensors) {
    SCOPED_TRACE(tensor.spec.name);
    const auto pulled = std::find_if(info_.tensors.begin(), info_.tensors.end(),
                                     [&](const auto& t) { return t.spec == tensor.spec; });
    ASSERT_NE(pulled, info_.tensors.end());
    for (int64_t i = tensor.begin; i < tensor.end; ++i) {
      EXPECT_EQ(bytes[header->header_bytes + i],
                static_cast<char>(pulled->offset + i - tensor.begin));
    }
  }
}

TEST_F(PulledFileTest, AnUnfinishedFileLeavesTheOldOne) {
  std::ofstream(Path("out")) << "old";
  {
    PulledFile file(Path("out"));
    ASSERT_THAT(file.Reserve(info_, {}), IsOk());
    EXPECT_EQ(FileCount(), 2U);
  }
  EXPECT_EQ(FileCount(), 1U);
  EXPECT_EQ(Read(Path("out")), "old");
}

TEST_F(PulledFileTest, ReportsAFolderThatIsNotThere) {
  PulledFile file(Path("none/out"));
  EXPECT_THAT(file.Reserve(info_, {}),
              StatusIs(absl::StatusCode::kUnknown, HasSubstr("No such file")));
}

}  // namespace
}  // namespace ema::cli
