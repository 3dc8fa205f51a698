// SPDX-License-Identifier: Apache-2.0
//
// What does not change costs nothing: frozen tensors, and tensors whose own schedule is not due,
// are shared by the versions.
#include <limits>
#include <optional>

#include "tests/core/test_model.h"

namespace ema {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Of a large tensor, which has blocks of its own.
constexpr int64_t kLarge = kLargeTensorBytes / int64_t{sizeof(float)} + 5;

// Tensors "live" and "frozen" of `live_count` and `frozen_count` floats.
class SharingTest : public testing::Test {
 protected:
  SharingTest() : store_(TestDevice(), SmallBlocks()) {}

  void Create(std::vector<TrackConfig> tracks, int64_t live_count = 2,
              int64_t frozen_count = kLarge,
              NonFinitePolicy non_finite = NonFinitePolicy::kReject) {
    live_count_ = live_count;
    frozen_count_ = frozen_count;
    const auto created =
        store_.Create({.name = "m",
                       .manifest = MakeManifest({{"live", Dtype::kFloat32, {live_count}},
                                                 {"frozen", Dtype::kFloat32, {frozen_count}}}),
                       .tracks = std::move(tracks),
                       .non_finite = non_finite});
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
  }

  void OpenRun(const std::string& launch_id, int64_t frozen_shard_count = 1) {
    rank_ = std::make_unique<TestRank>(model_, launch_id);
    ASSERT_THAT(rank_->Join(frozen_shard_count), IsOk());
  }

  // Without `frozen` the push omits the frozen tensor.
  absl::StatusOr<PushResult> Push(int64_t step, float live,
                                  std::optional<float> frozen = std::nullopt) {
    std::vector<float> values(live_count_, live);
    if (frozen.has_value()) values.resize(live_count_ + frozen_count_, *frozen);
    rank_->SetOmitsFrozen(!frozen.has_value());
    return rank_->Push(step, BytesOf(values));
  }

  // The first and last element of both tensors.
  std::vector<float> Read(const std::string& track, int64_t version = 0) {
    const auto snapshot = model_->history().Pin(version);
    const auto bytes = ReadAll(*model_, track, version);
    EXPECT_THAT(bytes, IsOk());
    if (!bytes.ok()) return {};
    std::vector<float> values;
    const StorageLayout& layout = (*snapshot)->Find(track)->track->layout();
    for (const StorageLayout::Entry& entry : layout.entries()) {
      const int64_t last = entry.offset + entry.length_bytes - DtypeSize(entry.dtype);
      for (const int64_t at : {entry.offset, last}) {
        const std::byte* const element = bytes->data() + at;
        values.push_back(entry.dtype == Dtype::kFloat64
                             ? static_cast<float>(LoadAs<double>(element))
                             : LoadAs<float>(element));
      }
    }
    return values;
  }

  // Blocks of `track` that two versions share, and all that it has.
  std::pair<int64_t, int64_t> SharedBlocks(const std::string& track, int64_t a, int64_t b) {
    const SnapshotRef first = *model_->history().Pin(a);
    const SnapshotRef second = *model_->history().Pin(b);
    int64_t shared = 0;
    const Blocks& blocks = first->Find(track)->blocks;
    for (size_t i = 0; i < blocks.size(); ++i) {
      shared += blocks[i] == second->Find(track)->blocks[i] ? 1 : 0;
    }
    return {shared, static_cast<int64_t>(blocks.size())};
  }

  ModelStore store_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<TestRank> rank_;
  int64_t live_count_ = 0;
  int64_t frozen_count_ = 0;
};

TEST_F(SharingTest, FrozenTensorsArePushedOnceAndSharedFromThen) {
  Create({{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")},
          {.name = "raw", .schedule = MakeSchedule("copy")}});
  OpenRun("launch");
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult first, Push(1, 2, 7));
  EXPECT_TRUE(first.plan.may_omit_frozen);
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult second, Push(2, 4));
  EXPECT_TRUE(second.plan.may_omit_frozen);
  EXPECT_THAT(Read("ema"), ElementsAre(3, 3, 7, 7));
  EXPECT_THAT(Read("raw"), ElementsAre(4, 4, 7, 7));
  for (const std::string track : {"ema", "raw"}) {
    const auto [shared, all] = SharedBlocks(track, 1, 2);
    EXPECT_EQ(shared, all - 1) << track;  // All but that of the live tensor.
    EXPECT_GT(all, 200);
  }
}

TEST_F(SharingTest, AMeanOfTheLastSharesFrozenTensorsOfItsWeights) {
  Create({{.name = "mean", .schedule = MakeSchedule("mean_of_last=3")}});
  OpenRun("launch");
  ASSERT_THAT(Push(1, 2, 7), IsOk());
  for (int step = 2; step <= 5; ++step) {
    EMA_ASSERT_OK_AND_ASSIGN(const PushResult result, Push(step, 2.0f * step));
    EXPECT_TRUE(result.plan.may_omit_frozen);
  }
  EXPECT_THAT(Read("mean"), ElementsAre(8, 8, 7, 7));
  const TrackSnapshot& track = *(*model_->history().Pin(0))->Find("mean");
  ASSERT_EQ(track.latest_weights.size(), 2);
  const Blocks& weights = *track.latest_weights[1];
  EXPECT_EQ(weights.back(), track.blocks.back());
  EXPECT_NE(weights.front(), track.blocks.front());
  // With other values there are two kinds in the mean, until all of its weights are new.
  ASSERT_THAT(Push(6, 12, 1), IsOk());
  EXPECT_THAT(Read("mean"), ElementsAre(10, 10, 5, 5));
  ASSERT_THAT(Push(7, 14, 1), IsOk());
  ASSERT_THAT(Push(8, 16, 1), IsOk());
  EXPECT_THAT(Read("mean"), ElementsAre(14, 14, 1, 1));
}

TEST_F(SharingTest, SmallFrozenTensorsAreCarriedAlong) {
  TrackConfig wide{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")};
  wide.dtype = Dtype::kFloat64;
  Create({wide}, /*live_count=*/3, /*frozen_count=*/2);
  OpenRun("launch");
  ASSERT_THAT(Push(1, 2, 0.1f), IsOk());
  ASSERT_THAT(Push(2, 4), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(3, 3, 0.1f, 0.1f));
  ASSERT_THAT(Push(3, 5, 0.1f), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(4, 4, 0.1f, 0.1f));
}

TEST_F(SharingTest, ATrackWhoseAverageDiffersGetsThemPushed) {
  Create({{.name = "zero", .schedule = MakeSchedule("smoothing=0.5, zero_init=plain")}});
  OpenRun("launch");
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult first, Push(1, 2, 8));
  EXPECT_FALSE(first.plan.may_omit_frozen);
  EXPECT_THAT(Push(2, 2),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("frozen: step 2 omits")));
  ASSERT_THAT(Push(2, 2, 8), IsOk());
  EXPECT_THAT(Read("zero"), ElementsAre(1.5, 1.5, 6, 6));
}

TEST_F(SharingTest, ANewRunPushesThemOnceAgain) {
  Create({{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")}});
  OpenRun("first");
  ASSERT_THAT(Push(1, 2, 7), IsOk());
  OpenRun("second");
  EXPECT_FALSE(rank_->plan().may_omit_frozen);
  EXPECT_THAT(Push(2, 2), StatusIs(absl::StatusCode::kFailedPrecondition,
                                   HasSubstr("push them until PushPlan.may_omit_frozen")));
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult same, Push(2, 2, 7));
  EXPECT_TRUE(same.plan.may_omit_frozen);
  // Other values than in the run before: averaged, until the average equals them.
  OpenRun("third");
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult changed, Push(3, 2, 9));
  EXPECT_FALSE(changed.plan.may_omit_frozen);
  EXPECT_THAT(Read("ema"), ElementsAre(2, 2, 8, 8));
}

TEST_F(SharingTest, ATrackThatWasNotDueHasThemStill) {
  Create({{.name = "often", .schedule = MakeSchedule("copy")},
          {.name = "seldom", .schedule = MakeSchedule("copy=true, update_interval=3ba")}});
  OpenRun("launch");
  ASSERT_THAT(Push(1, 2, 7), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult pushed, Push(2, 2, 7));
  EXPECT_TRUE(pushed.plan.may_omit_frozen);
  // Changed: the track that is not due has the old values.
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult changed, Push(4, 2, 8));
  EXPECT_TRUE(changed.plan.may_omit_frozen);  // Both were due.
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult again, Push(5, 2, 9));
  EXPECT_FALSE(again.plan.may_omit_frozen);
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult both, Push(6, 2, 9));
  EXPECT_TRUE(both.plan.may_omit_frozen);
}

// The same values in other boxes, pushed in chunks of other sizes.
TEST_F(SharingTest, TheDigestOfFrozenTensorsDoesNotDependOnHowRanksCutThem) {
  constexpr int64_t kRows = 6;
  constexpr int64_t kColumns = 5;
  const auto created =
      store_.Create({.name = "matrix",
                     .manifest = MakeManifest({{"live", Dtype::kFloat32, {1}},
                                               {"f", Dtype::kFloat64, {2}},
                                               {"g", Dtype::kFloat32, {kRows, kColumns}}}),
                     .tracks = {{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")}}});
  ASSERT_THAT(created, IsOk());
  const auto value = [](int64_t row, int64_t column) {
    return static_cast<float>(row * kColumns + column) + 0.25f;
  };
  const auto push = [&](const std::string& launch, int64_t step, int64_t split_column,
                        int64_t chunk_bytes, float change = 0) -> absl::StatusOr<PushResult> {
    // Rank 0 has the columns before `split_column`.
    std::vector<std::unique_ptr<TestRank>> ranks;
    for (int64_t r = 0; r < 2; ++r) {
      std::vector<Shard> shards;
      if (r == 0) shards = {{0, {0}, {1}}, {1, {0}, {2}}};
      const int64_t begin = r == 0 ? 0 : split_column;
      const int64_t end = r == 0 ? split_column : kColumns;
      shards.push_back({2, {0, begin}, {kRows, end - begin}});
      ranks.push_back(
          std::make_unique<TestRank>(created->model, launch, r, 2, shards, /*whole=*/false));
      EXPECT_THAT(ranks.back()->Join(r == 0 ? 2 : 1), IsOk());
    }
    absl::StatusOr<PushResult> result = absl::UnknownError("no rank");
    for (int64_t r = 0; r < 2; ++r) {
      std::vector<std::byte> bytes;
      const auto add = [&bytes](const auto& number) {
        const auto* const data = reinterpret_cast<const std::byte*>(&number);
        bytes.insert(bytes.end(), data, data + sizeof(number));
      };
      if (r == 0) {
        add(static_cast<float>(step));
        add(0.1);
        add(0.2);
      }
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t column = r == 0 ? 0 : split_column;
             column < (r == 0 ? split_column : kColumns); ++column) {
          add(value(row, column) + (row == 3 && column == 2 ? change : 0));
        }
      }
      result = ranks[r]->Push(step, bytes, chunk_bytes);
    }
    return result;
  };
  const absl::StatusOr<PushResult> first = push("a", 1, 2, 12);
  ASSERT_THAT(first, IsOk());
  EXPECT_TRUE(first->plan.may_omit_frozen);
  const absl::StatusOr<PushResult> same = push("b", 2, 3, 1 << 20);
  ASSERT_THAT(same, IsOk());
  EXPECT_TRUE(same->plan.may_omit_frozen);
  const absl::StatusOr<PushResult> changed = push("c", 3, 3, 12, 1e-3f);
  ASSERT_THAT(changed, IsOk());
  EXPECT_FALSE(changed->plan.may_omit_frozen);
}

TEST_F(SharingTest, ATrackThatIsAddedGetsThem) {
  Create({{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")}});
  OpenRun("launch");
  ASSERT_THAT(Push(1, 2, 7), IsOk());
  ASSERT_THAT(
      model_->UpdateTracks({.put = {{.name = "new", .schedule = MakeSchedule("smoothing=0.25")}}}),
      IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult pending, Push(2, 2));
  EXPECT_FALSE(pending.plan.may_omit_frozen);
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult pushed, Push(3, 2, 7));
  EXPECT_TRUE(pushed.plan.may_omit_frozen);
  EXPECT_THAT(Read("new"), ElementsAre(2, 2, 7, 7));
}

TEST_F(SharingTest, RanksMustSayTheSameOfThem) {
  Create({{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")}});
  TestRank zero(model_, "launch", 0, 2, {{0, {0}, {1}}, {1, {0}, {kLarge}}}, /*whole=*/false);
  TestRank one(model_, "launch", 1, 2, {{0, {1}, {1}}}, /*whole=*/false);
  ASSERT_THAT(zero.Join(1), IsOk());
  ASSERT_THAT(one.Join(), IsOk());
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, zero.Open(1, outcome));
  one.SetOmitsFrozen(true);
  EXPECT_THAT(one.Open(1, outcome).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("rank 1 omits the frozen tensors, but the step was opened with "
                                 "them")));
}

// Of two live elements and two frozen ones, each kind on a rank of its own.
struct LiveAndFrozenRanks {
  LiveAndFrozenRanks(const std::shared_ptr<Model>& model, const std::string& launch)
      : live(model, launch, 0, 2, {{0, {0}, {2}}}, /*whole=*/false),
        frozen(model, launch, 1, 2, {{1, {0}, {2}}}, /*whole=*/false) {
    EXPECT_THAT(live.Join(), IsOk());
    EXPECT_THAT(frozen.Join(1), IsOk());
  }
  absl::StatusOr<PushResult> Push(int64_t step) {
    EXPECT_THAT(live.Push(step, BytesOf({1, 1})), testing::Not(IsOk()));  // Not ended yet.
    return frozen.Push(step, BytesOf({5, 5}));
  }

  TestRank live;
  TestRank frozen;
};

TEST_F(SharingTest, AfterRanksHaveDisagreedTheRunPushesThemWithEachStep) {
  Create({{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")}}, /*live_count=*/2,
         /*frozen_count=*/2);
  for (const bool frozen_rank_omits : {false, true}) {
    LiveAndFrozenRanks ranks(model_, frozen_rank_omits ? "second" : "first");
    const int64_t step = frozen_rank_omits ? 11 : 1;
    EXPECT_TRUE(ranks.Push(step)->plan.may_omit_frozen);
    const auto outcome = std::make_shared<PushOutcome>();
    ranks.live.SetOmitsFrozen(!frozen_rank_omits);
    ranks.frozen.SetOmitsFrozen(frozen_rank_omits);
    {
      EMA_ASSERT_OK_AND_ASSIGN(const auto open, ranks.live.Open(step + 1, outcome));
      EXPECT_THAT(ranks.frozen.Open(step + 1, outcome).status(),
                  ReasonIs(ErrorReason::kPlanMismatch));
    }
    ranks.live.SetOmitsFrozen(true);
    EXPECT_THAT(ranks.live.Open(step + 2, outcome).status(), ReasonIs(ErrorReason::kPlanChanged));
    ranks.live.SetOmitsFrozen(false);
    ranks.frozen.SetOmitsFrozen(false);
    EXPECT_FALSE(ranks.Push(step + 2)->plan.may_omit_frozen);
  }
}

TEST_F(SharingTest, AnAverageThatIsToBeginWithZerosGetsThemPushed) {
  Create({{.name = "zero",
           .schedule = MakeSchedule("smoothing=0.5, zero_init=plain, ema_start=3ba")}});
  OpenRun("launch");
  for (int64_t step = 1; step <= 3; ++step) {
    EMA_ASSERT_OK_AND_ASSIGN(const PushResult pushed, Push(step, 8, 8));
    EXPECT_FALSE(pushed.plan.may_omit_frozen) << step;
  }
  EXPECT_THAT(Read("zero"), ElementsAre(4, 4, 4, 4));
}

TEST_F(SharingTest, ACommittedStepIsNotTakenForTheSameWithoutThem) {
  Create({{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")}});
  OpenRun("launch");
  ASSERT_THAT(Push(1, 2, 7), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult again, Push(1, 2, 7));
  EXPECT_TRUE(again.is_duplicate);
  EXPECT_THAT(Push(1, 2),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("step 1 is committed already, with the frozen tensors")));
}

TEST_F(SharingTest, APausedTrackThatIsResumedHasWhatChangedMeanwhile) {
  Create({{.name = "ema", .schedule = MakeSchedule("copy")},
          {.name = "paused", .schedule = MakeSchedule("copy")}});
  OpenRun("launch");
  ASSERT_THAT(Push(1, 2, 7), IsOk());
  ASSERT_THAT(model_->UpdateTracks({.pause = {"paused"}}), IsOk());
  ASSERT_THAT(Push(2, 2), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult changed, Push(3, 2, 8));
  EXPECT_TRUE(changed.plan.may_omit_frozen);  // Of the one that is not paused.
  ASSERT_THAT(model_->UpdateTracks({.resume = {"paused"}}), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult resumed, Push(4, 2));
  EXPECT_FALSE(resumed.plan.may_omit_frozen);
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult pushed, Push(5, 2, 8));
  EXPECT_TRUE(pushed.plan.may_omit_frozen);
}

TEST_F(SharingTest, ASkippedTensorOfAGroupThatIsNotDueStays) {
  TrackConfig ema{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")};
  ema.tensor_rules = {
      {"frozen", TensorAction::kAverage, MakeSchedule("smoothing=0.5, update_interval=2ba")}};
  Create({ema}, 2, kLarge, NonFinitePolicy::kSkipTensor);
  OpenRun("launch");
  ASSERT_THAT(Push(2, 4, 4), IsOk());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult not_due, Push(3, 2, nan));
  EXPECT_EQ(not_due.record.skipped_tensor_count, 1);
  EXPECT_THAT(Read("ema"), ElementsAre(3, 3, 4, 4));
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult due, Push(4, 1, nan));
  EXPECT_FALSE(due.plan.may_omit_frozen);
  EXPECT_THAT(Read("ema"), ElementsAre(2, 2, 4, 4));
}

TEST_F(SharingTest, ATensorGoesByTheScheduleOfItsRule) {
  TrackConfig ema{.name = "ema", .schedule = MakeSchedule("smoothing=0.5, update_interval=2ba")};
  ema.tensor_rules = {
      {"frozen", TensorAction::kAverage, MakeSchedule("smoothing=0.75, update_interval=3ba")}};
  Create({ema});
  OpenRun("launch", /*frozen_shard_count=*/0);
  ASSERT_THAT(Push(1, 8, 8), IsOk());
  ASSERT_THAT(Push(2, 4, 4), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(6, 6, 8, 8));
  {
    const auto [shared, all] = SharedBlocks("ema", 1, 2);
    EXPECT_EQ(shared, all - 1);
  }
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult third, Push(3, 4, 4));
  EXPECT_THAT(Read("ema"), ElementsAre(6, 6, 7, 7));
  {
    const auto [shared, all] = SharedBlocks("ema", 2, 3);
    EXPECT_EQ(shared, 1);
  }
  const TrackVersion& record = third.record.tracks[0];
  EXPECT_FALSE(record.updated);
  EXPECT_EQ(record.update_count, 2);
  ASSERT_EQ(record.rules.size(), 1);
  EXPECT_EQ(record.rules[0].track, "frozen");
  EXPECT_TRUE(record.rules[0].updated);
  EXPECT_EQ(record.rules[0].update_weight, 0.25);
  EXPECT_EQ(record.rules[0].window_steps, 8);
  EXPECT_EQ(record.rules[0].config, "smoothing=0.75, update_interval=3ba");
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult sixth, Push(6, 4, 4));
  EXPECT_THAT(Read("ema"), ElementsAre(5, 5, 6.25, 6.25));
  EXPECT_TRUE(sixth.record.tracks[0].updated);
}

TEST_F(SharingTest, AnotherScheduleOfARuleIsAChangeAnotherRuleIsNot) {
  TrackConfig ema{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")};
  ema.tensor_rules = {{"live", TensorAction::kAverage, MakeSchedule("smoothing=0.75")}};
  Create({ema}, 2, 2);
  OpenRun("launch", 0);
  ASSERT_THAT(Push(1, 8, 8), IsOk());
  ema.tensor_rules[0].schedule = MakeSchedule("smoothing=0.25");
  ASSERT_THAT(model_->UpdateTracks({.put = {ema}}), IsOk());
  ASSERT_THAT(Push(2, 8, 8), IsOk());
  ASSERT_THAT(Push(3, 4, 4), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(5, 5, 6, 6));
  ema.tensor_rules[0].pattern = "frozen";
  EXPECT_THAT(model_->UpdateTracks({.put = {ema}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("(but their schedules)")));
  ema.tensor_rules.clear();
  EXPECT_THAT(model_->UpdateTracks({.put = {ema}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cannot be changed")));
}

}  // namespace
}  // namespace ema
