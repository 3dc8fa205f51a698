// SPDX-License-Identifier: Apache-2.0
//
// Going back to earlier versions, by hand and for trainers that resume; with crashes at every
// operation.
#include <functional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/checkpoint/test_manager.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

absl::Status DiskError() { return absl::UnavailableError("Input/output error"); }

class RollbackTest : public testing::Test {
 protected:
  // Versions 1 to 3 are on the disk, and a server that has loaded the last has gone down.
  void SaveThree() {
    TestServer server(files_);
    for (int64_t version = 1; version <= 3; ++version) {
      server.PushTo(version);
      EXPECT_THAT(server.Save(), IsOk());
    }
  }

  FakeFileSystem files_;
};

TEST_F(RollbackTest, ToAVersionInMemory) {
  TestServer server(files_, {}, TwoTracks(/*max_pinned_versions=*/4));
  server.PushTo(3);
  const auto before = *ReadAll(server.model(), "ema", 1);
  EMA_ASSERT_OK_AND_ASSIGN(const Version record,
                           server.manager().Restore(server.model(), {1, 0}, ""));
  EXPECT_EQ(record.number, 4);
  EXPECT_EQ(record.step, 10);
  EXPECT_EQ(record.restored_from, (VersionId{1, server.manager().incarnation()}));
  EXPECT_TRUE(*ReadAll(server.model(), "ema") == before);
  EXPECT_EQ(server.RawValue(), 1);
  // And on the disk, with a lower step than what was there before.
  EXPECT_THAT(server.Complete(), ElementsAre(4));
  EXPECT_EQ(server.model().durable().step(), 10);
  server.PushStep(20, 7);
  EXPECT_EQ(server.version(), 5);
}

TEST_F(RollbackTest, ToAVersionOnTheDiskOrALabel) {
  SaveThree();
  TestServer server(files_);
  ASSERT_THAT(server.manager().SetLabel(server.model(), "good", {2, 0}), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const Version record,
                           server.manager().Restore(server.model(), {}, "good"));
  EXPECT_EQ(record.number, 4);
  EXPECT_EQ(record.step, 20);
  EXPECT_EQ(server.RawValue(), 2);
  EXPECT_THAT(server.manager().Restore(server.model(), {}, "none"),
              ReasonIs(ErrorReason::kLabelNotFound));
  EXPECT_THAT(server.manager().Restore(server.model(), {}, ""), ReasonIs(ErrorReason::kBadRequest));
  EXPECT_THAT(server.manager().Restore(server.model(), {1, 0}, "good"),
              ReasonIs(ErrorReason::kBadRequest));
  EXPECT_THAT(server.manager().Restore(server.model(), {9, 0}, ""),
              AllOf(ReasonIs(ErrorReason::kVersionNotKept),
                    StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("step 20 (version 4)"))));
}

TEST_F(RollbackTest, TheNextServerGoesOnFromIt) {
  SaveThree();
  {
    TestServer server(files_);
    ASSERT_THAT(server.manager().Restore(server.model(), {1, 0}, ""), IsOk());
  }
  TestServer server(files_);
  EXPECT_EQ(server.version(), 4);
  EXPECT_EQ(server.model().history().latest()->step, 10);
  EXPECT_EQ(server.RawValue(), 1);
  // Newer is what was committed later, whatever its step.
  server.PushStep(15, 9);
  EXPECT_THAT(server.Save(), IsOk());
  EXPECT_THAT(server.Complete(), ElementsAre(5, 4, 3));
}

TEST_F(RollbackTest, ABadCheckpointIsSetAsideAndNothingChanges) {
  SaveThree();
  TestServer server(files_);
  server.PushTo(4);
  const int64_t epoch = server.model().Describe().run_epoch;
  EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server.manager().List(server.model()));
  const std::string name = listing.checkpoints[2].name;
  files_.FileBytes(absl::StrCat(kTestFolder, "/", name, "/tracks/ema/model.safetensors")).back() ^=
      1;
  EXPECT_THAT(server.manager().Restore(server.model(), {1, 0}, ""),
              AllOf(ReasonIs(ErrorReason::kCheckpointCorrupt),
                    StatusIs(absl::StatusCode::kDataLoss, HasSubstr("track \"ema\""))));
  EXPECT_EQ(server.version(), 4);
  EXPECT_EQ(server.model().Describe().run_epoch, epoch);
  EXPECT_THAT(server.Complete(), ElementsAre(3, 2));
  server.PushTo(5);
  EXPECT_EQ(server.version(), 5);
}

// From whichever read on.
TEST_F(RollbackTest, AServerThatStopsDoesNotReadOn) {
  SaveThree();
  int64_t drain_count = 0;
  for (int64_t stop = 0;; ++stop) {
    const auto files = files_.AfterCrash(PowerLoss::kNone);
    TestServer server(*files);
    EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server.manager().List(server.model()));
    const std::string weights = absl::StrCat("/", listing.checkpoints[2].name, "/tracks/");
    int64_t read_count = 0;
    files->set_hook([&](const std::string& operation, const std::string& path) {
      if (operation != "read" || !absl::StrContains(path, weights)) return absl::OkStatus();
      return read_count++ == stop ? server.manager().Drain(server.models()) : absl::OkStatus();
    });
    const absl::Status restored = server.manager().Restore(server.model(), {1, 0}, "").status();
    files->set_hook(nullptr);
    if (read_count <= stop) {
      EXPECT_THAT(restored, IsOk());
      break;
    }
    ++drain_count;
    // What is left of one small file.
    EXPECT_LE(read_count, stop + 4);
    EXPECT_THAT(restored, ReasonIs(ErrorReason::kDraining)) << stop;
    EXPECT_EQ(server.version(), 3);
    EXPECT_THAT(server.errors(), IsEmpty());
    EXPECT_THAT(server.Complete(), ElementsAre(3, 2, 1));
  }
  EXPECT_GT(drain_count, 10);
}

TEST_F(RollbackTest, AFileThatAPersonHasPutBesideTheWeightsIsNoDamage) {
  SaveThree();
  TestServer server(files_);
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointList listing, server.manager().List(server.model()));
  for (const CheckpointInfo& info : listing.checkpoints) {
    ASSERT_THAT(files_.NewWritableFile(
                    absl::StrCat(kTestFolder, "/", info.name, "/tracks/ema/config.json")),
                IsOk());
  }
  EXPECT_EQ(server.manager().Scrub(server.models()).bad_count, 0);
  EXPECT_THAT(server.manager().Restore(server.model(), {1, 0}, ""), IsOk());
  EXPECT_EQ(server.RawValue(), 1);
}

TEST_F(RollbackTest, IfItCannotBeSavedTheErrorSaysThatItIsDone) {
  SaveThree();
  TestServer server(files_);
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "append" ? DiskError() : absl::OkStatus();
  });
  const auto restored = server.manager().Restore(server.model(), {2, 0}, "");
  server.manager().AwaitIdle();
  files_.set_hook(nullptr);
  EXPECT_THAT(restored, StatusIs(absl::StatusCode::kUnavailable,
                                 AllOf(HasSubstr("rolled back to version 2 in memory"),
                                       HasSubstr("Input/output error"))));
  EXPECT_EQ(server.version(), 4);
  EXPECT_EQ(server.RawValue(), 2);
  // Of what is pushed from here on nothing is on the disk.
  EXPECT_EQ(server.model().durable().step(), server.model().history().latest()->step);
  EXPECT_EQ(server.model().durable().version().version, 3);
}

TEST_F(RollbackTest, ReadersThatHoldAllVersionsDoNotHinderTheSave) {
  SaveThree();
  TestServer server(files_, {}, TwoTracks(/*max_pinned_versions=*/1));
  const auto held = server.model().history().Pin(0);
  ASSERT_THAT(held, IsOk());
  EXPECT_THAT(server.manager().Restore(server.model(), {1, 0}, ""), IsOk());
  EXPECT_EQ(server.Complete().front(), 4);
}

TEST_F(RollbackTest, SnapshotsAreKeptAnewAlsoAfterARestart) {
  ModelConfig config = TwoTracks();
  config.tracks[0] = {.name = "ema",
                      .schedule = MakeSchedule("sigma_rel=0.05"),
                      .snapshot_interval = *TrainingDuration::Parse("10ba")};
  const auto kept_steps = [this] {
    std::vector<int64_t> steps;
    for (const std::string& path : files_.AllPaths()) {
      const std::string folder = path.substr(0, path.find_last_of('/'));
      if (path != folder + "/KEEP") continue;
      steps.push_back(ParseCheckpointName(folder.substr(folder.find_last_of('/') + 1))->step);
    }
    return steps;
  };
  {
    TestServer server(files_, {}, config);
    for (int64_t version = 1; version <= 3; ++version) {
      server.PushTo(version);
      server.manager().AwaitIdle();
    }
    EXPECT_THAT(kept_steps(), ElementsAre(10, 20, 30));
    ASSERT_THAT(server.manager().Restore(server.model(), {1, 0}, ""), IsOk());
    server.manager().AwaitIdle();
  }
  TestServer server(files_, {}, config);
  EXPECT_EQ(server.model().history().latest()->step, 10);
  server.PushStep(20, 7);
  server.manager().AwaitIdle();
  EXPECT_THAT(kept_steps(), ElementsAre(10, 20, 20, 30));
}

// What a crash leaves of a rollback from version 3 to version 1, in memory or not.
class RollbackCrashTest : public RollbackTest, public testing::WithParamInterface<bool> {};

TEST_P(RollbackCrashTest, LeavesTheVersionBeforeOrTheRestoredOne) {
  const bool in_memory = GetParam();
  const ModelConfig config = TwoTracks(in_memory ? 4 : 1);
  FakeFileSystem machine;
  if (!in_memory) {
    TestServer server(machine, {}, config);
    for (int64_t version = 1; version <= 3; ++version) {
      server.PushTo(version);
      ASSERT_THAT(server.Save(), IsOk());
    }
  }
  int64_t states = 0;
  int64_t restored_seen = 0;
  for (int64_t stop = 0;; ++stop) {
    const auto files = machine.AfterCrash(PowerLoss::kNone);
    bool is_restored = false;
    int64_t count = 0;
    const auto server = std::make_unique<TestServer>(*files, CheckpointManager::Options(), config);
    if (in_memory) {
      server->PushTo(3);
      ASSERT_THAT(server->Save(), IsOk());
    }
    files->set_hook([&](const std::string&, const std::string&) {
      return count++ < stop ? absl::OkStatus() : DiskError();
    });
    is_restored = server->manager().Restore(server->model(), {1, 0}, "").ok();
    server->manager().AwaitIdle();
    const bool is_complete = count <= stop;
    const auto check = [&](PowerLoss loss, uint32_t seed) {
      const auto after = files->AfterCrash(loss, seed);
      for (int start = 0; start < 2; ++start) {
        TestServer next(*after, {}, config);
        ++states;
        if (is_restored || next.version() != 3) {
          ASSERT_EQ(next.version(), 4) << "stop " << stop << " seed " << seed;
          EXPECT_EQ(next.model().history().latest()->step, 10);
          EXPECT_EQ(next.RawValue(), 1);
          ++restored_seen;
        } else {
          EXPECT_EQ(next.RawValue(), 3);
        }
        // A crash before LATEST was moved.
        EXPECT_THAT(next.errors(), Each(HasSubstr("newer than LATEST")));
      }
    };
    check(PowerLoss::kNone, 0);
    check(PowerLoss::kNothing, 0);
    check(PowerLoss::kNamesOnly, 0);
    for (uint32_t seed = 0; seed < 4; ++seed) check(PowerLoss::kAnything, seed);
    if (HasFailure() || is_complete) break;
    ASSERT_LT(stop, 1000);
  }
  EXPECT_GT(states, 200);
  EXPECT_GT(restored_seen, 10);
}

INSTANTIATE_TEST_SUITE_P(Rollback, RollbackCrashTest, testing::Values(false, true),
                         [](const auto& tested) { return tested.param ? "Memory" : "Disk"; });

TEST_F(RollbackTest, ACrashLeavesALabelWhereItWasOrWhereItWasPut) {
  CheckpointManager::Options options;
  options.store.keep_count = 1;
  {
    TestServer server(files_, options);
    server.PushTo(1);
    ASSERT_THAT(server.Save(0, "best"), IsOk());
  }
  int64_t moved_seen = 0;
  for (int64_t stop = 0;; ++stop) {
    const auto files = files_.AfterCrash(PowerLoss::kNone);
    TestServer server(*files, options);
    server.PushTo(2);
    int64_t count = 0;
    files->set_hook([&](const std::string&, const std::string&) {
      return count++ < stop ? absl::OkStatus() : DiskError();
    });
    const bool is_moved = server.manager().SetLabel(server.model(), "best", {}).ok();
    const bool is_complete = count <= stop;
    const auto check = [&](PowerLoss loss, uint32_t seed) {
      const auto after = files->AfterCrash(loss, seed);
      TestServer next(*after, options);
      EXPECT_THAT(next.errors(), Each(HasSubstr("newer than LATEST"))) << stop;
      // What has it is on the disk.
      const auto found = next.manager().FindLabel(next.model(), "best");
      ASSERT_THAT(found, IsOk()) << stop;
      EXPECT_TRUE(found->version == 2 || (found->version == 1 && !is_moved)) << stop;
      moved_seen += found->version == 2;
      EXPECT_THAT(next.manager().Restore(next.model(), {}, "best"), IsOk()) << stop;
      EXPECT_EQ(next.RawValue(), static_cast<float>(found->version));
    };
    check(PowerLoss::kNone, 0);
    check(PowerLoss::kNothing, 0);
    check(PowerLoss::kNamesOnly, 0);
    for (uint32_t seed = 0; seed < 6; ++seed) check(PowerLoss::kAnything, seed);
    if (HasFailure() || is_complete) break;
    ASSERT_LT(stop, 1000);
  }
  EXPECT_GT(moved_seen, 5);
}

// --- Resuming ---

class ResumeTest : public RollbackTest {
 protected:
  // Also that it says at which version the model stands then.
  absl::Status Resume(TestServer& server, const ResumePoint& point,
                      const std::string& launch_id = "new") {
    EMA_ASSIGN_OR_RETURN(const std::optional<VersionId> newest,
                         server.manager().Resume(server.model(), {launch_id}, point));
    const std::optional<Version> latest = server.model().history().latest();
    if (!*server.model().IsRunOpen({launch_id})) {
      EXPECT_EQ(newest, latest.has_value() ? latest->id() : VersionId{});
    }
    return absl::OkStatus();
  }
  // Its only track is due at multiples of 10.
  static ModelConfig EveryTen() {
    ModelConfig config = TwoTracks();
    config.tracks = {{"slow", MakeSchedule("100ba", "10ba")}};
    return config;
  }
  static auto IsDueBetween(const std::string& where) {
    return AllOf(ReasonIs(ErrorReason::kResumeMismatch),
                 StatusIs(absl::StatusCode::kFailedPrecondition,
                          HasSubstr(where + ", and an update was due between them; versions")));
  }
};

TEST_F(ResumeTest, WhereTheModelStandsNothingHappens) {
  TestServer server(files_, {}, TwoTracks(4));
  EXPECT_THAT(Resume(server, {.step = 0}), IsOk());
  EXPECT_THAT(Resume(server, {.step = 5}), ReasonIs(ErrorReason::kResumeMismatch));
  server.PushTo(3);
  EXPECT_THAT(Resume(server, {.step = 30}), IsOk());
  EXPECT_EQ(server.version(), 3);
  EXPECT_THAT(Resume(server, {.step = -1}), ReasonIs(ErrorReason::kBadRequest));
}

TEST_F(ResumeTest, ARunThatIsOpenOrFencedIsLeftAlone) {
  TestServer server(files_, {}, TwoTracks(4));
  server.PushTo(3);
  const std::string first = server.launch_id();
  EXPECT_THAT(Resume(server, {.step = 10}, first), IsOk());
  EXPECT_EQ(server.version(), 3);
  ASSERT_THAT(server.manager().Restore(server.model(), {2, 0}, ""), IsOk());
  EXPECT_THAT(Resume(server, {.step = 10}, first), ReasonIs(ErrorReason::kFenced));
  EXPECT_EQ(server.version(), 4);
}

TEST_F(ResumeTest, AtAnEarlierStepThatVersionIsRestored) {
  SaveThree();
  CheckpointManager::Options options;
  options.store.keep_count = 10;
  TestServer server(files_, options);
  EXPECT_THAT(Resume(server, {.step = 20}), IsOk());
  EXPECT_EQ(server.version(), 4);
  EXPECT_EQ(server.RawValue(), 2);
  // The other ranks' calls find it there.
  EXPECT_THAT(Resume(server, {.step = 20}), IsOk());
  EXPECT_EQ(server.version(), 4);
  // Between two updates: what an uninterrupted run has there.
  EXPECT_THAT(Resume(server, {.step = 19}), IsOk());
  EXPECT_EQ(server.version(), 5);
  EXPECT_EQ(server.RawValue(), 1);
}

TEST_F(ResumeTest, AtAStepThatNothingStandsForItSaysWhatThereIs) {
  SaveThree();
  TestServer server(files_);
  EXPECT_THAT(Resume(server, {.step = 5}),
              AllOf(ReasonIs(ErrorReason::kResumeMismatch),
                    StatusIs(absl::StatusCode::kFailedPrecondition,
                             HasSubstr("the trainer is at step 5; the average is at step 30; "
                                       "versions that can be restored: step 10 (version 1), step "
                                       "20 (version 2), step 30 (version 3)"))));
  EXPECT_EQ(server.version(), 3);
}

TEST_F(ResumeTest, AtALaterStepOnlyIfNoUpdateWasDue) {
  TestServer server(files_, {}, EveryTen());
  server.PushTo(3);
  EXPECT_THAT(Resume(server, {.step = 35}), ReasonIs(ErrorReason::kResumeMismatch));
  EXPECT_THAT(Resume(server, {.step = 35, .time = TrainingTime::AtBatch(35)}), IsOk());
  EXPECT_THAT(Resume(server, {.step = 45, .time = TrainingTime::AtBatch(45)}),
              IsDueBetween("the average is at step 30"));
  EXPECT_EQ(server.version(), 3);
}

TEST_F(ResumeTest, AtAnEarlierStepInAGapOnlyIfNoUpdateWasDue) {
  {
    TestServer server(files_, {}, EveryTen());
    server.PushTo(1);
    ASSERT_THAT(server.Save(), IsOk());
    server.PushTo(3);
    ASSERT_THAT(server.Save(), IsOk());
  }
  TestServer server(files_, {}, EveryTen());
  EXPECT_THAT(Resume(server, {.step = 15}), ReasonIs(ErrorReason::kResumeMismatch));
  EXPECT_THAT(Resume(server, {.step = 25, .time = TrainingTime::AtBatch(25)}),
              IsDueBetween("the average is at step 30"));
  EXPECT_THAT(Resume(server, {.step = 9, .time = TrainingTime::AtBatch(9)}),
              ReasonIs(ErrorReason::kResumeMismatch));
  EXPECT_EQ(server.version(), 3);
  EXPECT_THAT(Resume(server, {.step = 15, .time = TrainingTime::AtBatch(15)}), IsOk());
  EXPECT_EQ(server.version(), 4);
  EXPECT_EQ(server.model().history().latest()->restored_from->version, 1);
}

TEST_F(ResumeTest, AtAVersionTooEarlyOnlyIfNoUpdateWasDue) {
  TestServer server(files_, {}, EveryTen());
  server.PushTo(1);
  ASSERT_THAT(server.Save(), IsOk());
  server.PushTo(3);  // The first is on the disk only, the second in memory only.
  for (const int64_t version : {1, 2}) {
    const VersionId id{version, 0};
    const int64_t step = 10 * version + 15;
    EXPECT_THAT(Resume(server, {.step = step, .version = id, .time = TrainingTime::AtBatch(step)}),
                IsDueBetween(absl::StrCat("which it asks for, is at step ", 10 * version)));
  }
  EXPECT_EQ(server.version(), 3);
  const VersionId second{2, 0};
  EXPECT_THAT(Resume(server, {.step = 29, .version = second, .time = TrainingTime::AtBatch(29)}),
              IsOk());
  EXPECT_EQ(server.version(), 4);
  // Where the model stands already.
  EXPECT_THAT(Resume(server, {.step = 28, .version = second, .time = TrainingTime::AtBatch(28)}),
              IsOk());
  EXPECT_THAT(Resume(server, {.step = 30, .version = second, .time = TrainingTime::AtBatch(30)}),
              IsDueBetween("version 2, which it asks for, is at step 20"));
  EXPECT_EQ(server.version(), 4);
  const VersionId first{1, 0};
  EXPECT_THAT(Resume(server, {.step = 19, .version = first, .time = TrainingTime::AtBatch(19)}),
              IsOk());
  EXPECT_EQ(server.version(), 5);
}

TEST_F(ResumeTest, ItIsNotOkBeforeTheRollbackIsOnTheDisk) {
  for (const auto version : {std::optional<VersionId>(), std::optional<VersionId>({2, 0})}) {
    const auto files = files_.AfterCrash(PowerLoss::kNone);
    {
      TestServer server(*files);
      server.PushTo(3);
      for (const int64_t saved : {2, 3}) ASSERT_THAT(server.Save(saved), IsOk());
    }
    TestServer server(*files);
    const ResumePoint point{.step = 20, .version = version};
    files->set_hook([](const std::string& operation, const std::string&) {
      return operation == "append" ? DiskError() : absl::OkStatus();
    });
    // A client asks again.
    for (int i = 0; i < 3; ++i) {
      EXPECT_THAT(Resume(server, point),
                  StatusIs(absl::StatusCode::kUnavailable,
                           AllOf(HasSubstr("rolled back to version 2 in memory"),
                                 HasSubstr("Input/output error"))));
      server.manager().AwaitIdle();
      EXPECT_EQ(server.version(), 4);
    }
    files->set_hook(nullptr);
    EXPECT_THAT(Resume(server, point), IsOk());
    EXPECT_EQ(server.version(), 4);
    const auto after = files->AfterCrash(PowerLoss::kNothing);
    TestServer next(*after);
    EXPECT_EQ(next.version(), 4);
    EXPECT_EQ(next.RawValue(), 2);
  }
}

TEST_F(ResumeTest, WithoutARollbackNothingIsSaved) {
  TestServer server(files_);
  server.PushTo(2);
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "append" ? DiskError() : absl::OkStatus();
  });
  EXPECT_THAT(Resume(server, {.step = 20}), IsOk());
  files_.set_hook(nullptr);
}

TEST_F(ResumeTest, AtAVersionThatOneIsRestored) {
  SaveThree();
  TestServer server(files_);
  const VersionId second{2, 0};
  EXPECT_THAT(Resume(server, {.step = 25, .version = second}), IsOk());
  EXPECT_EQ(server.version(), 4);
  EXPECT_EQ(server.RawValue(), 2);
  // Again, also by what it has become.
  EXPECT_THAT(Resume(server, {.step = 25, .version = second}), IsOk());
  EXPECT_THAT(Resume(server, {.step = 25, .version = VersionId{4, 0}}), IsOk());
  EXPECT_EQ(server.version(), 4);
  server.PushTo(5);
  EXPECT_THAT(Resume(server, {.step = 25, .version = second}), IsOk());
  EXPECT_EQ(server.version(), 6);
  EXPECT_EQ(server.RawValue(), 2);
  EXPECT_THAT(Resume(server, {.step = 25, .version = VersionId{77, 0}}),
              ReasonIs(ErrorReason::kVersionNotKept));
  EXPECT_THAT(Resume(server, {.step = 25, .version = VersionId{0, 0}}),
              ReasonIs(ErrorReason::kBadRequest));
}

TEST_F(ResumeTest, AVersionOfALaterStepIsNeverMixedIn) {
  SaveThree();
  TestServer server(files_);
  EXPECT_THAT(
      Resume(server, {.step = 29, .version = VersionId{3, 0}}),
      AllOf(ReasonIs(ErrorReason::kResumeMismatch),
            StatusIs(absl::StatusCode::kFailedPrecondition,
                     HasSubstr("the trainer is at step 29; version 3, which it asks for, is "
                               "at step 30"))));
  EXPECT_EQ(server.version(), 3);
}

TEST_F(ResumeTest, OnlyVersionsThatTheNewestHasComeFromCount) {
  TestServer server(files_, {}, TwoTracks(8));
  server.PushTo(4);  // Steps 10 to 40.
  ASSERT_THAT(server.manager().Restore(server.model(), {2, 0}, ""), IsOk());
  server.PushStep(45, 6);
  // Version 3, of step 30, was given up.
  EXPECT_THAT(Resume(server, {.step = 30}), IsOk());
  EXPECT_EQ(server.RawValue(), 2);
}

}  // namespace
}  // namespace ema
