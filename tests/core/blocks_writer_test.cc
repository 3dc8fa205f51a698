// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/core/snapshot.h"
#include "tests/core/test_model.h"

namespace ema {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;

constexpr int64_t kBlockBytes = 4096;

class BlocksWriterTest : public testing::Test {
 protected:
  BlocksWriterTest() {
    track_.CutIntoBlocks(kBlockBytes);
    // What the pool gives next has been used.
    std::vector<std::shared_ptr<Block>> blocks = *AllocateBlocks(*device_, track_);
    const std::vector<std::byte> dirt(kBlockBytes, std::byte{0xff});
    const std::unique_ptr<DeviceStream> stream = *device_->NewStream();
    for (const std::shared_ptr<Block>& block : blocks) {
      EXPECT_THAT(stream->CopyFromHost(block->data(), dirt.data(), block->size_bytes()), IsOk());
    }
    EXPECT_THAT(stream->Synchronize(), IsOk());
  }

  std::vector<std::byte> Finish(BlocksWriter& writer) {
    const Blocks blocks = *writer.Finish();
    const std::vector<HostPiece> pieces =
        *ReadBlocks(*device_, track_, blocks, 0, track_.layout().total_bytes());
    std::vector<std::byte> bytes;
    for (const HostPiece& piece : pieces) {
      bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
    }
    return bytes;
  }
  int64_t OffsetOf(int64_t tensor) const { return track_.layout().entry(tensor).offset; }

  const std::shared_ptr<Device> device_ = NewTestDevice(int64_t{1} << 20);
  // Three blocks, the last one not full. The tensors' ends are no multiple of anything.
  Track track_{{.name = "ema", .schedule = MakeSchedule("10ba")},
               *MakeManifest({{"a", Dtype::kFloat32, {7}},
                              {"b", Dtype::kFloat32, {1501}},
                              {"c", Dtype::kFloat32, {1003}}})};
};

TEST_F(BlocksWriterTest, WhatIsNeverWrittenIsZero) {
  ASSERT_EQ(track_.block_count(), 3);
  const std::unique_ptr<BlocksWriter> writer = *BlocksWriter::Create(*device_, track_);
  EXPECT_THAT(Finish(*writer), Each(std::byte{0}));
}

TEST_F(BlocksWriterTest, TensorsInAnyOrderAndTheirGapsAreInPlace) {
  std::vector<std::byte> expected(track_.layout().total_bytes(), std::byte{0});
  const std::unique_ptr<BlocksWriter> writer = *BlocksWriter::Create(*device_, track_);
  for (const int64_t tensor : {1, 2, 0}) {
    const int64_t length_bytes = track_.layout().entry(tensor).length_bytes;
    constexpr int64_t kPieceBytes = 1000;
    for (int64_t done = 0; done < length_bytes; done += kPieceBytes) {
      // The writer's source is used again at once.
      std::vector<std::byte> piece(std::min(kPieceBytes, length_bytes - done),
                                   static_cast<std::byte>(16 * tensor + done / kPieceBytes + 1));
      std::memcpy(expected.data() + OffsetOf(tensor) + done, piece.data(), piece.size());
      ASSERT_THAT(writer->Write(OffsetOf(tensor) + done, piece), IsOk());
      std::fill(piece.begin(), piece.end(), std::byte{0xee});
    }
  }
  EXPECT_EQ(Finish(*writer), expected);
}

TEST_F(BlocksWriterTest, MemoryInPlaceIsTheBlocksOwnWhereThatIsTheHosts) {
  const std::unique_ptr<BlocksWriter> writer = *BlocksWriter::Create(*device_, track_);
  const int64_t offset = OffsetOf(0);
  const std::span<std::byte> place = writer->InPlace(offset, 28);
  if (!device_->is_host()) {
    EXPECT_THAT(place, IsEmpty());
    return;
  }
  ASSERT_EQ(place.size(), 28);
  std::fill(place.begin(), place.end(), std::byte{0x11});
  ASSERT_THAT(writer->Write(offset, place), IsOk());
  // Up to a block's end, and past it.
  EXPECT_EQ(writer->InPlace(kBlockBytes - 8, 8).size(), 8);
  EXPECT_THAT(writer->InPlace(kBlockBytes - 8, 9), IsEmpty());
  EXPECT_THAT(writer->InPlace(OffsetOf(1), 0), IsEmpty());

  std::vector<std::byte> expected(track_.layout().total_bytes(), std::byte{0});
  std::fill_n(expected.begin() + offset, 28, std::byte{0x11});
  EXPECT_EQ(Finish(*writer), expected);
}

}  // namespace
}  // namespace ema
