// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/bench/rows.h"

namespace ema::bench {
namespace {

std::shared_ptr<Trainer> NewTrainer(const Bench& bench, const std::string& model,
                                    const std::shared_ptr<const Weights>& weights,
                                    const Trainer::Options& options = {}) {
  auto trainer = std::make_shared<Trainer>(bench.server(), model, weights, options);
  trainer->WarmUp();
  return trainer;
}

// A side that is ours, too.
Side Named(std::string name, Side side) {
  side.name = std::move(name);
  return side;
}

}  // namespace

namespace {

Row FourTracks(Bench& bench, bool same_host_lane) {
  constexpr int kTracks = 4;
  const std::shared_ptr<const Weights>& weights = bench.weights();
  const auto four = NewTrainer(bench, "four", weights,
                               {.track_count = kTracks, .same_host_lane = same_host_lane});
  const auto one = NewTrainer(bench, "one", weights, {.same_host_lane = same_host_lane});
  return {.key = same_host_lane ? "lane_tracks" : "tracks",
          .name = absl::StrCat("4 tracks from one push ",
                               same_host_lane ? "through the same-host lane" : "over TCP"),
          .unit = "s",
          .ours = TimeOf(bench.Ours(weights->gigabytes()), [four] { four->Push(); }),
          .peer = Named("4 pushes of one track", TimeOf(bench.Ours(kTracks * weights->gigabytes()),
                                                        [one] {
                                                          for (int i = 0; i < kTracks; ++i)
                                                            one->Push();
                                                        })),
          .goal = AtMost(same_host_lane ? 0.8 : 0.5)};
}

}  // namespace

Row FourTracks(Bench& bench) { return FourTracks(bench, /*same_host_lane=*/false); }
Row FourTracksThroughMemory(Bench& bench) { return FourTracks(bench, /*same_host_lane=*/true); }

Row EightRanks(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  const auto eight = NewTrainer(bench, "eight", weights, {.rank_count = 8});
  const auto one = NewTrainer(bench, "one", weights);
  const Side ours = bench.Ours(weights->gigabytes());
  return {.key = "ranks",
          .name = "8 ranks pushing one step",
          .unit = "GB/s",
          .ours = SpeedOf(ours, [eight] { eight->Push(); }),
          .peer = Named("1 rank pushing all of it", SpeedOf(ours, [one] { one->Push(); })),
          .goal = AtLeast(0.8)};
}

Row ManyTensors(Bench& bench) {
  constexpr size_t kElements = 1000;
  const size_t bytes = bench.standard_bytes();
  const auto tensor_count = static_cast<int64_t>(bytes / sizeof(float) / kElements);
  const auto many = NewTrainer(bench, "many", std::make_shared<const Weights>(bytes, tensor_count));
  const auto one = NewTrainer(bench, "single", std::make_shared<const Weights>(bytes, 1));
  const Side ours = bench.Ours(many->weights().gigabytes());
  return {.key = "tensors",
          .name = absl::StrCat("push of ", tensor_count, " tensors of ", kElements),
          .unit = "s",
          .ours = TimeOf(ours, [many] { many->Push(); }),
          .peer = Named("1 tensor of the same bytes", TimeOf(ours, [one] { one->Push(); })),
          .goal = AtMost(1.1)};
}

Row ManyEvaluators(Bench& bench) {
  constexpr int kEvaluators = 32;
  // Each has memory of its own, and all of it must fit.
  const auto weights = std::make_shared<const Weights>(bench.standard_bytes() / 10, 40);
  const auto trainer = std::make_shared<Trainer>(bench.server(), "read", weights);
  trainer->Push();
  struct Evaluator {
    std::unique_ptr<Client> client;
    std::unique_ptr<Arena> memory;
  };
  const auto evaluators = std::make_shared<std::vector<Evaluator>>();
  for (int i = 0; i < kEvaluators; ++i) {
    evaluators->push_back(
        {Must(Client::Create(bench.server().address(), {.same_host_lane = false})),
         std::make_unique<Arena>(weights->total_bytes())});
  }
  const auto pull = [trainer](const Evaluator& evaluator) {
    Must(Pull(*evaluator.client, trainer->model(), evaluator.memory->bytes()));
  };
  const Side ours = bench.Ours(kEvaluators * weights->gigabytes());
  return {.key = "evaluators",
          .name = absl::StrCat(kEvaluators, " evaluators pulling one version at once, all of them"),
          .unit = "GB/s",
          .ours = SpeedOf(ours,
                          [evaluators, pull] {
                            std::vector<std::jthread> threads;
                            for (const Evaluator& evaluator : *evaluators) {
                              threads.emplace_back([&] { pull(evaluator); });
                            }
                          }),
          .peer = Named("one evaluator, pulling as often", SpeedOf(ours,
                                                                   [evaluators, pull] {
                                                                     for (int i = 0;
                                                                          i < kEvaluators; ++i)
                                                                       pull(evaluators->front());
                                                                   })),
          .goal = AtLeast(0.8)};
}

}  // namespace ema::bench
