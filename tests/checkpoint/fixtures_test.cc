// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of every format of a release are read as they were written.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "tests/checkpoint/fixture_model.h"

namespace ema {
namespace {

class FixturesTest : public testing::TestWithParam<int64_t> {
 protected:
  static std::string Path() { return absl::StrCat(EMA_FIXTURES, "/format-", GetParam()); }
};

TEST_P(FixturesTest, VerifiesWithTheDigestsOfItsTime) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest checkpoint,
                           VerifyCheckpoint(PosixFileSystem(), Path()));
  EXPECT_FALSE(checkpoint.is_partial);
  EXPECT_EQ(checkpoint.record.step, 30);
  EXPECT_EQ(checkpoint.record.restored_from, std::nullopt);
  ASSERT_EQ(checkpoint.tracks.size(), 2u);
  EXPECT_EQ(checkpoint.tracks[0].weights->files.size(), 3u);
  EMA_ASSERT_OK_AND_ASSIGN(const auto attached,
                           ReadAttachedFiles(PosixFileSystem(), Path(), checkpoint));
  const std::vector<AttachedFile> config = {{"config.json", "{\"layers\": 2}"}};
  EXPECT_EQ(attached, config);
  EXPECT_EQ(checkpoint.tracks[0].weights->digest, kFixtureEmaDigest);
  EXPECT_EQ(checkpoint.tracks[1].weights->digest, kFixtureRawDigest);
}

TEST_P(FixturesTest, LoadsAsItWas) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest checkpoint,
                           ReadCheckpointManifest(PosixFileSystem(), Path()));
  const FixtureVersion expected;
  ModelStore models(TestDevice(), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(const auto created, models.Create(ConfigOf(checkpoint)));
  EXPECT_EQ(created.model->config().DifferenceFrom(expected.model->config()), "");
  EMA_ASSERT_OK_AND_ASSIGN(const auto snapshot,
                           ReadCheckpoint(PosixFileSystem(), Path(), checkpoint, *created.model));
  ASSERT_EQ(snapshot->tracks.size(), 2u);
  for (int64_t t = 0; t < 2; ++t) {
    const TrackSnapshot& there = expected.snapshot->tracks[t];
    EXPECT_TRUE(TensorsOf(*created.model, *snapshot, t) ==
                TensorsOf(*expected.model, *expected.snapshot, t));
    EXPECT_EQ(snapshot->tracks[t].state, there.state);
    EXPECT_EQ(snapshot->tracks[t].last_steps, there.last_steps);
    EMA_ASSERT_OK_AND_ASSIGN(
        const SnapshotRef stored,
        OpenStoredVersion(PosixFileSystem(), Path(), checkpoint, there.track->name()));
    const StorageLayout& layout = there.track->layout();
    const std::vector<std::vector<std::byte>> tensors =
        TensorsOf(*expected.model, *expected.snapshot, t);
    for (int64_t i = 0; i < created.model->manifest().tensor_count(); ++i) {
      EMA_ASSERT_OK_AND_ASSIGN(
          const std::vector<HostPiece> pieces,
          stored->tracks[0].stored->Read(layout.entry(i).offset, layout.entry(i).length_bytes));
      std::vector<std::byte> bytes;
      for (const HostPiece& piece : pieces) {
        bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
      }
      EXPECT_TRUE(bytes == tensors[i]) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, FixturesTest, testing::Values(6),
                         [](const testing::TestParamInfo<int64_t>& tested) {
                           return absl::StrCat("Format", tested.param);
                         });

}  // namespace
}  // namespace ema
