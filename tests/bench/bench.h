// SPDX-License-Identifier: Apache-2.0
//
// Our side of the rows: a real server on loopback, weights, trainers that push them, pulls.
#ifndef EMA_TESTS_BENCH_BENCH_H_
#define EMA_TESTS_BENCH_BENCH_H_

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ema/client.h"
#include "tests/bench/bench_util.h"
#include "tests/bench/child_process.h"
#include "tests/bench/row.h"

namespace ema::bench {

inline constexpr absl::Duration kTimeout = absl::Minutes(2);

// A real ema-server on a free port.
class ServerProcess {
 public:
  // `flags`: besides those that every row's server has.
  explicit ServerProcess(const std::string& binary, const std::vector<std::string>& flags = {});

  const std::string& address() const { return address_; }
  pid_t pid() const { return process_.pid(); }

 private:
  const std::string port_file_;
  const ChildProcess process_;
  const std::string address_;
};

// float32 weights in equal tensors. They are no constant: multiples of 0.001.
class Weights {
 public:
  Weights(size_t total_bytes, int64_t tensor_count);

  const Arena& memory() const { return memory_; }
  size_t total_bytes() const { return memory_.size(); }
  double gigabytes() const { return Gigabytes(total_bytes()); }
  const Manifest& manifest() const { return manifest_; }
  // In the manifest's order.
  const std::vector<std::span<const std::byte>>& tensors() const { return tensors_; }

 private:
  const Arena memory_;
  const Manifest manifest_;
  std::vector<std::span<const std::byte>> tensors_;
};

struct BenchOptions {
  std::string server;                         // The ema-server binary.
  std::string python;                         // With Ray and torch; empty: there is none.
  std::string scripts = "tests/bench/peers";  // The folder of the peers in Python.
  int64_t megabytes = 400;
  int64_t large_model_parameters = 1'000'000'000;
  int64_t checkpoint_megabytes = 1000;
  // Of checkpoints; on the disk that is to be measured.
  std::filesystem::path data_dir = "build/bench/data";
  int idle_commits = 200;
};

// What all rows share.
class Bench {
 public:
  explicit Bench(const BenchOptions& options);

  const BenchOptions& options() const { return options_; }
  const ServerProcess& server() const { return server_; }
  // Over TCP.
  Client& client() const { return *client_; }
  // Through shared memory.
  Client& lane_client() const { return *lane_client_; }

  // The weights of a row that says nothing else, in 400 tensors.
  const std::shared_ptr<const Weights>& weights() const { return weights_; }
  size_t standard_bytes() const { return static_cast<size_t>(options_.megabytes) * 1'000'000; }

  // Ours as one side of a row: the CPU time of this process and of the server.
  Side Ours(double gigabytes = 0) const {
    return {.name = "ours",
            .gigabytes = gigabytes,
            .client_pid = getpid(),
            .server_pids = {server_.pid()}};
  }

  // To be called while the models of a row are there: the formula of the server's memory is about
  // the most that ever was reserved.
  void NoteReservedBytes();
  int64_t most_reserved_bytes() const { return most_reserved_bytes_; }

 private:
  const BenchOptions options_;
  const ServerProcess server_;
  const std::unique_ptr<Client> client_;
  const std::unique_ptr<Client> lane_client_;
  const std::shared_ptr<const Weights> weights_;
  int64_t most_reserved_bytes_ = 0;
};

// A model of `weights`, and the ranks that push it. The model is deleted at the end.
class Trainer {
 public:
  struct Options {
    int track_count = 1;
    int rank_count = 1;
    bool same_host_lane = false;
    // The fewest: big models are many here, and memory is not.
    int64_t max_pinned_versions = 1;
    int64_t max_connections = 0;  // As Client::Options.
  };
  Trainer(const ServerProcess& server, std::string model, std::shared_ptr<const Weights> weights,
          const Options& options);
  Trainer(const ServerProcess& server, std::string model, std::shared_ptr<const Weights> weights)
      : Trainer(server, std::move(model), std::move(weights), Options()) {}
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // The next step, to its commit. Returns the seconds from the last byte's leaving (of the last
  // rank) to the reply.
  double Push();

  // The two halves of a push, for a trainer of one rank.
  void StartPush();
  void AwaitPush();

  // Enough pushes that every version that is kept has been allocated once.
  void WarmUp();

  const std::string& model() const { return model_; }
  const Weights& weights() const { return *weights_; }

 private:
  struct Rank {
    std::unique_ptr<Client> client;
    std::unique_ptr<Run> run;
    std::vector<std::span<const std::byte>> shards;
    std::unique_ptr<PendingPush> push;  // Null: none is running.
  };
  // For a call: its connection must not be one of those that the ranks may have together.
  std::unique_ptr<Client> Admin() const;
  // Begins a rank's push of step_.
  void StartRank(Rank& rank);
  // One rank's push; the seconds as Push() gives them.
  double PushRank(Rank& rank);

  const std::string address_;
  const std::string model_;
  const std::shared_ptr<const Weights> weights_;
  const int warm_up_pushes_;
  std::vector<Rank> ranks_;
  int64_t step_ = 0;
};

// Pulls the first track of a Trainer's model into as much of `memory` as it takes.
absl::Status Pull(Client& client, const std::string& model, std::span<std::byte> memory,
                  const Client::PullOptions& options = {});

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_BENCH_H_
