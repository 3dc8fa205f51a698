// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/manifest_json.h"

#include <cmath>
#include <limits>
#include <span>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/base/crc32c.h"
#include "server/checkpoint/json_fields.h"
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

CheckpointTrack MakeTrack(const std::string& name, const Schedule::Rule& rule,
                          std::optional<TrainingDuration> interval = {}) {
  CheckpointTrack track{.config = {name, *Schedule::Create(rule, interval)}};
  track.tensor_crc32c = {0, 0xffffffffu};
  return track;
}

CheckpointManifest MakeCheckpoint() {
  CheckpointManifest checkpoint;
  checkpoint.model_name = "digits-1.0";
  checkpoint.manifest = *Manifest::Create(
      {{"conv.weight", Dtype::kBFloat16, {3, 0, 5}}, {"\"n\" \xc3\xa4", Dtype::kInt64, {}}});
  checkpoint.max_pinned_versions = 3;
  checkpoint.record = {.incarnation = 1'760'000'000,
                       .version = 8,
                       .step = 40,
                       .time = Time(40, 0.1 + 0.2),
                       .run_epoch = 1'760'000'001,
                       .commit_time = absl::FromUnixMicros(1'760'000'123'456'789)};
  checkpoint.tracks = {MakeTrack("fast", HalfLifeRule{{200, TimeUnit::kBatch}},
                                 TrainingDuration{5, TimeUnit::kBatch}),
                       MakeTrack("slow", HalfLifeRule{{0.1, TimeUnit::kProgress}}),
                       MakeTrack("seconds", HalfLifeRule{{1.0 / 3, TimeUnit::kSecond}}),
                       MakeTrack("constant", ConstantDecayRule{std::nextafter(1.0, 0.0)}),
                       MakeTrack("raw", CopyRule{})};
  checkpoint.tracks[0].state = {.update_count = 7, .last_update = Time(40, 1e-300)};
  checkpoint.tracks[0].file_bytes = int64_t{1} << 60;
  checkpoint.tracks[0].header_crc32c = 0x0000abcd;
  checkpoint.record.tracks = {{true, 1.0f / 3, 1e300, 7},
                              {},
                              {true, 1, 0, 1},
                              {true, std::numeric_limits<float>::denorm_min(), 0, 2},
                              {}};
  checkpoint.total_bytes = (int64_t{1} << 60) + 17;
  return checkpoint;
}

// `text` with its checksum set right, as a hostile writer would.
std::string WithChecksum(std::string text) {
  const size_t digits = text.find(": \"") + 3;
  const std::string covered = text.substr(digits + 8 + 3);
  return text.replace(digits, 8, FormatChecksum(Crc32c(0, std::as_bytes(std::span(covered)))));
}

TEST(ManifestJsonTest, WhatIsWrittenIsReadBackExactly) {
  const CheckpointManifest before = MakeCheckpoint();
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointManifest after,
                           ParseCheckpointManifest(EncodeCheckpointManifest(before)));
  EXPECT_EQ(after.model_name, before.model_name);
  EXPECT_EQ(after.manifest, before.manifest);
  EXPECT_EQ(after.manifest.digest(), before.manifest.digest());
  EXPECT_EQ(after.max_pinned_versions, before.max_pinned_versions);
  EXPECT_EQ(after.total_bytes, before.total_bytes);
  EXPECT_EQ(after.record.incarnation, before.record.incarnation);
  EXPECT_EQ(after.record.version, before.record.version);
  EXPECT_EQ(after.record.step, before.record.step);
  EXPECT_EQ(after.record.time, before.record.time);
  EXPECT_EQ(after.record.run_epoch, before.record.run_epoch);
  EXPECT_EQ(after.record.commit_time, before.record.commit_time);
  ASSERT_EQ(after.tracks.size(), before.tracks.size());
  ASSERT_EQ(after.record.tracks.size(), before.record.tracks.size());
  for (size_t t = 0; t < before.tracks.size(); ++t) {
    EXPECT_EQ(after.tracks[t], before.tracks[t]) << before.tracks[t].config.name;
    EXPECT_EQ(after.record.tracks[t].updated, before.record.tracks[t].updated);
    EXPECT_EQ(after.record.tracks[t].update_weight, before.record.tracks[t].update_weight);
    EXPECT_EQ(after.record.tracks[t].elapsed, before.record.tracks[t].elapsed);
    EXPECT_EQ(after.record.tracks[t].update_count, before.record.tracks[t].update_count);
  }
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
                                       {{"\"format_version\": 1", "\"format_version\": 2"}}));
  EXPECT_THAT(ParseCheckpointManifest(text),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("format_version 2; this server reads up to 1")));
  // Also if that format has its checksum elsewhere.
  EXPECT_THAT(ParseCheckpointManifest(R"({"format_version": 3, "other": []})"),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("format_version 3")));
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
        BadCase{"KeyTwice", "\"model\":", "\"format\": 1, \"model\":", "right form"},
        BadCase{"Deep", "\"digits-1.0\"", std::string(50'000, '[') + std::string(50'000, ']'),
                "right form"},
        BadCase{"ZeroByte", "\"digits-1.0\"", std::string(1, '\0'), "right form"},
        BadCase{"Missing", "\"model\":", "\"mode\":", "model is missing"},
        BadCase{"VersionIsZero", "\"version\":8", "\"version\":0", "version.version"},
        BadCase{"VersionIsAFloat", "\"version\":8", "\"version\":8.0", "version.version"},
        BadCase{"StepIsHuge", "\"step\":40", "\"step\":18446744073709551615", "version.step"},
        BadCase{"BatchIsNegative", "\"ba\":40.0", "\"ba\":-40.0", "version.time"},
        BadCase{"HalfLifeIsZero", "\"half_life\":\"200ba\"", "\"half_life\":\"0ba\"",
                "tracks[0].schedule"},
        BadCase{"HalfLifeIsNothing", "\"half_life\":\"200ba\"", "\"half_life\":\"x\"",
                "tracks[0].schedule"},
        BadCase{"RuleIsUnknown", "\"rule\":\"copy\"", "\"rule\":\"best\"", "schedule rule"},
        BadCase{"ChecksumsAreShort", "[\"00000000\",\"ffffffff\"]", "[\"00000000\"]",
                "1 checksums for 2 tensors"},
        BadCase{"ChecksumIsANumber", "[\"00000000\",", "[0,", "not a CRC32C"},
        BadCase{"ChecksumHasASign", "[\"00000000\",", "[\"+0000000\",", "not a CRC32C"},
        BadCase{"DtypeIsUnknown", "\"int64\"", "\"int65\"", "int65"},
        BadCase{"ShapeIsNegative", "[3,0,5]", "[3,0,-5]", "bad shape"},
        BadCase{"TensorTwice", "\"\\\"n\\\" \xc3\xa4\"", "\"conv.weight\"", "conv.weight"},
        BadCase{"FormatVersionIsZero", "\"format_version\": 1", "\"format_version\": 0",
                "format_version"}),
    [](const testing::TestParamInfo<BadCase>& tested) { return tested.param.name; });

}  // namespace
}  // namespace ema
