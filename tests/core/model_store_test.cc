// SPDX-License-Identifier: Apache-2.0
#include "server/core/model_store.h"

#include "tests/core/test_model.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ModelConfig Config(const std::string& name, int64_t elements = 1000) {
  ModelConfig config;
  config.name = name;
  config.manifest = MakeManifest({{"w", Dtype::kFloat32, {elements}}});
  config.tracks = {{"ema", MakeSchedule("10ba")}};
  return config;
}

class ModelStoreTest : public testing::Test {
 protected:
  ModelStore store_{TestDevice(), SmallBlocks()};
};

TEST_F(ModelStoreTest, CreatingTheSameModelAgainChangesNothing) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto first, store_.Create(Config("m")));
  EXPECT_TRUE(first.created);
  EMA_ASSERT_OK_AND_ASSIGN(const auto second, store_.Create(Config("m")));
  EXPECT_FALSE(second.created);
  EXPECT_EQ(first.model, second.model);
}

TEST_F(ModelStoreTest, CreatingItDifferentlyNamesTheDifference) {
  ASSERT_THAT(store_.Create(Config("m")), IsOk());
  EXPECT_THAT(store_.Create(Config("m", 999)),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("float32[999]")));
  ModelConfig config = Config("m");
  config.tracks = {{"ema", MakeSchedule("20ba")}};
  EXPECT_THAT(store_.Create(config), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("20ba")));
  config = Config("m");
  config.max_pinned_versions = 5;
  EXPECT_THAT(store_.Create(config), ReasonIs(ErrorReason::kModelDiffers));
}

TEST_F(ModelStoreTest, AModelBeyondTheBudgetIsRefusedAndTakesNothing) {
  const int64_t total = store_.budget().total_bytes();
  // (3 + 2 pinned versions) x 4 bytes.
  const auto refused = store_.Create(Config("big", total / 20 + 1));
  EXPECT_THAT(refused,
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("model \"big\" needs")));
  EXPECT_THAT(refused, ReasonIs(ErrorReason::kMemoryBudget));
  EXPECT_EQ(store_.budget().reserved_bytes(), 0);
  EXPECT_THAT(store_.Create(Config("big", total / 20)), IsOk());
  EXPECT_THAT(store_.Create(Config("small")), ReasonIs(ErrorReason::kMemoryBudget));
  EXPECT_TRUE(store_.Delete("big"));
  EXPECT_EQ(store_.budget().reserved_bytes(), 0);
  EXPECT_THAT(store_.Create(Config("small")), IsOk());
}

// 2^55 bytes, of which the table of the blocks alone would take more memory than there is.
TEST_F(ModelStoreTest, AModelOfManyBytesIsRefusedBeforeItsBlocksAreCounted) {
  const int64_t elements = int64_t{1} << 53;
  EXPECT_THAT(store_.Create(Config("huge", elements)), ReasonIs(ErrorReason::kMemoryBudget));
  EXPECT_EQ(store_.budget().reserved_bytes(), 0);

  ModelConfig config = Config("m");
  config.manifest = MakeManifest({{"w", Dtype::kFloat32, {elements}}, {"b", Dtype::kFloat32, {1}}});
  config.tracks[0].tensor_rules = {{"w", TensorAction::kIgnore}};
  EMA_ASSERT_OK_AND_ASSIGN(const auto created, store_.Create(config));
  const int64_t reserved_bytes = store_.budget().reserved_bytes();
  EXPECT_THAT(created.model->UpdateTracks({.put = {{"all", MakeSchedule("10ba")}}}),
              ReasonIs(ErrorReason::kMemoryBudget));
  EXPECT_THAT(created.model->tracks().MakeSynthesizedTrack({"all", MakeSchedule("10ba")}),
              ReasonIs(ErrorReason::kMemoryBudget));
  EXPECT_EQ(store_.budget().reserved_bytes(), reserved_bytes);
}

TEST_F(ModelStoreTest, TheTablesOfManyTensorsAndTracksAreReserved) {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 20'000; ++i) tensors.push_back({absl::StrCat("t", i), Dtype::kFloat32, {0}});
  ModelConfig config = Config("m");
  config.manifest = MakeManifest(std::move(tensors));
  ModelStore::Options options = SmallBlocks();
  const int64_t bytes_per_track = 20'000 * Track::kBytesPerTensor;
  options.host_memory_bytes = config.manifest->memory_bytes() + 3 * bytes_per_track;
  ModelStore store(TestDevice(), options);
  for (int t = 1; t < kMaxTracks; ++t) {
    config.tracks.push_back({absl::StrCat("track", t), MakeSchedule("10ba")});
  }
  EXPECT_THAT(store.Create(config), ReasonIs(ErrorReason::kMemoryBudget));
  config.tracks.erase(config.tracks.begin() + 2, config.tracks.end());
  EMA_ASSERT_OK_AND_ASSIGN(const auto created, store.Create(config));
  EXPECT_THAT(created.model->UpdateTracks({.put = {{"third", MakeSchedule("10ba")}}}), IsOk());
  EXPECT_THAT(created.model->UpdateTracks({.put = {{"fourth", MakeSchedule("10ba")}}}),
              ReasonIs(ErrorReason::kMemoryBudget));
  EXPECT_THAT(created.model->UpdateTracks({.remove = {"third"}}), IsOk());
  EXPECT_THAT(created.model->UpdateTracks({.put = {{"fourth", MakeSchedule("10ba")}}}), IsOk());
}

TEST_F(ModelStoreTest, AModelTooManyIsToldTheWaysOut) {
  ModelStore::Options options = SmallBlocks();
  options.max_models = 1;
  ModelStore store(TestDevice(), options);
  ASSERT_THAT(store.Create(Config("m")), IsOk());
  const auto refused = store.Create(Config("n"));
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted,
                                AllOf(HasSubstr("has 1 models"), HasSubstr("--max-models"),
                                      HasSubstr("delete one"))));
  EXPECT_THAT(refused, ReasonIs(ErrorReason::kTooManyModels));
}

// As where averages are on a GPU.
TEST_F(ModelStoreTest, HostMemoryBesideBlocksMayHaveABudgetOfItsOwn) {
  ModelStore::Options options = SmallBlocks();
  options.host_memory_bytes = 2'500;
  ModelStore store(TestDevice(), options);
  EMA_ASSERT_OK_AND_ASSIGN(const auto created, store.Create(Config("m")));
  Model& model = *created.model;
  TestRank rank(created.model, "run");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(10, BytesOf(std::vector<float>(1000, 1.5f))), IsOk());
  const int64_t of_models = store.budget().reserved_bytes();

  Selection selection;
  selection.dtype = Dtype::kBFloat16;
  EMA_ASSERT_OK_AND_ASSIGN(const auto reading, model.readings().Open("ema", 0, 0, selection));
  EXPECT_EQ(reading->total_bytes(), 2'000);
  const std::string file(501, 'x');
  const absl::Status refused = model.attached_files().AddPart("config.json", 501, 0, file);
  EXPECT_THAT(refused, ReasonIs(ErrorReason::kMemoryBudget));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("500 of the host's 2500 are free"));
  EXPECT_THAT(model.attached_files().AddPart("config.json", 500, 0, file.substr(1)), IsOk());
  EXPECT_EQ(store.budget().reserved_bytes(), of_models);
}

TEST_F(ModelStoreTest, BadNamesTracksAndPinsAreRefused) {
  for (const char* name : {"", "..", "a/b", " a", "a ", "-a", "a\n"}) {
    EXPECT_THAT(store_.Create(Config(name)), ReasonIs(ErrorReason::kBadName)) << name;
  }
  ModelConfig config = Config("m");
  config.tracks.clear();
  EXPECT_THAT(store_.Create(config), ReasonIs(ErrorReason::kBadRequest));
  config.tracks = {{"a", MakeSchedule("10ba")}, {"a", MakeSchedule("copy")}};
  EXPECT_THAT(store_.Create(config), ReasonIs(ErrorReason::kBadName));
  config = Config("m");
  config.max_pinned_versions = 0;
  EXPECT_THAT(store_.Create(config), ReasonIs(ErrorReason::kBadRequest));
}

TEST_F(ModelStoreTest, UnknownModelsAreNotFound) {
  EXPECT_THAT(store_.Get("nope"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("nope")));
  EXPECT_THAT(store_.Get("no/pe"), ReasonIs(ErrorReason::kBadName));
  EXPECT_FALSE(store_.Delete("nope"));
}

TEST_F(ModelStoreTest, ANameIsFreeAgainWhenWhatElseThereWasIsForgotten) {
  for (const bool exists : {true, false}) {
    if (exists) {
      ASSERT_THAT(store_.Create(Config("m")), IsOk());
    }
    EXPECT_THAT(store_.DeleteAndForget("m",
                                       [&] {
                                         EXPECT_THAT(store_.Get("m"),
                                                     ReasonIs(ErrorReason::kModelNotFound));
                                         EXPECT_THAT(store_.Create(Config("m")),
                                                     AllOf(StatusIs(absl::StatusCode::kUnavailable,
                                                                    HasSubstr("is being deleted")),
                                                           ReasonIs(ErrorReason::kModelBusy)));
                                         EXPECT_THAT(store_.Create(Config("other")), IsOk());
                                         return absl::InternalError("no");
                                       }),
                StatusIs(absl::StatusCode::kInternal, "no"));
    EXPECT_THAT(store_.Create(Config("m")), IsOk());
    EXPECT_TRUE(store_.Delete("m"));
  }
}

TEST_F(ModelStoreTest, StepsOfAllModelsTogetherAreLimitedAndEndedOnesDoNotCount) {
  ModelStore::Options options = SmallBlocks();
  options.max_sessions = 1;
  ModelStore store(TestDevice(), options);
  EMA_ASSERT_OK_AND_ASSIGN(const auto first, store.Create(Config("first")));
  EMA_ASSERT_OK_AND_ASSIGN(const auto second, store.Create(Config("second")));
  TestRank rank(first.model, "launch");
  TestRank other(second.model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(other.Join(), IsOk());
  const std::vector<std::byte> weights(4000);

  EXPECT_THAT(rank.Push(1, weights), IsOk());
  EXPECT_EQ(store.sessions().used_count(), 0);
  EXPECT_THAT(other.Push(1, weights), IsOk());
  {
    EMA_ASSERT_OK_AND_ASSIGN(const auto open, rank.Open(2, std::make_shared<PushOutcome>()));
    EXPECT_EQ(store.sessions().used_count(), 1);
    const auto refused = other.Push(2, weights);
    EXPECT_THAT(refused,
                AllOf(StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("1 open steps")),
                      ReasonIs(ErrorReason::kTooManySessions)));
    EXPECT_GT(GetRetryDelay(refused.status()), absl::ZeroDuration());
    // A later step of the model takes the place of the open one.
    EMA_ASSERT_OK_AND_ASSIGN(const auto next, rank.Open(3, std::make_shared<PushOutcome>()));
    EXPECT_EQ(store.sessions().used_count(), 1);
    store.ExpireSessions(std::chrono::steady_clock::now() + std::chrono::hours(1),
                         std::chrono::seconds(1));
    // Its stream is still there.
    EXPECT_EQ(store.sessions().used_count(), 0);
  }
  EXPECT_THAT(other.Push(2, weights), IsOk());
}

TEST_F(ModelStoreTest, DrainingRefusesWhatIsNew) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto created, store_.Create(Config("m")));
  TestRank rank(created.model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  store_.Drain(SteadyNow());
  EXPECT_THAT(store_.Create(Config("n")), ReasonIs(ErrorReason::kDraining));
  EXPECT_THAT(rank.Push(1, std::vector<std::byte>(4000)), ReasonIs(ErrorReason::kDraining));
}

}  // namespace
}  // namespace ema
