// SPDX-License-Identifier: Apache-2.0
#include "client/cli/local_checkpoints.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "client/cli/exit_code.h"
#include "server/format/checkpoint_name.h"
#include "server/format/label_file.h"
#include "tests/testutil/status_matchers.h"

namespace ema::cli {
namespace {

using ::testing::_;
using ::testing::HasSubstr;

const std::string kFixture = std::string(EMA_FIXTURES) + "/format-6";

// A folder of two copies of the same checkpoint.
class CheckpointFilesTest : public testing::Test {
 protected:
  CheckpointFilesTest() : folder_(testing::TempDir() + "/ema_cli_XXXXXX") {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
    testing::internal::CaptureStdout();
    for (const char* const name : {"/a", "/b"}) {
      EXPECT_THAT(CopyCheckpoint(kFixture, folder_ + name, /*json=*/false), IsOk());
    }
    copied_ = testing::internal::GetCapturedStdout();
  }
  ~CheckpointFilesTest() override { std::filesystem::remove_all(folder_); }

  struct Result {
    absl::Status status;
    std::string printed;
  };
  static Result Verify(const std::string& path, bool json) {
    testing::internal::CaptureStdout();
    const absl::Status status = VerifyCheckpoints(path, json);
    return {status, testing::internal::GetCapturedStdout()};
  }

  // Changes the last byte of the copy's raw weights.
  void Damage(const std::string& name) {
    std::fstream file(folder_ + name + "/tracks/raw/model-00003-of-00003.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const char last = static_cast<char>(file.get());
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(last ^ 1));
  }

  std::string folder_;
  std::string copied_;
};

TEST_F(CheckpointFilesTest, CopiesAreVerifiedAndSaidToBe) {
  EXPECT_THAT(copied_, HasSubstr("format-6 (step 30"));
  EXPECT_THAT(copied_, HasSubstr("verified"));
  const Result one = Verify(folder_ + "/a/", /*json=*/false);
  EXPECT_THAT(one.status, IsOk());
  EXPECT_THAT(one.printed, HasSubstr("ema"));
  EXPECT_THAT(one.printed, HasSubstr("ok"));
  const Result both = Verify(folder_, /*json=*/true);
  EXPECT_THAT(both.status, IsOk());
  const auto rows = nlohmann::json::parse(both.printed)["verified"];
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0]["checkpoint"], "a");
  EXPECT_EQ(rows[0]["track"], "ema");
  EXPECT_EQ(rows[0]["files"], 5);  // 3 and their index, 1 attached.
  EXPECT_EQ(rows[1]["track"], "raw");
  uintmax_t raw_bytes = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder_ + "/a/tracks/raw")) {
    raw_bytes += file.file_size();
  }
  EXPECT_EQ(rows[1]["bytes"], raw_bytes);
  EXPECT_EQ(rows[3]["checkpoint"], "b");
  EXPECT_EQ(rows[3]["ok"], true);
}

TEST_F(CheckpointFilesTest, ADamagedOneIsNamedAndTheOthersAreStillRead) {
  Damage("/a");
  const Result result = Verify(folder_, /*json=*/true);
  EXPECT_THAT(
      result.status,
      StatusIs(absl::StatusCode::kDataLoss,
               HasSubstr("checkpoint \"a\": track \"raw\": tensor \"flag\": its checksum")));
  EXPECT_NE(ExitCode(result.status), 0);
  const auto rows = nlohmann::json::parse(result.printed)["verified"];
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0]["ok"], true);
  EXPECT_EQ(rows[1]["ok"], false);
  EXPECT_THAT(std::string(rows[1]["problem"]), HasSubstr("tensor \"flag\""));
  EXPECT_EQ(rows[2]["ok"], true);
  EXPECT_THAT(Verify(folder_, /*json=*/false).printed, HasSubstr("its checksum is wrong"));
  // Nor is it copied.
  EXPECT_THAT(CopyCheckpoint(folder_ + "/a", folder_ + "/c", /*json=*/false),
              StatusIs(absl::StatusCode::kDataLoss, _));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/c"));
}

TEST_F(CheckpointFilesTest, ADataDirectoryIsThoseOfAllItsModels) {
  for (const char* const model : {"m", "n"}) {
    const std::string model_path = folder_ + "/data/models/" + model;
    std::filesystem::create_directories(model_path + "/checkpoints");
    EXPECT_THAT(CopyCheckpoint(kFixture, model_path + "/checkpoints/one", /*json=*/true), IsOk());
  }
  std::filesystem::create_directories(folder_ + "/data/models/empty");
  Damage("/data/models/n/checkpoints/one");
  const Result result = Verify(folder_ + "/data", /*json=*/true);
  EXPECT_THAT(result.status, StatusIs(absl::StatusCode::kDataLoss,
                                      HasSubstr("checkpoint \"n/one\": track \"raw\"")));
  const auto rows = nlohmann::json::parse(result.printed)["verified"];
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[1]["checkpoint"], "m/one");
  EXPECT_EQ(rows[1]["ok"], true);
  EXPECT_EQ(rows[3]["checkpoint"], "n/one");
  EXPECT_EQ(rows[3]["ok"], false);
}

TEST_F(CheckpointFilesTest, WhatLatestOrALabelNamesMustBeThere) {
  const std::string folder = folder_ + "/data/models/m/checkpoints";
  std::filesystem::create_directories(folder);
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(folder + "/" + name, std::ios::binary) << text;
  };
  const CheckpointId id{7, 3, 30};
  const CheckpointId gone{7, 4, 40};
  write("LATEST", EncodeLatest(CheckpointName(gone)));
  const auto expect_missing = [&](const CheckpointId& missing, const std::string& why) {
    const Result result = Verify(folder_ + "/data", /*json=*/true);
    EXPECT_THAT(result.status, StatusIs(absl::StatusCode::kDataLoss,
                                        HasSubstr("checkpoint \"m/" + CheckpointName(missing) +
                                                  "\": it is missing")));
    EXPECT_NE(ExitCode(result.status), 0);
    const auto rows = nlohmann::json::parse(result.printed)["verified"];
    ASSERT_FALSE(rows.empty());
    EXPECT_EQ(rows.back()["checkpoint"], "m/" + CheckpointName(missing));
    EXPECT_THAT(std::string(rows.back()["problem"]), HasSubstr(why));
  };
  expect_missing(gone, "LATEST names it");  // Of all that there was.
  std::filesystem::copy(kFixture, folder + "/" + CheckpointName(id),
                        std::filesystem::copy_options::recursive);
  // Its manifest is of a version of its own, but that it is there is enough here.
  write("LATEST", EncodeLatest(CheckpointName(id)));
  write("LABELS.json", EncodeLabels({{"best", {.name = "best", .id = {4, 7}, .step = 40}}}));
  const Result labelled = Verify(folder, /*json=*/true);
  EXPECT_THAT(labelled.printed, HasSubstr("it is missing: label"));
  // What the server has set aside it has told of.
  std::filesystem::create_directory(folder + "/.corrupt-" + CheckpointName(gone));
  write("LATEST", EncodeLatest(CheckpointName(gone)));
  write("LABELS.json", EncodeLabels({}));
  EXPECT_THAT(Verify(folder, /*json=*/true).printed, testing::Not(HasSubstr("LATEST")));
  write("LATEST", "step");
  write("LABELS.json", "{}");
  const Result unreadable = Verify(folder, /*json=*/true);
  EXPECT_THAT(unreadable.printed, HasSubstr("\"LATEST\""));
  EXPECT_THAT(unreadable.printed, HasSubstr("\"LABELS.json\""));
}

TEST_F(CheckpointFilesTest, AWholeThatIsBadIsARow) {
  std::filesystem::remove(folder_ + "/a/manifest.json");
  const Result result = Verify(folder_, /*json=*/true);
  EXPECT_THAT(result.status, StatusIs(absl::StatusCode::kDataLoss, HasSubstr("checkpoint \"a\"")));
  const auto rows = nlohmann::json::parse(result.printed)["verified"];
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0]["track"], "");
  EXPECT_THAT(std::string(rows[0]["problem"]), HasSubstr("manifest.json"));
}

TEST_F(CheckpointFilesTest, AFileTooManyIsSaidWhenAllElseIsVerified) {
  std::ofstream(folder_ + "/a/tracks/ema/generation.json") << "{}";
  const Result result = Verify(folder_ + "/a", /*json=*/true);
  EXPECT_THAT(result.status,
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("track \"ema\": \"generation.json\" does not belong to the")));
  EXPECT_NE(ExitCode(result.status), 0);
  const auto rows = nlohmann::json::parse(result.printed)["verified"];
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0]["ok"], true);
  EXPECT_EQ(rows[1]["ok"], true);
  EXPECT_EQ(rows[2]["ok"], false);
  EXPECT_THAT(CopyCheckpoint(folder_ + "/a", folder_ + "/c", /*json=*/false),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("generation.json")));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/c"));
}

TEST_F(CheckpointFilesTest, WhatIsNotThereIsNotFoundAndWhatIsThereStays) {
  const std::string empty = folder_ + "/empty";
  std::filesystem::create_directory(empty);
  EXPECT_THAT(Verify(empty, /*json=*/false).status, StatusIs(absl::StatusCode::kNotFound, _));
  EXPECT_THAT(Verify(folder_ + "/nothing", /*json=*/false).status,
              StatusIs(absl::StatusCode::kNotFound, _));
  EXPECT_THAT(CopyCheckpoint(kFixture, empty, /*json=*/false),
              StatusIs(absl::StatusCode::kAlreadyExists, _));
  EXPECT_TRUE(std::filesystem::is_empty(empty));
  for (const char* const name : {"/nothing", "/empty", ""}) {
    EXPECT_THAT(CopyCheckpoint(folder_ + name, folder_ + "/c", /*json=*/false),
                StatusIs(absl::StatusCode::kNotFound, HasSubstr("not a checkpoint's folder")))
        << name;
  }
}

// It would be a part of it, which checkpoints must not have.
TEST_F(CheckpointFilesTest, ACheckpointIsNotCopiedIntoItself) {
  for (const char* const name : {"/a/inside", "/b/../a/tracks/inside/", "/a/./inside"}) {
    EXPECT_THAT(CopyCheckpoint(folder_ + "/a/", folder_ + name, /*json=*/false),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("elsewhere")))
        << name;
  }
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder_ + "/a");
  EXPECT_THAT(CopyCheckpoint(".", "inside", /*json=*/false),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("elsewhere")));
  std::filesystem::current_path(before);
  EXPECT_THAT(Verify(folder_ + "/a", /*json=*/false).status, IsOk());
  EXPECT_THAT(CopyCheckpoint(folder_ + "/a", folder_ + "/a-copy", /*json=*/true), IsOk());
}

}  // namespace
}  // namespace ema::cli
