// SPDX-License-Identifier: Apache-2.0
//
// Saves of a model on several servers: when they are written, committed and removed.
#include "server/checkpoint/partitioned_saves.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/checkpoint/checkpoint_store.h"
#include "tests/checkpoint/test_partitions.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::_;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const absl::Time kNow = absl::FromUnixSeconds(1'760'000'000);

absl::Status Fenced() {
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced, "newer incarnation");
}
absl::Status RegistryUnavailable() {
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kRegistryUnavailable, "no answer");
}
absl::Status InUse() {
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kCheckpointInUse, "base");
}

// Has all partitions in this process, and records the calls.
class FakeSaves final : public PartitionedSaves {
 public:
  FakeSaves(FakeFileSystem& files, TestPartitions& partitions)
      : files_(files), partitions_(partitions) {}

  absl::StatusOr<CheckpointManifest> Write(const std::string& path, Model& home,
                                           const Snapshot& snapshot,
                                           const WriteOptions& options) override {
    calls.push_back(absl::StrCat("write ", snapshot.record.step));
    const auto numbers = partitions_.NumberFiles(options.max_file_bytes);
    std::vector<CheckpointManifest> parts;
    for (size_t i = 0; i < partitions_.count(); ++i) {
      if (i == 1) EMA_RETURN_IF_ERROR(write_error);
      WriteOptions own = options;
      own.file_numbers = numbers[i];
      EMA_ASSIGN_OR_RETURN(
          parts.emplace_back(),
          WritePart(files_, latch_, path, *partitions_[i].model, *partitions_[i].snapshot, own));
    }
    absl::StatusOr<CheckpointManifest> whole =
        MergeParts(files_, latch_, path, home, std::move(parts));
    if (on_written) on_written();
    return whole;
  }

  absl::Status Commit(Model& home, const Version& record, int64_t total_bytes, bool keep) override {
    calls.push_back(absl::StrCat("commit ", record.step, keep ? " keep" : ""));
    EXPECT_GT(total_bytes, 0);
    // Nothing says yet that the version is durable.
    EXPECT_LT(home.durable().step(), record.step + (keep ? 1 : 0));
    const std::string folder = "/data/models/m/checkpoints/";
    EXPECT_THAT(files_.Exists(folder + CheckpointName(IdOf(record))), IsOkAndHolds(true));
    if (!keep) {
      const auto latest = files_.ReadSmallFile(folder + "LATEST", 1024);
      EXPECT_FALSE(latest.ok() && absl::StrContains(*latest, CheckpointName(IdOf(record))));
    }
    return commit_error;
  }

  absl::StatusOr<RecordedCheckpoints> Recorded(const std::string&) const override {
    return absl::UnimplementedError("no test reads checkpoints");
  }

  absl::Status Remove(Model&, const VersionId& id) override {
    calls.push_back(absl::StrCat("remove ", id.version));
    return id.version == in_use_version ? InUse() : remove_error;
  }

  absl::StatusOr<std::shared_ptr<const Manifest>> WholeManifest(const Model&) override {
    return absl::UnimplementedError("no test synthesizes an average");
  }
  absl::Status Synthesize(Model&, const SynthesisOrder&) override {
    return absl::UnimplementedError("no test synthesizes an average");
  }

  absl::Status RollBack(Model&, const VersionId&) override {
    return absl::UnimplementedError("no test rolls back");
  }

  std::vector<std::string> calls;
  std::function<void()> on_written;
  absl::Status write_error;
  absl::Status commit_error;
  absl::Status remove_error;
  int64_t in_use_version = 0;

 private:
  FakeFileSystem& files_;
  TestPartitions& partitions_;
  SyncLatch latch_;
};

class PartitionedSavesTest : public testing::Test {
 protected:
  PartitionedSavesTest()
      : partitions_(EveryKindOfModel("m"), {5, 7}),
        saves_(files_, partitions_),
        store_(*CheckpointStore::Open(files_,
                                      {.data_dir = "/data",
                                       .member = "a",
                                       .partitions = &saves_,
                                       .keep_count = 1,
                                       .max_file_bytes = 100},
                                      kNow)) {}

  Model& home() { return *partitions_[0].model; }
  CheckpointFolder& folder() { return store_->FolderOf("m"); }

  absl::Status Save(const CheckpointFolder::SaveOptions& options = {}) {
    return folder().Save(home(), partitions_[0].snapshot, options).status();
  }
  absl::Status PushAndSave(int64_t step) {
    partitions_.Push(step);
    return Save();
  }
  // The names in the folder of checkpoints, but for LATEST.
  std::vector<std::string> Names() {
    const auto entries = files_.ListDirectory("/data/models/m/checkpoints");
    std::vector<std::string> names;
    for (const DirectoryEntry& entry : *entries) {
      if (entry.is_directory) names.push_back(entry.name);
    }
    return names;
  }
  static std::string Name(int64_t step) {
    return CheckpointName({kTestIncarnation, step / 10, step});
  }

  FakeFileSystem files_;
  TestPartitions partitions_;
  FakeSaves saves_;
  std::unique_ptr<CheckpointStore> store_;
};

TEST_F(PartitionedSavesTest, ASaveIsDurableOnceTheRegistryHasIt) {
  ASSERT_THAT(PushAndSave(10), IsOk());
  EXPECT_THAT(saves_.calls, ElementsAre("write 10", "commit 10"));
  EXPECT_EQ(home().durable().step(), 10);
  EXPECT_THAT(Names(), ElementsAre(Name(10)));
  // Nothing is left to do, but to keep it.
  ASSERT_THAT(Save(), IsOk());
  ASSERT_THAT(Save({.keep = true}), IsOk());
  EXPECT_THAT(saves_.calls, ElementsAre("write 10", "commit 10", "commit 10 keep"));
}

TEST_F(PartitionedSavesTest, TheHomeLeavesItToThePartitionsToReadWeightsBack) {
  int read_count = 0;
  saves_.on_written = [&] {
    files_.set_hook([&](const std::string& operation, const std::string& path) {
      if (operation == "read" && absl::EndsWith(path, ".safetensors")) ++read_count;
      return absl::OkStatus();
    });
  };
  ASSERT_THAT(PushAndSave(10), IsOk());
  EXPECT_EQ(read_count, 0);
  // It still finds that a file is missing.
  saves_.on_written = [&] {
    for (const std::string& path : files_.AllPaths()) {
      if (absl::EndsWith(path, ".safetensors") && absl::StrContains(path, Name(20))) {
        EXPECT_THAT(files_.RemoveFile(path), IsOk());
        return;
      }
    }
  };
  EXPECT_THAT(PushAndSave(20), ReasonIs(ErrorReason::kCheckpointCorrupt));
}

TEST_F(PartitionedSavesTest, ASingleServerLoadsTheGroupsFolder) {
  ASSERT_THAT(PushAndSave(10), IsOk());
  store_.reset();
  EMA_ASSERT_OK_AND_ASSIGN(const auto single,
                           CheckpointStore::Open(files_, {.data_dir = "/data"}, kNow));
  ModelStore models(TestDevice(), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(const LoadReport report, single->LoadAll(models));
  ASSERT_THAT(report.loaded, SizeIs(1));
  const std::shared_ptr<Model> loaded = *models.Get("m");
  ExpectPartOf(*loaded, **loaded->history().Pin(0), partitions_.whole(), 0, 12);
}

TEST_F(PartitionedSavesTest, APartThatFailsLeavesNothing) {
  ASSERT_THAT(PushAndSave(10), IsOk());
  saves_.write_error = absl::UnavailableError("member \"b\": the disk failed");
  EXPECT_THAT(PushAndSave(20), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("member \"b\"")));
  EXPECT_EQ(home().durable().step(), 10);
  EXPECT_THAT(Names(), ElementsAre(Name(10)));
  EXPECT_THAT(saves_.calls, ElementsAre("write 10", "commit 10", "write 20"));
  saves_.write_error = absl::OkStatus();
  ASSERT_THAT(Save(), IsOk());
  EXPECT_EQ(home().durable().step(), 20);
}

TEST_F(PartitionedSavesTest, AFencedCheckpointIsNotDurableAndIsRemoved) {
  ASSERT_THAT(PushAndSave(10), IsOk());
  saves_.commit_error = Fenced();
  EXPECT_THAT(PushAndSave(20),
              AllOf(StatusIs(absl::StatusCode::kAborted, _), ReasonIs(ErrorReason::kFenced)));
  EXPECT_EQ(home().durable().step(), 10);
  EMA_ASSERT_OK_AND_ASSIGN(const std::vector<CheckpointEntry> listed, folder().ListNames());
  ASSERT_THAT(listed, SizeIs(1));
  EXPECT_EQ(listed[0].name, Name(10));
  saves_.commit_error = absl::OkStatus();
  ASSERT_THAT(PushAndSave(30), IsOk());
  EXPECT_THAT(Names(), ElementsAre(Name(30)));
  EXPECT_THAT(saves_.calls, ElementsAre("write 10", "commit 10", "write 20", "commit 20",
                                        "remove 2", "write 30", "commit 30", "remove 1"));
}

TEST_F(PartitionedSavesTest, AFencedCheckpointThatTheRegistryNeedsStays) {
  // The commit had reached the registry, and the next incarnation has begun from it.
  saves_.commit_error = RegistryUnavailable();
  EXPECT_THAT(PushAndSave(10), StatusIs(absl::StatusCode::kUnavailable, _));
  saves_.commit_error = Fenced();
  saves_.in_use_version = 1;
  EXPECT_THAT(Save(), StatusIs(absl::StatusCode::kAborted, _));
  EXPECT_THAT(Names(), ElementsAre(Name(10)));
  EXPECT_EQ(home().durable().step(), 0);
  EXPECT_THAT(saves_.calls, ElementsAre("write 10", "commit 10", "commit 10", "remove 1"));
}

TEST_F(PartitionedSavesTest, AFailedCommitIsRepeatedWithoutWritingAgain) {
  saves_.commit_error = RegistryUnavailable();
  EXPECT_THAT(PushAndSave(10), ReasonIs(ErrorReason::kRegistryUnavailable));
  EXPECT_EQ(home().durable().step(), 0);
  saves_.commit_error = absl::OkStatus();
  ASSERT_THAT(Save(), IsOk());
  EXPECT_EQ(home().durable().step(), 10);
  EXPECT_THAT(saves_.calls, ElementsAre("write 10", "commit 10", "commit 10"));
}

TEST_F(PartitionedSavesTest, SavesDoNotFillTheDiskWhileTheRegistryIsUnavailable) {
  saves_.commit_error = RegistryUnavailable();
  saves_.remove_error = RegistryUnavailable();
  EXPECT_THAT(PushAndSave(10), ReasonIs(ErrorReason::kRegistryUnavailable));
  EXPECT_THAT(PushAndSave(20), ReasonIs(ErrorReason::kRegistryUnavailable));
  EXPECT_THAT(PushAndSave(30), ReasonIs(ErrorReason::kRegistryUnavailable));
  EXPECT_THAT(Names(), ElementsAre(Name(10)));
  saves_.commit_error = absl::OkStatus();
  saves_.remove_error = absl::OkStatus();
  ASSERT_THAT(Save(), IsOk());
  EXPECT_THAT(Names(), ElementsAre(Name(30)));
}

TEST_F(PartitionedSavesTest, ADeletedModelLeavesNothingToRemove) {
  saves_.commit_error = RegistryUnavailable();
  EXPECT_THAT(PushAndSave(10), ReasonIs(ErrorReason::kRegistryUnavailable));
  ASSERT_THAT(folder().SetAsideAll(), IsOk());
  saves_.commit_error = absl::OkStatus();
  ASSERT_THAT(PushAndSave(20), IsOk());
  EXPECT_THAT(saves_.calls, ElementsAre("write 10", "commit 10", "write 20", "commit 20"));
}

TEST_F(PartitionedSavesTest, TheRegistryForgetsACheckpointBeforeItsFilesGo) {
  ASSERT_THAT(PushAndSave(10), IsOk());
  saves_.remove_error = RegistryUnavailable();
  ASSERT_THAT(PushAndSave(20), IsOk());
  EXPECT_THAT(Names(), ElementsAre(Name(10), Name(20)));
  EXPECT_THAT(folder().Delete(Name(10), &home()), ReasonIs(ErrorReason::kRegistryUnavailable));
  EXPECT_THAT(Names(), ElementsAre(Name(10), Name(20)));
  // One that the registry needs keeps no other from being removed.
  saves_.remove_error = absl::OkStatus();
  saves_.in_use_version = 2;
  ASSERT_THAT(PushAndSave(30), IsOk());
  EXPECT_THAT(Names(), ElementsAre(Name(20), Name(30)));
  EXPECT_THAT(folder().Delete(Name(20), &home()), ReasonIs(ErrorReason::kCheckpointInUse));
  saves_.in_use_version = 0;
  EXPECT_THAT(folder().Delete(Name(20), &home()), IsOk());
  EXPECT_THAT(Names(), ElementsAre(Name(30)));
}

TEST_F(PartitionedSavesTest, NewSettingsDoNotReplaceACheckpoint) {
  ASSERT_THAT(PushAndSave(10), IsOk());
  ASSERT_THAT(home().attached_files().AddPart("config.json", 2, 0, "{}"), IsOk());
  saves_.calls.clear();
  ASSERT_THAT(Save({.with_new_settings = true}), IsOk());
  EXPECT_THAT(saves_.calls, IsEmpty());
  ASSERT_THAT(PushAndSave(20), IsOk());
  EXPECT_THAT(files_.Exists(folder().Path(Name(20)) + "/tracks/fast/config.json"),
              IsOkAndHolds(true));
}

TEST_F(PartitionedSavesTest, APartialCheckpointIsNoVersionOfTheRegistry) {
  partitions_.Push(10);
  ASSERT_THAT(Save({.tracks = {"raw"}}), IsOk());
  EXPECT_THAT(saves_.calls, ElementsAre("write 10"));
  EXPECT_EQ(home().durable().step(), 0);
  ASSERT_THAT(Names(), SizeIs(1));
  EXPECT_THAT(folder().Delete(Names()[0], &home()), IsOk());
  EXPECT_THAT(saves_.calls, ElementsAre("write 10"));
}

}  // namespace
}  // namespace ema
