// SPDX-License-Identifier: Apache-2.0
//
// A model with tensors of more than one piece, for the tests of the checkpoint format.
#ifndef EMA_TESTS_CHECKPOINT_FORMAT_TESTING_H_
#define EMA_TESTS_CHECKPOINT_FORMAT_TESTING_H_

#include <memory>

#include "server/format/manifest_json.h"
#include "tests/checkpoint/test_checkpoints.h"

namespace ema {

inline ModelConfig LargeModel() {
  ModelConfig config;
  config.name = "large";
  config.manifest = MakeManifest({{"long", Dtype::kFloat32, {2, kPieceBytes / 4 + 3}},  // 3 pieces.
                                  {"byte", Dtype::kUInt8, {1}},
                                  {"empty", Dtype::kFloat32, {0}},
                                  {"one", Dtype::kUInt8, {kPieceBytes}},
                                  {"odd", Dtype::kUInt8, {kPieceBytes + 1}},
                                  {"last", Dtype::kFloat64, {3}}});
  config.tracks = {{"ema", MakeSchedule("10ba")}};
  return config;
}

// The model at its first version.
struct LargeVersion {
  LargeVersion() : models(TestDevice(), SmallBlocks()), model(models.Create(LargeModel())->model) {
    TestRank rank(model, "launch");
    EXPECT_THAT(rank.Join(), IsOk());
    // In chunks of 1 MiB, of which none ends inside an element.
    EXPECT_THAT(rank.Push(10, RandomWeights(model->manifest(), 5)).status(), IsOk());
    snapshot = *model->history().Pin(0);
  }

  ModelStore models;
  std::shared_ptr<Model> model;
  SnapshotRef snapshot;
};

}  // namespace ema

#endif  // EMA_TESTS_CHECKPOINT_FORMAT_TESTING_H_
