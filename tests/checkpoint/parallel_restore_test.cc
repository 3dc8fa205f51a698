// SPDX-License-Identifier: Apache-2.0
//
// A model that is large enough to be restored by several threads.
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/format/checkpoint_files.h"
#include "server/format/verify.h"
#include "tests/checkpoint/test_checkpoints.h"
#include "tests/checkpoint/test_data_dir.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

class ParallelRestoreTest : public DataDirTest {
 protected:
  ParallelRestoreTest() : models_(TestDevice(), Options()) {
    ModelConfig config;
    config.name = "m";
    config.manifest = MakeManifest({{"large", Dtype::kFloat32, {10 * kMiB + 1}},
                                    {"small", Dtype::kFloat32, {3}},
                                    {"other", Dtype::kFloat32, {10 * kMiB + 7}}});
    config.tracks = {{"ema", MakeSchedule("10ba")}};
    model_ = models_.Create(std::move(config))->model;
    TestRank rank(model_, "launch");
    EXPECT_THAT(rank.Join(), IsOk());
    std::vector<float> values(20 * kMiB + 11);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    EXPECT_THAT(rank.Push(10, BytesOf(values)), IsOk());
    snapshot_ = *model_->history().Pin(0);
    SyncLatch latch;
    EXPECT_THAT(WriteCheckpoint(PosixFileSystem(), latch, Path(), *model_, *snapshot_, {}), IsOk());
  }

  static ModelStore::Options Options() {
    ModelStore::Options options = SmallBlocks();
    options.model.block_bytes = 3 * kMiB;  // Parts of the files end inside them.
    return options;
  }
  std::string Path() const { return JoinPath(directory(), "c"); }

  absl::StatusOr<std::shared_ptr<Snapshot>> Restore() {
    EMA_ASSIGN_OR_RETURN(const CheckpointManifest checkpoint,
                         ReadCheckpointManifest(PosixFileSystem(), Path()));
    return ReadCheckpoint(PosixFileSystem(), Path(), checkpoint, *model_);
  }
  // Of the weights' file.
  void FlipByte(int64_t at) {
    std::fstream file(JoinPath(TrackPath(Path(), "ema"), TensorFileName(0, 1)),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get());
    file.seekp(at);
    file.put(static_cast<char>(byte ^ 1));
  }

  ModelStore models_;
  std::shared_ptr<Model> model_;
  SnapshotRef snapshot_;
};

TEST_F(ParallelRestoreTest, ComesBackBitForBit) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Snapshot> restored, Restore());
  const TrackSnapshot& track = restored->tracks[0];
  const int64_t total_bytes = track.track->layout().total_bytes();
  const auto all_of = [&](const Blocks& blocks) {
    const std::vector<HostPiece> pieces =
        *ReadBlocks(model_->device(), *track.track, blocks, 0, total_bytes);
    std::vector<std::byte> bytes;
    for (const HostPiece& piece : pieces) {
      bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
    }
    return bytes;
  };
  EXPECT_TRUE(all_of(track.blocks) == all_of(snapshot_->tracks[0].blocks));
}

TEST_F(ParallelRestoreTest, OfSeveralDamagedTensorsTheFirstIsNamed) {
  FlipByte(70 * kMiB);
  EXPECT_THAT(Restore(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("tensor \"other\"")));
  FlipByte(39 * kMiB);
  FlipByte(41 * kMiB);
  EXPECT_THAT(Restore(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("tensor \"large\"")));
}

}  // namespace
}  // namespace ema
