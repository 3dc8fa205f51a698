// SPDX-License-Identifier: Apache-2.0
//
// Norms of averages and their distances from raw weights: on demand, and by themselves.
#include <cmath>
#include <limits>

#include "server/core/commit_statistics.h"
#include "server/core/version_statistics.h"
#include "server/device/accelerator_device.h"
#include "tests/core/test_model.h"
#include "tests/testutil/fake_accelerator.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::DoubleEq;
using testing::ElementsAre;
using testing::FieldsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Optional;
using testing::UnorderedElementsAre;

TrackConfig Track(const std::string& name, const std::string& schedule) {
  return {.name = name, .schedule = MakeSchedule(schedule)};
}

auto Are(const std::string& track, double norm, double distance) {
  return FieldsAre(track, DoubleEq(norm), Optional(DoubleEq(distance)));
}
auto HasNorm(const std::string& track, double norm) {
  return FieldsAre(track, DoubleEq(norm), std::optional<double>());
}

absl::Status ComputeAll(Model& model, const VersionId& id) {
  return ComputeStatistics(model, id, {}).status();
}

class StatisticsTest : public testing::Test {
 protected:
  explicit StatisticsTest(std::shared_ptr<Device> device = TestDevice())
      : store_(std::move(device), Options()) {}

  ModelStore::Options Options() {
    ModelStore::Options options = SmallBlocks();
    options.model.on_commit = [this](const auto& model, const Snapshot& snapshot) {
      if (by_itself_ != nullptr) by_itself_->OnCommit(model, snapshot);
    };
    return options;
  }

  void Create(std::vector<TrackConfig> tracks,
              std::vector<TensorSpec> tensors = {{"w", Dtype::kFloat32, {3}}},
              int64_t frozen_shard_count = 0) {
    const auto created = store_.Create({.name = "m",
                                        .manifest = MakeManifest(std::move(tensors)),
                                        .tracks = std::move(tracks),
                                        .non_finite = NonFinitePolicy::kAllow});
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
    rank_ = std::make_unique<TestRank>(model_, "launch");
    ASSERT_THAT(rank_->Join(frozen_shard_count), IsOk());
  }

  absl::StatusOr<PushResult> Push(int64_t step, const std::vector<float>& values) {
    return rank_->Push(step, BytesOf(values));
  }

  std::vector<TrackStatistics> Statistics(int64_t version = 0,
                                          const std::vector<std::string>& tracks = {}) {
    const auto record = ComputeStatistics(*model_, {.version = version}, tracks);
    EXPECT_THAT(record, IsOk());
    return record.ok() ? record->statistics : std::vector<TrackStatistics>();
  }

  // What the record says.
  std::vector<TrackStatistics> Remembered(int64_t version) {
    return model_->history().RecordsAfter(version - 1, 0, 1).at(0).record.statistics;
  }

  std::unique_ptr<CommitStatistics> by_itself_;
  ModelStore store_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<TestRank> rank_;
};

TEST_F(StatisticsTest, NormAndDistanceAreThoseOfTheValues) {
  Create({Track("half", "smoothing=0.5"), Track("raw", "copy"), Track("most", "smoothing=0.75")});
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  ASSERT_THAT(Push(2, {4, -8, 8}), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const Version record, ComputeStatistics(*model_, {}, {}));
  EXPECT_EQ(record.number, 2);
  EXPECT_EQ(record.step, 2);
  // (2, -4, 4) and (1, -2, 2); the raw weights are no average.
  EXPECT_THAT(record.statistics, ElementsAre(Are("half", 6, 6), Are("most", 3, 9)));
  EXPECT_THAT(Statistics(1), ElementsAre(Are("half", 0, 0), Are("most", 0, 0)));
  EXPECT_THAT(Statistics(2, {"most", "half"}), ElementsAre(Are("most", 3, 9), Are("half", 6, 6)));
}

TEST_F(StatisticsTest, OnlyTensorsThatAreAveragedCount) {
  TrackConfig ema = Track("ema", "smoothing=0.5");
  ema.tensor_rules = {{"head", TensorAction::kIgnore}, {"scale", TensorAction::kCopy}};
  TrackConfig raw = Track("raw", "copy");
  raw.tensor_rules = {{"bias", TensorAction::kIgnore}};
  Create({ema, raw}, {{"head", Dtype::kFloat32, {1}},
                      {"body", Dtype::kFloat32, {2}},
                      {"empty", Dtype::kFloat32, {0, 4}},
                      {"scale", Dtype::kFloat32, {1}},
                      {"bias", Dtype::kFloat32, {1}},
                      {"count", Dtype::kInt32, {1}}});
  ASSERT_THAT(Push(1, {0, 0, 0, 0, 0, 0}), IsOk());
  ASSERT_THAT(Push(2, {100, 6, 8, 100, 24, 100}), IsOk());
  // (3, 4) and 12; of the last there is no raw value.
  EXPECT_THAT(Statistics(), ElementsAre(Are("ema", 13, 5)));
}

TEST_F(StatisticsTest, WithoutRawValuesThereIsNoDistance) {
  TrackConfig integers = Track("integers", "copy");
  integers.tensor_rules = {{"w", TensorAction::kIgnore}};
  for (const bool has_copy : {false, true}) {
    std::vector<TrackConfig> tracks = {Track("ema", "smoothing=0.5")};
    if (has_copy) tracks.push_back(integers);
    Create(tracks, {{"w", Dtype::kFloat32, {2}}, {"n", Dtype::kInt32, {1}}});
    ASSERT_THAT(Push(1, {3, 4, 7}), IsOk());
    EXPECT_THAT(Statistics(), ElementsAre(HasNorm("ema", 5)));
    ASSERT_TRUE(store_.Delete("m"));
  }
}

TEST_F(StatisticsTest, FrozenTensorsCount) {
  Create({Track("ema", "smoothing=0.5"), Track("raw", "copy")},
         {{"live", Dtype::kFloat32, {1}}, {"frozen", Dtype::kFloat32, {1}}},
         /*frozen_shard_count=*/1);
  ASSERT_THAT(Push(1, {0, 4}), IsOk());
  rank_->SetOmitsFrozen(true);
  ASSERT_THAT(Push(2, {6}), IsOk());
  EXPECT_THAT(Statistics(), ElementsAre(Are("ema", 5, 3)));
}

// Tensors of several blocks, which the tracks cut at different elements.
TEST_F(StatisticsTest, EveryElementMeetsItsOwnRawValue) {
  TrackConfig exact = Track("exact", "smoothing=0.5");
  exact.dtype = Dtype::kFloat64;
  Create({Track("ema", "smoothing=0.5"), exact, Track("raw", "copy")},
         {{"flags", Dtype::kUInt8, {7}},
          {"single", Dtype::kFloat32, {3001}},
          {"brain", Dtype::kBFloat16, {5003}},
          {"double", Dtype::kFloat64, {1501}},
          {"half", Dtype::kFloat16, {4099}}});
  double square = 0;
  const auto bytes = [&square](double scale) {
    std::vector<std::byte> result(7);
    const auto put = [&result](auto value) {
      const auto* const data = reinterpret_cast<const std::byte*>(&value);
      result.insert(result.end(), data, data + sizeof(value));
    };
    square = 0;
    // Neighbours differ; all have few bits.
    const auto value = [&](int i) {
      square += (i % 7) * (i % 7);
      return scale * (i % 7);
    };
    constexpr uint16_t kHalves[] = {0,      0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600,
                                    0x4700, 0x4800, 0x4880, 0x4900, 0x4980, 0x4a00};
    for (int i = 0; i < 3001; ++i) put(static_cast<float>(value(i)));
    for (int i = 0; i < 5003; ++i) {
      const float brain = static_cast<float>(value(i));
      uint32_t bits = 0;
      std::memcpy(&bits, &brain, sizeof(bits));
      put(static_cast<uint16_t>(bits >> 16));
    }
    for (int i = 0; i < 1501; ++i) put(value(i));
    for (int i = 0; i < 4099; ++i) put(kHalves[static_cast<int>(value(i))]);
    return result;
  };
  ASSERT_THAT(rank_->Push(1, bytes(0)), IsOk());
  ASSERT_THAT(rank_->Push(2, bytes(2)), IsOk());
  const double norm = std::sqrt(square);
  EXPECT_THAT(Statistics(), ElementsAre(Are("ema", norm, norm), Are("exact", norm, norm)));
}

TEST_F(StatisticsTest, WhatIsNotFiniteShows) {
  Create({Track("ema", "smoothing=0.5"), Track("raw", "copy")});
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  ASSERT_THAT(Push(2, {1, std::numeric_limits<float>::quiet_NaN(), 1}), IsOk());
  const std::vector<TrackStatistics> statistics = Statistics();
  ASSERT_EQ(statistics.size(), 1);
  EXPECT_TRUE(std::isnan(statistics[0].norm));
  EXPECT_TRUE(std::isnan(statistics[0].distance.value()));
}

TEST_F(StatisticsTest, TheRecordHasThemAlsoWhenTheVersionHasGone) {
  Create({Track("ema", "smoothing=0.5"), Track("raw", "copy"), Track("other", "smoothing=0.75")});
  ASSERT_THAT(Push(1, {3, 0, 4}), IsOk());
  EXPECT_THAT(Remembered(1), IsEmpty());
  EXPECT_THAT(Statistics(0, {"other"}), ElementsAre(Are("other", 5, 0)));
  EXPECT_THAT(Remembered(1), ElementsAre(Are("other", 5, 0)));
  EXPECT_THAT(Statistics(), ElementsAre(Are("ema", 5, 0), Are("other", 5, 0)));
  EXPECT_THAT(Remembered(1), UnorderedElementsAre(Are("ema", 5, 0), Are("other", 5, 0)));
  EXPECT_THAT(model_->history().latest()->statistics,
              UnorderedElementsAre(Are("ema", 5, 0), Are("other", 5, 0)));
  for (int step = 2; step <= 5; ++step) ASSERT_THAT(Push(step, {0, 0, 0}), IsOk());
  EXPECT_THAT(ComputeStatistics(*model_, {.version = 1}, {}),
              AllOf(StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("version 1 is not kept")),
                    ReasonIs(ErrorReason::kVersionNotKept)));
  EXPECT_THAT(Remembered(1), UnorderedElementsAre(Are("ema", 5, 0), Are("other", 5, 0)));
  EXPECT_THAT(Remembered(5), IsEmpty());
  EXPECT_THAT(model_->history().latest()->statistics, IsEmpty());
}

TEST_F(StatisticsTest, ErrorsNameTheThing) {
  Create({Track("ema", "smoothing=0.5"), Track("raw", "copy")});
  const auto ask = [&](int64_t version, const std::string& track) {
    return ComputeStatistics(*model_, {.version = version}, std::vector<std::string>{track});
  };
  EXPECT_THAT(ask(0, "ema"), ReasonIs(ErrorReason::kNoVersion));
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  EXPECT_THAT(ask(2, "ema"), ReasonIs(ErrorReason::kVersionNotYet));
  EXPECT_THAT(ComputeStatistics(*model_, {.version = 1, .incarnation = 6}, {}),
              ReasonIs(ErrorReason::kVersionNotKept));
  EXPECT_THAT(ask(0, "none"), AllOf(StatusIs(absl::StatusCode::kNotFound, HasSubstr("ema, raw")),
                                    ReasonIs(ErrorReason::kTrackNotFound)));
  EXPECT_THAT(ask(0, "raw"), AllOf(StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr("\"raw\" averages no tensor (copy)")),
                                   ReasonIs(ErrorReason::kBadRequest)));
  ASSERT_THAT(model_->UpdateTracks({.put = {Track("new", "smoothing=0.5")}}), IsOk());
  ASSERT_THAT(Push(2, {0, 0, 0}), IsOk());
  EXPECT_THAT(ask(0, "new"),
              AllOf(StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("version 2 yet")),
                    ReasonIs(ErrorReason::kNoVersion)));
  const absl::StatusOr<SnapshotRef> first = model_->history().Pin(1);
  const absl::StatusOr<SnapshotRef> second = model_->history().Pin(2);
  ASSERT_THAT(Push(3, {0, 0, 0}), IsOk());
  EXPECT_THAT(ask(3, "ema"), ReasonIs(ErrorReason::kTooManyPins));
  EXPECT_THAT(ask(2, "ema"), IsOk());
}

TEST_F(StatisticsTest, EveryNthVersionHasThemByItself) {
  by_itself_ = std::make_unique<CommitStatistics>(2, ComputeAll);
  Create({Track("ema", "smoothing=0.5"), Track("raw", "copy")});
  for (int step = 1; step <= 5; ++step) {
    ASSERT_THAT(Push(step, {static_cast<float>(step), 0, 0}), IsOk());
    by_itself_->AwaitIdle();
  }
  EXPECT_THAT(Remembered(1), IsEmpty());
  EXPECT_THAT(Remembered(2), ElementsAre(Are("ema", 1.5, 0.5)));
  EXPECT_THAT(Remembered(3), IsEmpty());
  EXPECT_THAT(Remembered(4), ElementsAre(Are("ema", 3.125, 0.875)));
  EXPECT_THAT(Remembered(5), IsEmpty());
}

TEST_F(StatisticsTest, CommitsDoNotWaitForThemAndTheEndMayComeAtAnyTime) {
  by_itself_ = std::make_unique<CommitStatistics>(1, ComputeAll);
  Create({Track("ema", "smoothing=0.5"), Track("raw", "copy")});
  for (int step = 1; step <= 100; ++step) ASSERT_THAT(Push(step, {1, 2, 2}), IsOk());
  by_itself_->AwaitIdle();
  // Which versions have not gone before their turn comes, nobody knows.
  for (const VersionHistory::RecordEntry& entry : model_->history().RecordsAfter(0, 0, 100)) {
    if (entry.record.statistics.empty()) continue;
    EXPECT_THAT(entry.record.statistics, ElementsAre(Are("ema", 3, 0)));
  }
  ASSERT_THAT(Push(101, {1, 2, 2}), IsOk());
  ASSERT_TRUE(store_.Delete("m"));
  model_ = nullptr;
  rank_ = nullptr;
  by_itself_ = nullptr;
}

class CountedStatisticsTest : public StatisticsTest {
 protected:
  explicit CountedStatisticsTest(std::shared_ptr<FakeAccelerator> accelerator =
                                     std::make_shared<FakeAccelerator>(FakeAccelerator::Options()))
      : StatisticsTest(MakeAcceleratorDevice(accelerator, {})), accelerator_(accelerator) {}

  const std::shared_ptr<FakeAccelerator> accelerator_;
};

TEST_F(CountedStatisticsTest, TheyAreComputedOnce) {
  Create({Track("ema", "smoothing=0.5"), Track("raw", "copy")});
  ASSERT_THAT(Push(1, {3, 0, 4}), IsOk());
  EXPECT_THAT(Statistics(), ElementsAre(Are("ema", 5, 0)));
  const int64_t before = accelerator_->work_count();
  EXPECT_THAT(Statistics(), ElementsAre(Are("ema", 5, 0)));
  EXPECT_EQ(accelerator_->work_count(), before);
}

}  // namespace
}  // namespace ema
