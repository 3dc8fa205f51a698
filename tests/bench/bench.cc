// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench.h"

#include <algorithm>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/transport/connection_count.h"

namespace ema::bench {
namespace {

constexpr int64_t kStandardTensors = 400;
// In which a run looks by how many connections it pushes: 1, 2, 4 or 8.
constexpr int kSearchPushes =
    client_internal::ConnectionCount::kWarmUp + 4 * client_internal::ConnectionCount::kPushes;

Manifest NewManifest(size_t total_bytes, int64_t tensor_count) {
  const int64_t elements = static_cast<int64_t>(total_bytes / sizeof(float)) / tensor_count;
  std::vector<TensorSpec> specs;
  for (int64_t i = 0; i < tensor_count; ++i) {
    specs.push_back({absl::StrCat("layer", i), Dtype::kFloat32, {elements}});
  }
  return Must(Manifest::Create(std::move(specs)));
}

// `total_bytes`, less what does not make equal tensors.
size_t EvenBytes(size_t total_bytes, int64_t tensor_count) {
  const size_t step = sizeof(float) * static_cast<size_t>(tensor_count);
  return total_bytes / step * step;
}

std::vector<std::string> CommandLine(const std::string& binary, const std::string& port_file,
                                     const std::vector<std::string>& flags) {
  std::vector<std::string> line = {binary,    "--listen",    "127.0.0.1:0", "--port-file",
                                   port_file, "--log-level", "error"};
  line.insert(line.end(), flags.begin(), flags.end());
  return line;
}

// What the server writes when it serves.
int TakePort(const std::string& port_file) {
  const absl::Time deadline = absl::Now() + kTimeout;
  int port = 0;
  while (!(std::ifstream(port_file) >> port)) {
    if (absl::Now() > deadline) Die("the server did not start");
    absl::SleepFor(absl::Milliseconds(10));
  }
  unlink(port_file.c_str());
  return port;
}

}  // namespace

ServerProcess::ServerProcess(const std::string& binary, const std::vector<std::string>& flags)
    : port_file_(absl::StrCat("/tmp/ema_bench.", getpid())),
      process_(CommandLine(binary, port_file_, flags), ChildProcess::Stop::kTerminate),
      address_(absl::StrCat("127.0.0.1:", TakePort(port_file_))) {}

Weights::Weights(size_t total_bytes, int64_t tensor_count)
    : memory_(EvenBytes(total_bytes, tensor_count)),
      manifest_(NewManifest(total_bytes, tensor_count)) {
  auto* const values = reinterpret_cast<float*>(memory_.data());
  for (size_t i = 0; i < memory_.size() / sizeof(float); ++i) {
    values[i] = static_cast<float>(i % 1000) * 0.001f;
  }
  const size_t tensor_bytes = memory_.size() / static_cast<size_t>(tensor_count);
  for (size_t offset = 0; offset < memory_.size(); offset += tensor_bytes) {
    tensors_.push_back(memory_.bytes().subspan(offset, tensor_bytes));
  }
}

Bench::Bench(const BenchOptions& options)
    : options_(options),
      server_(options.server),
      client_(Must(Client::Create(server_.address(), {.same_host_lane = false}))),
      lane_client_(Must(Client::Create(server_.address()))),
      weights_(std::make_shared<const Weights>(standard_bytes(), kStandardTensors)) {}

void Bench::NoteReservedBytes() {
  int64_t reserved = 0;
  for (const ModelInfo& model : Must(client_->ListModels())) reserved += model.reserved_bytes;
  most_reserved_bytes_ = std::max(most_reserved_bytes_, reserved);
}

Trainer::Trainer(const ServerProcess& server, std::string model,
                 std::shared_ptr<const Weights> weights, const Options& options)
    : address_(server.address()),
      model_(std::move(model)),
      weights_(std::move(weights)),
      warm_up_pushes_(std::max(
          static_cast<int>(options.max_pinned_versions) + 2,
          options.same_host_lane || std::thread::hardware_concurrency() < 4 ? 0 : kSearchPushes)) {
  std::vector<TrackConfig> tracks;
  for (int i = 0; i < options.track_count; ++i) {
    tracks.push_back({.name = absl::StrCat("ema", i),
                      .schedule = Must(Schedule::Parse(absl::StrCat(100 * (i + 1), "ba")))});
  }
  const Manifest& manifest = weights_->manifest();
  Must(Admin()->CreateModel(model_, manifest, tracks,
                            {.max_pinned_versions = options.max_pinned_versions}));
  for (int rank = 0; rank < options.rank_count; ++rank) {
    std::vector<Shard> layout;
    std::vector<std::span<const std::byte>> shards;
    for (int64_t i = rank; i < manifest.tensor_count(); i += options.rank_count) {
      layout.push_back(WholeTensor(manifest, i));
      shards.push_back(weights_->tensors()[i]);
    }
    std::unique_ptr<Client> client =
        Must(Client::Create(address_, {.same_host_lane = options.same_host_lane,
                                       .max_connections = options.max_connections}));
    std::unique_ptr<Run> run = Must(client->OpenRun(model_, {.launch_id = "bench",
                                                             .rank = rank,
                                                             .world_size = options.rank_count,
                                                             .shards = std::move(layout)}));
    ranks_.push_back({std::move(client), std::move(run), std::move(shards), /*push=*/nullptr});
  }
}

Trainer::~Trainer() {
  ranks_.clear();
  Must(Admin()->DeleteModel(model_));
}

std::unique_ptr<Client> Trainer::Admin() const {
  return Must(Client::Create(address_, {.same_host_lane = false}));
}

void Trainer::StartRank(Rank& rank) {
  rank.push = Must(rank.run->StartPush(step_, TrainingTime::AtBatch(step_), rank.shards, kTimeout));
}

double Trainer::PushRank(Rank& rank) {
  const double seconds_to_reply = SecondsOf([&] {
    StartRank(rank);
    Must(rank.push->Wait());
  });
  return seconds_to_reply - absl::ToDoubleSeconds(rank.push->stats().send_time);
}

void Trainer::StartPush() {
  ++step_;
  StartRank(ranks_.front());
}

void Trainer::AwaitPush() { Must(ranks_.front().push->Wait()); }

double Trainer::Push() {
  ++step_;
  if (ranks_.size() == 1) return PushRank(ranks_.front());
  std::vector<double> seconds(ranks_.size());
  {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      threads.emplace_back([&, i] { seconds[i] = PushRank(ranks_[i]); });
    }
  }
  return *std::min_element(seconds.begin(), seconds.end());
}

void Trainer::WarmUp() {
  for (int i = 0; i < warm_up_pushes_; ++i) Push();
}

absl::Status Pull(Client& client, const std::string& model, std::span<std::byte> memory,
                  const Client::PullOptions& options) {
  return client
      .Pull(
          model, "ema0", options,
          [&](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
            return memory.first(static_cast<size_t>(info.total_bytes));
          },
          kTimeout)
      .status();
}

}  // namespace ema::bench
