// SPDX-License-Identifier: Apache-2.0
//
// Many who read one version at the same time cost the device, or the disk, one read of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "server/device/accelerator_device.h"
#include "tests/core/test_model.h"
#include "tests/testutil/fake_accelerator.h"
#include "tests/testutil/fake_stored_track.h"

namespace ema {
namespace {

constexpr int kReaders = 32;
constexpr int64_t kElements = 700'000;  // Three chunks.

class ManyReadersTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto created =
        store_.Create({.name = "m",
                       .manifest = MakeManifest(
                           {{"a", Dtype::kFloat32, {777}}, {"b", Dtype::kFloat32, {kElements}}}),
                       .tracks = {{.name = "ema", .schedule = MakeSchedule("1ba")}}});
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
    TestRank rank(model_, "run");
    ASSERT_THAT(rank.Join(), IsOk());
    std::vector<float> values(777 + kElements);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1021);
    ASSERT_THAT(rank.Push(1, BytesOf(values)), IsOk());
    snapshot_ = *model_->history().Pin(0);
  }

  static std::vector<std::byte> Joined(const std::vector<HostPiece>& pieces) {
    std::vector<std::byte> bytes;
    for (const HostPiece& piece : pieces) {
      bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
    }
    return bytes;
  }

  // Each reader has a thread, opens with `open`, and reads all. Every reader gets the same bytes.
  template <typename Open>
  void ReadByMany(const Open& open) {
    std::vector<std::vector<std::byte>> got(kReaders);
    std::vector<std::thread> readers;
    // As long as somebody has it: those that come late are not another time.
    const std::shared_ptr<Reading> held = open();
    for (std::vector<std::byte>& bytes : got) {
      readers.emplace_back([&bytes, &open] {
        const std::shared_ptr<Reading> reading = open();
        for (int64_t at = 0; at < reading->total_bytes(); at = reading->ChunkEnd(at)) {
          const auto pieces = reading->Read(at, reading->ChunkEnd(at) - at);
          ASSERT_THAT(pieces, IsOk());
          const std::vector<std::byte> chunk = Joined(*pieces);
          bytes.insert(bytes.end(), chunk.begin(), chunk.end());
        }
      });
    }
    for (std::thread& reader : readers) reader.join();
    ASSERT_EQ(static_cast<int64_t>(got[0].size()), held->total_bytes());
    for (const std::vector<std::byte>& bytes : got) EXPECT_TRUE(bytes == got[0]);
  }

  const std::shared_ptr<FakeAccelerator> accelerator_ =
      std::make_shared<FakeAccelerator>(FakeAccelerator::Options{.max_delay_us = 100});
  ModelStore store_{MakeAcceleratorDevice(accelerator_, {.kept_free_bytes = int64_t{64} << 20,
                                                         .slab_bytes = 64 << 10}),
                    SmallBlocks()};
  std::shared_ptr<Model> model_;
  SnapshotRef snapshot_;
};

TEST_F(ManyReadersTest, OfADeviceCopyItOnce) {
  const int64_t before = accelerator_->bytes_to_host();
  ReadByMany([this] { return *model_->readings().Open("ema", 0, 0, {}); });
  EXPECT_EQ(accelerator_->bytes_to_host() - before,
            snapshot_->tracks[0].track->layout().total_bytes());
}

TEST_F(ManyReadersTest, OfHalvesCopyThemOnce) {
  const int64_t before = accelerator_->bytes_to_host();
  ReadByMany([this] {
    return *model_->readings().Open("ema", 0, 0, Selection{.dtype = Dtype::kBFloat16});
  });
  EXPECT_EQ(accelerator_->bytes_to_host() - before,
            snapshot_->tracks[0].track->layout().total_bytes() / 2);
}

TEST_F(ManyReadersTest, OfHalvesAreSentFromTheCopyThatTheyShare) {
  const Selection halves{.tensors = {"b"}, .dtype = Dtype::kBFloat16};
  const std::shared_ptr<Reading> reading = *model_->readings().Open("ema", 0, 0, halves);
  const int64_t end = reading->ChunkEnd(0);
  EXPECT_FALSE(reading->CanReadWithoutWaiting(0));
  const std::vector<HostPiece> all = *reading->Read(0, end);
  EXPECT_TRUE(reading->CanReadWithoutWaiting(0));
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto view, model_->device().HostView(snapshot_->tracks[0].blocks[1], Dtype::kBFloat16));
  const auto is_of_view = [&](const HostPiece& piece) { return piece.owner == view; };
  EXPECT_TRUE(std::any_of(all.begin(), all.end(), is_of_view));
  // A reader may go on in the middle of an element.
  const std::vector<HostPiece> rest = *reading->Read(3, end - 5);
  const std::vector<std::byte> expected = Joined(all);
  EXPECT_EQ(Joined(rest), std::vector(expected.begin() + 3, expected.end() - 2));
}

TEST_F(ManyReadersTest, OfADiskReadItOnce) {
  const TrackSnapshot& track = snapshot_->tracks[0];
  const int64_t total_bytes = track.track->layout().total_bytes();
  std::atomic<int64_t> read_bytes = 0;
  const auto disk = std::make_shared<FakeStoredTrack>(BytesOfBlocks(model_->device(), track),
                                                      [&](int64_t, int64_t length_bytes) {
                                                        read_bytes += length_bytes;
                                                        return absl::OkStatus();
                                                      });
  for (const Selection& selection : {Selection(), Selection{.tensors = {"b"}}}) {
    read_bytes = 0;
    const int64_t reserved_before = model_->memory().budget->reserved_bytes();
    std::atomic<int64_t> reserved = 0;  // By each reader, to the same.
    ReadByMany([&] {
      auto reading = *model_->readings().OpenStored(AsStored(*snapshot_, "ema", disk), selection);
      reserved = reading->total_bytes();
      EXPECT_EQ(model_->memory().budget->reserved_bytes(),
                reserved_before + reading->total_bytes());
      return reading;
    });
    EXPECT_EQ(read_bytes, reserved);
    EXPECT_LE(reserved, total_bytes);
    EXPECT_EQ(model_->memory().budget->reserved_bytes(), reserved_before);
  }
}

TEST_F(ManyReadersTest, OfADiskReadItEachIfThereIsNoMemory) {
  const TrackSnapshot& track = snapshot_->tracks[0];
  const auto disk = std::make_shared<FakeStoredTrack>(BytesOfBlocks(model_->device(), track));
  const auto rest =
      model_->memory().Reserve("all that there is", model_->memory().budget->total_bytes() -
                                                        model_->memory().budget->reserved_bytes());
  ASSERT_THAT(rest, IsOk());
  ReadByMany([&] { return *model_->readings().OpenStored(AsStored(*snapshot_, "ema", disk), {}); });
  EXPECT_EQ(disk->read_count(), kReaders * 3);
}

}  // namespace
}  // namespace ema
