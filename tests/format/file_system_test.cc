// SPDX-License-Identifier: Apache-2.0
#include "server/format/file_system.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <span>
#include <string>

#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

class FileSystemTest : public testing::Test {
 protected:
  FileSystemTest() {
    std::string pattern = testing::TempDir() + "/ema_fs_XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~FileSystemTest() override { files_.RemoveTree(directory_).IgnoreError(); }

  std::string Path(const std::string& name) const { return JoinPath(directory_, name); }

  void Write(const std::string& name, const std::string& text) {
    EMA_ASSERT_OK_AND_ASSIGN(const auto file, files_.NewWritableFile(Path(name)));
    ASSERT_THAT(file->Append(Bytes(text)), IsOk());
    ASSERT_THAT(file->Sync(), IsOk());
    ASSERT_THAT(file->Close(), IsOk());
  }

  FileSystem& files_ = PosixFileSystem();
  std::string directory_;
};

TEST_F(FileSystemTest, ReadsBackWhatWasWritten) {
  Write("a", "hello world");
  EXPECT_THAT(files_.ReadSmallFile(Path("a"), 100), IsOkAndHolds("hello world"));
  EMA_ASSERT_OK_AND_ASSIGN(const auto file, files_.OpenFile(Path("a")));
  EXPECT_EQ(file->size_bytes(), 11);
  std::string part(5, ' ');
  ASSERT_THAT(file->Read(6, std::as_writable_bytes(std::span(part))), IsOk());
  EXPECT_EQ(part, "world");
  EXPECT_THAT(file->Read(7, std::as_writable_bytes(std::span(part))),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("\"a\" ends at byte 11")));
}

TEST_F(FileSystemTest, AFileThatIsTruncatedWhileItIsOpenIsAnErrorAndNoSignal) {
  Write("a", std::string(100'000, 'x'));
  EMA_ASSERT_OK_AND_ASSIGN(const auto file, files_.OpenFile(Path("a")));
  ASSERT_EQ(truncate(Path("a").c_str(), 10), 0);
  std::string all(100'000, ' ');
  EXPECT_THAT(file->Read(0, std::as_writable_bytes(std::span(all))),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("ends at byte 10")));
}

TEST_F(FileSystemTest, ANewFileMustNotBeThere) {
  Write("a", "1");
  EXPECT_THAT(files_.NewWritableFile(Path("a")),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("\"a\"")));
  ASSERT_EQ(symlink("nowhere", Path("link").c_str()), 0);
  EXPECT_THAT(files_.NewWritableFile(Path("link")),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("\"link\"")));
}

TEST_F(FileSystemTest, OnlyRegularFilesAreOpened) {
  Write("a", "1");
  ASSERT_EQ(mkdir(Path("directory").c_str(), 0700), 0);
  ASSERT_EQ(symlink("a", Path("link").c_str()), 0);
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  for (const char* name : {"directory", "link", "pipe"}) {
    EXPECT_THAT(files_.OpenFile(Path(name)),
                StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("not a regular file")))
        << name;
  }
  EXPECT_THAT(files_.OpenFile("/dev/null"),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("not a regular file")));
}

TEST_F(FileSystemTest, MessagesHoldNoFolder) {
  const absl::Status status = files_.OpenFile(Path("some/missing")).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kNotFound,
                               AllOf(HasSubstr("\"missing\""), Not(HasSubstr("some")),
                                     Not(HasSubstr("tmp")))));
  EXPECT_THAT(files_.SyncDirectory(Path("gone/")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"gone\"")));
}

TEST_F(FileSystemTest, AFullDiskIsNamed) {
  // The file gets the lowest free descriptor; /dev/full, put in its place, refuses every write as a
  // full disk does.
  const int next = dup(STDIN_FILENO);
  close(next);
  EMA_ASSERT_OK_AND_ASSIGN(const auto file, files_.NewWritableFile(Path("a")));
  const int full = open("/dev/full", O_WRONLY);
  ASSERT_GT(full, next);
  ASSERT_EQ(dup2(full, next), next);
  close(full);
  const absl::Status status = file->Append(Bytes("x"));
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("\"a\"")));
  EXPECT_THAT(status, ReasonIs(ErrorReason::kDiskFull));
}

TEST_F(FileSystemTest, AFileThatIsTooLargeIsAnError) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1000;
  EMA_ASSERT_OK_AND_ASSIGN(const auto file, files_.NewWritableFile(Path("a")));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  // 1000 bytes are written by a short write, the rest fails.
  const absl::Status status = file->Append(Bytes(std::string(2000, 'x')));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("File too large")));
}

TEST_F(FileSystemTest, RenamesReplaceFilesAndSpareFullDirectories) {
  Write("a", "new");
  Write("b", "old");
  ASSERT_THAT(files_.Rename(Path("a"), Path("b")), IsOk());
  EXPECT_THAT(files_.ReadSmallFile(Path("b"), 10), IsOkAndHolds("new"));
  EXPECT_THAT(files_.Rename(Path("a"), Path("b")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"b\": No such file")));
  ASSERT_THAT(files_.CreateDirectory(Path("x")), IsOk());
  ASSERT_THAT(files_.CreateDirectory(Path("y")), IsOk());
  Write("y/file", "1");
  EXPECT_THAT(files_.Rename(Path("x"), Path("y")),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("\"y\"")));
  EXPECT_THAT(files_.CreateDirectory(Path("x")),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("\"x\"")));
}

TEST_F(FileSystemTest, ListsNamesInOrder) {
  Write("b", "");
  ASSERT_THAT(files_.CreateDirectory(Path("a")), IsOk());
  ASSERT_EQ(symlink("a", Path("c").c_str()), 0);
  EMA_ASSERT_OK_AND_ASSIGN(const auto entries, files_.ListDirectory(directory_));
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].name, "a");
  EXPECT_TRUE(entries[0].is_directory);
  EXPECT_EQ(entries[1].name, "b");
  EXPECT_FALSE(entries[1].is_directory);
  EXPECT_FALSE(entries[2].is_directory);
}

TEST_F(FileSystemTest, RemovingATreeFollowsNoLink) {
  ASSERT_THAT(files_.CreateDirectory(Path("kept")), IsOk());
  Write("kept/file", "1");
  ASSERT_THAT(files_.CreateDirectory(Path("tree")), IsOk());
  ASSERT_THAT(files_.CreateDirectory(Path("tree/inner")), IsOk());
  Write("tree/inner/file", "1");
  ASSERT_EQ(symlink(Path("kept").c_str(), Path("tree/link").c_str()), 0);
  ASSERT_THAT(files_.RemoveTree(Path("tree")), IsOk());
  EXPECT_THAT(files_.Exists(Path("tree")), IsOkAndHolds(false));
  EXPECT_THAT(files_.Exists(Path("kept/file")), IsOkAndHolds(true));
  EXPECT_THAT(files_.RemoveTree(Path("tree")), IsOk());
}

TEST_F(FileSystemTest, TwoDirectoriesExchangeTheirNames) {
  ASSERT_THAT(files_.CreateDirectory(Path("a")), IsOk());
  ASSERT_THAT(files_.CreateDirectory(Path("b")), IsOk());
  Write("a/file", "1");
  const absl::Status exchanged = files_.Exchange(Path("a"), Path("b"));
  if (absl::IsUnimplemented(exchanged)) GTEST_SKIP() << exchanged;
  ASSERT_THAT(exchanged, IsOk());
  EXPECT_THAT(files_.Exists(Path("a/file")), IsOkAndHolds(false));
  EXPECT_THAT(files_.Exists(Path("b/file")), IsOkAndHolds(true));
  EXPECT_THAT(files_.Exchange(Path("a"), Path("c")),
              StatusIs(absl::StatusCode::kNotFound, testing::_));
}

TEST_F(FileSystemTest, ALargeFileIsNotReadAsASmallOne) {
  Write("a", std::string(101, 'x'));
  EXPECT_THAT(files_.ReadSmallFile(Path("a"), 100),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("101")));
}

TEST_F(FileSystemTest, ALockHasOneHolderAndEndsWithIt) {
  EMA_ASSERT_OK_AND_ASSIGN(auto lock, files_.Lock(Path("LOCK")));
  EXPECT_THAT(files_.Lock(Path("LOCK")),
              StatusIs(absl::StatusCode::kAborted,
                       HasSubstr("is held by process " + std::to_string(getpid()) + " on host ")));
  lock.reset();
  EXPECT_THAT(files_.Lock(Path("LOCK")), IsOk());
}

TEST_F(FileSystemTest, ALockKnowsWhetherItsPathStillNamesItsFile) {
  const std::string path = Path("held/LOCK");
  for (const char* const name : {"held", "other"}) {
    ASSERT_THAT(files_.CreateDirectory(Path(name)), IsOk());
  }
  EMA_ASSERT_OK_AND_ASSIGN(const auto lock, files_.Lock(path));
  EXPECT_THAT(lock->IsInPlace(), IsOkAndHolds(true));
  ASSERT_THAT(files_.Rename(Path("held"), Path("away")), IsOk());
  EXPECT_THAT(lock->IsInPlace(), IsOkAndHolds(false));
  ASSERT_THAT(files_.Rename(Path("other"), Path("held")), IsOk());
  EXPECT_THAT(lock->IsInPlace(), IsOkAndHolds(false));
  EXPECT_THAT(files_.Lock(path), IsOk());  // Somebody else's.
  EXPECT_THAT(lock->IsInPlace(), IsOkAndHolds(false));
  ASSERT_THAT(files_.RemoveTree(Path("held")), IsOk());
  ASSERT_THAT(files_.Rename(Path("away"), Path("held")), IsOk());
  EXPECT_THAT(lock->IsInPlace(), IsOkAndHolds(true));
  ASSERT_THAT(files_.RemoveFile(path), IsOk());
  EXPECT_THAT(lock->IsInPlace(), IsOkAndHolds(false));
}

TEST_F(FileSystemTest, KnowsTheFreeSpace) {
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t bytes, files_.FreeBytes(directory_));
  EXPECT_GT(bytes, 0);
}

TEST(JoinPathTest, AddsOneSlash) {
  EXPECT_EQ(JoinPath("a", "b"), "a/b");
  EXPECT_EQ(JoinPath("a/", "b"), "a/b");
  EXPECT_EQ(JoinPath("", "b"), "b");
}

TEST(PathTest, IsTakenApart) {
  struct Case {
    const char* path;
    const char* parent;
    const char* base;
  };
  for (const Case& c : {Case{"a/b", "a", "b"},
                        {"a/b/", "a", "b"},
                        {"a//b//", "a", "b"},
                        {"/b", "/", "b"},
                        {"//b", "/", "b"},
                        {"/a/b", "/a", "b"},
                        {"b", ".", "b"},
                        {"b/", ".", "b"},
                        {"/", "/", ""}}) {
    EXPECT_EQ(ParentPath(c.path), c.parent) << c.path;
    EXPECT_EQ(BaseName(c.path), c.base) << c.path;
  }
}

}  // namespace
}  // namespace ema
