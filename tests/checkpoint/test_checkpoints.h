// SPDX-License-Identifier: Apache-2.0
//
// A model with every kind of tensor, and what the tests of the checkpoint store do with it.
#ifndef EMA_TESTS_CHECKPOINT_TEST_CHECKPOINTS_H_
#define EMA_TESTS_CHECKPOINT_TEST_CHECKPOINTS_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/checkpoint/checkpoint_store.h"
#include "tests/core/test_model.h"

namespace ema {

inline constexpr int64_t kTestIncarnation = 7;  // As SmallBlocks().

inline std::vector<TensorSpec> EveryKindOfTensor() {
  return {{"flag", Dtype::kBool, {3}},
          {"f32", Dtype::kFloat32, {40, 50}},  // In several blocks of 4 KiB.
          {"count", Dtype::kInt64, {}},
          {"f16", Dtype::kFloat16, {5, 7}},
          {"empty", Dtype::kFloat32, {0, 3}},
          {"bf16", Dtype::kBFloat16, {1, 2, 1, 3, 1, 1, 2, 1}},
          {"i8", Dtype::kInt8, {5}},
          {"f64", Dtype::kFloat64, {11}},
          {"i16", Dtype::kInt16, {3}},
          {"u8", Dtype::kUInt8, {1}},
          {"i32", Dtype::kInt32, {9}},
          {"scalar", Dtype::kFloat32, {}}};
}

inline ModelConfig EveryKindOfModel(const std::string& name) {
  ModelConfig config;
  config.name = name;
  config.manifest = MakeManifest(EveryKindOfTensor());
  config.tracks = {{"fast", MakeSchedule("10ba")},
                   {"slow", MakeSchedule("100ba", "10ba")},
                   {"raw", MakeSchedule("copy")},
                   {.name = "exact", .schedule = MakeSchedule("30ba"), .dtype = Dtype::kFloat64},
                   {.name = "some",
                    .schedule = MakeSchedule("uniform=true, ema_start=15ba"),
                    .tensor_rules = {{"f3?", TensorAction::kIgnore}, {"f*", TensorAction::kCopy}}}};
  config.max_pinned_versions = 8;
  return config;
}

// Any bits that are finite numbers.
inline std::vector<std::byte> RandomWeights(const Manifest& manifest, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes;
  for (const TensorSpec& spec : manifest.tensors()) {
    const int64_t size = DtypeSize(spec.dtype);
    for (int64_t i = 0; i < spec.element_count(); ++i) {
      for (int64_t b = 0; b < size; ++b) {
        auto byte = static_cast<uint8_t>(random());
        if (spec.dtype == Dtype::kBool) byte &= 1;
        // Without the exponent's highest bit no float is infinite or NaN, nor a double too large
        // for float32.
        if (IsFloat(spec.dtype) && b == size - 1) byte &= 0xbf;
        bytes.push_back(std::byte{byte});
      }
    }
  }
  return bytes;
}

// A model with some committed versions, all pinned.
struct TestVersions {
  explicit TestVersions(int64_t count, const std::string& name = "m")
      : models(TestDevice(), SmallBlocks()), model(models.Create(EveryKindOfModel(name))->model) {
    TestRank rank(model, "launch");
    EXPECT_THAT(rank.Join(), IsOk());
    for (int64_t version = 1; version <= count; ++version) {
      EXPECT_THAT(rank.Push(10 * version, RandomWeights(model->manifest(), version)), IsOk());
      snapshots.push_back(*model->history().Pin(0));
    }
  }

  const SnapshotRef& operator[](int64_t version) const { return snapshots[version - 1]; }

  ModelStore models;
  std::shared_ptr<Model> model;
  std::vector<SnapshotRef> snapshots;
};

// All bytes of one track.
inline std::vector<std::byte> BytesOfTrack(Model& model, const Snapshot& snapshot, int64_t t) {
  const TrackSnapshot& of_track = snapshot.tracks[t];
  const auto pieces = ReadBlocks(model.device(), *of_track.track, of_track.blocks, 0,
                                 of_track.track->layout().total_bytes());
  EXPECT_THAT(pieces, IsOk());
  std::vector<std::byte> bytes;
  for (const HostPiece& piece : *pieces) {
    bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
  }
  return bytes;
}

// The bytes of each tensor: what lies between them is of no matter.
inline std::vector<std::vector<std::byte>> TensorsOf(Model& model, const Snapshot& snapshot,
                                                     int64_t t) {
  const std::vector<std::byte> bytes = BytesOfTrack(model, snapshot, t);
  std::vector<std::vector<std::byte>> tensors;
  for (const StorageLayout::Entry& entry : snapshot.tracks[t].track->layout().entries()) {
    tensors.emplace_back(bytes.begin() + entry.offset,
                         bytes.begin() + entry.offset + entry.length_bytes);
  }
  return tensors;
}

// Expects that `loaded`'s newest version is `expected`, a version of `saved`, in everything.
inline void ExpectSameVersion(Model& loaded, Model& saved, const Snapshot& expected) {
  const auto snapshot = loaded.history().Pin(0);
  ASSERT_THAT(snapshot, IsOk());
  EXPECT_EQ(loaded.config().DifferenceFrom(saved.config()), "");
  const Version& record = (*snapshot)->record;
  ASSERT_EQ(record.incarnation, expected.record.incarnation);
  ASSERT_EQ(record.number, expected.record.number);
  EXPECT_EQ(record.step, expected.record.step);
  EXPECT_EQ(record.time, expected.record.time);
  EXPECT_EQ(absl::ToUnixMicros(record.commit_time),
            absl::ToUnixMicros(expected.record.commit_time));
  ASSERT_EQ((*snapshot)->tracks.size(), expected.tracks.size());
  for (size_t t = 0; t < expected.tracks.size(); ++t) {
    EXPECT_EQ((*snapshot)->tracks[t].track->config(), expected.tracks[t].track->config());
    EXPECT_EQ((*snapshot)->tracks[t].last_steps, expected.tracks[t].last_steps);
    EXPECT_EQ((*snapshot)->tracks[t].state, expected.tracks[t].state);
    EXPECT_EQ(record.tracks[t].update_weight, expected.record.tracks[t].update_weight);
    // Not EXPECT_EQ, which would print them.
    EXPECT_TRUE(TensorsOf(loaded, **snapshot, t) == TensorsOf(saved, expected, t))
        << expected.tracks[t].track->name();
  }
}

}  // namespace ema

#endif  // EMA_TESTS_CHECKPOINT_TEST_CHECKPOINTS_H_
