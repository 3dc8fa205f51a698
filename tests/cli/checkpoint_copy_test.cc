// SPDX-License-Identifier: Apache-2.0
#include "client/cli/checkpoint_copy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "server/format/verify.h"
#include "tests/testutil/fake_file_system.h"
#include "tests/testutil/status_matchers.h"

namespace ema::cli {
namespace {

using ::testing::_;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A checkpoint at "/c", of several files a track, synced.
class CheckpointCopyTest : public testing::Test {
 protected:
  CheckpointCopyTest() {
    const std::string fixture = std::string(EMA_FIXTURES) + "/format-6";
    EXPECT_THAT(files_.CreateDirectory("/c"), IsOk());
    for (const auto& entry : std::filesystem::recursive_directory_iterator(fixture)) {
      const std::string path = "/c" + entry.path().string().substr(fixture.size());
      if (entry.is_directory()) {
        EXPECT_THAT(files_.CreateDirectory(path), IsOk());
        continue;
      }
      EXPECT_THAT(files_.NewWritableFile(path), IsOk());
      std::ifstream file(entry.path(), std::ios::binary);
      files_.FileBytes(path).assign(std::istreambuf_iterator<char>(file), {});
    }
    files_.SyncAll();
  }

  // All files below `path`.
  std::vector<std::string> FilesIn(const std::string& path) {
    std::vector<std::string> found;
    for (const std::string& name : files_.AllPaths()) {
      if (absl::StartsWith(name, path + "/") && files_.OpenFile(name).ok()) found.push_back(name);
    }
    return found;
  }

  FakeFileSystem files_;
};

TEST_F(CheckpointCopyTest, ACopyIsTheSameOrNotThere) {
  ASSERT_THAT(files_.NewWritableFile("/c/KEEP"), IsOk());
  ASSERT_THAT(files_.CreateDirectory("/to"), IsOk());
  int64_t fail = 0;
  for (bool is_done = false; !is_done; ++fail) {
    int64_t count = 0;
    files_.set_hook([&](const std::string&, const std::string&) {
      return count++ == fail ? absl::UnavailableError("I/O error") : absl::OkStatus();
    });
    const auto copied = CopyVerified(files_, "/c", "/to/copy/");
    is_done = count <= fail;
    files_.set_hook(nullptr);
    EXPECT_EQ(copied.ok(), is_done) << fail;
    // The last operation is the sync after the rename: then it is there, and whole.
    const bool is_there = *files_.Exists("/to/copy");
    if (is_there) {
      EXPECT_THAT(VerifyCheckpoint(files_, "/to/copy"), IsOk()) << fail;
    }
    EXPECT_THAT(*files_.ListDirectory("/to"), SizeIs(is_there ? 1 : 0)) << fail;
    if (is_there && !is_done) {
      ASSERT_THAT(files_.RemoveTree("/to/copy"), IsOk());
    }
  }
  const std::vector<std::string> from = FilesIn("/c");
  const std::vector<std::string> to = FilesIn("/to/copy");
  ASSERT_EQ(from.size(), to.size());
  for (size_t i = 0; i < from.size(); ++i) {
    EXPECT_EQ(to[i], "/to/copy" + from[i].substr(2));
    EXPECT_EQ(files_.FileBytes(from[i]), files_.FileBytes(to[i])) << from[i];
  }
  EXPECT_THAT(CopyVerified(files_, "/c", "/to/copy"),
              StatusIs(absl::StatusCode::kAlreadyExists, _));
  // What was promised is there after the power has gone.
  EXPECT_THAT(VerifyCheckpoint(*files_.AfterCrash(PowerLoss::kNamesOnly), "/to/copy"), IsOk());
}

// In containers every copy may have the same process id.
TEST_F(CheckpointCopyTest, AnotherCopyIsNeitherInTheWayNorTouched) {
  const std::string other = absl::StrCat("/to/.tmp-copy-", getpid());
  ASSERT_THAT(files_.CreateDirectory("/to"), IsOk());
  ASSERT_THAT(files_.CreateDirectory(other), IsOk());
  ASSERT_THAT(files_.NewWritableFile(other + "/manifest.json"), IsOk());
  EXPECT_THAT(CopyVerified(files_, "/c", "/to/copy"), IsOk());
  EXPECT_TRUE(*files_.Exists(other + "/manifest.json"));
}

TEST_F(CheckpointCopyTest, AFileTooManyIsNotCopied) {
  for (const char* path : {"/c/x", "/c/tracks/x", "/c/tracks/raw/x", "/c/tracks/raw/KEEP"}) {
    ASSERT_THAT(files_.NewWritableFile(path), IsOk());
    EXPECT_THAT(CopyVerified(files_, "/c", "/copy"),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("does not belong to the checkpoint")))
        << path;
    EXPECT_FALSE(*files_.Exists("/copy"));
    ASSERT_THAT(files_.RemoveFile(path), IsOk());
  }
}

TEST_F(CheckpointCopyTest, ADamagedCheckpointIsNotCopied) {
  ASSERT_THAT(files_.CreateDirectory("/to"), IsOk());
  for (const std::string& path : FilesIn("/c")) {
    std::string& bytes = files_.FileBytes(path);
    if (bytes.empty()) continue;
    bytes.back() = static_cast<char>(bytes.back() ^ 4);
    EXPECT_THAT(
        CopyVerified(files_, "/c", "/to/copy"),
        AllOf(StatusIs(absl::StatusCode::kDataLoss, _), ReasonIs(ErrorReason::kCheckpointCorrupt)))
        << path;
    EXPECT_THAT(*files_.ListDirectory("/to"), IsEmpty()) << path;
    files_.FileBytes(path).back() = static_cast<char>(files_.FileBytes(path).back() ^ 4);
  }
}

}  // namespace
}  // namespace ema::cli
