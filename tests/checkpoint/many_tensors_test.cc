// SPDX-License-Identifier: Apache-2.0
//
// A model of a hundred thousand tensors goes through a save and a start bit for bit.
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/checkpoint/test_checkpoints.h"
#include "tests/checkpoint/test_data_dir.h"

namespace ema {
namespace {

constexpr int64_t kTensors = 100'000;

// Every dtype with every shape: their numbers have no common divisor.
std::vector<TensorSpec> ManyTensors() {
  const std::array kDtypes = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat64,
                              Dtype::kInt8,    Dtype::kInt16,   Dtype::kInt32,    Dtype::kInt64,
                              Dtype::kUInt8,   Dtype::kBool};
  const std::array<std::vector<int64_t>, 7> kShapes = {
      {{}, {0, 3}, {1}, {5, 3}, {13}, {2, 1, 3, 1, 1, 2, 1, 1}, {31}}};
  std::vector<TensorSpec> tensors;
  for (int64_t i = 0; i < kTensors; ++i) {
    tensors.push_back({absl::StrCat("blocks.", i / 10, ".part.", i % 10, ".weight"),
                       kDtypes[i % kDtypes.size()], kShapes[i % kShapes.size()]});
  }
  return tensors;
}

// By the most bytes of a file.
class ManyTensorsTest : public DataDirTest, public testing::WithParamInterface<int64_t> {};

TEST_P(ManyTensorsTest, ComeBackBitForBit) {
  ModelConfig config;
  config.name = "m";
  config.manifest = MakeManifest(ManyTensors());
  config.tracks = {{.name = "ema", .schedule = MakeSchedule("10ba"), .dtype = Dtype::kFloat64},
                   {"raw", MakeSchedule("copy")}};
  ModelStore models(TestDevice(), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(const auto created, models.Create(config));
  Model& model = *created.model;
  TestRank rank(created.model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  for (const uint32_t push : {1, 2}) {
    const std::vector<std::byte> weights = RandomWeights(model.manifest(), push);
    // One chunk: they lie so that another would end inside an element.
    ASSERT_THAT(rank.Push(10 * push, weights, static_cast<int64_t>(weights.size())), IsOk());
  }
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef snapshot, model.history().Pin(0));
  ASSERT_THAT(Save(model, snapshot, /*max_file_bytes=*/GetParam()), IsOk());

  ModelStore next_models(TestDevice(), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(const auto loaded, Start(next_models));
  EXPECT_EQ(loaded->manifest(), model.manifest());
  ExpectSameVersion(*loaded, model, *snapshot);
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, ManyTensorsTest, testing::Values(5'000'000'000, 50'000),
                         [](const auto& param) {
                           return param.param > 1'000'000 ? "InOneFile" : "InManyFiles";
                         });

}  // namespace
}  // namespace ema
