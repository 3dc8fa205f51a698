// SPDX-License-Identifier: Apache-2.0
//
// A model, and who pushes it, in this process: the server's own core without a network.
#ifndef EMA_TESTS_BENCH_CORE_TRAINER_H_
#define EMA_TESTS_BENCH_CORE_TRAINER_H_

#include <cstdint>
#include <memory>

#include "ema/track.h"
#include "server/core/model.h"
#include "server/device/device.h"
#include "tests/bench/bench_util.h"

namespace ema::bench {

// One rank that pushes the same chunk for every part of its model.
class CoreTrainer {
 public:
  struct Options {
    int64_t parameters = 0;
    int64_t tensor_count = 400;
    Dtype dtype = Dtype::kFloat32;
    TrackConfig track;
    std::shared_ptr<Device> device;  // Null: the CPU.
  };
  // Pushes the first step.
  explicit CoreTrainer(const Options& options);

  // Pushes a step, and times the call that hands in its commit message, to the call that says that
  // the new version is there.
  double CommitSeconds();
  double PinSeconds();

  Model& model() const { return *model_; }
  // Of all tensors, as they are pushed.
  int64_t total_bytes() const { return total_bytes_; }

 private:
  PushTotals AddChunks(RankPush& push);

  const std::shared_ptr<Model> model_;
  const Arena chunk_;
  int64_t total_bytes_ = 0;
  Model::JoinResult joined_;
  int64_t step_ = 0;
};

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_CORE_TRAINER_H_
