// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/crc32c.h"
#include "tests/bench/rows.h"
#include "tests/integration/stalled_peers.h"

namespace ema::bench {
namespace {

constexpr int64_t kPeers = 300;
constexpr int64_t kPeersPerConnection = 30;
constexpr int64_t kShardElements = 16;

// Pushers that stop in the middle of a step of a model of their own, and evaluators that ask for
// another one and read nothing.
class Crowd {
 public:
  Crowd(const Bench& bench, std::string model) : bench_(bench), pulled_model_(std::move(model)) {
    const Manifest manifest =
        Must(Manifest::Create({{.name = "w", .shape = {kPeers * kShardElements}}}));
    Must(bench.client().CreateModel(kModel, manifest,
                                    {{.name = "ema", .schedule = Must(Schedule::Parse("1ba"))}}));
    for (int64_t rank = 0; rank < kPeers; ++rank) {
      const std::unique_ptr<Run> run = Must(bench.client().OpenRun(
          kModel, {.launch_id = "crowd",
                   .rank = rank,
                   .world_size = kPeers,
                   .shards = std::vector<Shard>{{0, {rank * kShardElements}, {kShardElements}}}}));
      v1::PushRequest header;
      header.mutable_header()->set_model(kModel);
      header.mutable_header()->set_run_epoch(run->run_epoch());
      header.mutable_header()->set_rank(rank);
      header.mutable_header()->set_layout_digest(run->layout().digest());
      header.mutable_header()->set_step(1);
      header.mutable_header()->mutable_time()->set_batch(1);
      headers_.push_back(std::move(header));
    }
  }
  ~Crowd() {
    peers_.Leave();
    Must(bench_.client().DeleteModel(kModel));
  }

  // Returns when all of them stall, or have been refused.
  void Enter() {
    const std::string half(kShardElements * sizeof(float) / 2, '\0');
    v1::PushRequest chunk;
    chunk.mutable_chunk()->set_crc32c(Crc32c(0, std::as_bytes(std::span(half))));
    chunk.mutable_chunk()->set_data(half);
    v1::PullRequest pull;
    pull.set_model(pulled_model_);
    pull.set_track("ema0");
    for (int64_t i = 0; i < kPeers; ++i) {
      if (i % kPeersPerConnection == 0) peers_.Connect(bench_.server().address());
      peers_.StartPush({headers_[i], chunk});
      peers_.StartPull(pull);
    }
    if (!peers_.AwaitStalled(2 * kPeers, kTimeout)) Die("the crowd does not come to a standstill");
  }
  void Leave() { peers_.Leave(); }

 private:
  static constexpr char kModel[] = "crowd";

  const Bench& bench_;
  const std::string pulled_model_;
  std::vector<v1::PushRequest> headers_;
  StalledPeers peers_;
};

}  // namespace

Row PairBesideStalledPeers(Bench& bench) {
  constexpr int kSteps = 3;
  const auto trainer = std::make_shared<Trainer>(bench.server(), "pair", bench.weights(),
                                                 Trainer::Options{.max_pinned_versions = 2});
  trainer->WarmUp();
  const auto crowd = std::make_shared<Crowd>(bench, trainer->model());
  const auto memory = std::make_shared<Arena>(trainer->weights().total_bytes());
  const Side ours = bench.Ours(2 * kSteps * trainer->weights().gigabytes());
  const auto step = [&bench, trainer, memory] {
    trainer->Push();
    Must(Pull(bench.client(), trainer->model(), memory->bytes()));
  };
  const auto speed = [step, gigabytes = ours.gigabytes] {
    const double seconds = SecondsOf([&] {
      for (int i = 0; i < kSteps; ++i) step();
    });
    return std::vector<double>{gigabytes / seconds};
  };
  Side beside = ours;
  beside.run = [crowd, step, speed] {
    crowd->Enter();
    step();  // They hold all places: it waits until one is taken from them.
    std::vector<double> speeds = speed();
    crowd->Leave();
    return speeds;
  };
  Side alone = ours;
  alone.name = "alone";
  alone.run = speed;
  return {.key = "stalled",
          .name = absl::StrCat("push and pull beside ", kPeers, " stalled pushers and ", kPeers,
                               " stalled evaluators"),
          .unit = "GB/s",
          .ours = std::move(beside),
          .peer = std::move(alone),
          .goal = AtLeast(0.8)};
}

}  // namespace ema::bench
