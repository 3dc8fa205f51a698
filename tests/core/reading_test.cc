// SPDX-License-Identifier: Apache-2.0
//
// What readers get: parts of a track, cast, made once for all who read the same, and what of it has
// changed.
#include <gmock/gmock.h>

#include <limits>
#include <numeric>
#include <random>

#include "server/base/crc32c.h"
#include "server/device/accelerator_device.h"
#include "server/kernel/cast.h"
#include "tests/core/test_model.h"
#include "tests/testutil/fake_accelerator.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A model of which track "ema" averages and "raw" copies; "head", if the last tensor is "head.*",
// ignores all others. What is pushed counts up, element by element.
class ReadingTest : public testing::Test {
 protected:
  explicit ReadingTest(int64_t memory_bytes = int64_t{1} << 30,
                       std::shared_ptr<Device> device = TestDevice())
      : store_(std::move(device), Options(memory_bytes)) {}

  static ModelStore::Options Options(int64_t memory_bytes) {
    ModelStore::Options options = SmallBlocks();
    options.memory_bytes = memory_bytes;
    return options;
  }

  void Create(std::vector<TensorSpec> tensors) {
    std::vector<TrackConfig> tracks = {{.name = "ema", .schedule = MakeSchedule("1ba")},
                                       {.name = "raw", .schedule = MakeSchedule("copy")}};
    if (tensors.back().name.starts_with("head.")) {
      TrackConfig& head =
          tracks.emplace_back(TrackConfig{.name = "head", .schedule = MakeSchedule("1ba")});
      head.tensor_rules = {{"head.*", TensorAction::kAverage}, {"*", TensorAction::kIgnore}};
    }
    const auto created = store_.Create(
        {.name = "m", .manifest = MakeManifest(std::move(tensors)), .tracks = std::move(tracks)});
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
    rank_ = std::make_unique<TestRank>(model_, "run");
    ASSERT_THAT(rank_->Join(), IsOk());
    ASSERT_THAT(Push(1), IsOk());
  }

  absl::StatusOr<PushResult> Push(int64_t step) {
    std::vector<float> values(model_->manifest().total_bytes() / 4);
    std::iota(values.begin(), values.end(), 0.0f);
    return rank_->Push(step, BytesOf(values));
  }

  absl::StatusOr<std::shared_ptr<Reading>> Open(const Selection& selection,
                                                const std::string& track = "ema") {
    return model_->readings().Open(track, 0, 0, selection);
  }

  static std::vector<std::byte> BytesOfReading(Reading& reading) {
    std::vector<std::byte> bytes;
    for (int64_t at = 0; at < reading.total_bytes(); at = reading.ChunkEnd(at)) {
      const auto pieces = reading.Read(at, reading.ChunkEnd(at) - at);
      EXPECT_THAT(pieces, IsOk());
      if (!pieces.ok()) break;
      for (const HostPiece& piece : *pieces) {
        bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
      }
    }
    return bytes;
  }
  std::vector<float> Read(const Selection& selection, const std::string& track = "ema") {
    const auto reading = Open(selection, track);
    EXPECT_THAT(reading, IsOk());
    return reading.ok() ? FloatsOf(BytesOfReading(**reading)) : std::vector<float>();
  }

  std::vector<std::string> Names(const Selection& selection) {
    const auto reading = Open(selection);
    EXPECT_THAT(reading, IsOk());
    std::vector<std::string> names;
    (*reading)->ForEachTensor([&](const Reading::Tensor& tensor) {
      names.push_back(model_->manifest().tensor(tensor.index).name);
    });
    return names;
  }

  ModelStore store_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<TestRank> rank_;
};

TEST_F(ReadingTest, WithoutASelectionIsTheTrackAsItLies) {
  Create({{"a", Dtype::kFloat32, {3}}, {"b", Dtype::kFloat32, {2, 2}}});
  EXPECT_THAT(Read({}), ElementsAre(0, 1, 2, 3, 4, 5, 6));
  const BlockRef block = (*Open({}))->track().blocks[0];
  EXPECT_EQ((*(*Open({}))->Read(0, 4))[0].bytes.data(),
            model_->device().HostView(block, std::nullopt)->get());
}

TEST_F(ReadingTest, AChunksChecksumIsComputedOnceForAllItsReaders) {
  Create({{"w", Dtype::kFloat32, {1000}}});
  const std::shared_ptr<Reading> reading = *Open({});
  EXPECT_EQ(*Open({}), reading);
  const std::vector<HostPiece> pieces = *reading->Read(0, 4000);
  // Of a part nothing is remembered, and what is remembered is of the whole chunk.
  const std::vector<HostPiece> tail = *reading->Read(400, 3600);
  EXPECT_EQ(reading->Checksum(400, tail), Crc32c(0, tail[0].bytes));
  EXPECT_EQ(reading->Checksum(0, pieces), Crc32c(0, pieces[0].bytes));
  EXPECT_EQ(reading->Checksum(400, tail), Crc32c(0, tail[0].bytes));
  // Other bytes are not looked at any more.
  EXPECT_EQ(reading->Checksum(0, {}), Crc32c(0, pieces[0].bytes));
}

TEST_F(ReadingTest, TensorsAreFoundByNameAliasAndPatternAndComeInTheManifestsOrder) {
  Create({{"body.a", Dtype::kFloat32, {1}},
          {"body.b", Dtype::kFloat32, {1}},
          {"head.w", Dtype::kFloat32, {2}, false, {"tied"}}});
  EXPECT_THAT(Names({.tensors = {"head.w", "body.a"}}), ElementsAre("body.a", "head.w"));
  EXPECT_THAT(Names({.tensors = {"tied"}}), ElementsAre("head.w"));
  EXPECT_THAT(Names({.tensors = {"body.*", "*.a"}}), ElementsAre("body.a", "body.b"));
  EXPECT_THAT(Read({.tensors = {"head.*", "body.a"}}), ElementsAre(0, 2, 3));
}

TEST_F(ReadingTest, ABoxIsCutOutOfItsTensorAndOthersComeWhole) {
  Create(
      {{"a", Dtype::kFloat32, {2}}, {"m", Dtype::kFloat32, {3, 4}}, {"z", Dtype::kFloat32, {1}}});
  EXPECT_THAT(Read({.slices = {{"m", {1, 1}, {2, 2}}}}), ElementsAre(7, 8, 11, 12));
  EXPECT_THAT(Read({.tensors = {"a"}, .slices = {{"m", {0, 3}, {3, 1}}}}),
              ElementsAre(0, 1, 5, 9, 13));
  // Also where a pattern selects the whole of it.
  EXPECT_THAT(Read({.tensors = {"*"}, .slices = {{"m", {2, 0}, {1, 1}}}}),
              ElementsAre(0, 1, 10, 14));
  EXPECT_THAT(Read({.slices = {{"m", {0, 0}, {0, 4}}}}), ElementsAre());
}

TEST_F(ReadingTest, RandomBoxesAreWhatTheirIndicesSay) {
  constexpr int kSeed = 11;
  SCOPED_TRACE(kSeed);
  std::mt19937 random(kSeed);
  const auto below = [&random](int64_t n) { return static_cast<int64_t>(random() % n); };
  const std::vector<int64_t> shape = {7, 5, 11, 3};
  Create({{"pad", Dtype::kFloat32, {9}}, {"t", Dtype::kFloat32, shape}});
  for (int round = 0; round < 200; ++round) {
    TensorSlice box{"t", {}, {}};
    for (const int64_t extent : shape) {
      box.offsets.push_back(below(extent));
      box.extents.push_back(1 + below(extent - box.offsets.back()));
    }
    std::vector<float> expected;
    for (int64_t i = 0; i < 7 * 5 * 11 * 3; ++i) {
      const int64_t index[] = {i / 165, i / 33 % 5, i / 3 % 11, i % 3};
      bool inside = true;
      for (int d = 0; d < 4; ++d) {
        inside &= index[d] >= box.offsets[d] && index[d] < box.offsets[d] + box.extents[d];
      }
      if (inside) expected.push_back(static_cast<float>(9 + i));
    }
    ASSERT_EQ(Read({.slices = {box}}), expected) << "round " << round;
  }
}

TEST_F(ReadingTest, FloatsAreCastAndIntegersAreNot) {
  Create({{"i", Dtype::kInt32, {1}}, {"w", Dtype::kFloat32, {2'000'000}}});
  const auto reading = Open({.dtype = Dtype::kBFloat16});
  ASSERT_THAT(reading, IsOk());
  std::vector<Dtype> dtypes;
  (*reading)->ForEachTensor(
      [&](const Reading::Tensor& tensor) { dtypes.push_back(tensor.place.dtype); });
  EXPECT_THAT(dtypes, ElementsAre(Dtype::kInt32, Dtype::kBFloat16));
  const std::vector<std::byte> bytes = BytesOfReading(**reading);
  const std::vector<std::byte> stored = *ReadAll(*model_, "ema");
  // Large tensors lie at multiples of 64, and padding is zero.
  ASSERT_EQ(bytes.size(), 64 + 4'000'000);
  std::vector<std::byte> expected(bytes.size());
  std::memcpy(expected.data(), stored.data(), 4);
  CastScalar(Dtype::kFloat32, stored.data() + 64, Dtype::kBFloat16, expected.data() + 64,
             2'000'000);
  EXPECT_TRUE(bytes == expected);
}

TEST_F(ReadingTest, AnyRangeOfAChunkIsTheSameBytes) {
  Create({{"w", Dtype::kFloat32, {700'000}}});
  for (const Selection& selection :
       {Selection{.dtype = Dtype::kFloat16, .overflow = OverflowPolicy::kInfinity},
        Selection{.tensors = {"w"}}, Selection()}) {
    const auto reading = Open(selection);
    const std::vector<std::byte> all = BytesOfReading(**reading);
    for (const int64_t offset : {1, 4097, 1'048'575, 1'048'577}) {
      const int64_t length = (*reading)->ChunkEnd(offset) - offset;
      std::vector<std::byte> part;
      const auto pieces = (*reading)->Read(offset, length);
      ASSERT_THAT(pieces, IsOk());
      for (const HostPiece& piece : *pieces) {
        part.insert(part.end(), piece.bytes.begin(), piece.bytes.end());
      }
      ASSERT_EQ(part.size(), length);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + offset)) << offset;
    }
  }
}

TEST_F(ReadingTest, WhoReadsTheSameSharesWhatIsMade) {
  Create({{"w", Dtype::kFloat32, {1000}}});
  const Selection half{.dtype = Dtype::kFloat16};
  auto first = Open(half);
  EXPECT_EQ(*Open(half), *first);
  EXPECT_EQ((*(*first)->Read(0, 2000))[0].bytes.data(),
            (*(*Open(half))->Read(0, 2000))[0].bytes.data());
  EXPECT_NE(*Open({.dtype = Dtype::kBFloat16}), *first);
  EXPECT_NE(*Open(half, "raw"), *first);
  ASSERT_THAT(Push(2), IsOk());
  EXPECT_NE(*Open(half), *first);  // Another version.
}

TEST_F(ReadingTest, WhatIsMadeCountsAsMemoryWhileItIsRead) {
  Create({{"w", Dtype::kFloat32, {1000}}});
  const int64_t before = model_->memory().budget->reserved_bytes();
  auto reading = Open({.dtype = Dtype::kFloat16});
  EXPECT_EQ(model_->memory().budget->reserved_bytes(), before + 2000);
  // Pieces outlive the reading of them.
  const auto pieces = (*reading)->Read(0, 2000);
  reading->reset();
  EXPECT_EQ(model_->memory().budget->reserved_bytes(), before);
  EXPECT_EQ((*pieces)[0].bytes.size(), 2000);
}

TEST_F(ReadingTest, AValueThatIsTooLargeForADtypeIsTreatedAsTheSelectionSays) {
  Create({{"a", Dtype::kFloat32, {3}}, {"b", Dtype::kFloat32, {2, 40'000}}});
  // 70,000 and all after it are in the second row of "b".
  const auto reading = Open({.dtype = Dtype::kFloat16});
  ASSERT_THAT(reading, IsOk());
  const auto refused = (*reading)->Read(0, (*reading)->total_bytes());
  EXPECT_THAT(
      refused,
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("dtype: float16 given, but element 65517 of tensor \"b\" is 65520, "
                         "and float16 ends at 65504")));
  EXPECT_THAT(refused, ReasonIs(ErrorReason::kBadRequest));
  const auto last = [this](OverflowPolicy overflow) {
    Selection selection{.dtype = Dtype::kFloat16, .overflow = overflow};
    const std::vector<std::byte> bytes = BytesOfReading(**Open(selection));
    return ValueAt(Dtype::kFloat16, bytes.data(), static_cast<int64_t>(bytes.size()) / 2 - 1);
  };
  EXPECT_EQ(last(OverflowPolicy::kSaturate), 65504);
  EXPECT_EQ(last(OverflowPolicy::kInfinity), std::numeric_limits<double>::infinity());
  // What is not selected may be of any size, and so may what the dtype holds.
  EXPECT_EQ(BytesOfReading(**Open({.tensors = {"a"}, .dtype = Dtype::kFloat16})).size(), 6);
  EXPECT_GE(BytesOfReading(**Open({.dtype = Dtype::kBFloat16})).size(), 2 * 80'003);
}

// Averages in a device's memory, which casts them.
class DeviceReadingTest : public ReadingTest {
 protected:
  DeviceReadingTest()
      : ReadingTest(
            int64_t{1} << 30,
            MakeAcceleratorDevice(std::make_shared<FakeAccelerator>(FakeAccelerator::Options()),
                                  {.kept_free_bytes = 1 << 20})) {}
};

TEST_F(DeviceReadingTest, OverflowsOfTheCastOnTheDeviceAreFound) {
  constexpr int64_t kCount = 1 << 19;  // One chunk, sent from where the device's copy lies.
  Create({{"w", Dtype::kFloat32, {kCount}}});
  EXPECT_THAT((*Open({.dtype = Dtype::kFloat16}))->Read(0, kCount * 2),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("element 65520 of tensor \"w\" is 65520")));
  const auto bytes =
      BytesOfReading(**Open({.dtype = Dtype::kFloat16, .overflow = OverflowPolicy::kSaturate}));
  ASSERT_EQ(bytes.size(), kCount * 2);
  EXPECT_EQ(ValueAt(Dtype::kFloat16, bytes.data(), kCount - 1), 65504);
  EXPECT_EQ(BytesOfReading(**Open({.dtype = Dtype::kBFloat16})).size(), kCount * 2);
}

TEST_F(ReadingTest, InfinityIsNoOverflow) {
  const auto created = store_.Create({.name = "m",
                                      .manifest = MakeManifest({{"w", Dtype::kFloat32, {2}}}),
                                      .tracks = {{"ema", MakeSchedule("1ba")}},
                                      .non_finite = NonFinitePolicy::kAllow});
  ASSERT_THAT(created, IsOk());
  model_ = created->model;
  rank_ = std::make_unique<TestRank>(model_, "run");
  ASSERT_THAT(rank_->Join(), IsOk());
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  ASSERT_THAT(rank_->Push(1, BytesOf(std::vector<float>{-kInfinity, 1})), IsOk());
  for (const OverflowPolicy overflow : {OverflowPolicy::kError, OverflowPolicy::kSaturate}) {
    const auto bytes = BytesOfReading(**Open({.dtype = Dtype::kFloat16, .overflow = overflow}));
    ASSERT_EQ(bytes.size(), 4);
    EXPECT_EQ(ValueAt(Dtype::kFloat16, bytes.data(), 0), -kInfinity);
  }
}

class FullReadingTest : public ReadingTest {
 protected:
  // As much as the three tracks of 1000 floats need, the ignored one nothing.
  FullReadingTest() : ReadingTest(2 * 5 * 4000 + 2000) {}
};

TEST_F(FullReadingTest, WithoutMemoryToShareEachReaderMakesItsOwn) {
  Create({{"w", Dtype::kFloat32, {1000}}, {"head.b", Dtype::kFloat32, {1}}});
  const std::shared_ptr<Reading> first = *Open({.dtype = Dtype::kFloat32});
  const auto a = first->Read(0, 4000);
  const auto b = first->Read(0, 4000);
  ASSERT_THAT(a, IsOk());
  ASSERT_THAT(b, IsOk());
  EXPECT_EQ(FloatsOf(BytesOfReading(*first)).size(), 1001);
}

TEST_F(ReadingTest, ChunksOfBlocksThatNoPushHasTouchedHaveNotChanged) {
  // "slow" goes by a schedule of its own, and has blocks of its own.
  constexpr int64_t kCount = 1 << 19;
  const auto manifest =
      MakeManifest({{"fast", Dtype::kFloat32, {kCount}}, {"slow", Dtype::kFloat32, {kCount}}});
  TrackConfig track{.name = "ema", .schedule = MakeSchedule("1ba")};
  track.tensor_rules = {{"slow", TensorAction::kAverage, MakeSchedule("10ba", "10ba")}};
  model_ = store_.Create({.name = "m", .manifest = manifest, .tracks = {track}})->model;
  rank_ = std::make_unique<TestRank>(model_, "run");
  ASSERT_THAT(rank_->Join(), IsOk());
  for (const int64_t step : {1, 2, 3}) ASSERT_THAT(Push(step), IsOk());

  const int64_t slow_start = kCount * 4;
  const std::shared_ptr<Reading> all = *Open({});
  EXPECT_TRUE(all->ChunkChangedSince(2, 0));
  EXPECT_FALSE(all->ChunkChangedSince(3, 0));
  EXPECT_FALSE(all->ChunkChangedSince(1, slow_start));
  EXPECT_TRUE(all->ChunkChangedSince(0, slow_start));
  // The same for what is cast: both are in halves of the places.
  const std::shared_ptr<Reading> half = *Open({.dtype = Dtype::kFloat16});
  EXPECT_TRUE(half->ChunkChangedSince(2, 0));
  EXPECT_FALSE(half->ChunkChangedSince(1, slow_start / 2));

  EXPECT_TRUE(model_->history().FindRecord({2, 7}).has_value());
  EXPECT_FALSE(model_->history().FindRecord({2, 6}).has_value());
  EXPECT_FALSE(model_->history().FindRecord({4, 7}).has_value());
  EXPECT_FALSE(model_->history().FindRecord({0, 7}).has_value());
}

TEST_F(ReadingTest, BadSelectionsAreRefusedByName) {
  Create({{"w", Dtype::kFloat32, {4, 4}}, {"head.b", Dtype::kFloat32, {2}}});
  const auto refusal = [this](const Selection& selection, const std::string& track = "ema") {
    return Open(selection, track).status();
  };
  EXPECT_THAT(refusal({.tensors = {"haed.b"}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tensors: pattern \"haed.b\" matches no tensor; the nearest name "
                                 "is \"head.b\"")));
  EXPECT_THAT(refusal({.tensors = {"w"}}, "head"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ignores")));
  EXPECT_THAT(refusal({.slices = {{"w", {0, 0}, {1, 1}}}}, "head"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ignores")));
  EXPECT_THAT(refusal({.slices = {{"w", {0, 0}, {5, 1}}}}), ReasonIs(ErrorReason::kBadLayout));
  EXPECT_THAT(refusal({.slices = {{"w", {0}, {1}}}}), ReasonIs(ErrorReason::kBadLayout));
  EXPECT_THAT(refusal({.slices = {{"w", {0, 0}, {1, 1}}, {"w", {1, 0}, {1, 1}}}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("given twice")));
  EXPECT_THAT(refusal({.slices = {{"*", {0, 0}, {1, 1}}}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("several tensors")));
  EXPECT_THAT(refusal({.dtype = Dtype::kInt8}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("dtype: int8 given, expected float32, float16 or bfloat16")));
  EXPECT_THAT(refusal({.tensors = std::vector<std::string>(257, "*")}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("256")));
  EXPECT_THAT(refusal({.tensors = {""}}), ReasonIs(ErrorReason::kBadRequest));
  // "all" of a track is what it has.
  EXPECT_THAT(Read({.dtype = Dtype::kFloat32}, "head"), ElementsAre(16, 17));
}

}  // namespace
}  // namespace ema
