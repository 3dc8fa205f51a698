// SPDX-License-Identifier: Apache-2.0
//
// A checkpoint that several partitions write equals the one that a single server writes, and every
// placement can read it.
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/format/checkpoint_files.h"
#include "server/format/manifest_parts.h"
#include "server/format/safetensors.h"
#include "tests/checkpoint/test_partitions.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::_;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// The second partition has one tensor only, which the track "some" ignores.
const std::vector<int64_t> kCounts = {1, 1, 10};

class CheckpointPartsTest : public testing::Test {
 protected:
  CheckpointPartsTest() : partitions_(EveryKindOfModel("m"), kCounts) {
    partitions_.Push(10);
    partitions_.Push(20);
  }

  // What a member sends to the home.
  static absl::StatusOr<CheckpointManifest> Send(const CheckpointManifest& part) {
    return ParseCheckpointManifest(EncodeCheckpointManifest(part), ManifestScope::kPart);
  }

  // Writes the parts of a checkpoint at `path`, the last one first.
  absl::StatusOr<std::vector<CheckpointManifest>> WriteParts(TestPartitions& partitions,
                                                             const std::string& path,
                                                             int64_t max_file_bytes) {
    const WriteOptions options{.max_file_bytes = max_file_bytes};
    TestPartitions::Partition& home = partitions[0];
    EMA_RETURN_IF_ERROR(MakeCheckpointFolders(files_, path, *home.model, *home.snapshot, options));
    const auto numbers = partitions.NumberFiles(max_file_bytes);
    std::vector<CheckpointManifest> parts(partitions.count());
    for (size_t i = partitions.count(); i-- > 0;) {
      EMA_ASSIGN_OR_RETURN(
          const CheckpointManifest part,
          WritePart(files_, latch_, path, *partitions[i].model, *partitions[i].snapshot,
                    {.max_file_bytes = max_file_bytes, .file_numbers = numbers[i]}));
      EMA_ASSIGN_OR_RETURN(parts[i], Send(part));
    }
    return parts;
  }

  absl::StatusOr<CheckpointManifest> Merge(TestPartitions& partitions, const std::string& path,
                                           std::vector<CheckpointManifest> parts) {
    return MergeParts(files_, latch_, path, *partitions[0].model, std::move(parts));
  }

  absl::StatusOr<CheckpointManifest> Write(TestPartitions& partitions, const std::string& path,
                                           int64_t max_file_bytes) {
    EMA_ASSIGN_OR_RETURN(std::vector<CheckpointManifest> parts,
                         WriteParts(partitions, path, max_file_bytes));
    return Merge(partitions, path, std::move(parts));
  }

  absl::StatusOr<CheckpointManifest> WriteWhole(const TestPartitions& partitions,
                                                const std::string& path, int64_t max_file_bytes) {
    return WriteCheckpoint(files_, latch_, path, *partitions.whole().model,
                           *partitions.whole().snapshot, {.max_file_bytes = max_file_bytes});
  }

  // Reads the checkpoint at `path` into partitions of `counts` tensors.
  void ExpectReadableBy(const std::vector<int64_t>& counts, const TestPartitions& partitions,
                        const std::string& path) {
    EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest whole, ReadCheckpointManifest(files_, path));
    int64_t first = 0;
    for (const int64_t count : counts) {
      SCOPED_TRACE(absl::StrCat("tensors ", first, " to ", first + count - 1));
      EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest part, PartOf(whole, first, count));
      ModelStore models(TestDevice(), SmallBlocks());
      EMA_ASSERT_OK_AND_ASSIGN(
          const std::shared_ptr<Model> model,
          models.CreatePartition(ConfigOf(part), kTestIncarnation, /*gate=*/nullptr));
      EMA_ASSERT_OK_AND_ASSIGN(const auto read, ReadCheckpoint(files_, path, part, *model));
      ExpectPartOf(*model, *read, partitions.whole(), first, count);
      first += count;
    }
  }

  FakeFileSystem files_;
  SyncLatch latch_;
  TestPartitions partitions_;
};

TEST_F(CheckpointPartsTest, TheWholeIsThatOfASingleServer) {
  for (const int64_t max_file_bytes : {int64_t{5'000'000'000}, int64_t{100}}) {
    SCOPED_TRACE(max_file_bytes);
    EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest whole,
                             Write(partitions_, "/c", max_file_bytes));
    EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest verified, VerifyCheckpoint(files_, "/c"));
    EXPECT_EQ(verified.tracks, whole.tracks);
    EXPECT_EQ(verified.total_bytes, whole.total_bytes);
    EXPECT_THAT(CheckNoUnknownFiles(files_, "/c", verified), IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest single,
                             WriteWhole(partitions_, "/s", max_file_bytes));
    EXPECT_EQ(whole.manifest, single.manifest);
    EXPECT_EQ(ConfigOf(whole).DifferenceFrom(ConfigOf(single)), "");
    ASSERT_EQ(whole.tracks.size(), single.tracks.size());
    for (size_t t = 0; t < single.tracks.size(); ++t) {
      EXPECT_EQ(whole.tracks[t].weights->digest, single.tracks[t].weights->digest);
      EXPECT_EQ(whole.tracks[t].weights->tensor_crc32c, single.tracks[t].weights->tensor_crc32c);
      EXPECT_EQ(whole.tracks[t].weights->piece_crc32c, single.tracks[t].weights->piece_crc32c);
    }
    ModelStore models(TestDevice(), SmallBlocks());
    const std::shared_ptr<Model> loaded = models.Create(ConfigOf(verified))->model;
    EMA_ASSERT_OK_AND_ASSIGN(const auto read, ReadCheckpoint(files_, "/c", verified, *loaded));
    ExpectPartOf(*loaded, *read, partitions_.whole(), 0, 12);
    ASSERT_THAT(files_.RemoveTree("/c"), IsOk());
    ASSERT_THAT(files_.RemoveTree("/s"), IsOk());
  }
}

TEST_F(CheckpointPartsTest, TheIndexSaysWhereHuggingFaceFindsEachTensor) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest whole, Write(partitions_, "/c", 100));
  for (const CheckpointTrack& track : whole.tracks) {
    SCOPED_TRACE(track.config.name);
    const std::string folder = TrackPath("/c", track.config.name);
    const nlohmann::json index =
        nlohmann::json::parse(files_.FileBytes(JoinPath(folder, kIndexFileName)));
    size_t tensor_count = 0;
    int64_t bytes = 0;
    for (size_t f = 0; f < track.weights->files.size(); ++f) {
      const std::string& name = track.weights->files[f].name;
      EXPECT_EQ(name, TensorFileName(f, track.weights->files.size()));
      EMA_ASSERT_OK_AND_ASSIGN(const auto file, files_.OpenFile(JoinPath(folder, name)));
      EMA_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, ReadSafetensorsHeader(*file));
      EXPECT_THAT(header.tensors, Not(IsEmpty())) << name;
      for (const SafetensorsTensor& tensor : header.tensors) {
        EXPECT_EQ(index["weight_map"][tensor.spec.name], name) << tensor.spec.name;
        ++tensor_count;
      }
      bytes += file->size_bytes() - header.header_bytes;
    }
    EXPECT_EQ(index["weight_map"].size(), tensor_count);
    EXPECT_EQ(index["metadata"]["total_size"], bytes);
  }
  // The second partition has no file of a track that ignores its only tensor.
  EXPECT_EQ(partitions_.NumberFiles(100)[1]["some"].first, 1u);
  EXPECT_EQ(partitions_.NumberFiles(100)[2]["some"].first, 1u);
}

TEST_F(CheckpointPartsTest, OnePartitionWithAllFilesNeedsNoIndex) {
  ModelConfig config = EveryKindOfModel("m");
  config.tracks = {{.name = "first",
                    .schedule = MakeSchedule("10ba"),
                    .tensor_rules = {{"flag", TensorAction::kCopy}, {"*", TensorAction::kIgnore}}}};
  TestPartitions partitions(config, kCounts);
  partitions.Push(10);
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest whole, Write(partitions, "/c", 100));
  ASSERT_THAT(whole.tracks[0].weights->files, SizeIs(1));
  EXPECT_EQ(whole.tracks[0].weights->files[0].name, "model.safetensors");
  EXPECT_THAT(VerifyCheckpoint(files_, "/c"), IsOk());
  ExpectReadableBy({1, 2, 9}, partitions, "/c");
}

TEST_F(CheckpointPartsTest, EveryPlacementReadsWhatAnyPlacementHasWritten) {
  for (const int64_t max_file_bytes : {int64_t{5'000'000'000}, int64_t{9'000}, int64_t{1}}) {
    SCOPED_TRACE(max_file_bytes);
    ASSERT_THAT(Write(partitions_, "/c", max_file_bytes), IsOk());
    ASSERT_THAT(WriteWhole(partitions_, "/s", max_file_bytes), IsOk());
    for (const char* const path : {"/c", "/s"}) {
      SCOPED_TRACE(path);
      ExpectReadableBy({12}, partitions_, path);
      ExpectReadableBy({2, 10}, partitions_, path);
      ExpectReadableBy(kCounts, partitions_, path);
      ExpectReadableBy({7, 1, 1, 3}, partitions_, path);
      ASSERT_THAT(files_.RemoveTree(path), IsOk());
    }
  }
}

TEST_F(CheckpointPartsTest, KeptWeightsAreMergedAndRead) {
  ModelConfig config = EveryKindOfModel("m");
  config.tracks = {{"mean", MakeSchedule("mean_of_last=3")}};
  TestPartitions partitions(config, kCounts);
  for (const int64_t step : {10, 20, 30, 40}) partitions.Push(step);
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest whole, Write(partitions, "/c", 100));
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest single, WriteWhole(partitions, "/s", 100));
  ASSERT_THAT(whole.tracks[0].latest_weights, SizeIs(2));
  for (size_t w = 0; w < 2; ++w) {
    EXPECT_EQ(whole.tracks[0].latest_weights[w].digest, single.tracks[0].latest_weights[w].digest);
  }
  EXPECT_THAT(VerifyCheckpoint(files_, "/c"), IsOk());
  ExpectReadableBy({3, 9}, partitions, "/c");

  // The kept weights are there, too: the next update removes one of them from the mean.
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest part, PartOf(whole, 1, 1));
  ModelStore models(TestDevice(), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Model> model,
                           models.CreatePartition(ConfigOf(part), kTestIncarnation, nullptr));
  EMA_ASSERT_OK_AND_ASSIGN(auto read, ReadCheckpoint(files_, "/c", part, *model));
  model->Restore(std::move(read));
  TestRank rank(model, "next");
  ASSERT_THAT(rank.Join(), IsOk());
  partitions.Push(50);
  const Manifest& manifest = *config.manifest;
  ASSERT_THAT(rank.Push(50, PartOfWeights(RandomWeights(manifest, 50), manifest, 1, 1)), IsOk());
  EXPECT_TRUE(TensorsOf(*model, **model->history().Pin(0), 0) ==
              TensorsOf(*partitions[1].model, *partitions[1].snapshot, 0));
}

TEST_F(CheckpointPartsTest, SomeTracksMakeAPartialCheckpoint) {
  const WriteOptions options{.tracks = {"slow", "raw"}};
  ASSERT_THAT(
      MakeCheckpointFolders(files_, "/c", *partitions_[0].model, *partitions_[0].snapshot, options),
      IsOk());
  const auto numbers = partitions_.NumberFiles(options.max_file_bytes);
  std::vector<CheckpointManifest> parts;
  for (size_t i = 0; i < partitions_.count(); ++i) {
    EMA_ASSERT_OK_AND_ASSIGN(
        parts.emplace_back(),
        WritePart(files_, latch_, "/c", *partitions_[i].model, *partitions_[i].snapshot,
                  {.tracks = options.tracks, .file_numbers = numbers[i]}));
  }
  ASSERT_THAT(Merge(partitions_, "/c", parts), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest read, VerifyCheckpoint(files_, "/c"));
  EXPECT_TRUE(read.is_partial);
  EXPECT_THAT(read.tracks, SizeIs(2));
  EXPECT_THAT(CheckNoUnknownFiles(files_, "/c", read), IsOk());
}

TEST_F(CheckpointPartsTest, TheAttachedFilesAreTheHomes) {
  ASSERT_THAT(partitions_[0].model->attached_files().AddPart("config.json", 2, 0, "{}"), IsOk());
  ASSERT_THAT(partitions_[1].model->attached_files().AddPart("other.json", 2, 0, "{}"), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest whole, Write(partitions_, "/c", 100));
  ASSERT_THAT(whole.attached_files, SizeIs(1));
  EXPECT_THAT(VerifyCheckpoint(files_, "/c"), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto attached, ReadAttachedFiles(files_, "/c", whole));
  EXPECT_EQ(attached, (std::vector<AttachedFile>{{"config.json", "{}"}}));
}

TEST_F(CheckpointPartsTest, AFrozenDigestIsOfOneManifestOnly) {
  EMA_ASSERT_OK_AND_ASSIGN(std::vector<CheckpointManifest> parts,
                           WriteParts(partitions_, "/c", 100));
  for (CheckpointManifest& part : parts) part.tracks[0].frozen_digest = 5;
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest merged, MergeManifests(parts));
  EXPECT_EQ(merged.tracks[0].frozen_digest, 0);
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest one, MergeManifests({parts[2]}));
  EXPECT_EQ(one.tracks[0].frozen_digest, 5);
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest some, PartOf(one, 2, 3));
  EXPECT_EQ(some.tracks[0].frozen_digest, 0);
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest all, PartOf(one, 0, 10));
  EXPECT_EQ(all.tracks[0].frozen_digest, 5);
}

TEST_F(CheckpointPartsTest, PartsThatDisagreeAreRefusedWithBothValues) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::vector<CheckpointManifest> good,
                           WriteParts(partitions_, "/c", 100));
  const auto expect_refused = [&](const auto& change, const std::string& message) {
    std::vector<CheckpointManifest> parts = good;
    change(parts[1]);
    EXPECT_THAT(Merge(partitions_, "/c", parts).status(),
                AllOf(StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(message)),
                      ReasonIs(ErrorReason::kModelDiffers)));
  };
  expect_refused([](auto& part) { part.record.step = 10; },
                 "partition 1 has another checkpoint than partition 0: version.step is 10, "
                 "expected 20");
  expect_refused([](auto& part) { part.record.number = 1; }, "version.version is 1, expected 2");
  expect_refused([](auto& part) { part.model_name = "n"; }, "model is \"n\", expected \"m\"");
  expect_refused([](auto& part) { part.tracks.pop_back(); }, "it has 4 tracks, expected 5");
  expect_refused([](auto& part) { part.tracks[2].config.paused = true; },
                 "track \"raw\": config is {");
  expect_refused([](auto& part) { ++part.tracks[0].state[0].update_count; },
                 "track \"fast\": its schedules have other states");
  expect_refused([](auto& part) { part.tracks[1].last_steps[0] = 3; },
                 "track \"slow\": last_steps is [3], expected [20]");
  expect_refused([](auto& part) { part.tracks[1].weights.reset(); },
                 "track \"slow\": has_weights is false, expected true");
  expect_refused([&](auto& part) { part.manifest = good[0].manifest; },
                 "the partitions' tensors are not those of one model");
  // Statistics are of a partition's own tensors, so the home's are kept.
  std::vector<CheckpointManifest> parts = good;
  parts[0].record.statistics = {{"fast", 1, 2}};
  parts[1].record.statistics = {{"fast", 3, 4}};
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest merged, MergeManifests(parts));
  ASSERT_THAT(merged.record.statistics, SizeIs(1));
  EXPECT_EQ(merged.record.statistics[0].norm, 1);
}

TEST_F(CheckpointPartsTest, FilesThatDoNotFitTogetherAreRefused) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::vector<CheckpointManifest> good,
                           WriteParts(partitions_, "/c", 100));
  std::vector<CheckpointManifest> swapped = good;
  std::swap(swapped[0].tracks[1].weights->files, swapped[1].tracks[1].weights->files);
  EXPECT_THAT(Merge(partitions_, "/c", swapped).status(),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("files[0].name is not")));
  ASSERT_THAT(files_.RemoveTree("/c"), IsOk());

  for (const bool is_damaged : {true, false}) {
    SCOPED_TRACE(is_damaged);
    EMA_ASSERT_OK_AND_ASSIGN(const std::vector<CheckpointManifest> parts,
                             WriteParts(partitions_, "/c", 100));
    const std::string file =
        JoinPath(TrackPath("/c", "slow"), parts[2].tracks[1].weights->files[0].name);
    if (is_damaged) {
      files_.FileBytes(file)[9] ^= 1;
    } else {
      ASSERT_THAT(files_.RemoveFile(file), IsOk());
    }
    EXPECT_THAT(Merge(partitions_, "/c", parts).status(),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("track \"slow\"")));
    ASSERT_THAT(files_.RemoveTree("/c"), IsOk());
  }
}

TEST_F(CheckpointPartsTest, APartMayNotWriteOverAnother) {
  const TestPartitions::Partition& first = partitions_[0];
  const auto write = [&](const WriteOptions& options) {
    return WritePart(files_, latch_, "/c", *first.model, *first.snapshot, options).status();
  };
  // The home makes the folders, so that a late part does not bring a removed one back.
  EXPECT_THAT(write({}), StatusIs(absl::StatusCode::kNotFound, _));
  ASSERT_THAT(MakeCheckpointFolders(files_, "/c", *first.model, *first.snapshot, {}), IsOk());
  EXPECT_THAT(write({.file_numbers = {{"fast", {.first = 1, .count = 1}}}}),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("numbers from 1 on of 1")));
  EXPECT_THAT(write({.file_numbers = {{"slow", {.first = 0, .count = 1}}}}),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("track \"fast\"")));
  ASSERT_THAT(write({}), IsOk());
  EXPECT_THAT(write({}), StatusIs(absl::StatusCode::kAlreadyExists, _));
}

TEST_F(CheckpointPartsTest, EveryByteOfAPartIsVerifiedAndNoByteOfOthersIsRead) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest whole, Write(partitions_, "/c", 4'000));
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest part, PartOf(whole, 3, 4));
  ModelStore models(TestDevice(), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Model> model,
                           models.CreatePartition(ConfigOf(part), kTestIncarnation, nullptr));
  for (const CheckpointTrack& track : whole.tracks) {
    for (const TensorFile& file : track.weights->files) {
      const std::string path = JoinPath(TrackPath("/c", track.config.name), file.name);
      EMA_ASSERT_OK_AND_ASSIGN(const auto opened, files_.OpenFile(path));
      EMA_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, ReadSafetensorsHeader(*opened));
      for (const SafetensorsTensor& tensor : header.tensors) {
        if (tensor.begin == tensor.end) continue;
        char& byte = files_.FileBytes(path)[header.header_bytes + tensor.begin];
        byte ^= 1;
        const absl::Status status = ReadCheckpoint(files_, "/c", part, *model).status();
        byte ^= 1;
        if (part.manifest.Find(tensor.spec.name).has_value()) {
          EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, HasSubstr(tensor.spec.name)));
        } else {
          EXPECT_THAT(status, IsOk()) << path << " " << tensor.spec.name;
        }
      }
    }
  }
}

TEST_F(CheckpointPartsTest, EachPartitionVerifiesItsOwnFiles) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::vector<CheckpointManifest> parts,
                           WriteParts(partitions_, "/c", /*max_file_bytes=*/100));
  for (const CheckpointManifest& part : parts) {
    EXPECT_THAT(VerifyPart(files_, "/c", part, nullptr), IsOk());
  }
  const CheckpointTrack& track = parts[2].tracks[0];
  files_.FileBytes(JoinPath(TrackPath("/c", track.config.name), track.weights->files[0].name))
      .back() ^= 1;
  EXPECT_THAT(VerifyPart(files_, "/c", parts[0], nullptr), IsOk());
  EXPECT_THAT(VerifyPart(files_, "/c", parts[2], nullptr),
              ReasonIs(ErrorReason::kCheckpointCorrupt));
  ASSERT_THAT(Merge(partitions_, "/c", parts), IsOk());
  EXPECT_THAT(VerifyAllButWeights(files_, "/c"), IsOk());
}

TEST_F(CheckpointPartsTest, APartIsOfTensorsThatThereAre) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest whole, WriteWhole(partitions_, "/s", 100));
  for (const auto& [first, count] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 2}, {0, 0}, {0, 13}, {12, 1}, {INT64_MAX, 1}, {1, INT64_MAX}}) {
    EXPECT_THAT(PartOf(whole, first, count).status(),
                AllOf(StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("has 12")),
                      ReasonIs(ErrorReason::kBadRequest)))
        << first << " " << count;
  }
}

}  // namespace
}  // namespace ema
