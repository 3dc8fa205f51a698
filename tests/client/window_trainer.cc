// SPDX-License-Identifier: Apache-2.0
//
// A trainer whose weights are on a GPU of the fake driver, for window_test.cc to kill. Usage:
// window_trainer ADDRESS MODEL FIRST_STEP. Pushes at every step, without end; all elements of a
// step are the step's number.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ema/client.h"
#include "ema/internal/status_macros.h"
#include "tests/client/fake_cuda.h"

namespace {

absl::Status Train(const std::string& address, const std::string& model, int64_t step) {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<ema::Client> client, ema::Client::Create(address));
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<ema::Run> run, client->OpenRun(model, {}));
  const ema::GpuStream stream = {.device = 0, .handle = ema_fake_cuda_new_stream()};
  const size_t shard_count = run->layout().shards().size();
  std::vector<std::vector<float>> weights;
  for (const ema::Shard& shard : run->layout().shards())
    weights.emplace_back(shard.element_count());
  while (true) {
    std::vector<std::span<const std::byte>> shards;
    for (std::vector<float>& values : weights) {
      values.assign(values.size(), static_cast<float>(step));
      shards.push_back(std::as_bytes(std::span(values)));
    }
    const ema::GpuWeights gpu_weights = {.devices = std::vector<int>(shard_count, 0),
                                         .streams = {stream}};
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<ema::PendingPush> push,
                         run->StartPush(step, ema::TrainingTime::AtBatch(step), std::move(shards),
                                        absl::Seconds(60), {.gpu_weights = gpu_weights}));
    EMA_RETURN_IF_ERROR(push->Wait().status());
    ++step;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const absl::Status status = Train(argv[1], argv[2], std::atoll(argv[3]));
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
