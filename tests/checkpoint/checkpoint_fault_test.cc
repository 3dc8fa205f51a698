// SPDX-License-Identifier: Apache-2.0
//
// Faults at every operation of the checkpoint store: the process is killed, the power goes, an
// operation fails, the disk is full. After each, what loads is the version before or the one after,
// bit for bit.
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/checkpoint/checkpoint_store.h"
#include "tests/checkpoint/test_checkpoints.h"
#include "tests/testutil/campaign.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const absl::Time kNow = absl::FromUnixSeconds(1'760'000'000);
// Power losses of kAnything at each point: in a campaign, and in a sample.
constexpr uint32_t kCampaignSeedCount = 6;
constexpr uint32_t kSampleSeedCount = 1;

absl::Status DiskError() { return absl::UnavailableError("Input/output error"); }
absl::Status DiskFull() {
  return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kDiskFull, "No space left");
}
absl::Status ReadOnlyDisk() {
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kStoreReadOnly, "Read-only disk");
}

absl::StatusOr<std::unique_ptr<CheckpointStore>> OpenStore(FileSystem& files) {
  return CheckpointStore::Open(files, {.data_dir = "/data", .keep_count = 2}, kNow);
}

// Expects that what has the name of a checkpoint is one, not a part of one.
void ExpectWholeCheckpoints(FakeFileSystem& files) {
  const std::string folder = "/data/models/m/checkpoints";
  const auto entries = files.ListDirectory(folder);
  if (!entries.ok()) return;
  for (const DirectoryEntry& entry : *entries) {
    if (!ParseCheckpointName(entry.name).has_value()) continue;
    for (const char* file : {"manifest.json", "tracks/fast/model.safetensors",
                             "tracks/slow/model.safetensors", "tracks/raw/model.safetensors"}) {
      EXPECT_THAT(files.Exists(JoinPath(JoinPath(folder, entry.name), file)), IsOkAndHolds(true))
          << entry.name << " " << file;
    }
  }
}

// The version of "m" that a server finds; 0: none. Checks that it is whole and that a second start
// finds the same.
int64_t LoadedVersion(FakeFileSystem& files, const TestVersions& versions) {
  int64_t version = 0;
  for (int start = 0; start < 2; ++start) {
    const auto store = OpenStore(files);
    EXPECT_THAT(store, IsOk());
    ModelStore models(TestDevice(), SmallBlocks());
    const auto report = (*store)->LoadAll(models);
    EXPECT_THAT(report, IsOk());
    // Nothing that a crash leaves has the name of a checkpoint without being one.
    EXPECT_TRUE(report->corrupt.empty());
    const int64_t found = report->loaded.empty() ? 0 : report->loaded[0].record.number;
    if (start > 0) {
      EXPECT_EQ(found, version);
    }
    version = found;
    if (found > 0) ExpectSameVersion(**models.Get("m"), *versions.model, *versions[found]);
    for (const std::string& path : files.AllPaths()) {
      EXPECT_FALSE(absl::StrContains(path, "/.tmp-")) << path;
    }
  }
  ExpectWholeCheckpoints(files);
  return version;
}

// Counts operations, and from the `stop`-th on lets them fail as if the process were gone.
FakeFileSystem::Hook StopAt(int64_t stop, std::shared_ptr<int64_t> count) {
  return [stop, count](const std::string&, const std::string&) {
    return (*count)++ < stop ? absl::OkStatus() : DiskError();
  };
}

// Lets only the `fail`-th operation fail; `operation` tells which it was.
FakeFileSystem::Hook FailAt(int64_t fail, const absl::Status& status,
                            std::shared_ptr<std::string> operation) {
  return [fail, status, operation, count = int64_t{0}](const std::string& name,
                                                       const std::string&) mutable {
    if (count++ != fail) return absl::OkStatus();
    *operation = name;
    return status;
  };
}

class CheckpointFaultTest : public testing::Test {
 protected:
  CheckpointFaultTest() : versions_(4) {}

  // A machine on which versions 1 to `count` have been saved.
  std::unique_ptr<FakeFileSystem> Machine(int64_t count) {
    auto files = std::make_unique<FakeFileSystem>();
    if (count == 0) return files;
    const auto store = OpenStore(*files);
    EXPECT_THAT(store, IsOk());
    for (int64_t version = 1; version <= count; ++version) {
      EXPECT_THAT((*store)->FolderOf("m").Save(*versions_.model, versions_[version]), IsOk());
    }
    return files;
  }

  const TestVersions versions_;
};

// `before` checkpoints are there; with 2 of them the save also removes one.
class CrashTest : public CheckpointFaultTest, public testing::WithParamInterface<int64_t> {};

TEST_P(CrashTest, WhileSavingLeavesTheVersionBeforeOrTheOneAfter) {
  const int64_t before = GetParam();
  const uint32_t first_seed = IsCampaign() ? 0 : CampaignSeed();
  const uint32_t seed_count = IsCampaign() ? kCampaignSeedCount : kSampleSeedCount;
  int64_t states = 0;
  int64_t after_seen = 0;
  for (int64_t stop = 0;; ++stop) {
    auto files = Machine(before);
    const auto store = OpenStore(*files);
    ASSERT_THAT(store, IsOk());
    auto count = std::make_shared<int64_t>(0);
    files->set_hook(StopAt(stop, count));
    const bool is_saved =
        (*store)->FolderOf("m").Save(*versions_.model, versions_[before + 1]).ok();
    const bool is_complete = *count <= stop;
    const auto check = [&](PowerLoss loss, uint32_t seed) {
      const auto after = files->AfterCrash(loss, seed);
      const int64_t version = LoadedVersion(*after, versions_);
      ++states;
      after_seen += version == before + 1;
      if (is_saved) {
        EXPECT_EQ(version, before + 1) << "stop " << stop << " seed " << seed;
      } else {
        EXPECT_TRUE(version == before || version == before + 1) << "stop " << stop;
      }
      // And the machine is as good as new.
      const auto next = OpenStore(*after);
      ASSERT_THAT(next, IsOk());
      ASSERT_THAT((*next)->FolderOf("m").Save(*versions_.model, versions_[before + 2]), IsOk());
      const auto lost = after->AfterCrash(PowerLoss::kNothing);
      EXPECT_EQ(LoadedVersion(*lost, versions_), before + 2);
    };
    check(PowerLoss::kNone, 0);
    check(PowerLoss::kNothing, 0);
    check(PowerLoss::kNamesOnly, 0);
    for (uint32_t i = 0; i < seed_count; ++i) check(PowerLoss::kAnything, first_seed + i);
    if (HasFailure()) return;
    if (is_complete) break;
    ASSERT_LT(stop, 1000);
  }
  EXPECT_GT(states, IsCampaign() ? 200 : 80);
  EXPECT_GT(after_seen, IsCampaign() ? 10 : 2);
}

INSTANTIATE_TEST_SUITE_P(CheckpointFault, CrashTest, testing::Values(0, 1, 2),
                         testing::PrintToStringParamName());

TEST_F(CheckpointFaultTest, ACrashWhileRecoveringIsHarmless) {
  // A save and a removal were under way, and the newest checkpoint is damaged.
  for (int64_t stop = 0;; ++stop) {
    auto files = Machine(3);
    ASSERT_THAT(files->CreateDirectory("/data/models/m/checkpoints/.tmp-old"), IsOk());
    ASSERT_THAT(files->NewWritableFile("/data/models/m/checkpoints/.tmp-old/file"), IsOk());
    files->FileBytes(
        "/data/models/m/checkpoints/step-000000000030-version-7-3/manifest.json")[50] ^= 1;
    files = files->AfterCrash(PowerLoss::kNone);  // All of that is on the disk.
    auto count = std::make_shared<int64_t>(0);
    files->set_hook(StopAt(stop, count));
    {
      ModelStore models(TestDevice(), SmallBlocks());
      const auto store = OpenStore(*files);
      if (store.ok()) (*store)->LoadAll(models).IgnoreError();
    }
    const bool is_complete = *count <= stop;
    for (const PowerLoss loss : {PowerLoss::kNone, PowerLoss::kNothing, PowerLoss::kAnything}) {
      const auto after = files->AfterCrash(loss, static_cast<uint32_t>(stop));
      ModelStore models(TestDevice(), SmallBlocks());
      const auto store = OpenStore(*after);
      ASSERT_THAT(store, IsOk());
      ASSERT_THAT((*store)->LoadAll(models), IsOk());
      ExpectSameVersion(**models.Get("m"), *versions_.model, *versions_[2]);
    }
    if (HasFailure() || is_complete) break;
  }
}

TEST_F(CheckpointFaultTest, IncarnationsNeverRepeatAfterACrash) {
  for (int64_t stop = 0; stop < 40; ++stop) {
    FakeFileSystem files;
    std::unique_ptr<FakeFileSystem> after;
    int64_t highest = 0;
    for (int start = 0; start < 3; ++start) {
      FakeFileSystem& now = after == nullptr ? files : *after;
      now.set_hook(StopAt(stop, std::make_shared<int64_t>(0)));
      if (const auto store = OpenStore(now); store.ok()) {
        EXPECT_GT((*store)->data().incarnation(), highest);
        highest = (*store)->data().incarnation();
      }
      after = now.AfterCrash(PowerLoss::kAnything, static_cast<uint32_t>(stop));
    }
  }
}

TEST_F(CheckpointFaultTest, AnyFailedOperationLeavesTheOldVersionOrTheNew) {
  for (const absl::Status& error : {DiskError(), DiskFull(), ReadOnlyDisk()}) {
    for (int64_t fail = 0;; ++fail) {
      auto files = Machine(2);
      auto store = OpenStore(*files);
      ASSERT_THAT(store, IsOk());
      auto operation = std::make_shared<std::string>();
      files->set_hook(FailAt(fail, error, operation));
      const auto saved = (*store)->FolderOf("m").Save(*versions_.model, versions_[3]);
      if (operation->empty()) {
        EXPECT_THAT(saved, IsOk());
        break;
      }
      const std::string where = absl::StrCat(*operation, " ", fail, " ", saved.status().ToString());
      const bool is_latched = !(*store)->data().health().ok();
      if (absl::IsUnavailable(error) && absl::StrContains(*operation, "sync")) {
        EXPECT_TRUE(is_latched) << where;
      } else {
        EXPECT_FALSE(is_latched) << where;
      }
      if (!saved.ok() && !is_latched) {
        EXPECT_EQ(saved.status().code(), error.code()) << where;
        const ErrorReason reason = GetErrorReason(error);
        EXPECT_EQ(GetErrorReason(saved.status()),
                  reason == ErrorReason::kUnspecified ? ErrorReason::kDiskFailed : reason)
            << where;
      }
      const int64_t version = LoadedVersion(*files->AfterCrash(PowerLoss::kNothing), versions_);
      EXPECT_TRUE(version == 3 || (version == 2 && !saved.ok())) << where;
      if (is_latched) {
        EXPECT_THAT((*store)->FolderOf("m").Save(*versions_.model, versions_[4]),
                    AllOf(StatusIs(absl::StatusCode::kUnavailable, HasSubstr("read-only")),
                          ReasonIs(ErrorReason::kStoreReadOnly)));
        EXPECT_THAT((*store)->DeleteModel("m"), ReasonIs(ErrorReason::kStoreReadOnly));
        continue;
      }
      // It heals by itself.
      EXPECT_THAT((*store)->FolderOf("m").Save(*versions_.model, versions_[3]), IsOk()) << where;
      EXPECT_EQ(LoadedVersion(*files->AfterCrash(PowerLoss::kNothing), versions_), 3) << where;
      EXPECT_THAT((*store)->FolderOf("m").Save(*versions_.model, versions_[4]), IsOk()) << where;
      EXPECT_EQ(LoadedVersion(*files->AfterCrash(PowerLoss::kNothing), versions_), 4) << where;
      if (HasFailure()) return;
    }
  }
}

TEST_F(CheckpointFaultTest, AnyFailedOperationOfAStartIsSaidAndHarmless) {
  for (const absl::Status& error : {DiskError(), DiskFull(), ReadOnlyDisk()}) {
    for (int64_t fail = 0;; ++fail) {
      auto files = Machine(2);
      auto operation = std::make_shared<std::string>();
      files->set_hook(FailAt(fail, error, operation));
      {
        const auto store = OpenStore(*files);
        if (operation->empty()) {
          EXPECT_THAT(store, IsOk());
          break;
        }
        // There is nothing in a start that it can do without.
        EXPECT_EQ(store.status().code(), error.code()) << *operation << " " << fail;
        if (error == DiskFull()) {
          EXPECT_THAT(store.status().message(), HasSubstr("the data directory is full"));
        }
      }
      // The lock is free, and nothing has been lost.
      EXPECT_THAT(OpenStore(*files), IsOk()) << *operation << " " << fail;
      EXPECT_EQ(LoadedVersion(*files->AfterCrash(PowerLoss::kNothing), versions_), 2)
          << *operation << " " << fail;
      if (HasFailure()) return;
    }
  }
}

TEST_F(CheckpointFaultTest, ADiskThatIsFullIsNoticedBeforeAnythingIsWritten) {
  auto files = Machine(1);
  const auto store = OpenStore(*files);
  ASSERT_THAT(store, IsOk());
  files->set_free_bytes(1000);
  EXPECT_THAT((*store)->FolderOf("m").Save(*versions_.model, versions_[2]),
              AllOf(StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("the disk has 1000")),
                    ReasonIs(ErrorReason::kDiskFull)));
  EXPECT_EQ(versions_.model->durable().step(), 10);
  for (const std::string& path : files->AllPaths()) {
    EXPECT_FALSE(absl::StrContains(path, "version-7-2")) << path;
  }
  files->set_free_bytes(int64_t{1} << 30);
  EXPECT_THAT((*store)->FolderOf("m").Save(*versions_.model, versions_[2]), IsOk());
}

TEST_F(CheckpointFaultTest, ADiskThatIsFullOfWhatRetentionLetsGoHealsByItself) {
  // Whether that is noticed before anything is written, or by a write.
  for (const bool is_noticed : {true, false}) {
    auto files = Machine(2);  // As many as are kept.
    const auto store = OpenStore(*files);
    ASSERT_THAT(store, IsOk());
    ASSERT_THAT((*store)->FolderOf("m").PutLabel({.name = "l", .id = versions_[1]->record.id()}),
                IsOk());
    ASSERT_THAT((*store)->FolderOf("m").Save(*versions_.model, versions_[3]), IsOk());
    bool is_full = true;
    files->set_hook([&](const std::string& operation, const std::string& path) {
      if (operation == "remove" && absl::StrContains(path, "version-7-1")) is_full = false;
      if (operation == "free") files->set_free_bytes(is_full && is_noticed ? 1000 : 1 << 30);
      return operation == "append" && is_full && !absl::StrContains(path, "LABELS")
                 ? DiskFull()
                 : absl::OkStatus();
    });
    EXPECT_THAT((*store)->FolderOf("m").Save(*versions_.model, versions_[4]),
                ReasonIs(ErrorReason::kDiskFull));
    EXPECT_EQ((*store)->FolderOf("m").ListNames()->size(), 3u);
    ASSERT_THAT((*store)->FolderOf("m").RemoveLabel("l"), IsOk());
    EXPECT_THAT((*store)->FolderOf("m").Save(*versions_.model, versions_[4]), IsOk());
    EXPECT_EQ((*store)->FolderOf("m").ListNames()->size(), 2u);
    EXPECT_EQ(LoadedVersion(*files->AfterCrash(PowerLoss::kNothing), versions_), 4);
  }
}

TEST_F(CheckpointFaultTest, AFailedSaveRemovesItsTemporaryFiles) {
  auto files = Machine(1);
  const auto store = OpenStore(*files);
  ASSERT_THAT(store, IsOk());
  files->set_hook([](const std::string& operation, const std::string& path) {
    return operation == "append" && absl::StrContains(path, "raw") ? DiskFull() : absl::OkStatus();
  });
  EXPECT_THAT((*store)->FolderOf("m").Save(*versions_.model, versions_[2]),
              ReasonIs(ErrorReason::kDiskFull));
  EXPECT_THAT((*store)->data().health(), IsOk());
  for (const std::string& path : files->AllPaths()) {
    EXPECT_FALSE(absl::StrContains(path, ".tmp-")) << path;
  }
}

TEST_F(CheckpointFaultTest, ADiskThatCannotBeReadStopsTheStart) {
  auto files = Machine(2);
  for (int64_t fail = 0;; ++fail) {
    auto operation = std::make_shared<std::string>();
    const auto now = files->AfterCrash(PowerLoss::kNone);
    const auto store = OpenStore(*now);
    ASSERT_THAT(store, IsOk());
    now->set_hook(FailAt(fail, DiskError(), operation));
    ModelStore models(TestDevice(), SmallBlocks());
    const auto report = (*store)->LoadAll(models);
    if (operation->empty()) {
      EXPECT_THAT(report, IsOk());
      break;
    }
    // Nothing is set aside because of it.
    EXPECT_THAT(report, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("Input/output error")));
    EXPECT_EQ(LoadedVersion(*now->AfterCrash(PowerLoss::kNone), versions_), 2);
    if (HasFailure()) return;
  }
}

TEST_F(CheckpointFaultTest, ACrashWhileDeletingKeepsOrDeletesTheModel) {
  for (int64_t stop = 0;; ++stop) {
    auto files = Machine(1);
    const auto store = OpenStore(*files);
    ASSERT_THAT(store, IsOk());
    auto count = std::make_shared<int64_t>(0);
    files->set_hook(StopAt(stop, count));
    const bool is_deleted = (*store)->DeleteModel("m").ok();
    const bool is_complete = *count <= stop;
    for (const PowerLoss loss : {PowerLoss::kNone, PowerLoss::kNothing, PowerLoss::kAnything}) {
      const int64_t version = LoadedVersion(*files->AfterCrash(loss, 1), versions_);
      EXPECT_TRUE(version == 0 || (version == 1 && !is_deleted)) << stop;
    }
    if (is_complete) break;
  }
}

TEST_F(CheckpointFaultTest, ADeletedCheckpointStaysAwayOnceThatWasOk) {
  const std::string name = CheckpointName({kTestIncarnation, 1, 10});
  for (const absl::Status& error : {DiskError(), DiskFull(), ReadOnlyDisk()}) {
    for (int64_t fail = 0;; ++fail) {
      auto files = Machine(2);
      const auto store = OpenStore(*files);
      ASSERT_THAT(store, IsOk());
      auto operation = std::make_shared<std::string>();
      files->set_hook(FailAt(fail, error, operation));
      absl::Status deleted = (*store)->FolderOf("m").Delete(name);
      if (operation->empty()) {
        EXPECT_THAT(deleted, IsOk());
        break;
      }
      const std::string where = absl::StrCat(*operation, " ", fail, " ", deleted.ToString());
      if (!deleted.ok()) deleted = (*store)->FolderOf("m").Delete(name);
      EXPECT_EQ(deleted.ok(), (*store)->data().health().ok()) << where;
      // The power goes now, not after the next sync.
      const auto after = files->AfterCrash(PowerLoss::kNothing);
      if (deleted.ok()) {
        EXPECT_THAT(after->Exists(absl::StrCat("/data/models/m/checkpoints/", name)),
                    IsOkAndHolds(false))
            << where;
      }
      EXPECT_EQ(LoadedVersion(*after, versions_), 2) << where;
    }
  }
}

}  // namespace
}  // namespace ema
