// SPDX-License-Identifier: Apache-2.0
//
// What a model takes of the host's memory beside its averages.
#include <cmath>

#include "tests/core/test_model.h"
#include "tests/testutil/fake_stored_track.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

class HostMemoryTest : public testing::Test {
 protected:
  // A store in which attached files, readers, layouts and manifests have so much.
  void MakeStore(int64_t host_bytes) {
    ModelStore::Options options = SmallBlocks();
    options.host_memory_bytes = host_bytes;
    store_ = std::make_unique<ModelStore>(TestDevice(), options);
  }
  std::shared_ptr<Model> Create(std::vector<TensorSpec> tensors,
                                std::vector<TrackConfig> tracks = {{"ema", MakeSchedule("10ba")}}) {
    ModelConfig config;
    config.name = "m";
    config.manifest = MakeManifest(std::move(tensors));
    config.tracks = std::move(tracks);
    return store_->Create(std::move(config))->model;
  }
  static std::vector<Shard> Cells(int64_t begin, int64_t end) {
    std::vector<Shard> cells;
    for (int64_t i = begin; i < end; ++i) cells.push_back({0, {i}, {1}});
    return cells;
  }

  std::unique_ptr<ModelStore> store_;
};

TEST_F(HostMemoryTest, LargeLayoutsAreReservedUntilTheirRunHasGone) {
  constexpr int64_t kCells = 40'000;  // About 5 MB of layout.
  MakeStore(12 * kMiB);
  const std::shared_ptr<Model> model = Create({{"w", Dtype::kInt8, {2 * kCells}}});
  TestRank first(model, "launch", 0, 2, Cells(0, kCells), /*whole=*/false);
  TestRank second(model, "launch", 1, 2, Cells(kCells, 2 * kCells), /*whole=*/false);
  ASSERT_THAT(first.Join(), IsOk());
  ASSERT_THAT(second.Join(), IsOk());
  EXPECT_THAT(first.Join(), IsOk());  // Again: reserves nothing.

  const std::string file(4 * kMiB, ' ');
  // A file of what they leave does not fit, nor does one more layout of that kind.
  EXPECT_THAT(model->attached_files().AddPart("a.json", 4 * kMiB, 0, file),
              ReasonIs(ErrorReason::kMemoryBudget));
  TestRank next(model, "next", 0, 2, Cells(0, kCells), /*whole=*/false);
  const absl::Status refused = next.Join();
  EXPECT_THAT(refused, AllOf(ReasonIs(ErrorReason::kMemoryBudget),
                             StatusIs(absl::StatusCode::kResourceExhausted,
                                      HasSubstr("rank 0's layout needs "))));
  // Nothing has changed: the run goes on.
  EXPECT_THAT(first.Open(1, std::make_shared<PushOutcome>()), IsOk());

  TestRank whole(model, "whole");
  ASSERT_THAT(whole.Join(), IsOk());
  EXPECT_THAT(model->attached_files().AddPart("a.json", 4 * kMiB, 0, file), IsOk());
}

TEST_F(HostMemoryTest, SmallLayoutsAndManifestsNeedNoBudget) {
  MakeStore(1);
  const std::shared_ptr<Model> model = Create({{"w", Dtype::kInt8, {1000}}});
  TestRank rank(model, "launch", 0, 1, Cells(0, 1000), /*whole=*/false);
  EXPECT_THAT(rank.Join(), IsOk());
}

TEST_F(HostMemoryTest, ALargeManifestIsReserved) {
  MakeStore(kMiB);
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 10'000; ++i) tensors.push_back({absl::StrCat("w", i), Dtype::kInt8, {1}});
  ModelConfig config;
  config.name = "m";
  config.manifest = MakeManifest(std::move(tensors));
  config.tracks = {{"ema", MakeSchedule("10ba")}};
  EXPECT_THAT(store_->Create(config).status(),
              AllOf(ReasonIs(ErrorReason::kMemoryBudget),
                    StatusIs(absl::StatusCode::kResourceExhausted,
                             HasSubstr("the manifest of model \"m\" needs "))));
  EXPECT_EQ(store_->budget().reserved_bytes(), 0);
  MakeStore(8 * kMiB);
  EXPECT_THAT(store_->Create(config).status(), IsOk());
}

TEST_F(HostMemoryTest, AReaderOfVeryManyTensorsReservesItsList) {
  MakeStore(9 * kMiB);
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 10'000; ++i) tensors.push_back({absl::StrCat("w", i), Dtype::kFloat32, {1}});
  const std::shared_ptr<Model> model = Create(std::move(tensors));
  TestRank rank(model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(1, BytesOf(std::vector<float>(10'000, 1.0F))), IsOk());
  const auto read = [&](Selection selection) {
    return model->readings().Open("ema", /*version=*/0, /*incarnation=*/0, std::move(selection));
  };
  std::vector<std::shared_ptr<Reading>> readings;
  absl::Status refused;
  for (int i = 0; i < 8 && refused.ok(); ++i) {
    Selection selection;
    selection.tensors = {absl::StrCat("w*"), absl::StrCat("w", i)};  // Each another one.
    auto reading = read(std::move(selection));
    refused = reading.status();
    if (reading.ok()) readings.push_back(*std::move(reading));
  }
  EXPECT_THAT(refused, AllOf(ReasonIs(ErrorReason::kMemoryBudget),
                             StatusIs(absl::StatusCode::kResourceExhausted,
                                      HasSubstr("a pull with that many tensors needs "))));
  EXPECT_FALSE(readings.empty()) << refused;
  EXPECT_THAT(read({}), IsOk());                   // As it is stored: no list.
  EXPECT_THAT(read({.tensors = {"w3"}}), IsOk());  // A short one.
  const size_t count = readings.size();
  readings.clear();
  for (size_t i = 0; i < count; ++i) {
    EXPECT_THAT(read({.tensors = {"w*", absl::StrCat("w", i)}}), IsOk());
  }
}

TEST_F(HostMemoryTest, AReaderOfAStoredVersionOfManyTensorsReservesItsTables) {
  MakeStore(9 * kMiB);
  constexpr int kTensors = 10'000;
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < kTensors; ++i)
    tensors.push_back({absl::StrCat("w", i), Dtype::kFloat32, {1}});
  const std::shared_ptr<Model> model = Create(std::move(tensors));
  TestRank rank(model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  std::vector<SnapshotRef> versions;
  for (int step = 1; step <= 8; ++step) {
    ASSERT_THAT(rank.Push(step, BytesOf(std::vector<float>(kTensors, 1.0F))), IsOk());
    auto pinned = model->history().Pin(0);
    ASSERT_THAT(pinned, IsOk());
    const TrackSnapshot& track = *(*pinned)->Find("ema");
    versions.push_back(AsStored(
        **pinned, "ema", std::make_shared<FakeStoredTrack>(BytesOfBlocks(model->device(), track))));
  }
  const int64_t before = store_->budget().reserved_bytes();
  std::vector<std::shared_ptr<Reading>> readings;
  absl::Status refused;
  for (const SnapshotRef& version : versions) {
    auto reading = model->readings().OpenStored(version, {});
    refused = reading.status();
    if (!reading.ok()) break;
    readings.push_back(*std::move(reading));
  }
  EXPECT_THAT(refused, AllOf(ReasonIs(ErrorReason::kMemoryBudget),
                             StatusIs(absl::StatusCode::kResourceExhausted,
                                      HasSubstr("a pull with that many tensors needs "))));
  EXPECT_FALSE(readings.empty()) << refused;
  readings.clear();
  EXPECT_EQ(store_->budget().reserved_bytes(), before);
}

TEST_F(HostMemoryTest, TheHeaderOfAPullOfVeryManyTensorsIsReserved) {
  MakeStore(32 * kMiB);
  constexpr int kTensors = 40'000;
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < kTensors; ++i)
    tensors.push_back({absl::StrCat("w", i), Dtype::kFloat32, {1}});
  const std::shared_ptr<Model> model = Create(std::move(tensors));
  TestRank rank(model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(1, BytesOf(std::vector<float>(kTensors, 1.0F))), IsOk());
  const auto all = model->readings().Open("ema", /*version=*/0, /*incarnation=*/0, {});
  ASSERT_THAT(all, IsOk());
  std::vector<std::unique_ptr<MemoryBudget::Reservation>> headers;
  absl::Status refused;
  while (refused.ok() && headers.size() < 8) {
    auto header = (*all)->ReserveHeader();
    refused = header.status();
    if (header.ok()) headers.push_back(*std::move(header));
  }
  EXPECT_THAT(refused,
              AllOf(ReasonIs(ErrorReason::kMemoryBudget),
                    StatusIs(absl::StatusCode::kResourceExhausted,
                             HasSubstr("the header of a pull with that many tensors needs "))));
  ASSERT_FALSE(headers.empty());
  EXPECT_GE(headers[0]->bytes(), Reading::kUnbudgetedHeaderBytes);
  headers.clear();
  EXPECT_THAT((*all)->ReserveHeader(), IsOk());
  const auto one =
      model->readings().Open("ema", /*version=*/0, /*incarnation=*/0, {.tensors = {"w3"}});
  ASSERT_THAT(one, IsOk());
  EXPECT_EQ(*(*one)->ReserveHeader(), nullptr);
}

TEST_F(HostMemoryTest, RecordsThatAreLargeAreFewer) {
  MakeStore(kMiB);
  std::vector<TensorSpec> tensors;
  std::vector<TrackConfig> tracks;
  for (int i = 0; i < 16; ++i) {
    tensors.push_back({absl::StrCat("w", i, std::string(900, 'x')), Dtype::kFloat32, {1}});
  }
  // A string that is assigned 16 to 29 characters, such as a schedule's, has room for 30; a copy of
  // it has not.
  for (int t = 0; t < 32; ++t) {
    TrackConfig track{.name = absl::StrCat("t", t), .schedule = MakeSchedule("10ba")};
    for (int i = 0; i < 16; ++i) {
      track.tensor_rules.push_back({.pattern = tensors[i].name,
                                    .schedule = MakeSchedule(absl::StrCat(1'000'020 + i, "ba"))});
    }
    tracks.push_back(std::move(track));
  }
  const std::shared_ptr<Model> model = Create(std::move(tensors), std::move(tracks));
  TestRank rank(model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  int64_t step = 0;
  const auto kept_at = [&](int64_t last) {
    while (step < last) {
      EXPECT_THAT(rank.Push(++step, BytesOf(std::vector<float>(16, 1.0F))), IsOk());
    }
    const std::vector<VersionHistory::RecordEntry> records =
        model->history().RecordsAfter(0, 0, /*limit=*/100);
    EXPECT_EQ(records.empty() ? 0 : records.back().record.number, last);
    return records.size();
  };
  const size_t kept = kept_at(24);
  EXPECT_LT(kept, size_t{12});
  EXPECT_EQ(kept_at(400), kept) << "what goes is counted as it came";
}

// A weight next to nothing: JSON, which checkpoints are written in, has no infinity.
TEST_F(HostMemoryTest, WhatARecordSaysIsFinite) {
  MakeStore(kMiB);
  const std::shared_ptr<Model> model = Create(
      {{"w", Dtype::kFloat32, {1}}}, {{"ema", *Schedule::FromFields({{"half_life", "1e308sec"}})}});
  TestRank rank(model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  rank.SetTime([](int64_t step) {
    TrainingTime time = TrainingTime::AtBatch(step);
    time.Set(TimeUnit::kSecond, static_cast<double>(step) / 2);
    return time;
  });
  for (const int64_t step : {0, 1}) {
    ASSERT_THAT(rank.Push(step, BytesOf({1.0F})), IsOk());
    const std::optional<Version> record = model->history().latest();
    for (const TrackVersion& track : record->tracks) {
      EXPECT_TRUE(std::isfinite(track.window_steps)) << track.window_steps;
      EXPECT_TRUE(std::isfinite(track.stall_gap)) << track.stall_gap;
    }
  }
}

}  // namespace
}  // namespace ema
