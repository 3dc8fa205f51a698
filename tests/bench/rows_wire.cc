// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>

#include "tests/bench/peers/grpc_peer.h"
#include "tests/bench/peers/peer_server.h"
#include "tests/bench/peers/socket_peer.h"
#include "tests/bench/rows.h"

namespace ema::bench {
namespace {

Side OurPush(const Bench& bench, std::shared_ptr<const Weights> weights,
             bool same_host_lane = false) {
  const auto trainer = std::make_shared<Trainer>(
      bench.server(), "push", weights, Trainer::Options{.same_host_lane = same_host_lane});
  trainer->WarmUp();
  return SpeedOf(bench.Ours(weights->gigabytes()), [trainer] { trainer->Push(); });
}

Side OurPull(const Bench& bench, Client& client, std::shared_ptr<const Weights> weights,
             const Client::PullOptions& options = {}) {
  const auto trainer = std::make_shared<Trainer>(bench.server(), "pull", weights);
  trainer->Push();
  const auto memory = std::make_shared<Arena>(weights->total_bytes());
  return SpeedOf(bench.Ours(weights->gigabytes()), [&client, trainer, memory, options] {
    Must(Pull(client, trainer->model(), memory->bytes(), options));
  });
}

Side SocketPush(const std::string& name, std::shared_ptr<const Weights> weights, Command command) {
  const auto peer = std::make_shared<SocketPeer>(weights->total_bytes());
  return SpeedOf({.name = name,
                  .gigabytes = weights->gigabytes(),
                  .client_pid = getpid(),
                  .server_pids = {peer->pid()}},
                 [peer, weights, command] { peer->Push(weights->memory().data(), command); });
}

Side SocketPull(const std::string& name, size_t total_bytes, Command command) {
  const auto peer = std::make_shared<SocketPeer>(total_bytes);
  const auto memory = std::make_shared<Arena>(total_bytes);
  return SpeedOf({.name = name,
                  .gigabytes = Gigabytes(total_bytes),
                  .client_pid = getpid(),
                  .server_pids = {peer->pid()}},
                 [peer, memory, command] { peer->Pull(memory->data(), command); });
}

}  // namespace

Row PushBesideSocket(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  return {.key = "push",
          .name = "push to commit over TCP, one stream, one track",
          .unit = "GB/s",
          .ours = OurPush(bench, weights),
          .peer = SocketPush("plain TCP socket, same fold and checksums", weights, Command::kPush),
          .goal = AtLeast(0.95)};
}

Row PushUnchecked(Bench& bench) {
  return {.key = "push_unchecked",
          .name = "push to commit over TCP, without checksums",
          .unit = "GB/s",
          .peer = SocketPush("plain TCP socket, same fold, no checksums", bench.weights(),
                             Command::kPushUnchecked),
          .goal = AtLeast(0.95),
          .missing = "ours: over a network checksums cannot be turned off"};
}

Row PullBesideSocket(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  return {.key = "pull",
          .name = "pull over TCP",
          .unit = "GB/s",
          .ours = OurPull(bench, bench.client(), weights),
          .peer = SocketPull("plain TCP socket, received in place, same checksums",
                             weights->total_bytes(), Command::kPull),
          .goal = AtLeast(1.0)};
}

Row PullBfloat16(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  return {
      .key = "pull_bfloat16",
      .name = "pull over TCP, cast to bfloat16 by the server (bytes before the cast)",
      .unit = "GB/s",
      .ours = OurPull(bench, bench.client(), weights, {.selection = {.dtype = Dtype::kBFloat16}}),
      .peer = SocketPull("plain TCP socket, cast piece by piece, same checksums",
                         bench.standard_bytes(), Command::kPullBfloat16)};
}

Row PushThroughMemory(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  const auto average = std::make_shared<PeerAverage>(weights->total_bytes());
  return {.key = "lane_push",
          .name = "push through the same-host lane",
          .unit = "GB/s",
          .ours = OurPush(bench, weights, /*same_host_lane=*/true),
          .peer = SpeedOf({.name = "the fold alone in memory, non-temporal stores, one thread",
                           .gigabytes = weights->gigabytes(),
                           .client_pid = getpid()},
                          [weights, average] {
                            average->Fold(0, weights->memory().data(), weights->total_bytes());
                            average->Commit();
                          }),
          .goal = AtLeast(0.95)};
}

Row PullThroughMemory(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  const auto memory = std::make_shared<Arena>(weights->total_bytes());
  return {.key = "lane_pull",
          .name = "pull through the same-host lane",
          .unit = "GB/s",
          .ours = OurPull(bench, bench.lane_client(), weights),
          .peer = SpeedOf(
              {.name = "one memcpy", .gigabytes = weights->gigabytes(), .client_pid = getpid()},
              [weights, memory] {
                std::memcpy(memory->data(), weights->memory().data(), memory->size());
              }),
          .goal = AtLeast(0.8)};
}

Row PushBesideGrpc(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  const auto peer = std::make_shared<GrpcPeer>(weights->total_bytes());
  return {
      .key = "grpc",
      .name = "push to commit over TCP, beside plain gRPC",
      .unit = "GB/s",
      .ours = OurPush(bench, weights),
      .peer = SpeedOf({.name = "gRPC, protobuf bytes, synchronous, same fold and checksums",
                       .gigabytes = weights->gigabytes(),
                       .client_pid = getpid(),
                       .server_pids = {peer->pid()}},
                      [peer, weights] { peer->Push(weights->memory().bytes()); }),
  };
}

}  // namespace ema::bench
