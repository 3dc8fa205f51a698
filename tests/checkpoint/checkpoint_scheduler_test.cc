// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_scheduler.h"

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/checkpoint/checkpoint_store.h"
#include "tests/core/test_model.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr char kFolder[] = "/data/models/m/checkpoints";

ModelConfig SnapshotModel(const std::string& interval = "10ba") {
  ModelConfig config;
  config.name = "m";
  config.manifest = MakeManifest({{"w", Dtype::kFloat32, {3}}});
  config.tracks = {{.name = "a",
                    .schedule = MakeSchedule("sigma_rel=0.05"),
                    .snapshot_interval = *TrainingDuration::Parse(interval)},
                   {"raw", MakeSchedule("copy")}};
  return config;
}

ModelConfig PlainModel() {
  ModelConfig config = SnapshotModel();
  config.tracks = {{"raw", MakeSchedule("copy")}};
  return config;
}

std::unique_ptr<CheckpointStore> OpenStore(FileSystem& files, int64_t keep_count = 1) {
  auto store = CheckpointStore::Open(files, {.data_dir = "/data", .keep_count = keep_count});
  EXPECT_THAT(store, IsOk());
  return *std::move(store);
}

std::string PathOf(const Snapshot& snapshot) {
  return JoinPath(kFolder, CheckpointName(IdOf(snapshot.record)));
}

// Steps of the checkpoints, those with a KEEP file negative.
std::vector<int64_t> SavedSteps(FakeFileSystem& files) {
  std::vector<int64_t> steps;
  const auto entries = files.ListDirectory(kFolder);
  EXPECT_THAT(entries, IsOk());
  for (const DirectoryEntry& entry : *entries) {
    const auto id = ParseCheckpointName(entry.name);
    if (!id.has_value()) continue;
    const bool is_kept = *files.Exists(JoinPath(JoinPath(kFolder, entry.name), "KEEP"));
    steps.push_back(is_kept ? -id->step : id->step);
  }
  return steps;
}

// A server's parts around one model. The fake files are touched by the scheduler's thread only
// between a commit and AwaitIdle().
class CheckpointSchedulerTest : public testing::Test {
 protected:
  void Start(const ModelConfig& config = SnapshotModel()) {
    store_ = OpenStore(files_);
    scheduler_ = std::make_unique<CheckpointScheduler>(CheckpointScheduler::Options{
        .policy = policy_,
        .save =
            [this](Model& model, const SnapshotRef& snapshot, bool keep) {
              const absl::Status status = store_->FolderOf(model.config().name)
                                              .Save(model, snapshot, {.keep = keep})
                                              .status();
              absl::MutexLock lock(&mu_);
              tried_.push_back(snapshot->record.step);
              mu_.Await(absl::Condition(&may_end_));
              return status;
            },
        .on_error =
            [this](const Model&, const SnapshotRef&, const absl::Status& status) {
              absl::MutexLock lock(&mu_);
              errors_.push_back(status);
            },
        .retry_delay = retry_delay_});
    ModelStore::Options options = SmallBlocks();
    options.model.on_commit = [this](const std::shared_ptr<Model>& model,
                                     const Snapshot& snapshot) {
      scheduler_->OnCommit(model, snapshot);
    };
    models_ = std::make_unique<ModelStore>(TestDevice(), options);
    model_ = models_->Create(config)->model;
    rank_ = std::make_unique<TestRank>(model_, "launch");
    ASSERT_THAT(rank_->Join(), IsOk());
  }

  void Push(int64_t step) { EXPECT_THAT(rank_->Push(step, BytesOf({1, 2, 3})), IsOk()); }

  // Saves do not end from here on, or do again.
  void HoldSaves() { SetMayEnd(false); }
  void LetSavesEnd() { SetMayEnd(true); }

  // Until `count` saves have been tried in all.
  std::vector<int64_t> AwaitTried(size_t count) {
    absl::MutexLock lock(&mu_);
    const auto done = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return tried_.size() >= count; };
    mu_.Await(absl::Condition(&done));
    return tried_;
  }

  // The scheduler's thread is busy with another model until LetSavesEnd().
  void KeepBusy() {
    ModelConfig other = PlainModel();
    other.name = "other";
    TestRank rank(models_->Create(other)->model, "launch");
    ASSERT_THAT(rank.Join(), IsOk());
    HoldSaves();
    ASSERT_THAT(rank.Push(10, BytesOf({1, 2, 3})), IsOk());
    AwaitTried(1);
  }

  // Pushes the steps and lets each save end before the next push.
  void PushAndSettle(const std::vector<int64_t>& steps) {
    for (const int64_t step : steps) {
      Push(step);
      scheduler_->AwaitIdle();
    }
  }

  void SetMayEnd(bool may_end) {
    absl::MutexLock lock(&mu_);
    may_end_ = may_end;
  }

  FakeFileSystem files_;
  std::unique_ptr<CheckpointStore> store_;
  std::unique_ptr<ModelStore> models_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<TestRank> rank_;
  SavePolicy policy_;
  absl::Duration retry_delay_ = absl::ZeroDuration();
  absl::Mutex mu_;
  bool may_end_ ABSL_GUARDED_BY(mu_) = true;
  std::vector<int64_t> tried_ ABSL_GUARDED_BY(mu_);
  std::vector<absl::Status> errors_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<CheckpointScheduler> scheduler_;  // First to go: its thread uses the others.
};

TEST_F(CheckpointSchedulerTest, SavesTheFirstVersionOfEachInterval) {
  Start();
  PushAndSettle({1, 9, 10, 11, 19, 25, 29, 30, 47});
  EXPECT_THAT(AwaitTried(4), ElementsAre(10, 25, 30, 47));
  scheduler_->Stop();
  EXPECT_THAT(SavedSteps(files_), ElementsAre(-10, -25, -30, -47));
  EXPECT_EQ(model_->durable().kept_time()->Get(TimeUnit::kBatch), 47);
  EXPECT_THAT(errors_, IsEmpty());
}

TEST_F(CheckpointSchedulerTest, ATrackWithoutAnIntervalLeavesNothing) {
  ModelConfig config = SnapshotModel();
  config.tracks[0].snapshot_interval.reset();
  Start(config);
  PushAndSettle({10, 20});
  scheduler_->Stop();
  EXPECT_THAT(tried_, IsEmpty());
}

TEST_F(CheckpointSchedulerTest, ATrackThatIsNotUpdatedOrHasNotStartedIsNotDue) {
  ModelConfig config = SnapshotModel();
  config.tracks[0].schedule = MakeSchedule("sigma_rel=0.05, update_interval=7ba, ema_start=20ba");
  Start(config);
  // Updated at 20, which is its start, and at 21, 34 and 35.
  PushAndSettle({1, 10, 20, 21, 34, 35, 39});
  scheduler_->Stop();
  EXPECT_THAT(AwaitTried(2), ElementsAre(20, 34));
}

TEST_F(CheckpointSchedulerTest, WhatIsDueDuringASaveIsTakenAfterIt) {
  Start();
  HoldSaves();
  Push(10);
  AwaitTried(1);
  Push(20);
  Push(30);
  LetSavesEnd();
  scheduler_->AwaitIdle();
  // Commits did not wait, nor does it for another of them: training may have ended.
  EXPECT_THAT(AwaitTried(2), ElementsAre(10, 30));
  PushAndSettle({31, 32});
  scheduler_->Stop();
  EXPECT_THAT(AwaitTried(2), ElementsAre(10, 30));
}

TEST_F(CheckpointSchedulerTest, AFailedSaveIsTriedAgainAndToldOnce) {
  Start();
  files_.set_hook([](const std::string& operation, const std::string& path) {
    return operation == "create" && absl::StrContains(path, "KEEP")
               ? absl::UnavailableError("Input/output error")
               : absl::OkStatus();
  });
  PushAndSettle({10, 20, 25});
  EXPECT_THAT(AwaitTried(3), ElementsAre(10, 20, 25));
  scheduler_->Stop();
  EXPECT_EQ(errors_.size(), 1u);
  EXPECT_FALSE(model_->durable().kept_time().has_value());
  files_.set_hook(nullptr);
}

TEST_F(CheckpointSchedulerTest, AfterAnErrorItWaits) {
  retry_delay_ = absl::Hours(1);
  Start();
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "mkdir" ? absl::UnavailableError("Input/output error") : absl::OkStatus();
  });
  Push(10);
  AwaitTried(1);
  for (int64_t step = 20; step < 2000; step += 10) Push(step);
  scheduler_->Stop();
  EXPECT_THAT(AwaitTried(1), ElementsAre(10));
}

TEST_F(CheckpointSchedulerTest, SavesAlthoughReadersHoldAllVersions) {
  ModelConfig config = SnapshotModel();
  config.max_pinned_versions = 1;
  Start(config);
  Push(1);
  {
    const SnapshotRef read = *model_->history().Pin(0);
    PushAndSettle({10, 11, 12});
  }
  PushAndSettle({13});
  scheduler_->Stop();
  EXPECT_THAT(AwaitTried(1), ElementsAre(10));
  EXPECT_THAT(errors_, IsEmpty());
}

TEST_F(CheckpointSchedulerTest, ADeletedModelIsNoError) {
  Start();
  HoldSaves();
  Push(10);
  AwaitTried(1);
  models_->Delete("m");
  LetSavesEnd();
  EXPECT_THAT(store_->DeleteModel("m"), IsOk());
  scheduler_->Stop();
  EXPECT_THAT(errors_, IsEmpty());
}

// --- By commits, time and steps ---

TEST_F(CheckpointSchedulerTest, SavesTheNewestVersionEveryNCommits) {
  policy_.every_commits = 3;
  Start(PlainModel());
  PushAndSettle({1, 2, 3, 4, 5, 6, 7});
  EXPECT_THAT(AwaitTried(2), ElementsAre(3, 6));
  // A save by somebody else counts, too.
  EXPECT_THAT(store_->FolderOf("m").Save(*model_, *model_->history().Pin(0)), IsOk());
  PushAndSettle({8, 9, 10, 11});
  scheduler_->Stop();
  EXPECT_THAT(AwaitTried(3), ElementsAre(3, 6, 10));
  EXPECT_THAT(errors_, IsEmpty());
}

TEST_F(CheckpointSchedulerTest, SavesWhenAStepHasReachedAMultiple) {
  policy_.step_multiple = 10;
  Start(PlainModel());
  PushAndSettle({3, 9, 10, 11, 19, 25, 29, 30, 47});
  scheduler_->Stop();
  EXPECT_THAT(AwaitTried(4), ElementsAre(10, 25, 30, 47));
  EXPECT_FALSE(model_->durable().kept_time().has_value());
}

TEST_F(CheckpointSchedulerTest, AStepThatIsAMultipleIsSavedItselfHoweverLate) {
  policy_.step_multiple = 10;
  Start(PlainModel());
  KeepBusy();
  Push(10);
  Push(11);
  LetSavesEnd();
  scheduler_->AwaitIdle();
  scheduler_->Stop();
  EXPECT_THAT(SavedSteps(files_), ElementsAre(10));
}

TEST_F(CheckpointSchedulerTest, WhatIsDueWhileAStepWaitsToBeSavedItselfIsSavedAfterIt) {
  policy_.step_multiple = 10;
  Start(SnapshotModel("15ba"));
  KeepBusy();
  Push(10);
  Push(16);  // Due for its interval, and the last of the training.
  LetSavesEnd();
  scheduler_->AwaitIdle();
  scheduler_->Stop();
  EXPECT_THAT(AwaitTried(3), ElementsAre(10, 10, 16));
}

TEST_F(CheckpointSchedulerTest, ASecondLookSavesAlthoughReadersHoldAllVersions) {
  policy_.every_commits = 2;
  ModelConfig config = PlainModel();
  config.max_pinned_versions = 1;
  Start(config);
  HoldSaves();
  Push(1);
  Push(2);
  AwaitTried(1);
  const auto read = model_->history().Pin(0);
  EXPECT_THAT(read, IsOk());
  Push(3);
  Push(4);
  LetSavesEnd();
  scheduler_->AwaitIdle();
  scheduler_->Stop();
  EXPECT_THAT(AwaitTried(1), ElementsAre(2, 4));
  EXPECT_THAT(errors_, IsEmpty());
}

TEST_F(CheckpointSchedulerTest, SavesAfterATimeWithoutAnotherCommit) {
  policy_.every = absl::Milliseconds(1);
  Start(PlainModel());
  Push(5);
  EXPECT_THAT(AwaitTried(1), ElementsAre(5));
  scheduler_->AwaitIdle();
  Push(6);
  EXPECT_THAT(AwaitTried(2), ElementsAre(5, 6));
  scheduler_->Stop();
}

TEST_F(CheckpointSchedulerTest, BeforeTheTimeOnlyWhatIsAskedForIsSaved) {
  policy_.every = absl::Hours(1);
  Start(PlainModel());
  PushAndSettle({1, 2, 3});
  scheduler_->SaveNow(model_);
  EXPECT_THAT(AwaitTried(1), ElementsAre(3));
  scheduler_->Stop();
}

TEST_F(CheckpointSchedulerTest, WhatIsAskedForDuringASaveIsSavedAfterIt) {
  Start(PlainModel());
  const auto set_may_end = [this](bool may_end) {
    absl::MutexLock lock(&mu_);
    may_end_ = may_end;
  };
  set_may_end(false);
  Push(1);
  scheduler_->SaveNow(model_);
  AwaitTried(1);
  Push(2);
  scheduler_->SaveNow(model_);
  set_may_end(true);
  scheduler_->AwaitIdle();
  EXPECT_THAT(AwaitTried(1), ElementsAre(1, 2));
  scheduler_->Stop();
}

// Room for one checkpoint, but not for one that is kept, and another.
constexpr int64_t kRoomForOne = (int64_t{1} << 20) + 1000;  // The weights take a few bytes.

TEST_F(CheckpointSchedulerTest, WithoutRoomForOneThatIsKeptWhatIsDueIsSavedAllTheSame) {
  policy_.every_commits = 2;
  Start();
  files_.set_free_bytes(kRoomForOne);
  PushAndSettle({10, 20, 21, 22});
  // Of each second version, the second try is not to keep it.
  EXPECT_THAT(AwaitTried(1), ElementsAre(10, 20, 20, 21, 22, 22));
  EXPECT_THAT(SavedSteps(files_), ElementsAre(22));
  EXPECT_EQ(model_->durable().step(), 22);
  EXPECT_FALSE(model_->durable().kept_time().has_value());
  // It is still due.
  files_.set_free_bytes(int64_t{1} << 40);
  PushAndSettle({23, 24});
  scheduler_->Stop();
  EXPECT_THAT(SavedSteps(files_), ElementsAre(22, -23));
  ASSERT_EQ(errors_.size(), 1u);
  EXPECT_EQ(GetErrorReason(errors_[0]), ErrorReason::kDiskFull);
}

TEST_F(CheckpointSchedulerTest, OneThatIsKeptIsTriedAgainLaterWhileOthersAreSaved) {
  retry_delay_ = absl::Hours(1);
  policy_.step_multiple = 4;
  Start();
  files_.set_free_bytes(kRoomForOne);
  PushAndSettle({10, 11, 12, 13, 15, 16, 17});
  scheduler_->Stop();
  EXPECT_THAT(AwaitTried(1), ElementsAre(10, 10, 12, 16));
  EXPECT_EQ(model_->durable().step(), 16);
  EXPECT_EQ(errors_.size(), 1u);
}

TEST_F(CheckpointSchedulerTest, WithoutRoomForOneThatIsKeptWhatIsAskedForIsSaved) {
  retry_delay_ = absl::Hours(1);
  policy_.every = absl::Milliseconds(1);
  Start();
  files_.set_free_bytes(kRoomForOne);
  Push(10);
  EXPECT_THAT(AwaitTried(2), ElementsAre(10, 10));
  scheduler_->AwaitIdle();
  scheduler_->Stop();
  EXPECT_EQ(model_->durable().step(), 10);
  EXPECT_EQ(errors_.size(), 1u);
}

TEST(IsSaveDueTest, CountsFromWhatIsDurable) {
  const SavePolicy commits{.every_commits = 4};
  const SavePolicy steps{.step_multiple = 100};
  const auto record = [](int64_t version, int64_t step, int64_t incarnation = 7) {
    Version result;
    result.incarnation = incarnation;
    result.number = version;
    result.step = step;
    return result;
  };
  EXPECT_FALSE(IsSaveDue({}, record(1000, 1000), {}, 0));
  EXPECT_FALSE(IsSaveDue(commits, record(3, 3), {}, 0));
  EXPECT_TRUE(IsSaveDue(commits, record(4, 4), {}, 0));
  EXPECT_FALSE(IsSaveDue(commits, record(9, 9), {6, 7}, 6));
  EXPECT_TRUE(IsSaveDue(commits, record(10, 10, 8), {6, 7}, 6));
  EXPECT_FALSE(IsSaveDue(steps, record(1, 99), {}, 0));
  EXPECT_TRUE(IsSaveDue(steps, record(1, 100), {}, 0));
  EXPECT_FALSE(IsSaveDue(steps, record(9, 199), {8, 7}, 100));
  // Rolled back, and that could not be saved.
  EXPECT_TRUE(IsSaveDue(steps, record(9, 50), {8, 7}, 100));
  EXPECT_FALSE(IsSaveDue(steps, record(8, 300), {8, 7}, 100));
}

// --- The store's part ---

struct Versions {
  explicit Versions(const std::vector<int64_t>& steps) : models(TestDevice(), SmallBlocks()) {
    ModelConfig config = SnapshotModel();
    config.max_pinned_versions = 32;
    model = models.Create(config)->model;
    TestRank rank(model, "launch");
    EXPECT_THAT(rank.Join(), IsOk());
    for (const int64_t step : steps) {
      EXPECT_THAT(rank.Push(step, BytesOf({1, 2, 3})), IsOk());
      snapshots.push_back(*model->history().Pin(0));
    }
  }
  ModelStore models;
  std::shared_ptr<Model> model;
  std::vector<SnapshotRef> snapshots;
};

TEST(KeepTest, RetentionLeavesWhatIsKeptAndDoesNotCountIt) {
  FakeFileSystem files;
  const auto store = OpenStore(files, /*keep_count=*/2);
  const Versions versions({10, 20, 30, 40, 50});
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_THAT(
        store->FolderOf("m").Save(*versions.model, versions.snapshots[i], {.keep = i % 2 == 1}),
        IsOk());
  }
  EXPECT_THAT(SavedSteps(files), ElementsAre(-20, 30, -40, 50));
  // Saved already: it only gets the file.
  EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[4], {.keep = true}),
              IsOk());
  EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[2], {.keep = true}),
              IsOk());
  EXPECT_THAT(SavedSteps(files), ElementsAre(-20, -30, -40, -50));
  // By hand.
  EXPECT_THAT(files.RemoveFile(JoinPath(PathOf(*versions.snapshots[1]), "KEEP")), IsOk());
  EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[0]), IsOk());
  EXPECT_THAT(SavedSteps(files), ElementsAre(10, 20, -30, -40, -50));
}

TEST(KeepTest, WhatIsKeptLeavesRoomForWhatIsNot) {
  FakeFileSystem files;
  const auto store = OpenStore(files);
  const Versions versions({10, 20});
  files.set_free_bytes(kRoomForOne);
  EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[0], {.keep = true}),
              ReasonIs(ErrorReason::kDiskFull));
  EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[1]), IsOk());
}

TEST(KeepTest, AVersionThatACrashLeftBeforeLatestIsNoPartOfWhatFollows) {
  FakeFileSystem files;
  const Versions versions({10, 20});
  {
    const auto store = OpenStore(files);
    EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[0]), IsOk());
    files.set_hook([](const std::string& operation, const std::string& path) {
      return operation == "rename" && absl::StrContains(path, "LATEST")
                 ? absl::UnavailableError("Input/output error")
                 : absl::OkStatus();
    });
    EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[1], {.keep = true}),
                testing::Not(IsOk()));
    files.set_hook(nullptr);
    EXPECT_THAT(SavedSteps(files), ElementsAre(10, -20));
  }
  const auto store = OpenStore(files);
  ModelStore models(TestDevice(), SmallBlocks());
  EXPECT_THAT(store->LoadAll(models), IsOk());
  EXPECT_EQ((*models.Get("m"))->history().latest()->step, 10);
  EXPECT_FALSE((*models.Get("m"))->durable().kept_time().has_value());
  EXPECT_THAT(SavedSteps(files), ElementsAre(10));
  const std::string aside =
      absl::StrCat(kFolder, "/.abandoned-", CheckpointName(IdOf(versions.snapshots[1]->record)));
  EXPECT_TRUE(*files.Exists(aside));
}

TEST(KeepTest, WhatIsHeldIsNotRemoved) {
  FakeFileSystem files;
  const auto store = OpenStore(files);
  const Versions versions({10, 20, 30, 40});
  EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[0]), IsOk());
  {
    EMA_ASSERT_OK_AND_ASSIGN(const auto held, store->FolderOf("m").HoldAll());
    EMA_ASSERT_OK_AND_ASSIGN(const auto held_too, store->FolderOf("m").HoldAll());
    ASSERT_EQ(held->ids().size(), 1u);
    EXPECT_EQ(held->Path(held->ids()[0]), PathOf(*versions.snapshots[0]));
    EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[1]), IsOk());
    EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[2]), IsOk());
    EXPECT_THAT(SavedSteps(files), ElementsAre(10, 30));
  }
  EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[3]), IsOk());
  EXPECT_THAT(SavedSteps(files), ElementsAre(40));
}

TEST(KeepTest, ARestartKnowsWhatIsKept) {
  FakeFileSystem files;
  const Versions versions({10, 20, 30});
  {
    const auto store = OpenStore(files);
    EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[0], {.keep = true}),
                IsOk());
    EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[1], {.keep = true}),
                IsOk());
    EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[2]), IsOk());
  }
  const auto store = OpenStore(files);
  ModelStore models(TestDevice(), SmallBlocks());
  EXPECT_THAT(store->LoadAll(models), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto model, models.Get("m"));
  EXPECT_EQ(model->history().latest()->step, 30);
  EXPECT_EQ(model->durable().kept_time()->Get(TimeUnit::kBatch), 20);
  EXPECT_TRUE(IsKeepDue(**model->history().Pin(0), model->durable().kept_time()));
}

TEST(KeepTest, ACrashNeverLosesWhatWasSaidToBeKept) {
  const Versions versions({10, 20});
  for (int64_t stop = 0;; ++stop) {
    FakeFileSystem files;
    const auto store = OpenStore(files);
    EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions.snapshots[0]), IsOk());
    int64_t count = 0;
    files.set_hook([&](const std::string&, const std::string&) {
      return count++ < stop ? absl::OkStatus() : absl::UnavailableError("Input/output error");
    });
    const bool first =
        store->FolderOf("m").Save(*versions.model, versions.snapshots[0], {.keep = true}).ok();
    const bool second =
        store->FolderOf("m").Save(*versions.model, versions.snapshots[1], {.keep = true}).ok();
    for (const PowerLoss loss : {PowerLoss::kNothing, PowerLoss::kNone}) {
      const auto after = files.AfterCrash(loss);
      const std::vector<int64_t> steps = SavedSteps(*after);
      const auto has = [&](int64_t step) {
        return std::find(steps.begin(), steps.end(), step) != steps.end();
      };
      EXPECT_TRUE(!first || has(-10)) << stop;
      EXPECT_TRUE(!second || has(-20)) << stop;
      // A checkpoint that is to be kept has its file from the first.
      EXPECT_FALSE(has(20)) << stop;
    }
    if (count <= stop) break;
  }
}

TEST_F(CheckpointSchedulerTest, AnExactStepWaitsForItsTurnThoughReadersHoldAnother) {
  policy_.step_multiple = 10;
  Start(PlainModel());
  KeepBusy();
  Push(9);
  {
    const SnapshotRef read = *model_->history().Pin(0);
    Push(10);
    Push(11);
  }
  LetSavesEnd();
  EXPECT_THAT(AwaitTried(2), ElementsAre(10, 10));
}

}  // namespace
}  // namespace ema
