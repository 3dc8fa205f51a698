// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/synthesis.h"

#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/synthesis_plan.h"
#include "server/kernel/cast.h"
#include "tests/checkpoint/test_manager.h"
#include "tests/core/test_model.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kFolder[] = "/data/models/m/checkpoints";
constexpr int64_t kElements = 3000;  // Several blocks of 4 KiB.

TrackConfig PowerTrack(const std::string& name, const std::string& schedule) {
  return {.name = name,
          .schedule = MakeSchedule(schedule),
          .snapshot_interval = TrainingDuration{10, TimeUnit::kBatch}};
}

ModelConfig TestConfig() {
  ModelConfig config;
  config.name = "m";
  config.manifest = MakeManifest({{"n", Dtype::kInt64, {}},
                                  {"w", Dtype::kFloat32, {kElements}},
                                  {"mean", Dtype::kFloat32, {5}, /*is_buffer=*/true},
                                  {"left", Dtype::kFloat32, {2}},
                                  {"h", Dtype::kFloat16, {3}}});
  config.tracks = {PowerTrack("p05", "sigma_rel=0.05"),
                   PowerTrack("p10", "sigma_rel=0.1"),
                   {"raw", MakeSchedule("copy")}};
  for (TrackConfig& track : config.tracks) {
    track.tensor_rules = {{"left", TensorAction::kIgnore}, {"h", TensorAction::kCopy}};
  }
  config.tracks[1].dtype = Dtype::kFloat64;
  config.max_pinned_versions = 32;
  return config;
}

// A model whose versions at some steps are saved.
class SynthesisTest : public testing::Test {
 protected:
  void Start(const ModelConfig& config = TestConfig(), int64_t memory_bytes = int64_t{1} << 30) {
    store_ = *CheckpointStore::Open(files_, {.data_dir = "/data", .keep_count = 100});
    ModelStore::Options options = SmallBlocks();
    options.memory_bytes = memory_bytes;
    models_ = std::make_unique<ModelStore>(TestDevice(), options);
    model_ = models_->Create(config)->model;
    rank_ = std::make_unique<TestRank>(model_, "launch");
    ASSERT_THAT(rank_->Join(), IsOk());
  }

  std::vector<std::byte> Weights() {
    std::normal_distribution<float> normal;
    std::vector<std::byte> bytes;
    const auto append = [&](const void* data, size_t size) {
      const auto* begin = static_cast<const std::byte*>(data);
      bytes.insert(bytes.end(), begin, begin + size);
    };
    ++pushes_;
    append(&pushes_, sizeof(pushes_));
    for (int64_t i = 0; i < kElements + 7; ++i) {
      const float value = normal(random_);
      append(&value, sizeof(value));
    }
    const uint16_t halves[] = {0x3c00, 0x4000, static_cast<uint16_t>(pushes_)};
    append(halves, sizeof(halves));
    return bytes;
  }

  void PushAndSave(const std::vector<int64_t>& saved, int64_t last) {
    for (int64_t step = step_ + 1; step <= last; ++step) {
      EXPECT_THAT(rank_->Push(step, Weights()), IsOk());
      if (std::find(saved.begin(), saved.end(), step) == saved.end()) continue;
      const SnapshotRef snapshot = *model_->history().Pin(0);
      EXPECT_THAT(store_->FolderOf("m").Save(*model_, snapshot), IsOk());
      for (const TrackSnapshot& track : snapshot->tracks) {
        values_[{track.track->name(), step}] = *ReadAll(*model_, track.track->name());
      }
    }
    step_ = last;
  }

  absl::StatusOr<Synthesis> Build(const SynthesisRequest& request) {
    return Synthesize(store_->FolderOf("m"), *model_, request,
                      [](const std::string& checkpoint, const absl::Status& status) {
                        return LocateError(status, "m", checkpoint);
                      });
  }
  absl::StatusOr<Synthesis> Build(double sigma_rel, int64_t step = 0,
                                  std::vector<std::string> tracks = {}) {
    return Build({.name = "x", .profile = sigma_rel, .step = step, .tracks = tracks});
  }

  std::vector<std::byte> BytesOfResult(const std::string& name = "x") {
    const SnapshotRef result = model_->tracks().FindSynthesized(name);
    EXPECT_NE(result, nullptr);
    const TrackSnapshot& track = result->tracks[0];
    const auto pieces = ReadBlocks(model_->device(), *track.track, track.blocks, 0,
                                   track.track->layout().total_bytes());
    std::vector<std::byte> bytes;
    for (const HostPiece& piece : *pieces) {
      bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
    }
    return bytes;
  }

  // Element `i` of an averaged tensor, as it was saved.
  double Saved(const std::string& track, int64_t step, int64_t tensor, int64_t i) {
    const StorageLayout::Entry& entry = LayoutOf(track).entry(tensor);
    const std::byte* const at =
        values_.at({track, step}).data() + entry.offset + i * DtypeSize(entry.dtype);
    return ValueAt(entry.dtype, at, 0);
  }
  const StorageLayout& LayoutOf(const std::string& track) {
    return model_->history().Pin(0).value()->Find(track)->track->layout();
  }

  FakeFileSystem files_;
  std::unique_ptr<CheckpointStore> store_;
  std::unique_ptr<ModelStore> models_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<TestRank> rank_;
  std::mt19937 random_{20240607};
  int64_t pushes_ = 0;
  int64_t step_ = 0;
  // By track and step: what was saved.
  std::map<std::pair<std::string, int64_t>, std::vector<std::byte>> values_;
};

TEST_F(SynthesisTest, IsTheWeightedSumOfItsSources) {
  Start();
  PushAndSave({5, 10, 15, 20, 25}, 27);
  EMA_ASSERT_OK_AND_ASSIGN(const Synthesis synthesis, Build(.07, 22));
  EXPECT_EQ(synthesis.version.step, 22);
  EXPECT_EQ(synthesis.version.number, 20);
  EXPECT_EQ(synthesis.version.time, TrainingTime::AtBatch(22));
  ASSERT_EQ(synthesis.version.tracks.size(), 1u);
  EXPECT_THAT(synthesis.version.tracks[0].config, HasSubstr("sigma_rel=0.07"));
  std::vector<double> expected(kElements);
  const StorageLayout& layout = model_->Describe().tracks[0]->layout();
  const int64_t offset = layout.entry(1).offset;
  for (const Synthesis::Source& source : synthesis.sources) {
    for (int64_t i = 0; i < kElements; ++i) {
      expected[i] += source.weight * Saved(source.track, source.step, 1, i);
    }
  }
  const std::vector<std::byte> built = BytesOfResult();
  ASSERT_EQ(static_cast<int64_t>(built.size()), layout.total_bytes());
  for (int64_t i = 0; i < kElements; ++i) {
    float value = 0;
    std::memcpy(&value, &built[offset + i * sizeof(float)], sizeof(value));
    ASSERT_NEAR(value, expected[i], 1e-7 * std::max(1.0, std::abs(expected[i]))) << i;
  }
  // What is not averaged, and buffers, are as at the newest source, 20; p05 or p10, by their
  // weight.
  const auto weight_at_20 = [&](const std::string& track) {
    for (const Synthesis::Source& source : synthesis.sources) {
      if (source.track == track && source.step == 20) return std::abs(source.weight);
    }
    return 0.0;
  };
  const std::string newest = weight_at_20("p05") > weight_at_20("p10") ? "p05" : "p10";
  for (const int64_t i : {0, 4}) {
    const StorageLayout::Entry& entry = layout.entry(i);
    const std::byte* const saved = &values_.at({newest, 20})[LayoutOf(newest).entry(i).offset];
    EXPECT_EQ(std::memcmp(&built[entry.offset], saved, entry.length_bytes), 0) << i;
  }
  for (int64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(ValueAt(Dtype::kFloat32, &built[layout.entry(2).offset], i),
              static_cast<float>(Saved(newest, 20, 2, i)));
  }
  EXPECT_FALSE(layout.entry(3).is_stored);
  // A reader that has another one of that name gets all of this.
  const auto reading = model_->readings().Open("x", 0, 0, {});
  ASSERT_THAT(reading, IsOk());
  EXPECT_TRUE((*reading)->ChunkChangedSince(27, 0));
}

TEST_F(SynthesisTest, WithoutAStepItStandsAtTheNewestSnapshot) {
  Start();
  PushAndSave({5, 10, 20}, 27);
  EMA_ASSERT_OK_AND_ASSIGN(const Synthesis synthesis, Build(.05));
  EXPECT_EQ(synthesis.version.step, 20);
  EXPECT_LT(synthesis.residual, 1e-6);
  const std::vector<std::byte> built = BytesOfResult();
  const StorageLayout::Entry& entry = model_->Describe().tracks[0]->layout().entry(1);
  const std::vector<std::byte>& stored = values_.at({"p05", 20});
  for (int64_t i = 0; i < kElements; ++i) {
    float value = 0;
    float expected = 0;
    std::memcpy(&value, &built[entry.offset + i * sizeof(float)], sizeof(value));
    std::memcpy(&expected, &stored[entry.offset + i * sizeof(float)], sizeof(value));
    ASSERT_NEAR(value, expected, 2e-6);
  }
}

TEST_F(SynthesisTest, AHalfLifeIsBuiltToo) {
  Start();
  PushAndSave({5, 10, 15, 20, 25}, 27);
  const SynthesisRequest request{.name = "x", .profile = TrainingDuration{3, TimeUnit::kBatch}};
  EMA_ASSERT_OK_AND_ASSIGN(const Synthesis synthesis, Build(request));
  EXPECT_LT(synthesis.residual, .3);
  EXPECT_THAT(synthesis.version.tracks[0].config, HasSubstr("half_life=3ba"));
  const SynthesisRequest epochs{.name = "x", .profile = TrainingDuration{3, TimeUnit::kEpoch}};
  EXPECT_THAT(Build(epochs),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("half_life \"3ep\"")));
}

TEST_F(SynthesisTest, ReadsNoSourceWithoutAWeight) {
  Start();
  PushAndSave({5, 10, 15, 200}, 200);
  std::vector<std::string> opened;
  files_.set_hook([&](const std::string& operation, const std::string& path) {
    if (operation == "open" && path.find("tracks") != std::string::npos) opened.push_back(path);
    return absl::OkStatus();
  });
  EMA_ASSERT_OK_AND_ASSIGN(const Synthesis synthesis, Build(.05));
  EXPECT_EQ(opened.size(), synthesis.sources.size());
  EXPECT_LT(opened.size(), 8u);
}

TEST_F(SynthesisTest, ACorruptCheckpointIsNamedAndMakesNothing) {
  Start();
  PushAndSave({10, 20}, 20);
  const int64_t reserved = models_->budget().reserved_bytes();
  for (const char* file : {"manifest.json", "tracks/p10/model.safetensors"}) {
    std::string& bytes =
        files_.FileBytes(absl::StrCat(kFolder, "/step-000000000020-version-7-20/", file));
    bytes[bytes.size() / 2] ^= 1;
    EXPECT_THAT(Build(.07),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("step-000000000020-version-7-20")));
    EXPECT_EQ(model_->tracks().FindSynthesized("x"), nullptr);
    EXPECT_EQ(models_->budget().reserved_bytes(), reserved);
    bytes[bytes.size() / 2] ^= 1;
  }
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "read" ? absl::UnavailableError("Input/output error") : absl::OkStatus();
  });
  EXPECT_THAT(Build(.07), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("Input/output")));
}

TEST_F(SynthesisTest, MemoryIsReservedAndGivenBack) {
  const ModelConfig config = TestConfig();
  const auto bytes_as = [&](Dtype dtype) {
    return StorageLayout(*config.manifest, ActionsOf(config.tracks[0], *config.manifest), dtype)
        .total_bytes();
  };
  const int64_t stored = bytes_as(Dtype::kFloat32);
  // Room for one result while it is built, not for one beside another.
  Start(config, MemoryBytesOf(config) + stored + bytes_as(Dtype::kFloat64));
  PushAndSave({10, 20}, 20);
  EXPECT_THAT(Build(.07), IsOk());
  EXPECT_EQ(models_->budget().reserved_bytes(), MemoryBytesOf(config) + stored);
  const auto held_bytes = [this] {
    const Device::MemoryUse use = models_->device().memory_use();
    return use.block_bytes + use.kept_bytes;
  };
  // Versions to come may use it.
  EXPECT_LE(held_bytes(), models_->budget().reserved_bytes());
  const absl::Status status = Build(.08).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("to build \"x\"")));
  EXPECT_EQ(GetErrorReason(status), ErrorReason::kMemoryBudget);
  // The one before is still there, and goes with its last reader.
  SnapshotRef reader = model_->tracks().FindSynthesized("x");
  ASSERT_NE(reader, nullptr);
  models_->Delete("m");
  rank_.reset();
  model_.reset();
  EXPECT_GE(models_->budget().reserved_bytes(), stored);
  reader.reset();
  EXPECT_EQ(models_->budget().reserved_bytes(), 0);
  EXPECT_EQ(held_bytes(), 0);
}

TEST_F(SynthesisTest, TracksThatDoNotFitAreLeftOutOrRefused) {
  Start();
  PushAndSave({10}, 15);
  // Another start: it has averaged other things.
  ASSERT_THAT(model_->UpdateTracks({.put = {PowerTrack("late", "sigma_rel=0.2")}}), IsOk());
  PushAndSave({20}, 25);
  EMA_ASSERT_OK_AND_ASSIGN(const Synthesis synthesis, Build(.07));
  for (const Synthesis::Source& source : synthesis.sources) EXPECT_NE(source.track, "late");
  EXPECT_THAT(Build(.07, 0, {"p05", "late"}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"late\""), HasSubstr("\"p05\""), HasSubstr("began at"))));
  EXPECT_THAT(Build(.2, 0, {"late"}), IsOk());
  EXPECT_THAT(Build(.2, 12, {"late"}),
              StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("1 steps: 20")));
  EXPECT_THAT(Build(.2, 0, {"raw"}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("snapshot_interval")));
  // An earlier track of the same name is another one.
  ASSERT_THAT(model_->UpdateTracks(
                  {.put = {PowerTrack("p05", "sigma_rel=0.05")}, .remove = {"p05", "p10", "late"}}),
              IsOk());
  PushAndSave({30}, 31);
  EMA_ASSERT_OK_AND_ASSIGN(const Synthesis anew, Build(.07));
  ASSERT_EQ(anew.sources.size(), 1u);
  EXPECT_EQ(anew.sources[0].step, 30);
  // But at a step before it is the one that there was.
  EMA_ASSERT_OK_AND_ASSIGN(const Synthesis before, Build(.07, 22));
  EXPECT_EQ(before.sources.back().step, 20);
}

TEST_F(SynthesisTest, ADeletedModelIsNotFound) {
  Start();
  PushAndSave({10}, 10);
  bool is_deleted = false;
  files_.set_hook([&](const std::string& operation, const std::string& path) {
    if (operation == "open" && !is_deleted && path.find("tracks") != std::string::npos) {
      is_deleted = true;
      models_->Delete("m");
      EXPECT_THAT(store_->DeleteModel("m"), IsOk());
    }
    return absl::OkStatus();
  });
  EXPECT_THAT(Build(.07), StatusIs(absl::StatusCode::kNotFound, HasSubstr("deleted")));
}

TEST_F(SynthesisTest, AServerThatStopsDoesNotWaitForIt) {
  Start();
  PushAndSave({5, 10, 15, 20}, 20);
  int64_t opened = 0;
  files_.set_hook([&](const std::string& operation, const std::string& path) {
    if (operation == "open" && path.find("tracks") != std::string::npos && ++opened == 2) {
      models_->Close();
    }
    return absl::OkStatus();
  });
  const absl::Status status = Build(.07).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("shutting down")));
  EXPECT_EQ(opened, 2);
  EXPECT_EQ(GetErrorReason(Build(.07).status()), ErrorReason::kDraining);
}

TEST(SynthesisPlanTest, OfVeryManySnapshotsSomeAreLeftOut) {
  ModelStore models(TestDevice(), SmallBlocks());
  const ModelConfig config = TestConfig();
  const auto model = models.Create(config)->model;
  constexpr int64_t kCount = 700;  // Of each of two tracks.
  std::vector<StoredCheckpoint> checkpoints;
  for (int64_t step = kCount; step > 0; --step) {
    StoredCheckpoint& checkpoint = checkpoints.emplace_back();
    checkpoint.id = {7, step, step};
    checkpoint.manifest.record = {.incarnation = 7, .number = step, .step = step};
    checkpoint.manifest.record.time = TrainingTime::AtBatch(step);
    for (size_t t = 0; t < 2; ++t) {
      CheckpointTrack track{.config = config.tracks[t],
                            .state = {{.last_update = TrainingTime::AtBatch(step),
                                       .started = TrainingTime::AtBatch(1)}},
                            .last_steps = {step}};
      track.weights.emplace();
      checkpoint.manifest.tracks.push_back(std::move(track));
    }
  }
  EMA_ASSERT_OK_AND_ASSIGN(
      const SynthesisPlan plan,
      PlanSynthesis(*model, model->manifest(), {.name = "x", .profile = .07}, checkpoints));
  EXPECT_EQ(plan.record.step, kCount);
  EXPECT_LE(plan.sources.size(), 1024u);
  EXPECT_EQ(plan.newest.checkpoint->id.step, kCount);
  EXPECT_LT(plan.residual, 1e-3);
}

// --- After restores ---

// A server whose versions are all saved. Its training time is not the step, but what the test says.
class SynthesisBranchTest : public testing::Test {
 protected:
  void Start() {
    server_ = nullptr;
    CheckpointManager::Options options;
    options.store.keep_count = 100;
    ModelConfig config;
    config.name = "m";
    config.manifest = MakeManifest({{"w", Dtype::kFloat32, {3}}});
    config.tracks = {PowerTrack("p05", "sigma_rel=0.05")};
    config.max_pinned_versions = 4;
    server_ = std::make_unique<TestServer>(files_, std::move(options), config);
  }

  // One run: the version of each step is saved.
  void PushAndSave(const std::vector<std::pair<int64_t, int64_t>>& steps_and_times) {
    TestRank rank(server_->shared_model(), absl::StrCat("launch after ", server_->version()));
    ASSERT_THAT(rank.Join(), IsOk());
    for (const auto& [step, time] : steps_and_times) {
      rank.SetTime([at = time](int64_t) { return TrainingTime::AtBatch(at); });
      ASSERT_THAT(rank.Push(step, BytesOf({1, 2, 3})), IsOk());
      ASSERT_THAT(server_->Save(), IsOk());
    }
    server_->manager().AwaitIdle();  // Or an automatic save could bring a deleted one back.
  }
  void Restore(int64_t version) {
    ASSERT_THAT(server_->manager().Restore(server_->model(), {version, 0}, ""), IsOk());
  }

  Version RecordAt(int64_t step) {
    const auto synthesis = server_->manager().Synthesize(
        server_->model(), {.name = "x", .profile = .07, .step = step});
    EXPECT_THAT(synthesis, IsOk());
    return synthesis->version;
  }

  FakeFileSystem files_;
  std::unique_ptr<TestServer> server_;
};

TEST_F(SynthesisBranchTest, ACorruptCheckpointIsSetAside) {
  Start();
  PushAndSave({{10, 10}, {20, 20}, {30, 30}});
  EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server_->manager().List(server_->model()));
  const std::string& name = listing.checkpoints[1].name;
  files_.FileBytes(absl::StrCat(kFolder, "/", name, "/manifest.json"))[40] ^= 1;
  EXPECT_THAT(server_->manager().Synthesize(server_->model(), {.name = "x", .profile = .07}),
              AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr(name)),
                    ReasonIs(ErrorReason::kCheckpointCorrupt)));
  EXPECT_EQ(server_->manager().CountAll()["m"].corrupt, 1);
  EXPECT_EQ(RecordAt(30).number, 3);
}

TEST_F(SynthesisBranchTest, AFutureThatWasGivenUpIsNotUsed) {
  Start();
  PushAndSave({{10, 10}, {20, 20}, {30, 30}});
  Restore(1);                         // Version 4.
  PushAndSave({{20, 25}, {40, 45}});  // Versions 5 and 6.
  EXPECT_EQ(RecordAt(20).number, 5);
  EXPECT_EQ(RecordAt(20).time, TrainingTime::AtBatch(25));
  EXPECT_EQ(RecordAt(35).number, 5);
}

TEST_F(SynthesisBranchTest, NorIsItsTime) {
  Start();
  PushAndSave({{10, 10}, {20, 20}, {30, 30}});
  Restore(1);
  PushAndSave({{20, 50}, {30, 90}, {40, 130}});  // Versions 5 to 7.
  // Only its record says when it was.
  const CheckpointId id{server_->manager().incarnation(), 6, 30};
  ASSERT_THAT(server_->manager().Delete(server_->model(), CheckpointName(id)), IsOk());
  EXPECT_EQ(RecordAt(30).time, TrainingTime::AtBatch(90));
  EXPECT_EQ(RecordAt(30).number, 5);
}

TEST_F(SynthesisBranchTest, WhatWasRestoredLastIsUsedAlsoBehindAnotherRestore) {
  Start();
  PushAndSave({{10, 10}, {20, 20}, {30, 30}});
  Restore(1);               // Version 4.
  PushAndSave({{20, 25}});  // Version 5.
  Restore(3);               // Version 6.
  EXPECT_EQ(RecordAt(20).number, 2);
  EXPECT_EQ(RecordAt(20).time, TrainingTime::AtBatch(20));
  // The manifests say it, too.
  Start();
  EXPECT_EQ(RecordAt(20).number, 2);
  EXPECT_EQ(RecordAt(25).number, 2);
  EXPECT_EQ(RecordAt(30).number, 6);
}

}  // namespace
}  // namespace ema
