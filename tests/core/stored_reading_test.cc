// SPDX-License-Identifier: Apache-2.0
//
// What is read of a version on the disk is what was read of it while it was in memory.
#include <gmock/gmock.h>

#include <optional>
#include <random>

#include "tests/core/test_model.h"
#include "tests/testutil/fake_stored_track.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

// A model with tensors of every dtype and odd shapes; "ema" averages, "raw" copies, "part" ignores
// some. Its only version is in memory, and as `stored` ones.
class StoredReadingTest : public testing::Test {
 protected:
  explicit StoredReadingTest(bool has_spare_memory = true) {
    constexpr int kSeed = 6;
    ModelConfig config{.name = "m",
                       .manifest = MakeManifest({{"scalar", Dtype::kFloat64, {}},
                                                 {"empty", Dtype::kFloat32, {0, 3}},
                                                 {"b.bool", Dtype::kBool, {13}},
                                                 {"b.i8", Dtype::kInt8, {7}},
                                                 {"b.u8", Dtype::kUInt8, {3, 5}},
                                                 {"b.i16", Dtype::kInt16, {9}},
                                                 {"b.i32", Dtype::kInt32, {5}},
                                                 {"b.i64", Dtype::kInt64, {3}},
                                                 {"h.f16", Dtype::kFloat16, {331}},
                                                 {"h.bf16", Dtype::kBFloat16, {17, 3, 5}},
                                                 {"rows", Dtype::kFloat32, {300, 70}},
                                                 {"large", Dtype::kFloat32, {513, 1025}},
                                                 {"f64", Dtype::kFloat64, {99'999}}}),
                       .tracks = {{.name = "ema", .schedule = MakeSchedule("1ba")},
                                  {.name = "raw", .schedule = MakeSchedule("copy")},
                                  {.name = "part", .schedule = MakeSchedule("1ba")}},
                       .non_finite = NonFinitePolicy::kAllow};
    config.tracks[2].tensor_rules = {{"b.*", TensorAction::kIgnore}};
    ModelStore::Options options = SmallBlocks();
    if (!has_spare_memory) options.memory_bytes = MemoryBytesOf(config);
    store_.emplace(TestDevice(), options);
    const auto created = store_->Create(config);
    EXPECT_THAT(created, IsOk());
    model_ = created->model;
    TestRank rank(model_, "run");
    EXPECT_THAT(rank.Join(), IsOk());
    std::mt19937 random(kSeed);
    std::vector<std::byte> pushed(model_->manifest().total_bytes());
    for (std::byte& byte : pushed) byte = static_cast<std::byte>(random());
    EXPECT_THAT(rank.Push(1, pushed, static_cast<int64_t>(pushed.size())), IsOk());
    snapshot_ = *model_->history().Pin(0);
  }

  std::shared_ptr<FakeStoredTrack> Store(const std::string& track,
                                         FakeStoredTrack::OnRead on_read = nullptr) {
    return std::make_shared<FakeStoredTrack>(
        BytesOfBlocks(model_->device(), *snapshot_->Find(track)), std::move(on_read));
  }
  absl::StatusOr<std::shared_ptr<Reading>> Open(const std::string& track,
                                                std::shared_ptr<StoredTrack> stored,
                                                const Selection& selection = {}) {
    return model_->readings().OpenStored(AsStored(*snapshot_, track, std::move(stored)), selection);
  }

  static std::vector<std::byte> Joined(const std::vector<HostPiece>& pieces) {
    std::vector<std::byte> bytes;
    for (const HostPiece& piece : pieces) {
      bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
    }
    return bytes;
  }
  // Compares chunk by chunk, from their starts and from in between.
  static void ExpectSame(Reading& stored, Reading& in_memory) {
    EXPECT_TRUE(stored.is_stored());
    EXPECT_FALSE(in_memory.is_stored());
    ASSERT_EQ(stored.total_bytes(), in_memory.total_bytes());
    for (int64_t at = 0; at < stored.total_bytes(); at = stored.ChunkEnd(at)) {
      EXPECT_TRUE(stored.ChunkChangedSince(in_memory.snapshot()->record.number, at));
      const int64_t end = stored.ChunkEnd(at);
      for (const int64_t from : {at, at + (end - at) / 3, end - 1}) {
        const auto expected = in_memory.Read(from, end - from);
        const auto got = stored.Read(from, end - from);
        ASSERT_THAT(expected, IsOk());
        ASSERT_THAT(got, IsOk());
        ASSERT_TRUE(Joined(*got) == Joined(*expected)) << "at " << from;
        EXPECT_EQ(stored.Checksum(from, *got), in_memory.Checksum(from, *expected));
      }
    }
  }
  void ExpectEverySelectionIsTheSame() {
    const TensorSlice box{"rows", {3, 5}, {290, 61}};
    const TensorSlice column{"large", {1, 1024}, {512, 1}};
    const Selection selections[] = {
        {},
        {.tensors = {"scalar"}},
        {.tensors = {"empty"}},
        {.tensors = {"h.*", "f64"}},
        {.tensors = {"*"}},
        {.dtype = Dtype::kFloat32, .overflow = OverflowPolicy::kInfinity},
        {.dtype = Dtype::kFloat16, .overflow = OverflowPolicy::kInfinity},
        {.dtype = Dtype::kBFloat16, .overflow = OverflowPolicy::kInfinity},
        {.slices = {box}},
        {.slices = {box, column}},
        {.tensors = {"*"},
         .slices = {box, column},
         .dtype = Dtype::kBFloat16,
         .overflow = OverflowPolicy::kInfinity},
    };
    for (const std::string track : {"ema", "raw", "part"}) {
      for (const Selection& selection : selections) {
        SCOPED_TRACE(testing::Message() << track << ", selection " << &selection - selections);
        const auto in_memory = model_->readings().Open(track, 0, 0, selection);
        const auto stored = Open(track, Store(track), selection);
        ASSERT_THAT(in_memory, IsOk());
        ASSERT_THAT(stored, IsOk());
        ExpectSame(**stored, **in_memory);
      }
    }
  }

  std::optional<ModelStore> store_;
  std::shared_ptr<Model> model_;
  SnapshotRef snapshot_;
};

TEST_F(StoredReadingTest, EverySelectionOfEveryDtypeIsWhatTheBlocksHad) {
  ExpectEverySelectionIsTheSame();
}

class FullStoredReadingTest : public StoredReadingTest {
 protected:
  FullStoredReadingTest() : StoredReadingTest(/*has_spare_memory=*/false) {}
};

TEST_F(FullStoredReadingTest, AlsoWithoutMemoryToKeepWhatIsCast) {
  const int64_t before = model_->memory().budget->reserved_bytes();
  ASSERT_EQ(before, model_->memory().budget->total_bytes());
  ExpectEverySelectionIsTheSame();
}

TEST_F(StoredReadingTest, BadSelectionsAreRefusedBeforeAnythingIsRead) {
  const auto stored = Store("part");
  EXPECT_THAT(Open("part", stored, {.tensors = {"b.i8"}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ignores")));
  EXPECT_THAT(Open("part", stored, {.slices = {{"rows", {0, 0}, {301, 1}}}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rows")));
  EXPECT_EQ(stored->read_count(), 0);
}

TEST_F(StoredReadingTest, WhoReadsTheSameVersionSharesWhatIsMade) {
  const Selection half{
      .tensors = {"rows"}, .dtype = Dtype::kFloat16, .overflow = OverflowPolicy::kInfinity};
  const auto first_disk = Store("ema");
  const auto second_disk = Store("ema");
  const auto first = Open("ema", first_disk, half);
  const auto second = Open("ema", second_disk, half);
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT(second, IsOk());
  EXPECT_EQ(*first, *second);
  ASSERT_THAT((*first)->Read(0, 42'000), IsOk());
  ASSERT_THAT((*second)->Read(0, 42'000), IsOk());
  EXPECT_EQ(first_disk->read_count(), 1);
  EXPECT_EQ(second_disk->read_count(), 0);
  // Others are not the same: another track, another selection, what is in memory.
  EXPECT_NE(*Open("raw", Store("raw"), half), *first);
  EXPECT_NE(*Open("ema", Store("ema"), {.tensors = {"rows"}}), *first);
  EXPECT_FALSE((*model_->readings().Open("ema", 0, 0, half))->is_stored());
}

TEST_F(StoredReadingTest, RowsOfABoxAreNotAReadEach) {
  const auto stored = Store("ema");
  const auto reading = Open("ema", stored, {.slices = {{"rows", {0, 2}, {300, 3}}}});
  ASSERT_THAT(reading, IsOk());
  ASSERT_THAT((*reading)->Read(0, 3600), IsOk());
  EXPECT_EQ(stored->read_count(), 1);
}

TEST_F(StoredReadingTest, WhatTheDiskSaysIsTheReadersError) {
  const absl::Status lost = MakeError(absl::StatusCode::kDataLoss, ErrorReason::kCheckpointCorrupt,
                                      "tensor \"large\": bad");
  for (const Selection& selection :
       {Selection(), Selection{.tensors = {"large"}},
        Selection{.dtype = Dtype::kFloat16, .overflow = OverflowPolicy::kInfinity}}) {
    const auto reading =
        Open("ema", Store("ema", [&](int64_t, int64_t) { return lost; }), selection);
    ASSERT_THAT(reading, IsOk());
    const auto pieces = (*reading)->Read(0, (*reading)->ChunkEnd(0));
    EXPECT_THAT(pieces, StatusIs(absl::StatusCode::kDataLoss, HasSubstr("tensor \"large\"")));
    EXPECT_EQ(GetErrorReason(pieces.status()), ErrorReason::kCheckpointCorrupt);
  }
}

TEST_F(StoredReadingTest, AnErrorThatHasPassedIsNotRemembered) {
  const Selection half{.dtype = Dtype::kFloat16, .overflow = OverflowPolicy::kInfinity};
  const auto expected = (*model_->readings().Open("ema", 0, 0, half))->Read(0, 100);
  bool is_failing = true;
  const auto reading = Open(
      "ema",
      Store("ema",
            [&](int64_t, int64_t) {
              return is_failing ? absl::UnavailableError("Too many open files") : absl::OkStatus();
            }),
      half);
  ASSERT_THAT(reading, IsOk());
  EXPECT_THAT((*reading)->Read(0, 100),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("Too many")));
  is_failing = false;
  const auto pieces = (*reading)->Read(0, 100);
  ASSERT_THAT(pieces, IsOk());
  EXPECT_TRUE(Joined(*pieces) == Joined(*expected));
}

TEST_F(StoredReadingTest, IsFoundWhileSomebodyHoldsIt) {
  const VersionId id = snapshot_->record.id();
  const Selection half{.dtype = Dtype::kFloat16, .overflow = OverflowPolicy::kInfinity};
  EXPECT_EQ(model_->readings().FindStored(id, "ema", half), nullptr);
  ASSERT_THAT(model_->readings().Open("ema", 0, 0, half), IsOk());
  EXPECT_EQ(model_->readings().FindStored(id, "ema", half), nullptr);
  auto reading = Open("ema", Store("ema"), half);
  ASSERT_THAT(reading, IsOk());
  EXPECT_EQ(model_->readings().FindStored(id, "ema", half), *reading);
  EXPECT_EQ(model_->readings().FindStored(id, "ema", {}), nullptr);
  EXPECT_EQ(model_->readings().FindStored(id, "raw", half), nullptr);
  EXPECT_EQ(model_->readings().FindStored({id.version, id.incarnation + 1}, "ema", half), nullptr);
  store_->Delete("m");
  EXPECT_EQ(model_->readings().FindStored(id, "ema", half), nullptr);
  reading->reset();
}

TEST_F(StoredReadingTest, OutlivesItsModel) {
  const Selection half{.dtype = Dtype::kFloat16, .overflow = OverflowPolicy::kInfinity};
  const std::vector<std::byte> expected =
      Joined(*(*model_->readings().Open("ema", 0, 0, half))->Read(0, 100));
  const auto stored = Store("ema");
  const auto reading = Open("ema", stored, half);
  ASSERT_THAT(reading, IsOk());
  const SnapshotRef again = AsStored(*snapshot_, "ema", stored);
  store_->Delete("m");
  EXPECT_EQ(GetErrorReason(model_->readings().OpenStored(again, {}).status()),
            ErrorReason::kModelNotFound);
  snapshot_.reset();
  model_.reset();
  store_.reset();
  EXPECT_TRUE(Joined(*(*reading)->Read(0, 100)) == expected);
}

}  // namespace
}  // namespace ema
