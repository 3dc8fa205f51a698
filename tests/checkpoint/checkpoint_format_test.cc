// SPDX-License-Identifier: Apache-2.0
//
// What WriteCheckpoint() writes, VerifyCheckpoint() and ReadCheckpoint() take, and what they
// refuse.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/format/checkpoint_files.h"
#include "server/format/safetensors.h"
#include "tests/checkpoint/format_testing.h"
#include "tests/checkpoint/test_checkpoints.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::_;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

auto IsCorrupt() {
  return AllOf(StatusIs(absl::StatusCode::kDataLoss, _), ReasonIs(ErrorReason::kCheckpointCorrupt));
}

const std::vector<AttachedFile> kAttached = {{"config.json", "{\"layers\": 2}"}, {"vocab.txt", ""}};

// Loads the checkpoint at `path` as a start of the server does.
absl::Status Load(FileSystem& files, const std::string& path, ModelStore& models) {
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest checkpoint, ReadCheckpointManifest(files, path));
  EMA_ASSIGN_OR_RETURN(const auto created, models.Create(ConfigOf(checkpoint)));
  EMA_ASSIGN_OR_RETURN(auto snapshot, ReadCheckpoint(files, path, checkpoint, *created.model));
  created.model->Restore(std::move(snapshot));
  return absl::OkStatus();
}

absl::Status Load(FileSystem& files, const std::string& path) {
  ModelStore models(TestDevice(), SmallBlocks());
  return Load(files, path, models);
}

// All files below `path`.
std::vector<std::string> FilesIn(FakeFileSystem& files, const std::string& path) {
  std::vector<std::string> found;
  for (const std::string& name : files.AllPaths()) {
    if (absl::StartsWith(name, path + "/") && files.OpenFile(name).ok()) found.push_back(name);
  }
  return found;
}

class CheckpointFormatTest : public testing::Test {
 protected:
  CheckpointFormatTest() : versions_(2) {}

  void Attach() {
    for (const AttachedFile& file : kAttached) {
      ASSERT_THAT(versions_.model->attached_files().AddPart(
                      file.name, static_cast<int64_t>(file.bytes.size()), 0, file.bytes),
                  IsOk());
    }
  }
  absl::StatusOr<CheckpointManifest> Write(const WriteOptions& options) {
    return WriteCheckpoint(files_, latch_, "/c", *versions_.model, *versions_[2], options);
  }

  FakeFileSystem files_;
  SyncLatch latch_;
  TestVersions versions_;
};

TEST_F(CheckpointFormatTest, ComesBackBitForBitHoweverItIsSplit) {
  Attach();
  for (const int64_t max_file_bytes :
       {int64_t{5'000'000'000}, int64_t{9'000}, int64_t{100}, int64_t{1}}) {
    SCOPED_TRACE(max_file_bytes);
    EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest written,
                             Write({.max_file_bytes = max_file_bytes}));
    EXPECT_FALSE(written.is_partial);
    EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest verified, VerifyCheckpoint(files_, "/c"));
    EXPECT_EQ(verified.tracks, written.tracks);
    ModelStore models(TestDevice(), SmallBlocks());
    ASSERT_THAT(Load(files_, "/c", models), IsOk());
    ExpectSameVersion(**models.Get("m"), *versions_.model, *versions_[2]);
    int64_t bytes = 0;
    for (const std::string& path : FilesIn(files_, "/c/tracks")) {
      bytes += static_cast<int64_t>(files_.FileBytes(path).size());
    }
    EXPECT_EQ(written.total_bytes, bytes);
    ASSERT_THAT(files_.RemoveTree("/c"), IsOk());
  }
}

TEST_F(CheckpointFormatTest, AMeanOfTheLastGoesOnAsIfNothingHadHappened) {
  ModelConfig config = EveryKindOfModel("mean");
  config.tracks = {
      {"two", MakeSchedule("mean_of_last=2")},
      {"late", MakeSchedule("mean_of_last=3, ema_start=100ba")},
      {.name = "fine", .schedule = MakeSchedule("mean_of_last=5"), .dtype = Dtype::kFloat64}};
  const auto push = [](TestRank& rank, int64_t version) {
    return rank.Push(10 * version, RandomWeights(*MakeManifest(EveryKindOfTensor()), version));
  };
  for (const int64_t max_file_bytes : {int64_t{5'000'000'000}, int64_t{100}}) {
    SCOPED_TRACE(max_file_bytes);
    ModelStore models(TestDevice(), SmallBlocks());
    const auto model = models.Create(config)->model;
    TestRank rank(model, "launch");
    ASSERT_THAT(rank.Join(), IsOk());
    for (int64_t version = 1; version <= 4; ++version) ASSERT_THAT(push(rank, version), IsOk());
    const SnapshotRef saved = *model->history().Pin(0);
    EMA_ASSERT_OK_AND_ASSIGN(
        const CheckpointManifest written,
        WriteCheckpoint(files_, latch_, "/c", *model, *saved, {.max_file_bytes = max_file_bytes}));
    EXPECT_THAT(written.tracks[0].latest_weights, SizeIs(1));
    EXPECT_THAT(written.tracks[1].latest_weights, SizeIs(1));
    EXPECT_THAT(written.tracks[2].latest_weights, SizeIs(4));
    int64_t bytes = 0;
    for (const std::string& path : FilesIn(files_, "/c/tracks")) {
      bytes += static_cast<int64_t>(files_.FileBytes(path).size());
    }
    EXPECT_EQ(written.total_bytes, bytes);
    EXPECT_GT(bytes, CheckpointDataBytes(*model, *saved, {}));
    EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest verified, VerifyCheckpoint(files_, "/c"));
    EXPECT_EQ(verified.tracks, written.tracks);
    EXPECT_THAT(CheckNoUnknownFiles(files_, "/c", verified), IsOk());

    ModelStore loaded(TestDevice(), SmallBlocks());
    ASSERT_THAT(Load(files_, "/c", loaded), IsOk());
    const std::shared_ptr<Model> again = *loaded.Get("mean");
    ExpectSameVersion(*again, *model, *saved);
    TestRank next(again, "next");
    ASSERT_THAT(next.Join(), IsOk());
    for (int64_t version = 5; version <= 12; ++version) {
      ASSERT_THAT(push(rank, version), IsOk());
      ASSERT_THAT(push(next, version), IsOk());
      for (int64_t t = 0; t < 3; ++t) {
        EXPECT_TRUE(TensorsOf(*again, **again->history().Pin(0), t) ==
                    TensorsOf(*model, **model->history().Pin(0), t))
            << version << " " << t;
      }
    }

    // The kept weights are as protected as the average.
    const std::string file = "/c/tracks/fine/" + written.tracks[2].latest_weights[3].files[0].name;
    const std::string good = files_.FileBytes(file);
    files_.FileBytes(file).back() ^= 1;
    EXPECT_THAT(VerifyCheckpoint(files_, "/c").status(), IsCorrupt());
    EXPECT_THAT(Load(files_, "/c"), IsCorrupt());
    files_.FileBytes(file) = good;
    EXPECT_THAT(VerifyCheckpoint(files_, "/c"), IsOk());
    ASSERT_THAT(files_.RemoveFile(file), IsOk());
    EXPECT_THAT(VerifyCheckpoint(files_, "/c").status(), IsCorrupt());
    ASSERT_THAT(files_.RemoveTree("/c"), IsOk());
  }
}

TEST_F(CheckpointFormatTest, SplitsAsHuggingFaceDoes) {
  constexpr int64_t kMaxFileBytes = 100;
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest written,
                           Write({.max_file_bytes = kMaxFileBytes}));
  const CheckpointTrack& exact = *written.Find("exact");
  const size_t count = exact.weights->files.size();
  ASSERT_GT(count, 2u);
  EXPECT_EQ(exact.weights->files[1].name,
            absl::StrCat("model-00002-of-0000", count, ".safetensors"));
  const nlohmann::json index =
      nlohmann::json::parse(files_.FileBytes("/c/tracks/exact/model.safetensors.index.json"));
  int64_t total_bytes = 0;
  size_t tensor_count = 0;
  for (const TensorFile& saved : exact.weights->files) {
    EMA_ASSERT_OK_AND_ASSIGN(const auto file, files_.OpenFile("/c/tracks/exact/" + saved.name));
    EMA_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, ReadSafetensorsHeader(*file));
    EXPECT_EQ(header.metadata.at("format"), "pt");
    EXPECT_EQ(header.metadata.at("ema.model"), "m");
    EXPECT_EQ(header.metadata.at("ema.track"), "exact");
    EXPECT_EQ(header.metadata.at("ema.step"), "20");
    EXPECT_EQ(header.metadata.at("ema.version"), "2");
    EXPECT_EQ(header.metadata.at("ema.incarnation"), "7");
    const int64_t data_bytes = file->size_bytes() - header.header_bytes;
    EXPECT_TRUE(data_bytes <= kMaxFileBytes || header.tensors.size() == 1) << saved.name;
    for (const SafetensorsTensor& tensor : header.tensors) {
      EXPECT_EQ(index["weight_map"][tensor.spec.name], saved.name) << tensor.spec.name;
      EXPECT_EQ(tensor.begin % DtypeSize(tensor.spec.dtype), 0) << tensor.spec.name;
      ++tensor_count;
    }
    total_bytes += data_bytes;
  }
  EXPECT_EQ(index["weight_map"].size(), tensor_count);
  EXPECT_EQ(tensor_count, EveryKindOfTensor().size());
  EXPECT_EQ(index["metadata"]["total_size"], total_bytes);
}

TEST_F(CheckpointFormatTest, TheDigestIsOfTheTensorsInTheManifestsOrder) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest whole, Write({}));
  ASSERT_THAT(files_.RemoveTree("/c"), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest split, Write({.max_file_bytes = 100}));
  for (size_t t = 0; t < whole.tracks.size(); ++t) {
    uint32_t digest = 0;
    std::vector<std::vector<std::byte>> tensors =
        TensorsOf(*versions_.model, *versions_[2], static_cast<int64_t>(t));
    for (const std::vector<std::byte>& tensor : tensors) digest = Crc32c(digest, tensor);
    EXPECT_EQ(whole.tracks[t].weights->digest, digest) << whole.tracks[t].config.name;
    EXPECT_EQ(split.tracks[t].weights->digest, digest) << whole.tracks[t].config.name;
  }
}

TEST_F(CheckpointFormatTest, LongTensorsHaveAChecksumForEachPiece) {
  const LargeVersion large;
  EMA_ASSERT_OK_AND_ASSIGN(
      const CheckpointManifest written,
      WriteCheckpoint(files_, latch_, "/l", *large.model, *large.snapshot, {}));
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest read, VerifyCheckpoint(files_, "/l"));
  EXPECT_EQ(read.tracks, written.tracks);
  const std::vector<std::vector<std::byte>> tensors = TensorsOf(*large.model, *large.snapshot, 0);
  const TensorFiles& weights = *read.tracks[0].weights;
  std::vector<size_t> counts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    counts.push_back(weights.piece_crc32c[i].size());
    EXPECT_EQ(weights.tensor_crc32c[i], Crc32c(0, tensors[i]));
    for (size_t p = 0; p < counts[i]; ++p) {
      const auto rest = std::span(tensors[i]).subspan(p * kPieceBytes);
      EXPECT_EQ(weights.piece_crc32c[i][p],
                Crc32c(0, rest.first(std::min<size_t>(kPieceBytes, rest.size()))));
    }
  }
  // As LargeModel() has them: of one piece at most, there is none.
  EXPECT_THAT(counts, ElementsAre(3, 0, 0, 0, 2, 0));
}

TEST_F(CheckpointFormatTest, APartOfTheTracksIsAPartialCheckpoint) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest written, Write({.tracks = {"raw", "exact"}}));
  EXPECT_TRUE(written.is_partial);
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest read, VerifyCheckpoint(files_, "/c"));
  EXPECT_TRUE(read.is_partial);
  ASSERT_THAT(read.tracks, SizeIs(2));
  EXPECT_EQ(read.tracks[0].config.name, "raw");
  EXPECT_EQ(read.tracks[1].config.name, "exact");
  EXPECT_THAT(files_.AllPaths(), Contains("/c/tracks/exact"));
  EXPECT_THAT(files_.AllPaths(), Not(Contains("/c/tracks/fast")));
  EMA_ASSERT_OK_AND_ASSIGN(const auto snapshot,
                           ReadCheckpoint(files_, "/c", read, *versions_.model));
  ASSERT_THAT(snapshot->tracks, SizeIs(2));
  EXPECT_TRUE(TensorsOf(*versions_.model, *snapshot, 1) ==
              TensorsOf(*versions_.model, *versions_[2], 3));
}

TEST_F(CheckpointFormatTest, AllTracksWithAValueAreTheWhole) {
  // It has no value yet, and is part of the model.
  ASSERT_THAT(versions_.model->UpdateTracks({.put = {{"late", MakeSchedule("copy")}}}), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest written,
                           Write({.tracks = {"some", "exact", "raw", "slow", "fast"}}));
  EXPECT_FALSE(written.is_partial);
  EXPECT_THAT(written.tracks, SizeIs(6));
  EXPECT_THAT(VerifyCheckpoint(files_, "/c"), IsOk());
  EXPECT_THAT(Write({.tracks = {"late"}}),
              AllOf(StatusIs(absl::StatusCode::kNotFound, HasSubstr("track \"late\"")),
                    ReasonIs(ErrorReason::kTrackNotFound)));
}

TEST_F(CheckpointFormatTest, AttachedFilesAreInEveryFolder) {
  Attach();
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest written, Write({}));
  for (const char* track : {"fast", "slow", "raw", "exact", "some"}) {
    for (const AttachedFile& file : kAttached) {
      EXPECT_EQ(files_.FileBytes(absl::StrCat("/c/tracks/", track, "/", file.name)), file.bytes);
    }
  }
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest read, ReadCheckpointManifest(files_, "/c"));
  EMA_ASSERT_OK_AND_ASSIGN(const auto attached, ReadAttachedFiles(files_, "/c", read));
  EXPECT_EQ(attached, kAttached);
}

// One with every class of byte.
class DamagedFormatTest : public CheckpointFormatTest {
 protected:
  DamagedFormatTest() {
    Attach();
    EXPECT_THAT(Write({.max_file_bytes = 4'000}), IsOk());
  }
};

TEST_F(DamagedFormatTest, EveryChangedBitIsFoundByVerificationAndByLoading) {
  for (const std::string& path : FilesIn(files_, "/c")) {
    std::string& bytes = files_.FileBytes(path);
    // Headers end before byte 1200; the last bytes are those of the last tensor.
    for (size_t at = 0; at < bytes.size();
         at = at + 1 == bytes.size() ? at + 1
                                     : std::min(at + (at < 1200 ? 61 : 997), bytes.size() - 1)) {
      const char before = bytes[at];
      bytes[at] = static_cast<char>(before ^ (1 << (at % 8)));
      EXPECT_THAT(VerifyCheckpoint(files_, "/c").status(), IsCorrupt()) << path << " " << at;
      EXPECT_THAT(Load(files_, "/c"), IsCorrupt()) << path << " " << at;
      bytes[at] = before;
    }
  }
  EXPECT_THAT(VerifyCheckpoint(files_, "/c"), IsOk());
}

TEST_F(DamagedFormatTest, AMissingAShortAndALongFileAreFound) {
  for (const std::string& path : FilesIn(files_, "/c")) {
    const std::string before = files_.FileBytes(path);
    files_.FileBytes(path) += '\0';
    EXPECT_THAT(VerifyCheckpoint(files_, "/c").status(), IsCorrupt()) << path;
    EXPECT_THAT(Load(files_, "/c"), IsCorrupt()) << path;
    if (!before.empty()) {
      files_.FileBytes(path) = before.substr(0, before.size() - 1);
      EXPECT_THAT(VerifyCheckpoint(files_, "/c").status(), IsCorrupt()) << path;
      EXPECT_THAT(Load(files_, "/c"), IsCorrupt()) << path;
    }
    files_.FileBytes(path) = before;
    ASSERT_THAT(files_.RemoveFile(path), IsOk());
    EXPECT_THAT(VerifyCheckpoint(files_, "/c").status(), IsCorrupt()) << path;
    EXPECT_THAT(Load(files_, "/c"), IsCorrupt()) << path;
    ASSERT_THAT(files_.NewWritableFile(path), IsOk());
    files_.FileBytes(path) = before;
  }
  EXPECT_THAT(VerifyCheckpoint(files_, "/c"), IsOk());
}

TEST_F(DamagedFormatTest, TheProblemIsNamed) {
  files_.FileBytes("/c/tracks/raw/model.safetensors.index.json")[3] ^= 1;
  files_.FileBytes("/c/tracks/slow/vocab.txt") = "x";
  std::vector<std::string> verdicts;
  EXPECT_THAT(
      VerifyCheckpoint(
          files_, "/c",
          [&](const CheckpointManifest&, const CheckpointTrack& track, const absl::Status& status) {
            verdicts.push_back(
                absl::StrCat(track.config.name, ": ", status.ok() ? "ok" : status.message()));
          }),
      StatusIs(absl::StatusCode::kDataLoss,
               "track \"slow\": file \"vocab.txt\": it has 1 bytes, expected 0"));
  EXPECT_THAT(verdicts,
              ElementsAre("fast: ok", "slow: file \"vocab.txt\": it has 1 bytes, expected 0",
                          "raw: file \"model.safetensors.index.json\": its checksum is wrong",
                          "exact: ok", "some: ok"));
}

TEST_F(DamagedFormatTest, AFileTooManyIsNoDamageAndIsSaid) {
  const auto check = [this] {
    const auto verified = VerifyCheckpoint(files_, "/c");
    EXPECT_THAT(verified, IsOk());
    EXPECT_THAT(Load(files_, "/c"), IsOk());
    return CheckNoUnknownFiles(files_, "/c", *verified);
  };
  const auto is_said = StatusIs(absl::StatusCode::kFailedPrecondition,
                                HasSubstr("does not belong to the checkpoint"));
  for (const char* path : {"/c/x", "/c/tracks/x", "/c/tracks/raw/x", "/c/tracks/raw/KEEP"}) {
    ASSERT_THAT(files_.NewWritableFile(path), IsOk());
    EXPECT_THAT(check(), is_said) << path;
    ASSERT_THAT(files_.RemoveFile(path), IsOk());
    ASSERT_THAT(files_.CreateDirectory(path), IsOk());
    EXPECT_THAT(check(), is_said) << path;
    ASSERT_THAT(files_.RemoveTree(path), IsOk());
  }
  ASSERT_THAT(files_.NewWritableFile("/c/KEEP"), IsOk());
  EXPECT_THAT(check(), IsOk());
}

TEST_F(DamagedFormatTest, AnotherVersionsNameIsRefused) {
  ASSERT_THAT(files_.Rename("/c", "/step-000000000020-version-7-2"), IsOk());
  EXPECT_THAT(VerifyCheckpoint(files_, "/step-000000000020-version-7-2"), IsOk());
  ASSERT_THAT(files_.Rename("/step-000000000020-version-7-2", "/step-000000000020-version-7-3"),
              IsOk());
  EXPECT_THAT(VerifyCheckpoint(files_, "/step-000000000020-version-7-3").status(), IsCorrupt());
  EXPECT_THAT(VerifyCheckpoint(files_, "/nothing"), StatusIs(absl::StatusCode::kNotFound, _));
}

TEST_F(DamagedFormatTest, ADiskThatFailsIsNotTheCheckpointsFault) {
  for (int64_t fail = 0;; ++fail) {
    int64_t count = 0;
    files_.set_hook([&](const std::string&, const std::string&) {
      return count++ == fail ? absl::UnavailableError("I/O error") : absl::OkStatus();
    });
    const absl::Status status = VerifyCheckpoint(files_, "/c").status();
    if (count <= fail) {
      EXPECT_THAT(status, IsOk());
      break;
    }
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, _)) << fail;
  }
}

TEST_F(DamagedFormatTest, AHostileManifestDoesNotReachBeyondItsChecksums) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest good, ReadCheckpointManifest(files_, "/c"));
  const auto expect_refused = [&](const std::string& message, auto change) {
    CheckpointManifest bad = good;
    change(*bad.tracks[3].weights);
    files_.FileBytes("/c/manifest.json") = EncodeCheckpointManifest(bad);
    EXPECT_THAT(ReadCheckpointManifest(files_, "/c"),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(message)));
  };
  expect_refused("pieces, expected 0", [](TensorFiles& files) { files.piece_crc32c[1] = {7}; });
  expect_refused("digest", [](TensorFiles& files) { files.digest ^= 1; });
  expect_refused("digest", [](TensorFiles& files) { files.tensor_crc32c[0] ^= 1; });
}

TEST_F(CheckpointFormatTest, ARollbackRestoresTheTracksThatCanTakeIt) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest checkpoint, Write({}));
  std::vector<TrackConfig> tracks = versions_.model->config().tracks;
  tracks[0].schedule = MakeSchedule("20ba");  // "fast": a value of it is one, still.
  tracks[2].tensor_rules = {{"f32", TensorAction::kIgnore}};                        // "raw"
  tracks[3].dtype = Dtype::kFloat32;                                                // "exact"
  tracks[4].tensor_rules.push_back({"i8", TensorAction::kCopy});                    // "some"
  tracks[1].tensor_rules = {{"f16", TensorAction::kAverage, MakeSchedule("5ba")}};  // "slow"
  ModelConfig config = EveryKindOfModel("other");
  config.tracks = tracks;
  ModelStore models(TestDevice(), SmallBlocks());
  const auto model = models.Create(config)->model;
  EMA_ASSERT_OK_AND_ASSIGN(const auto snapshot, ReadCheckpoint(files_, "/c", checkpoint, *model));
  std::vector<std::string> names;
  for (const TrackSnapshot& track : snapshot->tracks) names.push_back(track.track->name());
  // i8 is no float, so it was copied before, too.
  EXPECT_THAT(names, ElementsAre("fast", "some"));
  EXPECT_EQ(snapshot->tracks[0].track, model->Describe().tracks[0]);
  EXPECT_EQ(snapshot->tracks[0].state, versions_[2]->tracks[0].state);
  EXPECT_EQ(snapshot->tracks[0].last_steps, versions_[2]->tracks[0].last_steps);
  EXPECT_TRUE(TensorsOf(*model, *snapshot, 0) == TensorsOf(*versions_.model, *versions_[2], 0));
}

TEST_F(CheckpointFormatTest, OtherTensorsAreRefused) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest checkpoint, Write({}));
  ModelConfig config = EveryKindOfModel("other");
  config.tracks = {{"raw", MakeSchedule("copy")}};
  config.manifest = MakeManifest({{"flag", Dtype::kBool, {4}}});
  ModelStore models(TestDevice(), SmallBlocks());
  EXPECT_THAT(ReadCheckpoint(files_, "/c", checkpoint, *models.Create(config)->model),
              AllOf(StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("\"flag\"")),
                    ReasonIs(ErrorReason::kModelDiffers)));
}

}  // namespace
}  // namespace ema
