// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_manager.h"

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/checkpoint/test_manager.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::_;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using State = CheckpointInfo::State;

absl::Status DiskError() { return absl::UnavailableError("Input/output error"); }

std::string NameOf(const Version& record) { return CheckpointName(IdOf(record)); }

class CheckpointManagerTest : public testing::Test {
 protected:
  FakeFileSystem files_;
};

// --- Saving ---

TEST_F(CheckpointManagerTest, SavesAVersionInMemoryAndFindsOneOnTheDisk) {
  TestServer server(files_);
  EXPECT_THAT(server.Save(), ReasonIs(ErrorReason::kNoVersion));
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved first, server.Save());
  EXPECT_EQ(first.record.number, 1);
  EXPECT_EQ(first.name, NameOf(first.record));
  EXPECT_EQ(first.state, State::kComplete);
  server.PushTo(3);
  EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved second, server.Save(2));
  EXPECT_EQ(second.record.step, 20);
  // No longer in memory: the same, and nothing is written.
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "create" || operation == "rename" ? DiskError() : absl::OkStatus();
  });
  EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved again, server.Save(1));
  files_.set_hook(nullptr);
  EXPECT_EQ(again.record.number, 1);
  EXPECT_EQ(again.name, first.name);
  EXPECT_EQ(again.total_bytes, first.total_bytes);
  EXPECT_THAT(server.Save(4), ReasonIs(ErrorReason::kVersionNotYet));
  server.PushTo(6);
  EXPECT_THAT(server.Save(3), ReasonIs(ErrorReason::kVersionNotKept));
  EXPECT_EQ(server.model().durable().step(), 20);
}

TEST_F(CheckpointManagerTest, AVersionOnTheDiskIsHeldWhileItIsSavedAgain) {
  TestServer server(files_);
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved first, server.Save());
  server.PushTo(4);
  ASSERT_THAT(server.Save(), IsOk());
  bool is_asked = false;
  files_.set_hook([&](const std::string& operation, const std::string& path) {
    if (operation == "open" && absl::StrContains(path, first.name) &&
        !std::exchange(is_asked, true)) {
      EXPECT_THAT(server.manager().Delete(server.model(), first.name),
                  ReasonIs(ErrorReason::kCheckpointInUse));
    }
    return absl::OkStatus();
  });
  EXPECT_THAT(server.Save(1, "old"), IsOk());
  files_.set_hook(nullptr);
  EXPECT_TRUE(is_asked);
}

TEST_F(CheckpointManagerTest, SomeTracksAreACheckpointOfTheirOwn) {
  TestServer server(files_);
  server.PushTo(1);
  Checkpoints::SaveRequest request{.tracks = {"raw", "raw"}};
  EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved saved,
                           server.manager().Save(server.model(), request));
  EXPECT_EQ(saved.name, PartialCheckpointName(IdOf(saved.record), {"raw"}));
  EXPECT_EQ(server.model().durable().step(), 0);
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointInfo info,
                           server.manager().Get(server.model(), saved.name));
  EXPECT_TRUE(info.is_partial);
  EXPECT_THAT(info.tracks, ElementsAre("raw"));
  EXPECT_THAT(server.manager().Restore(server.model(), {1, 0}, ""), IsOk());  // In memory.
  request.tracks = {"none"};
  EXPECT_THAT(server.manager().Save(server.model(), request),
              ReasonIs(ErrorReason::kTrackNotFound));
  request = {.tracks = {"raw"}, .label = "best"};
  EXPECT_THAT(server.manager().Save(server.model(), request), ReasonIs(ErrorReason::kBadRequest));
  // All of them are no part.
  request = {.tracks = {"raw", "ema"}};
  EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved whole,
                           server.manager().Save(server.model(), request));
  EXPECT_EQ(whole.name, NameOf(whole.record));
}

TEST_F(CheckpointManagerTest, AVersionOfWhichOnlyAPartIsLeftCannotBeSaved) {
  TestServer server(files_);
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved part,
                           server.manager().Save(server.model(), {.tracks = {"raw"}}));
  server.PushTo(5);
  for (const Checkpoints::SaveRequest& request :
       {Checkpoints::SaveRequest{.id = {1, 0}},
        Checkpoints::SaveRequest{.id = {1, 0}, .tracks = {"raw"}}}) {
    EXPECT_THAT(
        server.manager().Save(server.model(), request),
        AllOf(ReasonIs(ErrorReason::kVersionNotKept),
              StatusIs(absl::StatusCode::kOutOfRange,
                       HasSubstr("only a partial checkpoint of it is on the disk, " + part.name))));
  }
  // Of others nothing is there.
  EXPECT_THAT(server.Save(2),
              AllOf(ReasonIs(ErrorReason::kVersionNotKept),
                    StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("version 2 is not kept"))));
}

TEST_F(CheckpointManagerTest, AServerDoesNotStartFromAPart) {
  {
    TestServer server(files_);
    server.PushTo(1);
    EXPECT_THAT(server.Save(), IsOk());
    server.PushTo(2);
    EXPECT_THAT(server.manager().Save(server.model(), {.tracks = {"raw"}}), IsOk());
  }
  TestServer server(files_);
  EXPECT_EQ(server.version(), 1);
  EXPECT_THAT(server.manager().Restore(server.model(), {2, 0}, ""),
              AllOf(ReasonIs(ErrorReason::kPartialCheckpoint),
                    StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("some tracks"))));
}

TEST_F(CheckpointManagerTest, AFailedSaveIsKeptInMindUntilItSucceeds) {
  TestServer server(files_);
  server.PushTo(1);
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "append" ? DiskError() : absl::OkStatus();
  });
  EXPECT_FALSE(server.Save().ok());
  EXPECT_FALSE(server.Save().ok());
  files_.set_hook(nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server.manager().List(server.model()));
  ASSERT_THAT(listing.checkpoints, SizeIs(1));
  EXPECT_EQ(listing.checkpoints[0].state, State::kFailed);
  EXPECT_EQ(listing.checkpoints[0].id.version, 1);
  EXPECT_THAT(listing.checkpoints[0].problem, HasSubstr("Input/output error"));
  const auto counts = server.manager().CountAll();
  EXPECT_EQ(counts.at("m").failed, 1);
  EXPECT_EQ(counts.at("m").complete, 0);
  EXPECT_THAT(server.Save(), IsOk());
  EXPECT_EQ(server.manager().CountAll().at("m").failed, 0);
  EXPECT_EQ(server.manager().CountAll().at("m").complete, 1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto info,
                           server.manager().Get(server.model(), listing.checkpoints[0].name));
  EXPECT_EQ(info.state, State::kComplete);
  EXPECT_EQ(info.problem, "");
  EXPECT_GT(info.total_bytes, 0);
  EXPECT_EQ(absl::ToUnixMicros(info.commit_time),
            absl::ToUnixMicros(server.model().history().latest()->commit_time));
}

TEST_F(CheckpointManagerTest, TheLogSaysOnceWhyEachWayToSaveFails) {
  CheckpointManager::Options options;
  options.policy.every_commits = 2;
  TestServer server(files_, std::move(options));
  server.PushTo(1);
  files_.set_free_bytes(1000);
  EXPECT_THAT(server.Save(), ReasonIs(ErrorReason::kDiskFull));
  EXPECT_THAT(server.manager().Save(server.model(), {.async = true}), IsOk());
  server.manager().AwaitIdle();
  server.PushTo(2);  // By itself.
  server.manager().AwaitIdle();
  server.models().Drain(SteadyNow());
  EXPECT_THAT(server.manager().Drain(server.models()), ReasonIs(ErrorReason::kDiskFull));
  const auto is_of = [](int64_t version, const std::string& more = "") {
    return AllOf(HasSubstr("checkpoint failed model=m"),
                 HasSubstr(absl::StrCat(" step=", 10 * version, " version=", version,
                                        " checkpoint=step-0000000000", 10 * version)),
                 HasSubstr(more), HasSubstr(" reason=DISK_FULL error="), HasSubstr("1000 left"),
                 Not(HasSubstr("ema.v1")));
  };
  EXPECT_THAT(server.errors(), ElementsAre(is_of(1), is_of(2, "automatic=true"), is_of(2)));
  EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server.manager().List(server.model()));
  ASSERT_THAT(listing.checkpoints, SizeIs(2));
  EXPECT_THAT(listing.checkpoints[0].problem,
              AllOf(HasSubstr("1000 left"), Not(HasSubstr("ema.v1"))));
}

TEST_F(CheckpointManagerTest, ReadersThatHoldAllVersionsDoNotKeepTheServerFromSaving) {
  struct Ends : ServerObserver {
    void OnSaveEnded(const SaveEnd& end) override { reasons.push_back(GetErrorReason(end.status)); }
    std::vector<ErrorReason> reasons;
  } ends;
  CheckpointManager::Options options;
  options.policy.every_commits = 2;
  options.observer = &ends;
  {
    TestServer server(files_, std::move(options), TwoTracks(/*max_pinned_versions=*/1));
    server.PushTo(1);
    const SnapshotRef read = *server.model().history().Pin(0);
    server.PushTo(2);
    server.manager().AwaitIdle();
    EXPECT_THAT(server.errors(), IsEmpty());
    EXPECT_EQ(server.model().durable().step(), 20);
  }
  EXPECT_THAT(ends.reasons, ElementsAre(ErrorReason::kUnspecified));
}

TEST_F(CheckpointManagerTest, WhatIsFreeIsAskedAtTheStart) {
  files_.set_free_bytes(int64_t{5} << 30);
  EXPECT_EQ(TestServer(files_).manager().free_bytes(), std::nullopt);
  CheckpointManager::Options options;
  options.free_space_interval = absl::Hours(1);
  EXPECT_EQ(TestServer(files_, std::move(options)).manager().free_bytes(), int64_t{5} << 30);
}

TEST_F(CheckpointManagerTest, TheLogSaysOnceThatTheStoreIsReadOnly) {
  TestServer server(files_);
  server.PushTo(1);
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "sync" ? DiskError() : absl::OkStatus();
  });
  EXPECT_THAT(server.Save(), ReasonIs(ErrorReason::kStoreReadOnly));
  EXPECT_THAT(server.Save(), ReasonIs(ErrorReason::kStoreReadOnly));
  files_.set_hook(nullptr);
  EXPECT_THAT(server.errors(), ElementsAre(AllOf(HasSubstr("checkpoints read-only"),
                                                 HasSubstr("Input/output error")),
                                           HasSubstr("checkpoint failed")));
}

TEST_F(CheckpointManagerTest, TheLogSaysOnceWhyTheSameSaveFailsAgain) {
  TestServer server(files_);
  server.PushTo(1);
  absl::Status error = DiskError();
  files_.set_hook([&](const std::string& operation, const std::string&) {
    return operation == "append" ? error : absl::OkStatus();
  });
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(server.Save(), AllOf(StatusIs(absl::StatusCode::kUnavailable, _),
                                     ReasonIs(ErrorReason::kDiskFailed)));
  }
  EXPECT_THAT(server.errors(), ElementsAre(HasSubstr("reason=DISK_FAILED")));
  error = MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kDiskFull, "full");
  for (int i = 0; i < 2; ++i) EXPECT_THAT(server.Save(), ReasonIs(ErrorReason::kDiskFull));
  EXPECT_THAT(server.errors(), SizeIs(2));
  error = absl::OkStatus();
  EXPECT_THAT(server.Save(), IsOk());
  server.PushTo(2);
  error = DiskError();
  EXPECT_THAT(server.Save(), ReasonIs(ErrorReason::kDiskFailed));
  EXPECT_THAT(server.errors(), SizeIs(3));
}

TEST_F(CheckpointManagerTest, LabelsAndDeletionsSayThatTheDiskFailed) {
  TestServer server(files_);
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved first, server.Save(0, "old"));
  server.PushTo(4);
  EXPECT_THAT(server.Save(), IsOk());
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "create" || operation == "rename" ? DiskError() : absl::OkStatus();
  });
  const auto is_failed =
      AllOf(StatusIs(absl::StatusCode::kUnavailable, _), ReasonIs(ErrorReason::kDiskFailed));
  EXPECT_THAT(server.manager().SetLabel(server.model(), "best", {1, 0}), is_failed);
  EXPECT_THAT(server.manager().RemoveLabel(server.model(), "old"), is_failed);
  files_.set_hook(nullptr);
  EXPECT_THAT(server.manager().RemoveLabel(server.model(), "old"), IsOk());
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "rename" ? DiskError() : absl::OkStatus();
  });
  EXPECT_THAT(server.manager().Delete(server.model(), first.name), is_failed);
  files_.set_hook(nullptr);
}

TEST_F(CheckpointManagerTest, OfFailedSavesTheLast64AreKeptInMind) {
  TestServer server(files_);
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "append" ? DiskError() : absl::OkStatus();
  });
  for (int64_t version = 1; version <= 70; ++version) {
    server.PushTo(version);
    EXPECT_FALSE(server.Save().ok());
  }
  files_.set_hook(nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server.manager().List(server.model()));
  ASSERT_THAT(listing.checkpoints, SizeIs(64));
  EXPECT_EQ(listing.checkpoints.front().id.version, 70);
  EXPECT_EQ(listing.checkpoints.back().id.version, 7);
}

TEST_F(CheckpointManagerTest, WhatIsDueIsSavedByItself) {
  CheckpointManager::Options options;
  options.policy.every_commits = 2;
  TestServer server(files_, std::move(options));
  for (int64_t version = 1; version <= 5; ++version) {
    server.PushTo(version);
    server.manager().AwaitIdle();
  }
  EXPECT_THAT(server.Complete(), ElementsAre(4, 2));
  EXPECT_EQ(server.model().durable().step(), 40);
}

TEST_F(CheckpointManagerTest, WhatPutsNothingNewerOnTheDiskPutsNoAutomaticSaveOff) {
  CheckpointManager::Options options;
  options.policy.every = absl::Milliseconds(100);
  TestServer server(files_, std::move(options), TwoTracks(/*max_pinned_versions=*/2));
  server.PushTo(1);
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  // Some tracks, again and again.
  while (server.model().durable().step() == 0 && absl::Now() < deadline) {
    ASSERT_THAT(server.manager().Save(server.model(), {.tracks = {"raw"}}), IsOk());
  }
  EXPECT_EQ(server.model().durable().step(), 10);
  server.manager().AwaitIdle();
  server.PushTo(2);
  // A label for what is there.
  for (int i = 0; server.model().durable().step() == 10 && absl::Now() < deadline; ++i) {
    ASSERT_THAT(server.Save(1, absl::StrCat("label-", i % 2)), IsOk());
  }
  EXPECT_EQ(server.model().durable().step(), 20);
  server.manager().AwaitIdle();
}

TEST_F(CheckpointManagerTest, DrainSavesTheNewest) {
  {
    TestServer server(files_);
    server.PushTo(2);
    server.models().Drain(SteadyNow());
    EXPECT_THAT(server.manager().Drain(server.models()), IsOk());
  }
  TestServer server(files_);
  EXPECT_EQ(server.version(), 2);
}

TEST_F(CheckpointManagerTest, DrainSavesTheNewestWithoutRoomForOneThatIsKept) {
  ModelConfig config = TwoTracks();
  config.tracks = {{.name = "raw",
                    .schedule = MakeSchedule("sigma_rel=0.05"),
                    .snapshot_interval = *TrainingDuration::Parse("1000ba")}};
  {
    TestServer server(files_, {}, config);
    server.PushTo(1);
    EXPECT_THAT(server.Save(), IsOk());
    files_.set_free_bytes((int64_t{1} << 20) + 1000);  // The weights take a few bytes.
    server.PushStep(1000, 2);
    server.models().Drain(SteadyNow());
    EXPECT_THAT(server.manager().Drain(server.models()), IsOk());
  }
  TestServer server(files_, {}, config);
  EXPECT_EQ(server.version(), 2);
}

TEST_F(CheckpointManagerTest, AFailedSyncIsSaidAtOnceAndEndsAllSaves) {
  {
    TestServer server(files_);
    server.PushTo(1);
    EXPECT_THAT(server.Save(), IsOk());
    EXPECT_THAT(server.manager().health(), IsOk());
    server.PushTo(2);
    bool has_failed = false;
    files_.set_hook([&](const std::string& operation, const std::string&) {
      if (operation != "sync" || std::exchange(has_failed, true)) return absl::OkStatus();
      return DiskError();
    });
    // Also when the disk is good again.
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(server.Save(), AllOf(StatusIs(absl::StatusCode::kUnavailable, _),
                                       ReasonIs(ErrorReason::kStoreReadOnly)));
    }
    EXPECT_THAT(server.manager().SetLabel(server.model(), "a", {1, 0}),
                ReasonIs(ErrorReason::kStoreReadOnly));
    EXPECT_THAT(server.manager().health(), ReasonIs(ErrorReason::kStoreReadOnly));
    EXPECT_THAT(server.errors(),
                Contains(AllOf(HasSubstr("checkpoints read-only"), HasSubstr("Input/output error")))
                    .Times(1));
    server.PushTo(3);
    EXPECT_EQ(server.version(), 3);
    EXPECT_EQ(server.model().durable().step(), 10);
    files_.set_hook(nullptr);
  }
  TestServer server(files_);
  EXPECT_EQ(server.version(), 1);
  EXPECT_THAT(server.manager().health(), IsOk());
  server.PushTo(2);
  EXPECT_THAT(server.Save(), IsOk());
}

// A save that fails after its checkpoint has got its name.
class HalfSavedTest : public CheckpointManagerTest {
 protected:
  // Saves version 1, and fails to save version 2: `operation` on a path with `part` fails once it
  // has its name.
  void Start(const std::string& operation, const std::string& part) {
    server_ = std::make_unique<TestServer>(files_);
    server_->PushTo(1);
    ASSERT_THAT(server_->Save(), IsOk());
    server_->PushTo(2);
    files_.set_hook(
        [=, is_renamed = false](const std::string& at, const std::string& path) mutable {
          const bool fails = is_renamed && at == operation && absl::StrContains(path, part);
          is_renamed |= at == "rename" && absl::StrContains(path, ".tmp-step-");
          return fails ? DiskError() : absl::OkStatus();
        });
    ASSERT_THAT(server_->Save(), StatusIs(absl::StatusCode::kUnavailable, _));
    files_.set_hook(nullptr);
    ASSERT_THAT(files_.AllPaths(), Contains(JoinPath(kTestFolder, Name())));
  }
  std::string Name() { return NameOf(*server_->model().history().latest()); }
  CheckpointInfo Get(const std::string& name) {
    const auto info = server_->manager().Get(server_->model(), name);
    EXPECT_THAT(info, IsOk());
    return *info;
  }
  // Version 2 is only on the disk.
  void ExpectRefused(ErrorReason reason) {
    EXPECT_THAT(server_->Save(2),
                AllOf(StatusIs(absl::StatusCode::kUnavailable, _), ReasonIs(reason)));
    EXPECT_THAT(server_->manager().SetLabel(server_->model(), "best", {2, 0}), Not(IsOk()));
    EXPECT_THAT(server_->manager().List(server_->model())->labels, IsEmpty());
  }

  std::unique_ptr<TestServer> server_;
};

TEST_F(HalfSavedTest, WithoutLatestItIsFailedUntilItIsSavedAgain) {
  Start("rename", "LATEST");
  EXPECT_EQ(Get(Name()).state, State::kFailed);
  EXPECT_THAT(Get(Name()).problem, HasSubstr("Input/output error"));
  EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved saved,
                           server_->manager().Save(server_->model(), {.async = true}));
  EXPECT_EQ(saved.state, State::kSaving);
  server_->manager().AwaitIdle();
  EXPECT_EQ(Get(Name()).state, State::kComplete);
  EXPECT_EQ(Get(Name()).problem, "");
  server_ = nullptr;
  EXPECT_EQ(TestServer(files_).version(), 2);
}

TEST_F(HalfSavedTest, WithoutLatestItIsNoLabelsVersionNorAnAnswer) {
  Start("rename", "LATEST");
  const std::string name = Name();
  server_->PushTo(5);
  ExpectRefused(ErrorReason::kUnspecified);
  EXPECT_EQ(Get(name).state, State::kFailed);
  // What comes after it makes it one that a restart leaves in its place.
  ASSERT_THAT(server_->Save(), IsOk());
  EXPECT_THAT(server_->Save(2), IsOk());
  EXPECT_THAT(server_->manager().SetLabel(server_->model(), "best", {2, 0}), IsOk());
}

TEST_F(HalfSavedTest, WithoutItsFoldersSyncItIsFailedForGood) {
  Start("syncdir", kTestFolder);
  const std::string name = Name();
  EXPECT_EQ(Get(name).state, State::kFailed);
  EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved saved,
                           server_->manager().Save(server_->model(), {.async = true}));
  EXPECT_EQ(saved.state, State::kSaving);
  server_->manager().AwaitIdle();
  EXPECT_EQ(Get(name).state, State::kFailed);
  server_->PushTo(4);
  ExpectRefused(ErrorReason::kStoreReadOnly);
  server_ = nullptr;
  EXPECT_EQ(TestServer(files_).version(), 1);
}

TEST_F(CheckpointManagerTest, ADiskThatIsReadOnlyIsNotHealthyUntilASaveIsWritten) {
  TestServer server(files_);
  server.PushTo(1);
  EXPECT_THAT(server.Save(), IsOk());
  server.PushTo(2);
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "mkdir" || operation == "create" || operation == "remove"
               ? MakeError(absl::StatusCode::kUnavailable, ErrorReason::kStoreReadOnly, "read-only")
               : absl::OkStatus();
  });
  EXPECT_THAT(server.Save(), ReasonIs(ErrorReason::kStoreReadOnly));
  EXPECT_THAT(server.manager().health(), ReasonIs(ErrorReason::kStoreReadOnly));
  EXPECT_THAT(server.Save(), ReasonIs(ErrorReason::kStoreReadOnly));
  EXPECT_THAT(server.errors(), Contains(HasSubstr("checkpoints read-only")).Times(1));
  // Nothing is written for one that is there.
  EXPECT_THAT(server.Save(1), IsOk());
  EXPECT_THAT(server.manager().health(), ReasonIs(ErrorReason::kStoreReadOnly));
  files_.set_hook(nullptr);
  EXPECT_THAT(server.Save(), IsOk());
  EXPECT_THAT(server.manager().health(), IsOk());
  EXPECT_THAT(server.others(), Contains(HasSubstr("checkpoints writable again")).Times(1));
}

TEST_F(CheckpointManagerTest, ADataDirectoryThatHasGoneIsSeenAndSoIsThatItIsBack) {
  CheckpointManager::Options options;
  options.free_space_interval = absl::Milliseconds(1);
  TestServer server(files_, std::move(options));
  server.PushTo(1);
  EXPECT_THAT(server.Save(), IsOk());
  server.PushTo(2);
  // As where a volume was mounted.
  ASSERT_THAT(files_.Rename("/data", "/gone"), IsOk());
  ASSERT_THAT(files_.CreateDirectory("/data"), IsOk());
  EXPECT_THAT(server.Save(), AllOf(ReasonIs(ErrorReason::kStoreReadOnly),
                                   StatusIs(absl::StatusCode::kUnavailable,
                                            HasSubstr("the data directory is missing"))));
  EXPECT_THAT(server.manager().health(), ReasonIs(ErrorReason::kStoreReadOnly));
  EXPECT_THAT(files_.ListDirectory("/data"), IsOkAndHolds(IsEmpty()));
  ASSERT_THAT(files_.Rename("/gone", "/data"), IsOk());
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (!server.manager().health().ok() && absl::Now() < deadline) std::this_thread::yield();
  EXPECT_THAT(server.manager().health(), IsOk());
  EXPECT_THAT(server.Save(), IsOk());
}

// As who restores a backup without stopping the server, and starts another one on it.
TEST_F(CheckpointManagerTest, ADataDirectoryThatWasReplacedIsAnotherServers) {
  CheckpointManager::Options options;
  options.free_space_interval = absl::Milliseconds(1);
  options.store.keep_count = 1;
  TestServer server(files_, options);
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto first, server.Save(0, "first"));
  server.PushTo(2);
  EXPECT_THAT(server.Save(), IsOk());
  server.PushTo(3);
  ASSERT_THAT(files_.Rename("/data", "/broken"), IsOk());
  {
    TestServer other(files_);
    other.PushTo(4);
    EXPECT_THAT(other.Save(0, "other"), IsOk());
    const std::string before = files_.Fingerprint();
    EXPECT_THAT(server.Save(), AllOf(ReasonIs(ErrorReason::kStoreReadOnly),
                                     StatusIs(absl::StatusCode::kUnavailable,
                                              HasSubstr("the data directory has been replaced"))));
    const auto is_refused = ReasonIs(ErrorReason::kStoreReadOnly);
    EXPECT_THAT(server.manager().SetLabel(server.model(), "more", {2, 0}), is_refused);
    EXPECT_THAT(server.manager().RemoveLabel(server.model(), "first"), is_refused);
    EXPECT_THAT(server.manager().Delete(server.model(), first.name), is_refused);
    EXPECT_THAT(server.manager().CheckMaySetAside(), is_refused);
    server.manager().Scrub(server.models());
    // Nor does it take what is there for its own.
    EXPECT_THAT(server.manager().List(server.model())->labels,
                ElementsAre(testing::Field(&CheckpointLabel::name, "first")));
    EXPECT_THAT(server.manager().SetAsideAll("m"), is_refused);
    EXPECT_THAT(server.manager().Purge("m"), is_refused);
    EXPECT_EQ(files_.Fingerprint(), before);
    EXPECT_THAT(server.manager().health(), is_refused);
    EXPECT_THAT(other.manager().health(), IsOk());
  }
  ASSERT_THAT(files_.RemoveTree("/data"), IsOk());
  EXPECT_THAT(server.manager().health(), ReasonIs(ErrorReason::kStoreReadOnly));
  ASSERT_THAT(files_.Rename("/broken", "/data"), IsOk());
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (!server.manager().health().ok() && absl::Now() < deadline) std::this_thread::yield();
  EXPECT_THAT(server.manager().health(), IsOk());
}

TEST_F(CheckpointManagerTest, ADataDirectoryThatIsReplacedDuringASaveKeepsItsNames) {
  for (const char* const file : {"/.tmp-LATEST", "/.tmp-LABELS.json"}) {
    FakeFileSystem files;
    {
      TestServer other(files);
      other.PushTo(3);
      EXPECT_THAT(other.Save(0, "other"), IsOk());
    }
    ASSERT_THAT(files.Rename("/data", "/backup"), IsOk());
    TestServer server(files);
    server.PushTo(1);
    bool is_replaced = false;
    files.set_hook([&](const std::string& operation, const std::string& path) {
      if (!is_replaced && operation == "create" && path == kTestFolder + std::string(file)) {
        is_replaced = true;
        EXPECT_THAT(files.Rename("/data", "/broken"), IsOk());
        EXPECT_THAT(files.Rename("/backup", "/data"), IsOk());
      }
      return absl::OkStatus();
    });
    EXPECT_THAT(server.Save(0, "ours"), ReasonIs(ErrorReason::kStoreReadOnly)) << file;
    EXPECT_TRUE(is_replaced);
    files.set_hook(nullptr);
    TestServer other(files);
    EXPECT_EQ(other.version(), 3) << file;
    EXPECT_THAT(other.errors(), IsEmpty()) << file;
    EXPECT_THAT(other.manager().FindLabel(other.model(), "other"), IsOk()) << file;
    EXPECT_THAT(other.manager().FindLabel(other.model(), "ours"),
                ReasonIs(ErrorReason::kLabelNotFound))
        << file;
  }
}

}  // namespace
}  // namespace ema
