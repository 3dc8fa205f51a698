// SPDX-License-Identifier: Apache-2.0
//
// The version that is in every fixture of tests/checkpoint/fixtures: one of each format of a
// release, as the code of its time wrote it. From the first release on they are never written
// again. That of format 6 is split (24 bytes a file) and has an attached file, `{"layers": 2}` as
// config.json.
#ifndef EMA_TESTS_CHECKPOINT_FIXTURE_MODEL_H_
#define EMA_TESTS_CHECKPOINT_FIXTURE_MODEL_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/checkpoint/test_checkpoints.h"

namespace ema {

// Of the tensors' bytes, in the manifest's order.
inline constexpr uint32_t kFixtureEmaDigest = 0xa3b66b9f;
inline constexpr uint32_t kFixtureRawDigest = 0xdf3629d1;

inline ModelConfig FixtureModel() {
  ModelConfig config;
  config.name = "fixture";
  config.manifest = MakeManifest({{"weight", Dtype::kFloat32, {3, 2}},
                                  {"half", Dtype::kBFloat16, {5}},
                                  {"empty", Dtype::kFloat32, {0, 3}},
                                  {"count", Dtype::kInt64, {}},
                                  {"flag", Dtype::kBool, {3}}});
  config.tracks = {{.name = "ema", .schedule = MakeSchedule("10ba"), .dtype = Dtype::kFloat64},
                   {"raw", MakeSchedule("copy")}};
  return config;
}

// What was pushed, as the `push`-th: weight is 0.25, 0.5, ... and half 0.5, 1, ..., times `push`.
inline std::vector<std::byte> FixtureWeights(int push) {
  std::vector<std::byte> bytes;
  const auto append = [&bytes](const auto value) {
    const auto* const begin = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), begin, begin + sizeof(value));
  };
  for (int i = 1; i <= 6; ++i) append(static_cast<float>(i * push) * 0.25f);
  for (int i = 1; i <= 5; ++i) {
    // Small enough for a bfloat16, which is the upper half of a float32.
    append(
        static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(i * push) * 0.5f) >> 16));
  }
  append(int64_t{1000} * push);
  append(push % 2 == 1);
  append(true);
  append(false);
  return bytes;
}

// The model at its second version, step 30.
struct FixtureVersion {
  FixtureVersion()
      : models(TestDevice(), SmallBlocks()), model(models.Create(FixtureModel())->model) {
    TestRank rank(model, "launch");
    EXPECT_THAT(rank.Join(), IsOk());
    for (const int push : {1, 3}) {
      EXPECT_THAT(rank.Push(10 * push, FixtureWeights(push)), IsOk());
    }
    snapshot = *model->history().Pin(0);
  }

  ModelStore models;
  std::shared_ptr<Model> model;
  SnapshotRef snapshot;
};

}  // namespace ema

#endif  // EMA_TESTS_CHECKPOINT_FIXTURE_MODEL_H_
