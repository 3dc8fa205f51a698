// SPDX-License-Identifier: Apache-2.0
//
// Averages that a group of real servers builds from its checkpoints, and the search for checkpoints
// that have gone bad.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "tests/group/trained_group.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using ::testing::SizeIs;

TrackConfig PowerTrack(const std::string& name, double sigma_rel) {
  return {.name = name,
          .schedule = *Schedule::Parse(absl::StrCat("sigma_rel=", sigma_rel)),
          .snapshot_interval = TrainingDuration{10, TimeUnit::kBatch}};
}

class GroupFilesTest : public testing::Test {
 protected:
  GroupFilesTest() : directory_(testing::TempDir() + "/ema_group_XXXXXX") {
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
  }
  ~GroupFilesTest() override { PosixFileSystem().RemoveTree(directory_).IgnoreError(); }

  static GroupServer& ServerOf(TrainedGroup& group, int partition) {
    return group.ServerAt(group.Describe("m").partitions(partition).address());
  }
  // Changes a byte of a checkpoint's average.
  void Corrupt(const std::string& checkpoint) const {
    const std::string folder = absl::StrCat(directory_, "/models/m/checkpoints/", checkpoint);
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
      if (entry.path().extension() != ".safetensors") continue;
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(-1, std::ios::end);
      const char last = static_cast<char>(file.get());
      file.seekp(-1, std::ios::end);
      file.put(static_cast<char>(~last));
      return;
    }
    FAIL() << "no file in " << folder;
  }
  // Returns how many checkpoints have been set aside.
  static int64_t Scrub(TrainedGroup& group) {
    int64_t count = 0;
    for (const auto& server : group.servers_) {
      count += server->checkpoints().Scrub(server->store()).bad_count;
    }
    return count;
  }

  std::string directory_;
};

TEST_F(GroupFilesTest, ASynthesizedAverageIsThatOfOneServer) {
  std::map<std::string, std::string> expected;
  for (const int server_count : {1, 3}) {
    SCOPED_TRACE(server_count);
    const std::string directory = absl::StrCat(directory_, "/", server_count);
    std::filesystem::create_directory(directory);
    TrainedGroup group(server_count, /*tensor_count=*/6, directory);
    ASSERT_THAT(group.client().UpdateModel(
                    "m", {.put = {PowerTrack("p05", 0.05), PowerTrack("p10", 0.1)}}, kPatience),
                IsOk());
    const auto run = group.Open();
    ASSERT_NE(run, nullptr);
    for (int64_t step = 1; step <= 40; ++step) {
      ASSERT_THAT(Push(*run, step), IsOk());
      ServerOf(group, 0).checkpoints().AwaitIdle();
    }
    EMA_ASSERT_OK_AND_ASSIGN(const Synthesis made,
                             group.client().Synthesize("m", {.name = "wide", .sigma_rel = 0.07}));
    EXPECT_EQ(made.version.step, 40);
    EXPECT_GT(made.sources.size(), 2);
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled wide, group.Pull("wide"));
    EXPECT_EQ(wide.info.version.id(), made.version.id());
    ASSERT_THAT(wide.tensors, SizeIs(6));
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled last,
                             group.Pull("wide", {.selection = {.tensors = {"t5"}}}));
    EXPECT_EQ(last.tensors.at("t5"), wide.tensors.at("t5"));
    if (expected.empty()) expected = wide.tensors;
    EXPECT_EQ(wide.tensors, expected);

    // Another one of the same name replaces it on all servers.
    EMA_ASSERT_OK_AND_ASSIGN(
        const Synthesis other,
        group.client().Synthesize("m", {.name = "wide", .half_life = "5ba", .step = 30}));
    EXPECT_EQ(other.version.step, 30);
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled replaced, group.Pull("wide"));
    EXPECT_EQ(replaced.info.version.step, 30);
    for (const auto& [name, bytes] : replaced.tensors) EXPECT_NE(bytes, wide.tensors.at(name));
    EXPECT_THAT(group.client().Synthesize("m", {.name = "ema", .sigma_rel = 0.07}),
                ReasonIs(ErrorReason::kModelDiffers));
  }
}

TEST_F(GroupFilesTest, TheHomeFindsBadCheckpoints) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto first, group.client().CreateCheckpoint("m", kPatience));
  ASSERT_THAT(Push(*run, 2), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto second, group.client().CreateCheckpoint("m", kPatience));
  EXPECT_EQ(Scrub(group), 0);

  // The registry does not have an older one any more.
  Corrupt(first.checkpoint);
  EXPECT_EQ(Scrub(group), 1);
  const auto is_recorded = [&](const VersionId& id) {
    return ServerOf(group, 0).member().model("m")->Find(id) != nullptr;
  };
  TrainedGroup::Await([&] { return !is_recorded(first.version.id()); });
  EXPECT_TRUE(is_recorded(second.version.id()));

  // The newest one is written again.
  Corrupt(second.checkpoint);
  EXPECT_EQ(Scrub(group), 1);
  ServerOf(group, 0).checkpoints().AwaitIdle();
  EXPECT_EQ(Scrub(group), 0);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled expected, group.Pull("ema"));
  GroupServer& crashed = ServerOf(group, 1);
  crashed.Stop();
  group.Restart(crashed);
  const int64_t incarnation = expected.info.version.incarnation;
  TrainedGroup::Await([&] { return group.Describe("m").incarnation() > incarnation; });
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group.Pull("ema"));
  EXPECT_EQ(found.info.version.step, 2);
  EXPECT_EQ(found.tensors, expected.tensors);
}

}  // namespace
}  // namespace ema::group
