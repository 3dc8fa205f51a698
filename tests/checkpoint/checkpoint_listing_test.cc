// SPDX-License-Identifier: Apache-2.0
//
// Which checkpoints a server has: what it lists, sets aside, removes and passes over.
#include <atomic>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "tests/checkpoint/test_manager.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using State = CheckpointInfo::State;

absl::Status DiskError() { return absl::UnavailableError("Input/output error"); }

std::string NameOf(const Version& record) { return CheckpointName(IdOf(record)); }

class CheckpointListingTest : public testing::Test {
 protected:
  FakeFileSystem files_;
};

TEST_F(CheckpointListingTest, ManifestsAreReadOnce) {
  {
    TestServer server(files_);
    server.PushTo(1);
    EXPECT_THAT(server.Save(), IsOk());
    server.PushTo(2);
    EXPECT_THAT(server.Save(), IsOk());
  }
  TestServer server(files_);
  int64_t reads = 0;
  files_.set_hook([&](const std::string& operation, const std::string&) {
    reads += operation == "open";
    return absl::OkStatus();
  });
  EXPECT_THAT(server.Complete(), ElementsAre(2, 1));
  EXPECT_GE(reads, 1);
  reads = 0;
  EXPECT_THAT(server.Complete(), ElementsAre(2, 1));
  EXPECT_EQ(reads, 0);
  files_.set_hook(nullptr);
}

TEST_F(CheckpointListingTest, WhatIsCorruptIsListedWithItsProblem) {
  std::string name;
  {
    TestServer server(files_);
    server.PushTo(1);
    EXPECT_THAT(server.Save(), IsOk());
    server.PushTo(2);
    name = server.Save()->name;
  }
  files_.FileBytes(absl::StrCat(kTestFolder, "/", name, "/manifest.json"))[30] ^= 1;
  {
    TestServer server(files_);
    EXPECT_EQ(server.version(), 1);
    ASSERT_THAT(server.errors(), SizeIs(1));
    EXPECT_THAT(server.errors()[0], AllOf(HasSubstr(name), HasSubstr("set aside")));
    EMA_ASSERT_OK_AND_ASSIGN(const auto info,
                             server.manager().Get(server.model(), ".corrupt-" + name));
    EXPECT_EQ(info.state, State::kCorrupt);
    EXPECT_EQ(info.id.version, 2);
    EXPECT_THAT(info.problem, HasSubstr("manifest.json"));
    EXPECT_EQ(server.manager().CountAll().at("m").corrupt, 1);
  }
  TestServer server(files_);
  EMA_ASSERT_OK_AND_ASSIGN(const auto info,
                           server.manager().Get(server.model(), ".corrupt-" + name));
  EXPECT_THAT(info.problem, HasSubstr("by an earlier server"));
  EXPECT_THAT(server.manager().Delete(server.model(), info.name), IsOk());
  EXPECT_EQ(server.manager().CountAll().at("m").corrupt, 0);
  EXPECT_THAT(server.manager().Get(server.model(), info.name),
              ReasonIs(ErrorReason::kCheckpointNotFound));
  EXPECT_FALSE(*files_.Exists(absl::StrCat(kTestFolder, "/", info.name)));
}

TEST_F(CheckpointListingTest, WhatAListingFindsCorruptIsSetAsideAndSavedAnew) {
  {
    TestServer server(files_);
    server.PushTo(2);
    EXPECT_THAT(server.Save(), IsOk());
  }
  {
    TestServer server(files_);
    const std::string name = NameOf(*server.model().history().latest());
    files_.FileBytes(absl::StrCat(kTestFolder, "/", name, "/manifest.json"))[30] ^= 1;
    EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server.manager().List(server.model()));
    ASSERT_THAT(listing.checkpoints,
                Contains(testing::Field(&CheckpointInfo::state, State::kCorrupt)));
    ASSERT_THAT(server.errors(), SizeIs(1));
    EXPECT_THAT(server.errors()[0],
                AllOf(HasSubstr("checkpoint set aside"), HasSubstr(name), HasSubstr("manifest")));
    server.manager().AwaitIdle();
    EXPECT_THAT(server.Complete(), ElementsAre(2));
  }
  EXPECT_EQ(TestServer(files_).version(), 2);
}

TEST_F(CheckpointListingTest, WhatIsFoundCorruptDuringASaveIsSetAsideByTheNextListing) {
  std::string name;
  {
    TestServer server(files_);
    server.PushTo(1);
    name = server.Save()->name;
    server.PushTo(2);
    EXPECT_THAT(server.Save(), IsOk());
  }
  TestServer server(files_);
  server.PushTo(3);
  files_.FileBytes(absl::StrCat(kTestFolder, "/", name, "/manifest.json"))[30] ^= 1;
  absl::Notification is_saving;
  absl::Notification may_go_on;
  std::atomic<bool> has_begun = false;
  files_.set_hook([&](const std::string& operation, const std::string&) {
    if (operation == "append" && !has_begun.exchange(true)) {
      is_saving.Notify();
      may_go_on.WaitForNotification();
    }
    return absl::OkStatus();
  });
  std::thread saver([&] { EXPECT_THAT(server.Save(), IsOk()); });
  is_saving.WaitForNotification();
  // Or the listing would wait for ever.
  EXPECT_THAT(server.manager().List(server.model()), IsOk());
  EXPECT_THAT(server.errors(), IsEmpty());
  may_go_on.Notify();
  saver.join();
  files_.set_hook(nullptr);
  EXPECT_THAT(server.Complete(), ElementsAre(3, 2));
  ASSERT_THAT(server.errors(), SizeIs(1));
  EXPECT_THAT(server.errors()[0], AllOf(HasSubstr("checkpoint set aside"), HasSubstr(name)));
}

TEST_F(CheckpointListingTest, AManifestThatCannotBeReadHindersOnlyItsOwnCheckpoint) {
  std::string bad;
  {
    TestServer server(files_);
    server.PushTo(1);
    bad = server.Save()->name;
    server.PushTo(2);
    EXPECT_THAT(server.Save(), IsOk());
  }
  TestServer server(files_);
  std::vector<std::string> opened;
  files_.set_hook([&](const std::string& operation, const std::string& path) {
    if (operation == "open") opened.push_back(path);
    return operation == "open" && absl::StrContains(path, bad) ? DiskError() : absl::OkStatus();
  });
  // Asks for no others.
  EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved saved,
                           server.manager().Save(server.model(), {.async = true}));
  EXPECT_EQ(saved.state, State::kComplete);
  EXPECT_THAT(opened, ElementsAre(HasSubstr(saved.name)));
  EXPECT_THAT(server.Complete(), ElementsAre(2, 1));
  EMA_ASSERT_OK_AND_ASSIGN(CheckpointInfo info, server.manager().Get(server.model(), bad));
  EXPECT_EQ(info.state, State::kComplete);
  EXPECT_THAT(info.problem, HasSubstr("Input/output error"));
  EXPECT_EQ(info.total_bytes, 0);
  // It was only for a moment.
  files_.set_hook(nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(info, server.manager().Get(server.model(), bad));
  EXPECT_EQ(info.problem, "");
  EXPECT_GT(info.total_bytes, 0);
}

TEST_F(CheckpointListingTest, WhatACrashLeftNewerThanLatestIsListedAndCanBeDeleted) {
  {
    TestServer server(files_);
    server.PushTo(1);
    EXPECT_THAT(server.Save(), IsOk());
    server.PushTo(2);
    files_.set_hook([](const std::string& operation, const std::string& path) {
      return operation == "rename" && absl::StrContains(path, "LATEST") ? DiskError()
                                                                        : absl::OkStatus();
    });
    EXPECT_FALSE(server.Save().ok());
    files_.set_hook(nullptr);
  }
  for (const bool is_first : {true, false}) {
    TestServer server(files_);
    EXPECT_EQ(server.version(), 1);
    EXPECT_THAT(server.errors(), SizeIs(is_first ? 1 : 0));
    EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server.manager().List(server.model()));
    ASSERT_THAT(listing.checkpoints, SizeIs(2));
    const CheckpointInfo& info = listing.checkpoints[0];
    EXPECT_THAT(info.name, testing::StartsWith(".abandoned-step-"));
    EXPECT_EQ(info.state, State::kCorrupt);
    EXPECT_EQ(info.id.version, 2);
    EXPECT_THAT(info.problem, HasSubstr("newer than LATEST"));
    EXPECT_EQ(server.manager().CountAll().at("m").abandoned, 1);
    if (is_first) {
      EXPECT_THAT(server.errors()[0], HasSubstr(info.name));
      continue;
    }
    EXPECT_THAT(server.manager().Delete(server.model(), info.name), IsOk());
    EXPECT_THAT(server.manager().List(server.model())->checkpoints, SizeIs(1));
    for (const std::string& path : files_.AllPaths()) {
      EXPECT_FALSE(absl::StrContains(path, "/.")) << path;
    }
  }
}

TEST_F(CheckpointListingTest, OfWhatCrashesLeaveASaveKeepsTheNewestAndWhatAPersonKeeps) {
  CheckpointManager::Options options;
  options.store.keep_step_multiple = 100;
  const auto is_abandoned = [](const std::string& path) {
    const std::string_view name = std::string_view(path).substr(path.rfind('/') + 1);
    return name.starts_with(".abandoned-");
  };
  const auto abandoned = [&] {
    std::vector<std::string> paths = files_.AllPaths();
    std::erase_if(paths, [&](const std::string& path) { return !is_abandoned(path); });
    return paths;
  };
  for (int crash = 0; crash < 4; ++crash) {
    TestServer server(files_, options);
    if (crash == 0) {
      server.PushTo(1);
      EXPECT_THAT(server.Save(), IsOk());
    }
    EXPECT_EQ(server.version(), 1);
    server.PushTo(2);
    files_.set_hook([](const std::string& operation, const std::string& path) {
      return operation == "rename" && absl::StrContains(path, "LATEST") ? DiskError()
                                                                        : absl::OkStatus();
    });
    EXPECT_FALSE(server.Save().ok());
    files_.set_hook(nullptr);
  }
  TestServer server(files_, options);
  const std::vector<std::string> all = abandoned();
  ASSERT_THAT(all, SizeIs(4));
  ASSERT_THAT(files_.NewWritableFile(all[0] + "/KEEP"), IsOk());
  server.PushTo(2);
  EXPECT_THAT(server.Save(), IsOk());
  EXPECT_THAT(abandoned(), ElementsAre(all[0], all[3]));
  EXPECT_EQ(server.manager().CountAll().at("m").abandoned, 2);
  EXPECT_THAT(server.manager().List(server.model())->checkpoints, SizeIs(4));
}

TEST_F(CheckpointListingTest, TheLogNamesACheckpointThatHasAnotherName) {
  const std::string folder = absl::StrCat(kTestFolder, "/");
  std::string name;
  {
    TestServer server(files_);
    server.PushTo(1);
    name = server.Save()->name;
  }
  ASSERT_THAT(files_.Rename(folder + name, folder + "backup"), IsOk());
  for (const char* const other : {"notes", ".old"}) {
    ASSERT_THAT(files_.CreateDirectory(folder + other), IsOk());
  }
  ASSERT_THAT(files_.NewWritableFile(folder + ".old/manifest.json"), IsOk());
  ASSERT_THAT(files_.RemoveFile(folder + "LATEST"), IsOk());
  {
    TestServer server(files_);
    EXPECT_EQ(server.version(), 0);
    EXPECT_THAT(server.others(),
                Contains(AllOf(HasSubstr("folder ignored"), HasSubstr("folder=backup"),
                               HasSubstr("expected=" + name)))
                    .Times(1));
    EXPECT_THAT(server.others(), Contains(HasSubstr("folder ignored")).Times(1));
  }
  ASSERT_THAT(files_.Rename(folder + "backup", folder + name), IsOk());
  EXPECT_EQ(TestServer(files_).version(), 1);
}

TEST_F(CheckpointListingTest, OnlyWhatIsNotNeededIsDeleted) {
  TestServer server(files_);
  std::vector<std::string> names;
  for (int64_t version = 1; version <= 3; ++version) {
    server.PushTo(version);
    names.push_back(server.Save()->name);
  }
  ASSERT_THAT(server.manager().SetLabel(server.model(), "good", {2, 0}), IsOk());
  const auto remove = [&](const std::string& name) {
    return server.manager().Delete(server.model(), name);
  };
  EXPECT_THAT(remove(names[2]),
              AllOf(ReasonIs(ErrorReason::kCheckpointInUse),
                    StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("the newest"))));
  EXPECT_THAT(remove(names[1]),
              AllOf(ReasonIs(ErrorReason::kCheckpointInUse),
                    StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("label \"good\""))));
  EXPECT_THAT(remove(names[0]), IsOk());
  EXPECT_THAT(remove(names[0]), IsOk());
  EXPECT_THAT(remove("../../m"), IsOk());
  EXPECT_THAT(server.Complete(), ElementsAre(3, 2));
  EXPECT_FALSE(*files_.Exists(absl::StrCat(kTestFolder, "/", names[0])));
  EXPECT_TRUE(*files_.Exists("/data/models/m"));
  // Durable: the power may go.
  const auto after = files_.AfterCrash(PowerLoss::kNothing);
  TestServer next(*after);
  EXPECT_THAT(next.Complete(), ElementsAre(3, 2));
}

TEST_F(CheckpointListingTest, ADeletedModelLeavesNoLabelsAndFailures) {
  TestServer server(files_);
  server.PushTo(1);
  ASSERT_THAT(server.Save(0, "best"), IsOk());
  ASSERT_TRUE(server.models().Delete("m"));
  ASSERT_THAT(server.manager().SetAsideAll("m"), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto created, server.models().Create(TwoTracks()));
  EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server.manager().List(*created.model));
  EXPECT_THAT(listing.checkpoints, IsEmpty());
  EXPECT_THAT(listing.labels, IsEmpty());
}

TEST_F(CheckpointListingTest, AFolderThatMayNotBeLookedIntoHindersNoStart) {
  {
    TestServer server(files_);
    server.PushTo(1);
    EXPECT_THAT(server.Save(), IsOk());
  }
  ASSERT_THAT(files_.CreateDirectory(absl::StrCat(kTestFolder, "/lost+found")), IsOk());
  files_.set_hook([](const std::string& operation, const std::string& path) {
    return operation == "exists" && absl::StrContains(path, "lost+found")
               ? absl::PermissionDeniedError("Permission denied")
               : absl::OkStatus();
  });
  EXPECT_EQ(TestServer(files_).version(), 1);
  files_.set_hook(nullptr);
}

TEST_F(CheckpointListingTest, WhatIsAwayWhileItIsListedIsThereAgain) {
  {
    TestServer server(files_);
    server.PushTo(1);
    EXPECT_THAT(server.Save(0, "best"), IsOk());
  }
  TestServer server(files_);  // Has read no manifest but the newest.
  server.PushTo(2);
  EXPECT_THAT(server.Save(), IsOk());
  ASSERT_THAT(files_.Rename("/data", "/elsewhere"), IsOk());
  (void)server.manager().List(server.model());
  ASSERT_THAT(files_.Rename("/elsewhere", "/data"), IsOk());
  EXPECT_THAT(server.Complete(), ElementsAre(2, 1));
}

TEST_F(CheckpointListingTest, AMissingOneThatIsPutBackIsLikeOthers) {
  std::string name;
  {
    TestServer server(files_);
    server.PushTo(1);
    EXPECT_THAT(server.Save(), IsOk());
    server.PushTo(2);
    name = server.Save(0, "best")->name;
  }
  const std::string path = absl::StrCat(kTestFolder, "/", name);
  const std::string away = absl::StrCat(kTestFolder, "/.away");
  ASSERT_THAT(files_.Rename(path, away), IsOk());
  {
    TestServer server(files_);
    EXPECT_EQ(server.version(), 1);
    EXPECT_THAT(server.Complete(), ElementsAre(1));
    ASSERT_THAT(files_.Rename(away, path), IsOk());
    EXPECT_THAT(server.manager().Delete(server.model(), name),
                ReasonIs(ErrorReason::kCheckpointInUse));
  }
  EXPECT_EQ(TestServer(files_).version(), 2);
}

}  // namespace
}  // namespace ema
