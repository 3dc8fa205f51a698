// SPDX-License-Identifier: Apache-2.0
//
// What reading parts of averages costs that are in an accelerator's memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "server/device/accelerator_device.h"
#include "tests/core/test_model.h"
#include "tests/testutil/fake_accelerator.h"
#include "tests/testutil/wrapped_device.h"

namespace ema {
namespace {

using ::testing::SizeIs;

constexpr int64_t kBefore = 16;  // Elements; tensors lie at multiples of 64 bytes.
constexpr int64_t kRows = 8;
constexpr int64_t kColumns = int64_t{64} << 10;

// Knows how often somebody has asked for copies.
class AskedDevice final : public WrappedDevice {
 public:
  using WrappedDevice::WrappedDevice;

  absl::StatusOr<std::shared_ptr<const std::byte>> HostView(const BlockRef& block,
                                                            std::optional<Dtype> cast) override {
    ++asked_count;
    return WrappedDevice::HostView(block, cast);
  }
  bool HasHostView(const BlockRef& block, std::optional<Dtype> cast) override {
    ++asked_count;
    return WrappedDevice::HasHostView(block, cast);
  }

  int asked_count = 0;
};

// A model with a block for each of tensors "a" to "d", and one for "first", before them.
class SlicedReadingTest : public testing::Test {
 protected:
  void SetUp() override {
    static_assert(kRows * kColumns * sizeof(float) == kLargeTensorBytes);
    std::vector<TensorSpec> tensors = {{"first", Dtype::kFloat32, {kBefore}}};
    for (const char* const name : {"a", "b", "c", "d"}) {
      tensors.push_back({name, Dtype::kFloat32, {kRows, kColumns}});
    }
    const auto created =
        store_.Create({.name = "m",
                       .manifest = MakeManifest(std::move(tensors)),
                       .tracks = {{.name = "ema", .schedule = MakeSchedule("1ba")}}});
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
    TestRank rank(model_, "run");
    ASSERT_THAT(rank.Join(), IsOk());
    values_.resize(kBefore + 4 * kRows * kColumns);
    std::iota(values_.begin(), values_.end(), 0.0f);
    ASSERT_THAT(rank.Push(1, BytesOf(values_)), IsOk());
  }

  static ModelStore::Options LargeBlocks() {
    ModelStore::Options options = SmallBlocks();
    options.model.block_bytes = kLargeTensorBytes;
    return options;
  }

  std::shared_ptr<Reading> Open(const Selection& selection) {
    return *model_->readings().Open("ema", 0, 0, selection);
  }
  static std::vector<HostPiece> ReadFirstChunk(Reading& reading) {
    return *reading.Read(0, reading.ChunkEnd(0));
  }

  const std::shared_ptr<AskedDevice> device_ = std::make_shared<AskedDevice>(MakeAcceleratorDevice(
      std::make_shared<FakeAccelerator>(FakeAccelerator::Options{}), {.slab_bytes = 64 << 10}));
  ModelStore store_{device_, LargeBlocks()};
  std::shared_ptr<Model> model_;
  std::vector<float> values_;
};

TEST_F(SlicedReadingTest, AColumnAsksForItsBlockOnce) {
  const std::shared_ptr<Reading> reading = Open({.slices = {{"a", {0, 5}, {kRows, 1}}}});
  device_->asked_count = 0;
  EXPECT_FALSE(reading->CanReadWithoutWaiting(0));
  EXPECT_EQ(device_->asked_count, 1);
  const std::vector<HostPiece> pieces = ReadFirstChunk(*reading);
  EXPECT_EQ(device_->asked_count, 2);
  ASSERT_THAT(pieces, SizeIs(1));
  std::vector<float> expected;
  for (int64_t row = 0; row < kRows; ++row)
    expected.push_back(values_[kBefore + 5 + row * kColumns]);
  EXPECT_EQ(FloatsOf({pieces[0].bytes.begin(), pieces[0].bytes.end()}), expected);
  // By somebody else, whose chunk has not been made.
  const std::shared_ptr<Reading> other = Open({.slices = {{"a", {0, 6}, {kRows, 1}}}});
  device_->asked_count = 0;
  EXPECT_TRUE(other->CanReadWithoutWaiting(0));
  EXPECT_EQ(device_->asked_count, 1);
}

// As the memory formula counts: one block of each reader.
TEST_F(SlicedReadingTest, AChunkHoldsTheCopiesOfFewBlocks) {
  const auto halves = [](std::vector<TensorSlice> slices) {
    return Selection{.slices = std::move(slices), .dtype = Dtype::kBFloat16};
  };
  const TensorSlice a = {"a", {1, 0}, {1, kColumns}};
  const TensorSlice b = {"b", {2, 0}, {1, kColumns}};
  const TensorSlice c = {"c", {3, 0}, {1, kColumns}};
  const TensorSlice d = {"d", {4, 0}, {1, kColumns}};
  EXPECT_THAT(ReadFirstChunk(*Open(halves({a, b}))), SizeIs(2)) << "sent from where they lie";
  EXPECT_THAT(ReadFirstChunk(*Open(halves({a, b, c, d}))), SizeIs(1)) << "copied together";
  EXPECT_THAT(ReadFirstChunk(*Open({.slices = {a}})), SizeIs(1));
  EXPECT_THAT(ReadFirstChunk(*Open({.slices = {a, b, c}})), SizeIs(1)) << "copied together";
  const std::vector<HostPiece> whole = ReadFirstChunk(*Open({}));
  ASSERT_THAT(whole, SizeIs(1)) << "of \"first\" and \"a\", copied together";
  const std::vector<float> floats = FloatsOf({whole[0].bytes.begin(), whole[0].bytes.end()});
  EXPECT_EQ(floats, std::vector(values_.begin(), values_.begin() + floats.size()));
}

}  // namespace
}  // namespace ema
