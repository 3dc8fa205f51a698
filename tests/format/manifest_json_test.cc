// SPDX-License-Identifier: Apache-2.0
#include "server/format/manifest_json.h"

#include <cmath>
#include <limits>
#include <span>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "server/base/crc32c.h"
#include "server/format/json_file.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TrainingTime Time(double batch, double seconds) {
  TrainingTime time;
  time.Set(TimeUnit::kBatch, batch);
  time.Set(TimeUnit::kSecond, seconds);
  return time;
}

CheckpointTrack MakeTrack(const std::string& name, const Schedule::Fields& schedule) {
  CheckpointTrack track{.config = {.name = name, .schedule = *Schedule::FromFields(schedule)}};
  track.weights = TensorFiles{.files = {{"model.safetensors", 12, 34}},
                              .tensor_crc32c = {0, 0xffffffffu},
                              .piece_crc32c = {{}, {}}};
  track.state.emplace_back();
  track.last_steps.emplace_back();
  return track;
}

CheckpointManifest MakeCheckpoint() {
  CheckpointManifest checkpoint;
  checkpoint.model_name = "digits-1.0";
  checkpoint.manifest =
      *Manifest::Create({{"conv.weight", Dtype::kBFloat16, {3, 0, 5}, true, {"tied", "too"}},
                         {"\"n\" \xc3\xa4", Dtype::kInt64, {}}});
  checkpoint.max_pinned_versions = 3;
  checkpoint.record = {.incarnation = 1'760'000'000,
                       .number = 8,
                       .step = 40,
                       .time = Time(40, 0.1 + 0.2),
                       .run_epoch = 1'760'000'001,
                       .commit_time = absl::FromUnixNanos(1'760'000'123'456'789'012),
                       .skipped_tensor_count = 20,
                       .skipped_tensors = {"conv.weight"},
                       .restored_from = VersionId{5, 1'750'000'000},
                       .statistics = {{"fast", 0.1, 0.2}, {"slow", 1e300, std::nullopt}}};
  checkpoint.non_finite = NonFinitePolicy::kSkipTensor;
  checkpoint.tracks = {MakeTrack("fast", {{"half_life", "200ba"}, {"update_interval", "5ba"}}),
                       MakeTrack("slow", {{"half_life", "0.1dur"}, {"ema_start", "3ep"}}),
                       MakeTrack("seconds", {{"half_life", "0.3333333333333333sec"}}),
                       MakeTrack("constant", {{"smoothing", "0.99999999999999989"}}),
                       MakeTrack("raw", {{"copy", "true"}})};
  checkpoint.tracks[3].config.snapshot_interval = TrainingDuration{50, TimeUnit::kEpoch};
  checkpoint.tracks[4] = {.config = checkpoint.tracks[4].config};
  checkpoint.created_tracks = {checkpoint.tracks[1].config};
  TrackConfig& config = checkpoint.tracks[0].config;
  config.tensor_rules = {{"conv.*", TensorAction::kCopy},
                         {"\"n\" \xc3\xa4", TensorAction::kIgnore},
                         {"head", TensorAction::kAverage, *Schedule::Parse("smoothing=0.5")}};
  config.buffers = TensorAction::kCopy;
  config.dtype = Dtype::kFloat64;
  config.paused = true;
  checkpoint.tracks[0].state = {
      {.update_count = 7,
       .averaged_count = 3,
       .last_update = Time(40, 1e-300),
       .started = Time(20, 0)},
      {.update_count = 2, .averaged_count = 1, .last_update = Time(39, 1), .started = {}}};
  checkpoint.tracks[0].last_steps = {39, 38};
  TensorFiles& weights = *checkpoint.tracks[0].weights;
  weights.files = {{"model-00001-of-00002.safetensors", int64_t{1} << 60, 0x0000abcd},
                   {"model-00002-of-00002.safetensors", 8, 9}};
  weights.index = SmallFile{"model.safetensors.index.json", 99, 0xfedcba98u};
  weights.piece_crc32c[1] = {0x00000001, 0xffffffff, 0x89abcdef};
  weights.digest = 0x12345678;
  checkpoint.is_partial = true;
  checkpoint.attached_files = {{"config.json", 0, 0}, {"tokenizer.model", 1'000, 0xa}};
  checkpoint.record.tracks = {{"fast",
                               true,
                               1.0 / 3,
                               1e300,
                               7,
                               3,
                               1e-300,
                               "half_life=200ba",
                               0.1,
                               {{"head", false, 0, 2, 2, 1, 0, "smoothing=0.5", 0}}},
                              {"slow"},
                              {"seconds", true, 1, 0, 1},
                              {"constant", true, std::numeric_limits<double>::denorm_min(), 0, 2},
                              {"raw"}};
  checkpoint.total_bytes = (int64_t{1} << 60) + 17;
  return checkpoint;
}

// `text` with its checksum set right, as a hostile writer would.
std::string WithChecksum(std::string text) {
  const size_t digits = text.find(": \"") + 3;
  const std::string covered = text.substr(digits + 8 + 3);
  return text.replace(digits, 8,
                      absl::StrFormat("%08x", Crc32c(0, std::as_bytes(std::span(covered)))));
}

TEST(ManifestJsonTest, WhatIsWrittenIsReadBackExactly) {
  const CheckpointManifest before = MakeCheckpoint();
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest after,
                           ParseCheckpointManifest(EncodeCheckpointManifest(before)));
  EXPECT_EQ(EncodeCheckpointManifest(after), EncodeCheckpointManifest(before));
  EXPECT_EQ(after.model_name, before.model_name);
  EXPECT_EQ(after.manifest, before.manifest);
  EXPECT_EQ(after.manifest.digest(), before.manifest.digest());
  EXPECT_EQ(after.max_pinned_versions, before.max_pinned_versions);
  EXPECT_EQ(after.total_bytes, before.total_bytes);
  EXPECT_EQ(after.non_finite, before.non_finite);
  EXPECT_EQ(after.created_tracks, before.created_tracks);
  EXPECT_EQ(after.record.skipped_tensor_count, before.record.skipped_tensor_count);
  EXPECT_EQ(after.record.skipped_tensors, before.record.skipped_tensors);
  EXPECT_EQ(after.record.incarnation, before.record.incarnation);
  EXPECT_EQ(after.record.number, before.record.number);
  EXPECT_EQ(after.record.step, before.record.step);
  EXPECT_EQ(after.record.time, before.record.time);
  EXPECT_EQ(after.record.run_epoch, before.record.run_epoch);
  EXPECT_EQ(after.record.commit_time, before.record.commit_time);
  EXPECT_EQ(after.record.restored_from, before.record.restored_from);
  EXPECT_EQ(after.is_partial, before.is_partial);
  EXPECT_EQ(after.attached_files, before.attached_files);
  ASSERT_EQ(after.tracks.size(), before.tracks.size());
  ASSERT_EQ(after.record.tracks.size(), before.record.tracks.size());
  for (size_t t = 0; t < before.tracks.size(); ++t) {
    EXPECT_EQ(after.tracks[t], before.tracks[t]) << before.tracks[t].config.name;
    EXPECT_EQ(after.record.tracks[t].updated, before.record.tracks[t].updated);
    EXPECT_EQ(after.record.tracks[t].update_weight, before.record.tracks[t].update_weight);
    EXPECT_EQ(after.record.tracks[t].elapsed, before.record.tracks[t].elapsed);
    EXPECT_EQ(after.record.tracks[t].update_count, before.record.tracks[t].update_count);
    EXPECT_EQ(after.record.tracks[t].track, before.record.tracks[t].track);
    EXPECT_EQ(after.record.tracks[t].window_steps, before.record.tracks[t].window_steps);
    EXPECT_EQ(after.record.tracks[t].config, before.record.tracks[t].config);
    EXPECT_EQ(after.record.tracks[t].stall_gap, before.record.tracks[t].stall_gap);
  }
}

TEST(ManifestJsonTest, AMeanOfTheLastHasTheWeightsThatItsStateSays) {
  CheckpointManifest checkpoint = MakeCheckpoint();
  CheckpointTrack& track = checkpoint.tracks[1];
  track.config.schedule = *Schedule::Parse("mean_of_last=3");
  const auto parsed = [&checkpoint] {
    return ParseCheckpointManifest(EncodeCheckpointManifest(checkpoint));
  };
  const auto is_refused = [](const std::string& message) {
    return StatusIs(absl::StatusCode::kDataLoss, HasSubstr(message));
  };
  EXPECT_THAT(parsed(), is_refused("tracks[1] has 0 latest_weights, expected 1"));
  TensorFiles files = *track.weights;
  for (int64_t count = 1; count <= 5; ++count) {
    track.state[0].averaged_count = count;
    if (count <= 2) {
      files.files[0].name = absl::StrCat("latest-", count, ".safetensors");
      track.latest_weights.push_back(files);
    }
    EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest read, parsed());
    EXPECT_EQ(read.tracks[1], track);
  }
  EXPECT_EQ(checkpoint.FolderBytes(track), 3 * 12 + 1'000);
  track.latest_weights[1].files[0].name = "../x";
  EXPECT_THAT(parsed(),
              is_refused("latest_weights[1].files[0].name is not \"latest-2.safetensors\""));
  track.latest_weights[1].files[0].name = "latest-2.safetensors";
  track.latest_weights[0].index = SmallFile{"model.safetensors.index.json", 99, 1};
  EXPECT_THAT(parsed(), is_refused("latest_weights[0].index is not null"));
}

TEST(ManifestJsonTest, APartHasConsecutiveFilesAndNoIndex) {
  CheckpointManifest part = MakeCheckpoint();
  TensorFiles& weights = *part.tracks[0].weights;
  const auto parsed = [&part](ManifestScope scope) {
    return ParseCheckpointManifest(EncodeCheckpointManifest(part), scope).status();
  };
  const auto is_refused = [](const std::string& message) {
    return StatusIs(absl::StatusCode::kDataLoss, HasSubstr(message));
  };
  EXPECT_THAT(parsed(ManifestScope::kPart), is_refused("tracks[0].weights.index is not null"));
  weights.index.reset();
  EXPECT_THAT(parsed(ManifestScope::kPart), IsOk());
  EXPECT_THAT(parsed(ManifestScope::kWhole), is_refused("tracks[0].weights.index is not model"));
  weights.files[0].name = "model-00003-of-00004.safetensors";
  weights.files[1].name = "model-00004-of-00004.safetensors";
  EXPECT_THAT(parsed(ManifestScope::kPart), IsOk());
  EXPECT_THAT(parsed(ManifestScope::kWhole), is_refused("tracks[0].weights.files[0].name"));
  for (const char* const other :
       {"model-00003-of-00004.safetensors", "model-00004-of-00005.safetensors",
        "model-00005-of-00004.safetensors", "model-4-of-00004.safetensors", "model.safetensors",
        "latest-1-00004-of-00004.safetensors", "model-00004-of-00004.safetensors/../x"}) {
    weights.files[1].name = other;
    EXPECT_THAT(parsed(ManifestScope::kPart), is_refused("tracks[0].weights.files[1].name is not"))
        << other;
  }
  for (const char* const other :
       {"model-00004-of-00004.safetensors", "model-00000-of-00004.safetensors", "../x", "",
        "model--1-of-00004.safetensors", "model-+0003-of-00004.safetensors"}) {
    weights.files[0].name = other;
    EXPECT_THAT(parsed(ManifestScope::kPart), is_refused("tracks[0].weights.files[0].name is not"))
        << other;
  }
  weights.files.clear();
  EXPECT_THAT(parsed(ManifestScope::kPart), IsOk());
  EXPECT_THAT(parsed(ManifestScope::kWhole), is_refused("tracks[0].weights.files is empty"));
}

TEST(ManifestJsonTest, EveryChangedBitAndEveryCutIsNoticed) {
  const std::string text = EncodeCheckpointManifest(MakeCheckpoint());
  for (size_t i = 0; i < text.size(); ++i) {
    EXPECT_FALSE(ParseCheckpointManifest(text.substr(0, i)).ok()) << i;
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = text;
      changed[i] = static_cast<char>(changed[i] ^ (1 << bit));
      EXPECT_THAT(ParseCheckpointManifest(changed),
                  AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr("manifest.json")),
                        ReasonIs(ErrorReason::kCheckpointCorrupt)))
          << i << " " << bit;
    }
  }
  EXPECT_FALSE(ParseCheckpointManifest(text + "x").ok());
}

TEST(ManifestJsonTest, ANewerFormatIsRefusedByName) {
  const std::string text =
      WithChecksum(absl::StrReplaceAll(EncodeCheckpointManifest(MakeCheckpoint()),
                                       {{"\"format_version\": 6", "\"format_version\": 7"}}));
  EXPECT_THAT(ParseCheckpointManifest(text),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("format_version 7; this build reads only 6")));
  // However different the rest of it is.
  EXPECT_THAT(ParseCheckpointManifest(FormatJsonFile(7, Json::object({{"other", 1}}))),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("format_version 7")));
}

// Takes minutes if each member is searched for among all others.
TEST(ManifestJsonTest, VeryManyMembersAreReadInTime) {
  constexpr int kCount = 200'000;
  std::vector<TensorSpec> specs(kCount);
  for (int i = 0; i < kCount; ++i) {
    specs[i] = {absl::StrCat("layers.", i, ".weight"), Dtype::kFloat32, {1}};
  }
  CheckpointManifest checkpoint = MakeCheckpoint();
  checkpoint.manifest = *Manifest::Create(std::move(specs));
  checkpoint.tracks = {MakeTrack("fast", {{"half_life", "200ba"}})};
  checkpoint.tracks[0].weights->tensor_crc32c.assign(kCount, 1);
  checkpoint.tracks[0].weights->piece_crc32c.assign(kCount, {1, 2});
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest after,
                           ParseCheckpointManifest(EncodeCheckpointManifest(checkpoint)));
  EXPECT_TRUE(after.tracks[0] == checkpoint.tracks[0]);
}

TEST(ManifestJsonTest, AForeignTextIsRefused) {
  for (const char* const other : {"", "1", "[[], {\"format_version\": 6}]", "\"", "{", "{}"}) {
    EXPECT_THAT(ParseCheckpointManifest(other),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("checksum is wrong, or missing")))
        << other;
  }
}

TEST(ManifestJsonTest, AnAbsentValueIsReadBackAsAbsent) {
  CheckpointManifest before = MakeCheckpoint();
  before.record.restored_from.reset();
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest after,
                           ParseCheckpointManifest(EncodeCheckpointManifest(before)));
  EXPECT_EQ(after.record.restored_from, std::nullopt);
}

// Calls `test` once for each value inside `json`, with the object or array that holds it; `name` is
// its key, or the key of the array.
template <typename Test>
void ForEachValue(ParsedJson& json, const std::string& name, const Test& test) {
  for (auto it = json.begin(); it != json.end(); ++it) {
    const std::string key = json.is_object() ? it.key() : name;
    test(json, it, key);
    if (it->is_structured()) ForEachValue(*it, key, test);
  }
}

TEST(ManifestJsonTest, AMissingOrUnknownFieldIsNamedAndNoValueOfAnotherTypeIsTaken) {
  EMA_ASSERT_OK_AND_ASSIGN(
      ParsedJson json,
      ParseJsonFile("f", kCheckpointFormatVersion, EncodeCheckpointManifest(MakeCheckpoint())));
  const auto parse = [&json] {
    return ParseCheckpointManifest(FormatJsonFile(kCheckpointFormatVersion, Json(json)));
  };
  ASSERT_THAT(parse().status(), IsOk());
  int tested = 0;
  ForEachValue(json, "", [&](ParsedJson& parent, ParsedJson::iterator it, const std::string& key) {
    const ParsedJson before = *it;
    for (const char* const text : {"null", "[]", "{}", "true", "-1", "0.5", "1e300", "\"\"",
                                   "18446744073709551615", "[null]", "{\"\": {}}"}) {
      *it = ParsedJson::parse(text);
      const absl::Status status = parse().status();
      if (!status.ok()) {
        EXPECT_THAT(status, AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr("manifest.json")),
                                  ReasonIs(ErrorReason::kCheckpointCorrupt)))
            << key << " " << text;
      }
      // These are of no field's type but an optional one's.
      if (!before.is_null() && it->type() != before.type() && !it->is_number() && !it->is_null()) {
        EXPECT_FALSE(status.ok()) << key << " " << text;
      }
      *it = before;
    }
    if (!parent.is_object()) return;
    ++tested;
    ParsedJson changed = parent;
    changed["zz"] = 1;
    changed.swap(parent);
    EXPECT_THAT(parse(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("zz"))) << key;
    changed.swap(parent);
  });
  EXPECT_GT(tested, 200);
}

struct BadCase {
  std::string name;
  std::string from;
  std::string to;
  std::string message;
};

class BadManifestTest : public testing::TestWithParam<BadCase> {};

TEST_P(BadManifestTest, IsRefused) {
  const std::string text = EncodeCheckpointManifest(MakeCheckpoint());
  const size_t at = text.find(GetParam().from);
  ASSERT_NE(at, std::string::npos);
  std::string changed = text;
  changed.replace(at, GetParam().from.size(), GetParam().to);
  EXPECT_THAT(ParseCheckpointManifest(WithChecksum(changed)),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr(GetParam().message)));
}

INSTANTIATE_TEST_SUITE_P(
    ManifestJson, BadManifestTest,
    testing::Values(
        BadCase{"KeyTwice", "\"model\":", "\"model\": 1, \"model\":", "model is there twice"},
        BadCase{"InnerKeyTwice", "\"updated\":true", "\"updated\":true,\"updated\":true",
                "updated is there twice"},
        BadCase{"Deep", "\"digits-1.0\"", std::string(50'000, '[') + std::string(50'000, ']'),
                "nested deeper than 8 levels"},
        BadCase{"ZeroByte", "\"digits-1.0\"", std::string(1, '\0'), "zero byte"},
        BadCase{"NumberIsTooLarge", "\"step\":40", "\"step\":1e999", "not JSON at byte"},
        BadCase{"Missing", "\"model\":", "\"mode\":", "model is missing"},
        BadCase{"InnerMissing",
                "\"restored_from\":", "\"restored\":", "version.restored_from is missing"},
        BadCase{"Unknown",
                "\"is_partial\":", "\"other\": 1, \"is_partial\":", "other is not a field"},
        BadCase{"InnerUnknown", "\"paused\":true", "\"paused\":true,\"other\":1",
                "tracks[0].config.other is not a field"},
        BadCase{"VersionIsZero", "\"version\":8", "\"version\":0", "version.version"},
        BadCase{"VersionIsAFloat", "\"version\":8", "\"version\":8.0", "version.version"},
        BadCase{"StepIsHuge", "\"step\":40", "\"step\":18446744073709551615", "version.step"},
        BadCase{"RunEpochCannotBeCountedOn", "\"run_epoch\":1760000001",
                "\"run_epoch\":9223372036854775807", "version.run_epoch"},
        BadCase{"BatchIsNegative", "\"batch\":40", "\"batch\":-40", "version.time"},
        BadCase{"BatchIsAFraction", "\"batch\":40", "\"batch\":40.5", "version.time"},
        BadCase{"UnitIsUnknown", "\"batch\":40", "\"week\":40", "version.time.week is not a field"},
        BadCase{"CommitTimeIsAWord", "\"commit_time\":\"", "\"commit_time\":\"x",
                "version.commit_time is not a time"},
        BadCase{"WireDtypeIsUnknown", "\"as pushed\"", "\"float8\"",
                "version.wire_dtype is \"float8\""},
        BadCase{"HalfLifeIsZero", "\"half_life\":\"200ba\"", "\"half_life\":\"0ba\"", "schedule"},
        BadCase{"HalfLifeIsNothing", "\"half_life\":\"200ba\"", "\"half_life\":\"x\"", "schedule"},
        BadCase{"NoStates",
                "\"states\":[{\"update_count\":0,\"averaged_count\":0,\"last_update\":null,"
                "\"started\":null}]",
                "\"states\":[]", "tracks[1] has 0 states and 1 last_steps, expected 1"},
        BadCase{"StatesWithoutWeights", "\"states\":[],\"last_steps\":[]",
                "\"states\":[],\"last_steps\":[1]",
                "tracks[4] has 0 states and 1 last_steps, expected 0"},
        BadCase{"UpdatesWithoutALast", "\"update_count\":0,\"averaged_count\":0,\"last_update\"",
                "\"update_count\":1,\"averaged_count\":0,\"last_update\"", "last_update"},
        BadCase{"StartedWithoutALast", "\"last_update\":null,\"started\":null",
                "\"last_update\":null,\"started\":{\"batch\":1}", "last_update"},
        BadCase{"RuleIsUnknown", "{\"copy\":\"true\"}", "{\"best\":\"true\"}", "best"},
        BadCase{"RuleHasNoText", "{\"copy\":\"true\"}", "{\"copy\":true}",
                "tracks[4].config.schedule.copy is not a string"},
        BadCase{"ActionIsUnknown", "\"action\":\"copy\"", "\"action\":\"burn\"",
                "tensor_rules[0].action is \"burn\""},
        BadCase{"PolicyIsUnknown", "\"non_finite\": \"skip\"", "\"non_finite\": \"none\"",
                "non_finite is \"none\""},
        BadCase{"AliasTwice", "[\"tied\",\"too\"]", "[\"too\",\"too\"]", "too"},
        BadCase{"ChecksumsAreShort", "\"tensor_crc32c\":[0,4294967295]", "\"tensor_crc32c\":[0]",
                "tracks[0].weights has 1 tensor_crc32c and 2 piece_crc32c, expected 2"},
        BadCase{"ChecksumIsAText", "\"tensor_crc32c\":[0,", "\"tensor_crc32c\":[\"0\",",
                "weights.tensor_crc32c[0] is not an integer"},
        BadCase{"ChecksumIsTooLarge", "\"tensor_crc32c\":[0,4294967295]",
                "\"tensor_crc32c\":[0,4294967296]", "weights.tensor_crc32c[1] is not an integer"},
        BadCase{"PiecesAreShort", "[[],[1,", "[[1,", "1 piece_crc32c, expected 2"},
        BadCase{"DtypeIsUnknown", "\"int64\"", "\"int65\"", "tensors[1].dtype: "},
        BadCase{"ShapeIsNegative", "[3,0,5]", "[3,0,-5]", "tensors[0].shape[2] is not an integer"},
        BadCase{"TensorTwice", "\"name\":\"\\\"n\\\" \xc3\xa4\"", "\"name\":\"conv.weight\"",
                "conv.weight"},
        BadCase{"FileNameLeavesTheFolder", "\"model-00002-of-00002.safetensors\"",
                "\"../../../../etc/passwd\"",
                "tracks[0].weights.files[1].name is not \"model-00002-of-00002.safetensors\""},
        BadCase{"FilesInAnotherOrder", "model-00001-of-00002", "model-00002-of-00002",
                "files[0].name is not"},
        BadCase{"IndexIsMissing", "\"index\":", "\"indeks\":", "index is missing"},
        BadCase{"IndexHasAnotherName", "model.safetensors.index.json", "../x",
                "weights.index is not model.safetensors.index.json"},
        BadCase{"DtypeOfATrackIsUnknown", "\"float64\"", "\"float65\"", "config.dtype: "},
        BadCase{"AttachedLeavesTheFolder", "\"config.json\"", "\"../config.json\"",
                "a name must be"},
        BadCase{"AttachedIsLikeWeights", "\"config.json\"", "\"model.safetensors\"",
                "the weights that the server writes"},
        BadCase{"AttachedTwice", "\"config.json\"", "\"tokenizer.model\"",
                "\"tokenizer.model\" is too large, or there twice"},
        BadCase{"RestoredFromNothing", "\"version\":5,", "\"version\":0,",
                "version.restored_from.version"},
        BadCase{"FormatVersionIsZero", "\"format_version\": 6", "\"format_version\": 0",
                "format_version is not an integer"},
        BadCase{"FormatVersionIsMissing", "\"format_version\": 6", "\"format\": 6",
                "format_version is missing"}),
    [](const testing::TestParamInfo<BadCase>& tested) { return tested.param.name; });

}  // namespace
}  // namespace ema
