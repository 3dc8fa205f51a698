// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/format/checkpoint_files.h"
#include "tests/checkpoint/format_testing.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

using Bytes = std::vector<std::byte>;

// The bytes of a track as readers get them: zero between tensors.
Bytes ExpectedBytes(Model& model, const Snapshot& snapshot, int64_t t) {
  const StorageLayout& layout = snapshot.tracks[t].track->layout();
  const std::vector<Bytes> tensors = TensorsOf(model, snapshot, t);
  Bytes bytes(layout.total_bytes());
  for (size_t i = 0; i < layout.entries().size(); ++i) {
    std::copy(tensors[i].begin(), tensors[i].end(),
              bytes.begin() + layout.entry(static_cast<int64_t>(i)).offset);
  }
  return bytes;
}

absl::StatusOr<Bytes> Read(StoredTrack& track, int64_t offset, int64_t length_bytes) {
  EMA_ASSIGN_OR_RETURN(const std::vector<HostPiece> pieces, track.Read(offset, length_bytes));
  Bytes bytes;
  for (const HostPiece& piece : pieces) {
    bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
  }
  return bytes;
}

Bytes Part(const Bytes& bytes, int64_t offset, int64_t length_bytes) {
  return Bytes(bytes.begin() + offset, bytes.begin() + offset + length_bytes);
}

// The large model's checkpoint, and what its track holds.
class StoredTrackTest : public testing::Test {
 protected:
  StoredTrackTest() : expected_(ExpectedBytes(*version_.model, *version_.snapshot, 0)) {
    checkpoint_ = *WriteCheckpoint(files_, latch_, "/c", *version_.model, *version_.snapshot,
                                   {.max_file_bytes = kPieceBytes * 2});
    checkpoint_ = *ReadCheckpointManifest(files_, "/c");
  }

  std::shared_ptr<StoredTrack> Open() {
    const auto track = OpenStoredTrack(files_, "/c", checkpoint_, "ema", layout());
    EXPECT_THAT(track, IsOk());
    return *track;
  }

  const StorageLayout& layout() const { return version_.snapshot->tracks[0].track->layout(); }
  int64_t total_bytes() const { return layout().total_bytes(); }

  void ExpectRandomRangesAreRight(StoredTrack& track, uint32_t seed, int count) {
    std::mt19937 random(seed);
    for (int i = 0; i < count; ++i) {
      const int64_t offset = random() % total_bytes();
      // Often short, often at the end of something.
      const int64_t most = i % 2 == 0 ? 100 : total_bytes();
      const int64_t length = random() % (std::min(most, total_bytes() - offset) + 1);
      const auto bytes = Read(track, offset, length);
      ASSERT_THAT(bytes, IsOk());
      ASSERT_TRUE(*bytes == Part(expected_, offset, length)) << seed << " " << offset;
    }
  }

  FakeFileSystem files_;
  SyncLatch latch_;
  LargeVersion version_;
  const Bytes expected_;
  CheckpointManifest checkpoint_;
};

TEST_F(StoredTrackTest, GivesTheBytesOfTheVersion) {
  const auto track = Open();
  EXPECT_TRUE(*Read(*track, 0, total_bytes()) == expected_);
  EXPECT_THAT(*track->Read(total_bytes(), 0), SizeIs(0));
  ExpectRandomRangesAreRight(*track, 1, 200);
}

TEST_F(StoredTrackTest, EveryKindOfTensorIsRight) {
  const TestVersions versions(1);
  for (const int64_t max_file_bytes : {int64_t{5'000'000'000}, int64_t{50}}) {
    EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest checkpoint,
                             WriteCheckpoint(files_, latch_, "/every", *versions.model,
                                             *versions[1], {.max_file_bytes = max_file_bytes}));
    for (size_t t = 0; t < checkpoint.tracks.size(); ++t) {
      const std::string& name = checkpoint.tracks[t].config.name;
      const int64_t at = static_cast<int64_t>(t);
      const Bytes expected = ExpectedBytes(*versions.model, *versions[1], at);
      EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef snapshot,
                               OpenStoredVersion(files_, "/every", checkpoint, name));
      ASSERT_THAT(snapshot->tracks, SizeIs(1));
      const TrackSnapshot& of_track = snapshot->tracks[0];
      EXPECT_EQ(snapshot->record.number, 1);
      EXPECT_EQ(of_track.track->config(), versions[1]->tracks[t].track->config());
      EXPECT_EQ(of_track.state, versions[1]->tracks[t].state);
      EXPECT_EQ(of_track.last_steps, versions[1]->tracks[t].last_steps);
      ASSERT_EQ(of_track.track->layout().total_bytes(), static_cast<int64_t>(expected.size()));
      ASSERT_THAT(of_track.block_versions, SizeIs(of_track.track->block_count()));
      for (const int64_t version : of_track.block_versions) EXPECT_EQ(version, INT64_MAX);
      for (int64_t offset = 0; offset < static_cast<int64_t>(expected.size()); offset += 37) {
        for (const int64_t length : {1, 37, 500}) {
          const int64_t n = std::min<int64_t>(length, expected.size() - offset);
          ASSERT_TRUE(*Read(*of_track.stored, offset, n) == Part(expected, offset, n))
              << name << " " << offset;
        }
      }
    }
    ASSERT_THAT(files_.RemoveTree("/every"), IsOk());
  }
}

TEST_F(StoredTrackTest, OnlyReadsThatTouchADamagedPieceFail) {
  // The second piece of "long".
  const TensorFiles& saved = *checkpoint_.tracks[0].weights;
  const int64_t begin = layout().entry(0).offset + kPieceBytes;
  const int64_t end = begin + kPieceBytes;
  // It is alone in its file, being longer than a file should be.
  std::string path;
  for (const TensorFile& file : saved.files) {
    if (file.file_bytes > layout().entry(0).length_bytes) path = "/c/tracks/ema/" + file.name;
  }
  std::string& bytes = files_.FileBytes(path);
  const size_t data = bytes.size() - static_cast<size_t>(layout().entry(0).length_bytes);
  bytes[data + kPieceBytes + 12345] ^= 16;
  const auto track = Open();
  const auto is_named =
      AllOf(StatusIs(absl::StatusCode::kDataLoss,
                     HasSubstr("track \"ema\": tensor \"long\": its checksum is wrong")),
            ReasonIs(ErrorReason::kCheckpointCorrupt));
  std::mt19937 random(3);
  int bad_count = 0;
  for (int i = 0; i < 200; ++i) {
    const int64_t offset = random() % total_bytes();
    const int64_t length =
        1 + static_cast<int64_t>(random()) % std::min<int64_t>(kPieceBytes, total_bytes() - offset);
    const auto got = Read(*track, offset, length);
    if (offset < end && offset + length > begin) {
      EXPECT_THAT(got.status(), is_named) << offset;
      ++bad_count;
    } else {
      ASSERT_THAT(got, IsOk());
      EXPECT_TRUE(*got == Part(expected_, offset, length)) << offset;
    }
  }
  EXPECT_GT(bad_count, 10);
  EXPECT_LT(bad_count, 190);
}

TEST_F(StoredTrackTest, ChunksThatSplitPiecesReadEachOnce) {
  const auto track = Open();
  int64_t read_count = 0;
  files_.set_hook([&](const std::string& operation, const std::string&) {
    read_count += operation == "read" ? 1 : 0;
    return absl::OkStatus();
  });
  constexpr int64_t kChunkBytes = kPieceBytes / 3 + 1;
  for (int64_t offset = 0; offset < total_bytes(); offset += kChunkBytes) {
    ASSERT_THAT(Read(*track, offset, std::min(kChunkBytes, total_bytes() - offset)), IsOk());
  }
  files_.set_hook(nullptr);
  // As LargeModel() has them: 3 + 1 + 1 + 2 + 1.
  EXPECT_EQ(read_count, 8);
}

TEST_F(StoredTrackTest, RemovingTheCheckpointDoesNotHinderIt) {
  const auto track = Open();
  ASSERT_THAT(files_.RemoveTree("/c"), IsOk());
  EXPECT_TRUE(*Read(*track, 0, total_bytes()) == expected_);
}

TEST_F(StoredTrackTest, ReadersShareIt) {
  std::string directory = testing::TempDir() + "/ema_stored_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  ASSERT_THAT(WriteCheckpoint(PosixFileSystem(), latch_, directory + "/c", *version_.model,
                              *version_.snapshot, {}),
              IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(checkpoint_,
                           ReadCheckpointManifest(PosixFileSystem(), directory + "/c"));
  EMA_ASSERT_OK_AND_ASSIGN(const auto track, OpenStoredTrack(PosixFileSystem(), directory + "/c",
                                                             checkpoint_, "ema", layout()));
  std::vector<std::thread> readers;
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    readers.emplace_back([&, seed] { ExpectRandomRangesAreRight(*track, seed, 50); });
  }
  for (std::thread& reader : readers) reader.join();
  PosixFileSystem().RemoveTree(directory).IgnoreError();
}

TEST_F(StoredTrackTest, ATensorThatTheFilesDoNotHaveTakesNoMemory) {
  std::vector<TensorSpec> tensors(checkpoint_.manifest.tensors().begin(),
                                  checkpoint_.manifest.tensors().end());
  tensors[0].shape = {int64_t{1} << 58};
  checkpoint_.manifest = *Manifest::Create(std::move(tensors));
  EXPECT_THAT(OpenStoredVersion(files_, "/c", checkpoint_, "ema"),
              AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr("tensor \"long\"")),
                    ReasonIs(ErrorReason::kCheckpointCorrupt)));
}

TEST_F(StoredTrackTest, WhoeverOpenedItIsToldOfABadByte) {
  std::vector<absl::Status> problems;
  EMA_ASSERT_OK_AND_ASSIGN(
      const SnapshotRef version,
      OpenStoredVersion(files_, "/c", checkpoint_, "ema",
                        [&](const absl::Status& problem) { problems.push_back(problem); }));
  StoredTrack& track = *version->tracks[0].stored;
  for (const TensorFile& file : checkpoint_.tracks[0].weights->files) {
    files_.FileBytes("/c/tracks/ema/" + file.name).back() ^= 1;
  }
  // Its first piece is as it was.
  EXPECT_THAT(Read(track, 0, 100), IsOk());
  EXPECT_THAT(problems, SizeIs(0));
  EXPECT_FALSE(Read(track, 0, total_bytes()).ok());
  ASSERT_THAT(problems, SizeIs(1));
  EXPECT_THAT(problems[0], AllOf(ReasonIs(ErrorReason::kCheckpointCorrupt),
                                 StatusIs(absl::StatusCode::kDataLoss, HasSubstr("track"))));
}

TEST_F(StoredTrackTest, AMissingTrackIsNamed) {
  EXPECT_THAT(OpenStoredVersion(files_, "/c", checkpoint_, "x").status(),
              AllOf(StatusIs(absl::StatusCode::kNotFound, HasSubstr("no track \"x\"; it has ema")),
                    ReasonIs(ErrorReason::kTrackNotFound)));
  ASSERT_THAT(files_.RemoveFile("/c/tracks/ema/" + checkpoint_.tracks[0].weights->files[0].name),
              IsOk());
  EXPECT_THAT(OpenStoredVersion(files_, "/c", checkpoint_, "ema").status(),
              AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr("track \"ema\"")),
                    ReasonIs(ErrorReason::kCheckpointCorrupt)));
}

}  // namespace
}  // namespace ema
