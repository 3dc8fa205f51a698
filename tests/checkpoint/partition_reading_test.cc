// SPDX-License-Identifier: Apache-2.0
//
// A server of a group reads its tensors from the checkpoint of a whole model.
#include <memory>
#include <string>
#include <vector>

#include "server/checkpoint/checkpoint_manager.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/format/manifest_parts.h"
#include "server/format/verify.h"
#include "tests/checkpoint/test_checkpoints.h"
#include "tests/checkpoint/test_partitions.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1'760'000'000);

// Of a model that nothing is pushed to.
class IdleGate final : public CommitGate {
 public:
  bool is_home() const override { return false; }
  int64_t round() const override { return 0; }
  int64_t tracks_revision() const override { return 0; }
  absl::Status CheckLaunch(const Launch&) override { return absl::OkStatus(); }
  void OnRunOpened(int64_t, std::string_view) override {}
  absl::Status CheckPush(const PushStart&) override { return absl::OkStatus(); }
  absl::Status AbandonRound(int64_t, int64_t, const absl::Status&) override {
    return absl::OkStatus();
  }
  void OnPrepared(int64_t, const Version&) override {}
  void OnDropped(int64_t, const absl::Status&) override {}
};

TEST(PartitionReadingTest, AStoredVersionIsReadWithThePartitionsTensors) {
  FakeFileSystem files;
  TestVersions whole(1);
  {
    EMA_ASSERT_OK_AND_ASSIGN(const auto store,
                             CheckpointStore::Open(files, {.data_dir = "/data"}, kNow));
    ASSERT_THAT(store->FolderOf("m").Save(*whole.model, whole[1]), IsOk());
  }
  CheckpointManager::Options options;
  options.store.data_dir = "/data";
  options.store.member = "a";
  EMA_ASSERT_OK_AND_ASSIGN(const auto manager, CheckpointManager::Open(files, options, kNow));
  ModelStore models(TestDevice(), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Model> partition,
                           models.CreatePartition(PartitionConfig(EveryKindOfModel("m"), 1, 3),
                                                  kTestIncarnation, std::make_shared<IdleGate>()));
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef opened,
                           manager->OpenVersion(*partition, {1, kTestIncarnation}, "raw"));
  const TrackSnapshot& track = opened->tracks[0];
  const auto expected = TensorsOf(*whole.model, *whole[1], 2);
  ASSERT_EQ(track.track->layout().entries().size(), 3u);
  for (int64_t i = 0; i < 3; ++i) {
    const StorageLayout::Entry& entry = track.track->layout().entry(i);
    EMA_ASSERT_OK_AND_ASSIGN(
        const std::vector<HostPiece> pieces,
        ReadTrack(partition->device(), track, entry.offset, entry.length_bytes));
    std::vector<std::byte> bytes;
    for (const HostPiece& piece : pieces) {
      bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
    }
    EXPECT_TRUE(bytes == expected[1 + i]) << i;
  }
  // It is a good checkpoint, so nothing has set it aside.
  EXPECT_THAT(files.Exists("/data/models/m/checkpoints/" + CheckpointName(IdOf(whole[1]->record))),
              IsOkAndHolds(true));
}

TEST(PartitionReadingTest, ASaveEndsWithTheIncarnationOfThePartition) {
  FakeFileSystem files;
  TestVersions whole(1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto store,
                           CheckpointStore::Open(files, {.data_dir = "/data"}, kNow));
  ASSERT_THAT(store->FolderOf("m").Save(*whole.model, whole[1]), IsOk());
  const std::string stored = store->FolderOf("m").Path(CheckpointName(IdOf(whole[1]->record)));
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest manifest,
                           ReadCheckpointManifest(files, stored));
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest part, PartOf(manifest, 1, 3));
  ModelStore models(TestDevice(), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Model> partition,
                           models.CreatePartition(PartitionConfig(EveryKindOfModel("m"), 1, 3),
                                                  kTestIncarnation, std::make_shared<IdleGate>()));
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Snapshot> snapshot,
                           ReadCheckpoint(files, stored, part, *partition));
  const auto write = [&](const std::string& path) {
    EXPECT_THAT(MakeCheckpointFolders(files, path, *partition, *snapshot, {}), IsOk());
    return WritePart(files, store->data().latch(), path, *partition, *snapshot, {}).status();
  };
  EXPECT_THAT(write("/data/first"), IsOk());
  partition->Close(absl::UnavailableError("the incarnation has ended"));
  EXPECT_THAT(write("/data/second"),
              StatusIs(absl::StatusCode::kUnavailable, "the incarnation has ended"));
}

}  // namespace
}  // namespace ema
