// SPDX-License-Identifier: Apache-2.0
//
// Everything that a real disk may show after the power has gone is among what FakeFileSystem shows.
#include "tests/testutil/fake_file_system.h"

#include <functional>
#include <set>
#include <string>

#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

constexpr uint32_t kSeeds = 400;
const std::string kData(1100, 'x');  // Two sectors and a part of one.

void Write(FakeFileSystem& files, const std::string& path, const std::string& text, bool sync) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto file, files.NewWritableFile(path));
  ASSERT_THAT(file->Append(std::as_bytes(std::span(text))), IsOk());
  if (sync) {
    ASSERT_THAT(file->Sync(), IsOk());
  }
  ASSERT_THAT(file->Close(), IsOk());
}

// Whether any power loss leaves a disk that `is_so`.
bool MayBe(const FakeFileSystem& files, const std::function<bool(FakeFileSystem&)>& is_so) {
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    const auto after = files.AfterCrash(PowerLoss::kAnything, seed);
    if (is_so(*after)) return true;
  }
  return false;
}

bool Has(FakeFileSystem& files, const std::string& path) { return *files.Exists(path); }

// What is left of a file; "-": not even its name.
std::string Left(FakeFileSystem& files, const std::string& path) {
  return Has(files, path) ? files.FileBytes(path) : "-";
}

TEST(FakeFileSystemTest, AnUnsyncedFileMayBeAnyPartOfItself) {
  FakeFileSystem files;
  Write(files, "/f", kData, /*sync=*/false);
  const auto may_be = [&](const std::function<bool(const std::string&)>& is_so) {
    return MayBe(files, [&](FakeFileSystem& after) { return is_so(Left(after, "/f")); });
  };
  EXPECT_TRUE(may_be([](const std::string& left) { return left == "-"; }));
  EXPECT_TRUE(may_be([](const std::string& left) { return left.empty(); }));
  EXPECT_TRUE(may_be([](const std::string& left) { return left == kData; }));
  // Of the right length, and zeros.
  EXPECT_TRUE(may_be([](const std::string& left) { return left == std::string(1100, '\0'); }));
  // Torn between sectors, and within one.
  EXPECT_TRUE(may_be([](const std::string& left) { return left == kData.substr(0, 512); }));
  EXPECT_TRUE(may_be([](const std::string& left) {
    return left.size() > 512 && left.size() < 1024 && left == kData.substr(0, left.size());
  }));
  // A later sector is there, an earlier one is not.
  EXPECT_TRUE(may_be([](const std::string& left) {
    return left.size() == 1100 && left[0] == '\0' && left[600] == 'x';
  }));
  EXPECT_TRUE(may_be([](const std::string& left) {
    return left.size() == 1100 && left[0] == 'x' && left[1099] == '\0';
  }));
}

TEST(FakeFileSystemTest, WhatIsSyncedStays) {
  FakeFileSystem files;
  Write(files, "/f", kData, /*sync=*/true);
  ASSERT_THAT(files.SyncDirectory("/"), IsOk());
  EXPECT_FALSE(MayBe(files, [](FakeFileSystem& after) { return Left(after, "/f") != kData; }));
}

TEST(FakeFileSystemTest, ASyncedFileMayLoseItsName) {
  FakeFileSystem files;
  Write(files, "/f", kData, /*sync=*/true);
  EXPECT_TRUE(MayBe(files, [](FakeFileSystem& after) { return !Has(after, "/f"); }));
}

TEST(FakeFileSystemTest, ARenameMayBeThereBeforeItsFilesBytes) {
  FakeFileSystem files;
  Write(files, "/old", kData, /*sync=*/true);
  ASSERT_THAT(files.SyncDirectory("/"), IsOk());
  Write(files, "/new", std::string(1100, 'y'), /*sync=*/false);
  ASSERT_THAT(files.Rename("/new", "/old"), IsOk());
  EXPECT_TRUE(MayBe(
      files, [](FakeFileSystem& after) { return Left(after, "/old") == std::string(1100, '\0'); }));
  EXPECT_TRUE(MayBe(files, [](FakeFileSystem& after) { return Left(after, "/old").empty(); }));
  // Never neither.
  EXPECT_FALSE(MayBe(files, [](FakeFileSystem& after) { return !Has(after, "/old"); }));
}

TEST(FakeFileSystemTest, ChangesOfNamesMayComeInAnyOrder) {
  FakeFileSystem files;
  ASSERT_THAT(files.CreateDirectory("/a"), IsOk());
  ASSERT_THAT(files.CreateDirectory("/b"), IsOk());
  Write(files, "/a/from", "1", /*sync=*/true);
  Write(files, "/b/from", "2", /*sync=*/true);
  files.SyncAll();
  ASSERT_THAT(files.Rename("/a/from", "/a/to"), IsOk());
  ASSERT_THAT(files.Rename("/b/from", "/b/to"), IsOk());
  Write(files, "/a/next", "3", /*sync=*/true);
  // Between directories, and in one.
  EXPECT_TRUE(MayBe(files, [](FakeFileSystem& after) {
    return Has(after, "/a/from") && Has(after, "/b/to") && Has(after, "/a/next");
  }));
  EXPECT_TRUE(MayBe(files, [](FakeFileSystem& after) {
    return Has(after, "/a/to") && Has(after, "/b/from") && !Has(after, "/a/next");
  }));
  EXPECT_FALSE(MayBe(
      files, [](FakeFileSystem& after) { return Has(after, "/a/from") && Has(after, "/a/to"); }));
}

TEST(FakeFileSystemTest, SomeOfARemovedTreeMayComeBack) {
  FakeFileSystem files;
  ASSERT_THAT(files.CreateDirectory("/tree"), IsOk());
  Write(files, "/tree/1", "1", /*sync=*/true);
  Write(files, "/tree/2", "2", /*sync=*/true);
  files.SyncAll();
  ASSERT_THAT(files.RemoveTree("/tree"), IsOk());
  EXPECT_TRUE(MayBe(files, [](FakeFileSystem& after) {
    return Has(after, "/tree/1") && !Has(after, "/tree/2");
  }));
}

TEST(FakeFileSystemTest, AnIgnoredSyncSyncsNothing) {
  FakeFileSystem files;
  files.set_ignored([](const std::string& operation, const std::string&) {
    return operation == "sync" || operation == "syncdir";
  });
  Write(files, "/f", kData, /*sync=*/true);
  ASSERT_THAT(files.SyncDirectory("/"), IsOk());
  EXPECT_FALSE(Has(*files.AfterCrash(PowerLoss::kNothing), "/f"));
}

TEST(FakeFileSystemTest, FingerprintsTellDisksApart) {
  FakeFileSystem files;
  std::set<std::string> seen = {files.Fingerprint()};
  Write(files, "/f", "1", /*sync=*/true);
  EXPECT_TRUE(seen.insert(files.Fingerprint()).second);
  files.FileBytes("/f") = "2";
  EXPECT_TRUE(seen.insert(files.Fingerprint()).second);
  ASSERT_THAT(files.Rename("/f", "/g"), IsOk());
  EXPECT_TRUE(seen.insert(files.Fingerprint()).second);
  ASSERT_THAT(files.RemoveFile("/g"), IsOk());
  EXPECT_FALSE(seen.insert(files.Fingerprint()).second);
}

}  // namespace
}  // namespace ema
