// SPDX-License-Identifier: Apache-2.0
//
// A model that goes back to an earlier version: what is the same as if it had never gone on, who is
// kept out, and what a trainer that resumes can ask.
#include <gmock/gmock.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "tests/core/test_model.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Where the version that a rollback goes to is.
enum class Source { kMemory, kFresh };

class RollbackTest : public testing::Test {
 protected:
  static constexpr int64_t kCount = 3000;  // Three blocks.

  explicit RollbackTest(ModelStore::Options options = SmallBlocks()) {
    options.model.on_commit = [this](const std::shared_ptr<Model>&, const Snapshot& snapshot) {
      absl::MutexLock lock(&mu_);
      committed_.push_back(snapshot.record.number);
    };
    options.model.log = [this](const LogEvent& event) {
      if (event.level != LogLevel::kWarning || event.name == "step dropped") return;
      absl::MutexLock lock(&mu_);
      warnings_.push_back(ToText(event));
    };
    store_ = std::make_unique<ModelStore>(TestDevice(), options);
    model_ = Create("m");
  }

  static std::vector<TrackConfig> Tracks() {
    std::vector<TrackConfig> tracks = {
        {.name = "ema", .schedule = MakeSchedule("smoothing=0.5")},
        {.name = "slow", .schedule = MakeSchedule("10ba", "3ba")},
        {.name = "raw", .schedule = MakeSchedule("copy")},
        {.name = "zero", .schedule = MakeSchedule("smoothing=0.9, zero_init=debias")},
        {.name = "fine", .schedule = MakeSchedule("5ba")},
        {.name = "mean", .schedule = MakeSchedule("mean_of_last=3")}};
    tracks[4].dtype = Dtype::kFloat64;
    return tracks;
  }

  std::shared_ptr<Model> Create(const std::string& name) {
    const auto created = store_->Create({.name = name,
                                         .manifest = MakeManifest({{"w", Dtype::kFloat32, {kCount}},
                                                                   {"steps", Dtype::kInt64, {1}}}),
                                         .tracks = Tracks(),
                                         .max_pinned_versions = 4});
    EXPECT_THAT(created, IsOk());
    return created->model;
  }

  // What a trainer has at a step.
  static std::vector<std::byte> Weights(int64_t step, float scale = 1) {
    std::vector<float> values(kCount + 2);
    for (int64_t i = 0; i < kCount; ++i) {
      values[i] = scale * (0.1f * static_cast<float>(step) + static_cast<float>(i % 97) / 7);
    }
    std::vector<std::byte> bytes = BytesOf(values);
    std::memcpy(bytes.data() + kCount * 4, &step, sizeof(step));
    return bytes;
  }

  static std::unique_ptr<TestRank> OpenRun(const std::shared_ptr<Model>& model,
                                           const std::string& launch_id) {
    auto rank = std::make_unique<TestRank>(model, launch_id);
    EXPECT_THAT(rank->Join(), IsOk());
    return rank;
  }
  // Steps `first` to `last`, a version each.
  static void Train(TestRank& rank, int64_t first, int64_t last, float scale = 1) {
    for (int64_t step = first; step <= last; ++step) {
      ASSERT_THAT(rank.Push(step, Weights(step, scale)), IsOk());
    }
  }

  // A push whose end may come from another thread.
  absl::Status PushAndWait(TestRank& rank, int64_t step) {
    struct Ending {
      absl::Notification has_come;
      absl::Status status;
    };
    const auto ending = std::make_shared<Ending>();
    EMA_ASSIGN_OR_RETURN(const auto push,
                         model_->OpenPush(rank.Start(step), [ending](const auto& result) {
                           ending->status = result.status();
                           ending->has_come.Notify();
                         }));
    const std::vector<std::byte> weights = Weights(step);
    EMA_RETURN_IF_ERROR(
        TestRank::AddChunk(*push, weights, 0, static_cast<int64_t>(weights.size())));
    EMA_RETURN_IF_ERROR(push->Commit(TestRank::EndOf(weights, 1)));
    ending->has_come.WaitForNotification();
    return ending->status;
  }

  // The version as somebody would load it: sharing its blocks, or from a file.
  absl::StatusOr<std::shared_ptr<Snapshot>> Load(const SnapshotRef& version, Source source) {
    auto loaded = std::make_shared<Snapshot>(*version);
    if (source == Source::kMemory) return loaded;
    for (TrackSnapshot& track : loaded->tracks) {
      EMA_RETURN_IF_ERROR(MakeFresh(*track.track, track.blocks));
      for (BlocksRef& weights : track.latest_weights) {
        Blocks blocks = *weights;
        EMA_RETURN_IF_ERROR(MakeFresh(*track.track, blocks));
        weights = std::make_shared<const Blocks>(std::move(blocks));
      }
      track.block_versions.assign(track.blocks.size(), 0);
    }
    return loaded;
  }
  absl::Status MakeFresh(const Track& track, Blocks& blocks) {
    EMA_ASSIGN_OR_RETURN(auto writer, BlocksWriter::Create(model_->device(), track));
    const int64_t total_bytes = track.layout().total_bytes();
    EMA_ASSIGN_OR_RETURN(const std::vector<HostPiece> pieces,
                         ReadBlocks(model_->device(), track, blocks, 0, total_bytes));
    int64_t offset = 0;
    for (const HostPiece& piece : pieces) {
      EMA_RETURN_IF_ERROR(writer->Write(offset, piece.bytes));
      offset += static_cast<int64_t>(piece.bytes.size());
    }
    EMA_ASSIGN_OR_RETURN(blocks, writer->Finish());
    return absl::OkStatus();
  }
  absl::StatusOr<Version> RollBack(const SnapshotRef& version, Source source = Source::kMemory) {
    EMA_ASSIGN_OR_RETURN(const SnapshotRef newest, model_->RollBack(version->record.id(), [&] {
      return Load(version, source);
    }));
    return newest->record;
  }
  absl::StatusOr<Version> RollBack(int64_t version, Source source = Source::kMemory) {
    EMA_ASSIGN_OR_RETURN(const SnapshotRef pinned, model_->history().Pin(version));
    return RollBack(pinned, source);
  }

  static std::vector<std::byte> Bytes(Model& model, const TrackSnapshot& track) {
    std::vector<std::byte> bytes;
    const auto pieces = ReadBlocks(model.device(), *track.track, track.blocks, 0,
                                   track.track->layout().total_bytes());
    for (const HostPiece& piece : *pieces) {
      bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
    }
    return bytes;
  }
  // The newest versions of both models have the same values and stand at the same point.
  static void ExpectSame(Model& a, Model& b) {
    const SnapshotRef one = *a.history().Pin(0);
    const SnapshotRef other = *b.history().Pin(0);
    EXPECT_EQ(one->record.step, other->record.step);
    EXPECT_EQ(one->record.time, other->record.time);
    ASSERT_EQ(one->tracks.size(), other->tracks.size());
    for (size_t t = 0; t < one->tracks.size(); ++t) {
      SCOPED_TRACE(one->tracks[t].track->name());
      EXPECT_TRUE(one->tracks[t].state == other->tracks[t].state);
      EXPECT_EQ(one->tracks[t].last_steps, other->tracks[t].last_steps);
      EXPECT_TRUE(Bytes(a, one->tracks[t]) == Bytes(b, other->tracks[t]));
      EXPECT_EQ(one->record.tracks[t].update_count, other->record.tracks[t].update_count);
    }
  }

  std::vector<int64_t> Versions() const {
    std::vector<int64_t> versions;
    for (const VersionHistory::RecordEntry& entry : model_->history().RecordsAfter(0, 0, 100)) {
      versions.push_back(entry.record.number);
    }
    return versions;
  }

  std::vector<int64_t> committed() {
    absl::MutexLock lock(&mu_);
    return committed_;
  }

  std::vector<std::string> warnings() {
    absl::MutexLock lock(&mu_);
    return warnings_;
  }

  absl::Mutex mu_;
  std::vector<int64_t> committed_ ABSL_GUARDED_BY(mu_);  // As on_commit was told.
  std::vector<std::string> warnings_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<ModelStore> store_;
  std::shared_ptr<Model> model_;
};

class RollbackFromTest : public RollbackTest, public testing::WithParamInterface<Source> {};
INSTANTIATE_TEST_SUITE_P(Sources, RollbackFromTest,
                         testing::Values(Source::kMemory, Source::kFresh),
                         [](const auto& param_info) {
                           return param_info.param == Source::kMemory ? "Memory" : "Fresh";
                         });

TEST_P(RollbackFromTest, WhatComesAfterIsWhatWouldHaveComeWithoutTheStepsBetween) {
  const std::shared_ptr<Model> straight = Create("straight");
  const auto straight_rank = OpenRun(straight, "straight");
  Train(*straight_rank, 1, 5);
  const auto first = OpenRun(model_, "first");
  Train(*first, 1, 5);
  const SnapshotRef good = *model_->history().Pin(0);
  Train(*first, 6, 9, /*scale=*/1e6f);

  EMA_ASSERT_OK_AND_ASSIGN(const Version record, RollBack(good, GetParam()));
  EXPECT_EQ(record.id(), (VersionId{10, 7}));
  EXPECT_EQ(record.step, 5);
  EXPECT_EQ(record.time, TrainingTime::AtBatch(5));
  EXPECT_EQ(record.restored_from, (VersionId{5, 7}));
  EXPECT_GT(record.run_epoch, first->run_epoch());
  EXPECT_GE(record.commit_time, good->record.commit_time);
  EXPECT_EQ(record.tracks.size(), 6);
  for (const TrackVersion& track : record.tracks) EXPECT_FALSE(track.updated);
  EXPECT_EQ(model_->history().latest()->id(), record.id());
  ExpectSame(*model_, *straight);
  for (const TrackConfig& track : Tracks()) {
    EXPECT_EQ(*ReadAll(*model_, track.name), *ReadAll(*model_, track.name, 5)) << track.name;
  }

  const auto second = OpenRun(model_, "second");
  EXPECT_GT(second->run_epoch(), record.run_epoch);
  for (int64_t step = 6; step <= 12; ++step) {
    Train(*second, step, step);
    Train(*straight_rank, step, step);
    ExpectSame(*model_, *straight);
  }
  EXPECT_EQ(model_->history().latest()->number, 17);
  EXPECT_FALSE(model_->history().latest()->restored_from.has_value());
}

TEST_P(RollbackFromTest, ItsBlocksCountAsNew) {
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 2);
  ASSERT_THAT(RollBack(1, GetParam()), IsOk());
  const SnapshotRef now = *model_->history().Pin(0);
  for (const TrackSnapshot& track : now->tracks) {
    EXPECT_EQ(track.block_versions, std::vector<int64_t>(track.blocks.size(), 3));
  }
  // A reader that has one of the versions before gets everything.
  for (const int64_t base : {1, 2}) {
    EXPECT_TRUE(model_->history().FindRecord({base, 7}).has_value());
    EXPECT_TRUE((*model_->readings().Open("ema", 0, 0, {}))->ChunkChangedSince(base, 0));
  }
  EXPECT_FALSE((*model_->readings().Open("ema", 0, 0, {}))->ChunkChangedSince(3, 0));
}

TEST_F(RollbackTest, WaitsForTheMemoryOfTheVersionThatGoes) {
  const auto rank = OpenRun(model_, "launch");
  for (int64_t step = 1; step <= 5; ++step) ASSERT_THAT(rank->Push(step, Weights(step)), IsOk());
  const auto used_bytes = [this] { return model_->device().memory_use().block_bytes; };
  int64_t used_by_load = 0;
  // An operator goes back as soon as the last rank is told.
  absl::Notification is_loaded;
  std::thread going_back;
  const auto go_back = [&](const auto&) {
    going_back = std::thread([&] {
      const auto load = [&]() -> absl::StatusOr<std::shared_ptr<Snapshot>> {
        used_by_load = used_bytes();
        return absl::DataLossError("a byte is wrong");
      };
      EXPECT_FALSE(model_->RollBack({1, 7}, load).ok());
      is_loaded.Notify();
    });
    is_loaded.WaitForNotificationWithTimeout(absl::Milliseconds(20));
  };
  const std::vector<std::byte> bytes = Weights(6);
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, model_->OpenPush(rank->Start(6), go_back));
  ASSERT_THAT(TestRank::AddChunk(*push, bytes, 0, static_cast<int64_t>(bytes.size())), IsOk());
  ASSERT_THAT(push->Commit(TestRank::EndOf(bytes, 1)), IsOk());
  going_back.join();
  EXPECT_EQ(used_by_load, used_bytes());
}

TEST_F(RollbackTest, AVersionInMemoryIsSharedNotCopied) {
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 2);
  ASSERT_THAT(RollBack(1), IsOk());
  EXPECT_EQ((*model_->history().Pin(0))->Find("ema")->blocks,
            (*model_->history().Pin(1))->Find("ema")->blocks);
}

TEST_F(RollbackTest, TheOpenSessionEndsAndItsWritersAreFenced) {
  const auto rank = OpenRun(model_, "old");
  Train(*rank, 1, 2);
  const auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, rank->Open(3, outcome));
  const std::vector<std::byte> weights = Weights(3);
  const int64_t half = static_cast<int64_t>(weights.size()) / 2;
  ASSERT_THAT(TestRank::AddChunk(*push, weights, 0, half), IsOk());

  ASSERT_THAT(RollBack(1), IsOk());
  EXPECT_EQ(outcome->calls, 1);
  EXPECT_THAT(outcome->result,
              StatusIs(absl::StatusCode::kAborted,
                       AllOf(HasSubstr("step 3"), HasSubstr("rolled back to version 1, step 1"))));
  EXPECT_EQ(GetErrorReason(outcome->result.status()), ErrorReason::kFenced);
  const auto is_fenced = [](const absl::Status& status) {
    return absl::IsAborted(status) && GetErrorReason(status) == ErrorReason::kFenced;
  };
  EXPECT_TRUE(is_fenced(
      TestRank::AddChunk(*push, weights, half, static_cast<int64_t>(weights.size()) - half)));
  EXPECT_TRUE(is_fenced(push->Commit(TestRank::EndOf(weights, 2))));
  EXPECT_EQ(outcome->calls, 1);
  const absl::Status late = rank->Push(3, weights).status();
  EXPECT_TRUE(is_fenced(late));
  EXPECT_THAT(late.message(), HasSubstr("rolled back to version 1, step 1"));
  EXPECT_TRUE(is_fenced(model_->QueryPush(rank->run_epoch(), 3, 0, false).status()));
  EXPECT_TRUE(is_fenced(rank->Join()));
  EXPECT_TRUE(is_fenced(model_->IsRunOpen({"old"}).status()));
  EXPECT_THAT(model_->IsRunOpen({"new"}), IsOkAndHolds(false));
  EXPECT_EQ(model_->history().latest()->number, 3);

  const auto next = OpenRun(model_, "new");
  EXPECT_THAT(model_->IsRunOpen({"new"}), IsOkAndHolds(true));
  EXPECT_TRUE(is_fenced(rank->Push(3, weights).status()));
  EXPECT_EQ(outcome->calls, 1);
}

TEST_F(RollbackTest, TheNextRunLearnsWhereItStandsAndGoesOnFromThere) {
  const auto rank = OpenRun(model_, "old");
  Train(*rank, 1, 4);
  EMA_ASSERT_OK_AND_ASSIGN(const Version record, RollBack(2));
  EMA_ASSERT_OK_AND_ASSIGN(
      RankLayout layout,
      RankLayout::Create(model_->manifest(),
                         {WholeTensor(model_->manifest(), 0), WholeTensor(model_->manifest(), 1)}));
  EMA_ASSERT_OK_AND_ASSIGN(const Model::JoinResult joined,
                           model_->JoinRun({"new"}, 0, 1, std::move(layout)));
  ASSERT_TRUE(joined.latest.has_value());
  EXPECT_EQ(joined.latest->id(), record.id());
  EXPECT_EQ(joined.latest->restored_from, (VersionId{2, 7}));
  EXPECT_EQ(joined.plan.tracks[0].state[0].update_count, 2);

  const auto next = OpenRun(model_, "new");
  // It was never pushed by this run: neither a retry, nor a step to come.
  const absl::Status again = next->Push(2, Weights(2)).status();
  EXPECT_EQ(GetErrorReason(again), ErrorReason::kStaleStep);
  EXPECT_EQ(model_->QueryPush(next->run_epoch(), 2, 0, false)->state,
            Model::PushState::State::kUnknown);
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult pushed, next->Push(3, Weights(3)));
  EXPECT_EQ(pushed.record.number, 6);
  EXPECT_FALSE(pushed.is_duplicate);
}

TEST_F(RollbackTest, NobodyGetsInWhileItLoadsButReadersDo) {
  const auto rank = OpenRun(model_, "old");
  Train(*rank, 1, 2);
  TestRank newcomer(model_, "new");
  const auto rolled = model_->RollBack({1, 7}, [&]() -> absl::StatusOr<std::shared_ptr<Snapshot>> {
    const absl::Status refused[] = {
        newcomer.Join(), rank->Push(3, Weights(3)).status(),
        model_->RollBack({2, 7}, [] { return absl::InternalError("never called"); }).status()};
    for (const absl::Status& status : refused) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rolled back")));
      EXPECT_EQ(GetErrorReason(status), ErrorReason::kModelBusy);
      EXPECT_GT(GetRetryDelay(status), absl::ZeroDuration());
    }
    EXPECT_EQ(model_->history().latest()->number, 2);
    EXPECT_THAT(ReadAll(*model_, "ema"), IsOk());
    EMA_ASSIGN_OR_RETURN(const SnapshotRef version, model_->history().Pin(1));
    return Load(version, Source::kFresh);
  });
  ASSERT_THAT(rolled, IsOk());
  EXPECT_EQ((*rolled)->record.number, 3);
  EXPECT_THAT(newcomer.Join(), IsOk());
}

TEST_F(RollbackTest, WhenLoadingFailsOnlyTheRunHasEnded) {
  const auto rank = OpenRun(model_, "old");
  Train(*rank, 1, 3);
  const SnapshotRef before = *model_->history().Pin(0);
  const auto rolled =
      model_->RollBack({1, 7}, [] { return absl::DataLossError("tensor \"w\": a byte is wrong"); });
  EXPECT_THAT(rolled, StatusIs(absl::StatusCode::kDataLoss, HasSubstr("tensor \"w\"")));
  EXPECT_EQ(*model_->history().Pin(0), before);
  EXPECT_THAT(Versions(), ElementsAre(1, 2, 3));
  EXPECT_THAT(committed(), ElementsAre(1, 2, 3));
  EXPECT_EQ(GetErrorReason(rank->Push(4, Weights(4)).status()), ErrorReason::kFenced);

  const auto next = OpenRun(model_, "new");
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult pushed, next->Push(4, Weights(4)));
  EXPECT_EQ(pushed.record.number, 4);
  EXPECT_THAT(RollBack(3), IsOk());
}

TEST_F(RollbackTest, ReadersOfOldVersionsFinishWhatTheyRead) {
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 3);
  const std::shared_ptr<Reading> newest = *model_->readings().Open("ema", 3, 0, {});
  const std::vector<std::byte> expected = *ReadAll(*model_, "ema", 3);
  // More versions than are kept.
  for (int round = 0; round < 6; ++round) {
    ASSERT_THAT(RollBack(3), IsOk());
    const auto again = OpenRun(model_, absl::StrCat("run ", round));
    Train(*again, 4, 4);
  }
  const auto pieces = newest->Read(0, newest->total_bytes());
  ASSERT_THAT(pieces, IsOk());
  std::vector<std::byte> bytes;
  for (const HostPiece& piece : *pieces) {
    bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
  }
  EXPECT_TRUE(bytes == expected);
  int64_t available = 0;
  for (const auto& entry : model_->history().RecordsAfter(0, 0, 100))
    available += entry.available ? 1 : 0;
  // And one for saves.
  EXPECT_LE(available, 2 + model_->config().max_pinned_versions);
}

TEST_F(RollbackTest, WatchersAndListsSeeItInOrder) {
  std::vector<int64_t> seen;
  const int64_t watcher =
      model_->watchers().Watch([&] { seen.push_back(model_->history().latest()->number); });
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 2);
  ASSERT_THAT(RollBack(1), IsOk());
  const auto next = OpenRun(model_, "next");
  Train(*next, 2, 2);
  model_->watchers().Unwatch(watcher);
  EXPECT_THAT(seen, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(committed(), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(Versions(), ElementsAre(1, 2, 3, 4));
  const std::vector<VersionHistory::RecordEntry> after = model_->history().RecordsAfter(2, 7, 100);
  ASSERT_EQ(after.size(), 2);
  EXPECT_EQ(after[0].record.restored_from, (VersionId{1, 7}));
  EXPECT_EQ(after[0].record.step, 1);
  EXPECT_EQ(after[1].record.step, 2);
}

TEST_F(RollbackTest, TracksThatCameOrWentSinceAreAsTheyAreNow) {
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 3);
  const SnapshotRef good = *model_->history().Pin(0);
  ASSERT_THAT(model_->UpdateTracks(
                  {.put = {{.name = "late", .schedule = MakeSchedule("2ba")}}, .remove = {"raw"}}),
              IsOk());
  Train(*rank, 4, 5);
  ASSERT_NE((*model_->history().Pin(0))->Find("late"), nullptr);
  // Takes effect with the rollback, as with a commit: there is no run then.
  TrackConfig faster{.name = "ema", .schedule = MakeSchedule("smoothing=0.25")};
  ASSERT_THAT(model_->UpdateTracks({.put = {faster}, .remove = {"fine"}}), IsOk());

  EMA_ASSERT_OK_AND_ASSIGN(const Version record, RollBack(good));
  std::vector<std::string> names;
  for (const TrackVersion& track : record.tracks) names.push_back(track.track);
  EXPECT_THAT(names, ElementsAre("ema", "slow", "zero", "mean"));
  const SnapshotRef now = *model_->history().Pin(0);
  EXPECT_EQ(now->Find("raw"), nullptr);
  EXPECT_EQ(now->Find("ema")->track->config(), faster);
  EXPECT_EQ(record.tracks[0].config, now->Find("ema")->track->config_text());
  EXPECT_EQ(*ReadAll(*model_, "ema"), *ReadAll(*model_, "ema", 3));
  EXPECT_EQ(GetErrorReason(model_->readings().Open("late", 0, 0, {}).status()),
            ErrorReason::kNoVersion);
  EXPECT_THAT(model_->Describe().pending_tracks, IsEmpty());

  const auto next = OpenRun(model_, "next");
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult pushed, next->Push(4, Weights(4)));
  const auto late = std::find_if(pushed.record.tracks.begin(), pushed.record.tracks.end(),
                                 [](const TrackVersion& track) { return track.track == "late"; });
  ASSERT_NE(late, pushed.record.tracks.end());
  EXPECT_EQ(late->update_count, 1);
  const std::vector<float> ema = FloatsOf(*ReadAll(*model_, "ema"));
  const std::vector<float> before = FloatsOf(*ReadAll(*model_, "ema", 3));
  const std::vector<float> weights = FloatsOf(Weights(4));
  EXPECT_FLOAT_EQ(ema[5], before[5] + 0.75f * (weights[5] - before[5]));
}

TEST_F(RollbackTest, ATrackOfTheSameNameButAnotherFormDoesNotGetItsBytes) {
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 1);
  const SnapshotRef good = *model_->history().Pin(0);
  ASSERT_THAT(model_->UpdateTracks({.remove = {"ema", "slow"}}), IsOk());
  Train(*rank, 2, 2);
  TrackConfig form{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")};
  form.tensor_rules = {{"steps", TensorAction::kIgnore}};
  const TrackConfig same{.name = "slow", .schedule = MakeSchedule("10ba", "3ba")};
  ASSERT_THAT(model_->UpdateTracks({.put = {form, same}}), IsOk());
  Train(*rank, 3, 3);
  ASSERT_THAT(RollBack(good), IsOk());
  const SnapshotRef now = *model_->history().Pin(0);
  EXPECT_EQ(now->Find("ema"), nullptr);
  ASSERT_NE(now->Find("slow"), nullptr);
  EXPECT_EQ(now->FindId(now->Find("slow")->track->id())->track->config(), same);
  EXPECT_EQ(*ReadAll(*model_, "slow"), *ReadAll(*model_, "slow", 1));
  const auto next = OpenRun(model_, "next");
  EXPECT_THAT(next->Push(2, Weights(2)), IsOk());
  EXPECT_EQ((*model_->history().Pin(0))->Find("ema")->state[0].update_count, 1);
}

TEST_F(RollbackTest, TracksThatAreLeftOutAreNamed) {
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 1);
  ASSERT_THAT(RollBack(1), IsOk());
  EXPECT_THAT(warnings(), IsEmpty());
  ASSERT_THAT(model_->UpdateTracks({.remove = {"ema", "fine"}}), IsOk());
  ASSERT_THAT(RollBack(1), IsOk());
  ASSERT_THAT(warnings(), SizeIs(1));
  EXPECT_THAT(warnings()[0], AllOf(HasSubstr("version=1"), HasSubstr("tracks=ema,fine ")));
}

TEST_F(RollbackTest, AVersionOfWhichNoTrackFitsIsRefused) {
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 1);
  ASSERT_THAT(model_->UpdateTracks({.put = {{.name = "late", .schedule = MakeSchedule("2ba")}},
                                    .remove = {"ema", "slow", "raw", "zero", "fine", "mean"}}),
              IsOk());
  // Takes effect with a commit, or a rollback.
  EXPECT_THAT(RollBack(1), AllOf(StatusIs(absl::StatusCode::kFailedPrecondition,
                                          HasSubstr("ema, slow, raw, zero, fine, mean")),
                                 ReasonIs(ErrorReason::kModelDiffers)));
  EXPECT_THAT(Versions(), ElementsAre(1));
  EXPECT_THAT(committed(), ElementsAre(1));
  EXPECT_THAT(OpenRun(model_, "next")->Push(2, Weights(2)), IsOk());
  EXPECT_THAT(RollBack(1), ReasonIs(ErrorReason::kModelDiffers));
  EXPECT_EQ(model_->history().latest()->number, 2);
}

TEST_F(RollbackTest, ARunThatIsToGoOnFromAVersionFindsNoOther) {
  const auto join = [this](const std::string& launch_id, const VersionId& newest) {
    return model_
        ->JoinRun({launch_id}, 0, 1,
                  *RankLayout::Create(model_->manifest(), {WholeTensor(model_->manifest(), 0),
                                                           WholeTensor(model_->manifest(), 1)}),
                  newest)
        .status();
  };
  const auto is_busy =
      AllOf(StatusIs(absl::StatusCode::kUnavailable, HasSubstr("version 1 was committed")),
            ReasonIs(ErrorReason::kModelBusy));
  const auto rank = OpenRun(model_, "old");
  Train(*rank, 1, 1);
  EXPECT_THAT(join("new", {}), is_busy);
  EXPECT_THAT(join("new", {1, 6}), is_busy);
  // The run that is open has not been touched; who joins that is not asked.
  EXPECT_THAT(join("old", {}), IsOk());
  Train(*rank, 2, 2);
  EXPECT_THAT(join("new", {2, 7}), IsOk());
  EXPECT_EQ(GetErrorReason(rank->Push(3, Weights(3)).status()), ErrorReason::kFenced);
  EXPECT_THAT(join("newer", {2, 7}), IsOk());
}

TEST_F(RollbackTest, AModelWithoutAVersionCanBeginWithOne) {
  const auto other = Create("other");
  const auto rank = OpenRun(other, "run");
  Train(*rank, 1, 5);
  const SnapshotRef there = *other->history().Pin(0);
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef newest,
                           model_->RollBack({5, 6}, [&] { return Load(there, Source::kFresh); }));
  const Version& record = newest->record;
  EXPECT_EQ(record.id(), (VersionId{1, 7}));
  EXPECT_EQ(record.step, 5);
  const auto next = OpenRun(model_, "next");
  Train(*next, 6, 7);
  Train(*rank, 6, 7);
  ExpectSame(*model_, *other);
}

TEST_F(RollbackTest, WhatItHasMadeIsKeptWithinTheModelsMemory) {
  const auto rank = OpenRun(model_, "run");
  std::vector<SnapshotRef> held;  // As many as may be.
  for (int64_t step = 1; step <= 5; ++step) {
    Train(*rank, step, step);
    if (step <= 4) held.push_back(*model_->history().Pin(step));
  }
  const SnapshotRef saved = *model_->history().PinForSave(5);
  const auto roll_back = [&] {
    return model_->RollBack(held[0]->record.id(), [&] { return Load(held[0], Source::kFresh); });
  };
  const auto outcome = std::make_shared<PushOutcome>();
  const auto taken = [&] { return model_->device().memory_use().block_bytes; };
  for (const bool is_saved : {true, false}) {
    absl::StatusOr<SnapshotRef> newest = roll_back();
    ASSERT_THAT(newest, IsOk());
    const auto next = OpenRun(model_, absl::StrCat("next", is_saved));
    const absl::Status refused = next->Open(2, outcome).status();
    EXPECT_THAT(refused, AllOf(StatusIs(absl::StatusCode::kUnavailable,
                                        HasSubstr("readers and saves hold 5")),
                               ReasonIs(ErrorReason::kModelBusy)));
    EXPECT_EQ(roll_back().status(), refused);
    EXPECT_EQ(GetErrorReason(model_->history().Pin(4).status()), ErrorReason::kUnspecified);
    if (is_saved) {
      *newest = nullptr;
    } else {
      held.pop_back();
    }
    EXPECT_THAT(next->Open(2, outcome), IsOk());
    EXPECT_LE(taken(), model_->tracks().reserved_bytes());
    Train(*next, 2, 3);
    EXPECT_LE(taken(), model_->tracks().reserved_bytes());
  }
}

// The version that is saved and the one that it was rolled back to leave memory for three readers.
TEST_F(RollbackTest, NoReaderGetsThePlaceThatASecondSaveHolds) {
  const auto rank = OpenRun(model_, "run");
  std::vector<SnapshotRef> held;
  for (int64_t step = 1; step <= 5; ++step) {
    Train(*rank, step, step);
    if (step <= 3) held.push_back(*model_->history().Pin(step));
  }
  const SnapshotRef saved = *model_->history().PinForSave(5);
  const absl::StatusOr<SnapshotRef> newest =
      model_->RollBack(held[0]->record.id(), [&] { return Load(held[0], Source::kFresh); });
  ASSERT_THAT(newest, IsOk());
  const auto next = OpenRun(model_, "next");
  EXPECT_THAT(model_->history().Pin(4), ReasonIs(ErrorReason::kTooManyPins));
  Train(*next, 2, 4);
  EXPECT_LE(model_->device().memory_use().block_bytes, model_->tracks().reserved_bytes());
  EXPECT_EQ(held[0]->record.step, 1);
}

TEST_F(RollbackTest, FrozenTensorsMustBePushedOnceMore) {
  TestRank rank(model_, "run");
  ASSERT_THAT(rank.Join(/*frozen_shard_count=*/1), IsOk());
  const absl::StatusOr<PushResult> pushed = rank.Push(1, Weights(1));
  ASSERT_THAT(pushed, IsOk());
  ASSERT_THAT(RollBack(1), IsOk());
  TestRank next(model_, "next");
  ASSERT_THAT(next.Join(/*frozen_shard_count=*/1), IsOk());
  EXPECT_FALSE(next.plan().may_omit_frozen);
  next.SetOmitsFrozen(true);
  EXPECT_EQ(GetErrorReason(next.Push(2, Weights(2)).status()), ErrorReason::kPlanChanged);
  // The version that the model was rolled back to has the digest of the same values.
  next.SetOmitsFrozen(false);
  const absl::StatusOr<PushResult> again = next.Push(2, Weights(1));
  ASSERT_THAT(again, IsOk());
  EXPECT_TRUE(again->plan.may_omit_frozen);
}

TEST_F(RollbackTest, AServerThatStopsDoesNotRollBack) {
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 2);
  const absl::Status draining =
      MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDraining, "stopping");
  // Also if it begins to stop while the version is loaded.
  const auto rolled = model_->RollBack({1, 7}, [&]() -> absl::StatusOr<std::shared_ptr<Snapshot>> {
    EMA_ASSIGN_OR_RETURN(const SnapshotRef version, model_->history().Pin(1));
    model_->StopAcceptingWork(draining);
    return Load(version, Source::kMemory);
  });
  EXPECT_EQ(rolled.status(), draining);
  EXPECT_EQ(model_->history().latest()->number, 2);
  bool was_called = false;
  EXPECT_EQ(model_
                ->RollBack({1, 7},
                           [&] {
                             was_called = true;
                             return absl::InternalError("");
                           })
                .status(),
            draining);
  EXPECT_FALSE(was_called);
  EXPECT_EQ(model_->IsRunOpen({"any"}).status(), draining);
}

TEST_F(RollbackTest, SnapshotsThatAreKeptAreKeptAnewFromThere) {
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 4);
  model_->durable().SetKeptTime(TrainingTime::AtBatch(4));
  ASSERT_THAT(RollBack(2), IsOk());
  EXPECT_EQ(model_->durable().kept_time(), TrainingTime::AtBatch(2));
  model_->durable().SetKeptTime(TrainingTime::AtBatch(1));
  ASSERT_THAT(RollBack(0), IsOk());
  EXPECT_EQ(model_->durable().kept_time(), TrainingTime::AtBatch(1));
}

TEST_F(RollbackTest, WhetherAnUpdateIsDueIsAskedOfAVersion) {
  const auto is_due_by = [this](const TrainingTime& time) {
    return model_->tracks().IsDueBy(time, model_->history().NewestStates());
  };
  EXPECT_THAT(is_due_by(TrainingTime::AtBatch(1)), IsOkAndHolds(true));  // The first.
  ASSERT_THAT(model_->UpdateTracks({.remove = {"ema", "raw", "zero", "fine", "mean"}}), IsOk());
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 4);
  // "slow" is due at multiples of 3.
  EXPECT_THAT(is_due_by(TrainingTime::AtBatch(4)), IsOkAndHolds(false));
  EXPECT_THAT(is_due_by(TrainingTime::AtBatch(5)), IsOkAndHolds(false));
  EXPECT_THAT(is_due_by(TrainingTime::AtBatch(6)), IsOkAndHolds(true));
  EXPECT_THAT(is_due_by(TrainingTime::AtBatch(700)), IsOkAndHolds(true));
  EXPECT_EQ(GetErrorReason(is_due_by(TrainingTime::AtBatch(2)).status()), ErrorReason::kBadTime);
  EXPECT_EQ(GetErrorReason(is_due_by(TrainingTime()).status()), ErrorReason::kBadTime);
  // After an earlier version.
  const TrackStates second = TrackStatesOf(**model_->history().Pin(2));
  EXPECT_THAT(model_->tracks().IsDueBy(TrainingTime::AtBatch(2), second), IsOkAndHolds(false));
  EXPECT_THAT(model_->tracks().IsDueBy(TrainingTime::AtBatch(3), second), IsOkAndHolds(true));
  ASSERT_THAT(model_->UpdateTracks({.pause = {"slow"}}), IsOk());
  Train(*rank, 5, 5);
  EXPECT_THAT(is_due_by(TrainingTime::AtBatch(6)), IsOkAndHolds(false));
}

TEST_F(RollbackTest, WhatIsDurableGoesByVersionsNotBySteps) {
  EXPECT_EQ(model_->durable().version(), VersionId());
  EXPECT_EQ(model_->durable().step(), 0);
  model_->durable().SetVersion({3, 7}, 30, 0);
  model_->durable().SetVersion({2, 7}, 40, 0);
  EXPECT_EQ(model_->durable().version(), (VersionId{3, 7}));
  EXPECT_EQ(model_->durable().step(), 30);
  model_->durable().SetVersion({4, 7}, 20, 0);
  EXPECT_EQ(model_->durable().step(), 20);
  model_->durable().SetVersion({9, 6}, 90, 0);
  EXPECT_EQ(model_->durable().step(), 20);
  model_->durable().SetVersion({1, 8}, 10, 0);
  EXPECT_EQ(model_->durable().version(), (VersionId{1, 8}));
  EXPECT_EQ(model_->durable().step(), 10);
}

// Such as one that had begun before, and ends now.
TEST_F(RollbackTest, WhatIsSavedOfTheBranchGivenUpIsNoLaterStep) {
  const auto rank = OpenRun(model_, "run");
  Train(*rank, 1, 3);
  const SnapshotRef third = *model_->history().Pin(3);
  model_->durable().SetVersion((*model_->history().Pin(2))->record.id(), 2, 0);
  EMA_ASSERT_OK_AND_ASSIGN(const Version restored, RollBack(1));
  EXPECT_EQ(model_->durable().step(), 1);
  model_->durable().SetVersion(third->record.id(), 3, 0);
  EXPECT_EQ(model_->durable().version(), third->record.id());
  EXPECT_EQ(model_->durable().step(), 1);
  const auto next = OpenRun(model_, "next");
  Train(*next, 2, 5);
  model_->durable().SetVersion(model_->history().latest()->id(), 5, 0);
  EXPECT_EQ(model_->durable().step(), 5);
}

TEST_F(RollbackTest, WritersAndReadersMeetItAtAnyMoment) {
  const auto base = OpenRun(model_, "base");
  Train(*base, 1, 1);
  const SnapshotRef good = *model_->history().Pin(0);
  const std::vector<std::byte> expected = *ReadAll(*model_, "raw");
  std::atomic<bool> is_over = false;
  std::thread writer([&] {
    for (int run = 0; !is_over; ++run) {
      TestRank rank(model_, absl::StrCat("run ", run));
      if (!rank.Join().ok()) continue;
      absl::Status status;
      for (int64_t step = model_->history().latest()->step + 1; status.ok() && !is_over; ++step) {
        status = PushAndWait(rank, step);
      }
      const ErrorReason reason = GetErrorReason(status);
      EXPECT_TRUE(status.ok() || reason == ErrorReason::kFenced ||
                  reason == ErrorReason::kModelBusy || reason == ErrorReason::kStaleStep)
          << status;
    }
  });
  std::thread reader([&] {
    int64_t last = 0;
    while (!is_over) {
      const SnapshotRef newest = *model_->history().Pin(0);
      EXPECT_GE(newest->record.number, last);
      last = newest->record.number;
      if (newest->record.restored_from.has_value()) {
        EXPECT_TRUE(*ReadAll(*model_, "raw", last) == expected);
      }
    }
  });
  for (int round = 0; round < 50; ++round) {
    EXPECT_THAT(RollBack(good, round % 2 == 0 ? Source::kMemory : Source::kFresh), IsOk());
  }
  is_over = true;
  writer.join();
  reader.join();
  const std::vector<int64_t> versions = Versions();
  for (size_t i = 0; i < versions.size(); ++i) EXPECT_EQ(versions[i], static_cast<int64_t>(i + 1));
}

}  // namespace
}  // namespace ema
