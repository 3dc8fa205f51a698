// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/bench/peers/python_peer.h"
#include "tests/bench/peers/redis_peer.h"
#include "tests/bench/rows.h"

namespace ema::bench {
namespace {

constexpr char kNoPython[] = "peer: no Ray here; deploy/setup.sh --bench installs it";
constexpr char kNoRedis[] = "peer: no Redis here; deploy/setup.sh --bench installs it";

Side RedisSide(const std::string& name, const Weights& weights, const RedisPeer& redis) {
  return {.name = name,
          .gigabytes = weights.gigabytes(),
          .client_pid = getpid(),
          .server_pids = {redis.pid()}};
}

std::vector<std::span<std::byte>> CutLike(const std::vector<std::span<const std::byte>>& tensors,
                                          std::span<std::byte> memory) {
  std::vector<std::span<std::byte>> result;
  for (const std::span<const std::byte> tensor : tensors) {
    result.push_back(memory.first(tensor.size()));
    memory = memory.subspan(tensor.size());
  }
  return result;
}

}  // namespace

Row PushBesideRedis(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  const auto trainer = std::make_shared<Trainer>(bench.server(), "redis", weights);
  Row row{.key = "redis_set",
          .name = "push to commit over TCP, beside Redis",
          .unit = "GB/s",
          .ours = SpeedOf(bench.Ours(weights->gigabytes()), [trainer] { trainer->Push(); }),
          .peer = {.name = "Redis SET of each tensor, without averaging"},
          .goal = AtLeast(1)};
  const std::shared_ptr<RedisPeer> redis = StartRedis();
  if (redis == nullptr) {
    row.missing = kNoRedis;
    return row;
  }
  trainer->WarmUp();
  row.peer = SpeedOf(RedisSide(row.peer.name, *weights, *redis),
                     [redis, weights] { redis->Set(weights->tensors()); });
  return row;
}

Row PullBesideRedis(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  const auto trainer = std::make_shared<Trainer>(bench.server(), "redis", weights);
  trainer->Push();
  const auto memory = std::make_shared<Arena>(weights->total_bytes());
  Row row{.key = "redis_get",
          .name = "pull over TCP, beside Redis",
          .unit = "GB/s",
          .ours = SpeedOf(bench.Ours(weights->gigabytes()),
                          [&bench, trainer, memory] {
                            Must(Pull(bench.client(), trainer->model(), memory->bytes()));
                          }),
          .peer = {.name = "Redis GET of each tensor"},
          .goal = AtLeast(1)};
  const std::shared_ptr<RedisPeer> redis = StartRedis();
  if (redis == nullptr) {
    row.missing = kNoRedis;
    return row;
  }
  redis->Set(weights->tensors());
  row.peer = SpeedOf(RedisSide(row.peer.name, *weights, *redis),
                     [redis, memory, tensors = CutLike(weights->tensors(), memory->bytes())] {
                       redis->Get(tensors);
                     });
  return row;
}

Row PushBesideRay(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  const auto trainer = std::make_shared<Trainer>(bench.server(), "ray", weights,
                                                 Trainer::Options{.same_host_lane = true});
  trainer->WarmUp();
  Row row{.key = "ray",
          .name = "push through the same-host lane, beside a Ray actor",
          .unit = "GB/s",
          .ours = SpeedOf(bench.Ours(weights->gigabytes()), [trainer] { trainer->Push(); }),
          .peer = {.name = "Ray actor that receives and averages (shared memory)"},
          .goal = AtLeast(2),
          // Ray's shared memory is slow the first few times: fresh pages.
          .warm_up_rounds = 4};
  if (bench.options().python.empty()) {
    row.missing = kNoPython;
    return row;
  }
  const auto peer =
      std::make_shared<PythonPeer>(bench.options(), "ray_peer.py", bench.options().megabytes);
  const double gigabytes = weights->gigabytes();
  row.peer = {.name = row.peer.name,
              .run = [peer, gigabytes] { return std::vector{gigabytes / peer->RunRound()}; },
              .gigabytes = gigabytes,
              .client_pid = peer->client_pid(),
              .server_pids = {peer->server_pid()}};
  return row;
}

// What an average costs the trainer: a push runs beside the training, but uses its processors.
Row PushBesideTorch(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  const auto trainer = std::make_shared<Trainer>(bench.server(), "torch", weights);
  trainer->WarmUp();
  const auto cpu_of = [](pid_t pid, const std::function<void()>& work) {
    const double before = CpuSeconds(pid);
    work();
    return std::vector<double>{CpuSeconds(pid) - before};
  };
  Row row{.key = "torch",
          .name = "CPU time of the trainer for an update, push over TCP",
          .unit = "s",
          .ours = {.name = "ours",
                   .run = [trainer, cpu_of] { return cpu_of(getpid(), [&] { trainer->Push(); }); }},
          .peer = {.name = "torch.optim.swa_utils.AveragedModel, in the trainer"}};
  if (bench.options().python.empty()) {
    row.missing = kNoPython;
    return row;
  }
  const auto peer =
      std::make_shared<PythonPeer>(bench.options(), "torch_peer.py", bench.options().megabytes);
  row.peer.run = [peer, cpu_of] { return cpu_of(peer->client_pid(), [&] { peer->RunRound(); }); };
  return row;
}

}  // namespace ema::bench
