// SPDX-License-Identifier: Apache-2.0
//
// The data plane and the checkpoints, row by row, each beside its peer, in turns and in one run:
// machines are noisy, only ratios of neighbours mean anything. Prints one JSON object a line, of
// which report.py makes the report; tests/bench/run.sh does both.
//
//   data_bench --server build/release/server/ema-server [--row push] [--seconds 5]
#include <algorithm>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "tests/bench/bench.h"
#include "tests/bench/row.h"
#include "tests/bench/rows.h"

namespace ema::bench {
namespace {

struct Entry {
  const char* key;
  Row (*make)(Bench&);
};

// The server's memory comes last: it is about all others.
constexpr Entry kRows[] = {
    {"push", PushBesideSocket},
    {"push_unchecked", PushUnchecked},
    {"pull", PullBesideSocket},
    {"pull_bfloat16", PullBfloat16},
    {"lane_push", PushThroughMemory},
    {"lane_pull", PullThroughMemory},
    {"tracks", FourTracks},
    {"lane_tracks", FourTracksThroughMemory},
    {"ranks", EightRanks},
    {"tensors", ManyTensors},
    {"commit", LargeCommit},
    {"commit_size", LargeCommitBesideSmall},
    {"pin_size", LargePinBesideSmall},
    {"evaluators", ManyEvaluators},
    {"readers", PushWhileOthersRead},
    {"stalled", PairBesideStalledPeers},
    {"idle", CommitAfterIdleness},
    {"group_push", GroupPush},
    {"group_pull", GroupPull},
    {"group_commit", GroupCommit},
    {"redis_set", PushBesideRedis},
    {"redis_get", PullBesideRedis},
    {"ray", PushBesideRay},
    {"torch", PushBesideTorch},
    {"grpc", PushBesideGrpc},
    {"save", SaveBesidePlainFile},
    {"read_back", ReadBackBesidePlainFile},
    {"restore", RestoreBesidePlainFile},
    {"saving", PushSpeedWhileSaving},
    {"saving_commit", CommitWhileSaving},
    {"save_torch", SaveBesideTorch},
    {"save_torch_synced", SaveBesideSyncedTorch},
    {"save_safetensors", SaveBesideSafetensors},
    {"save_safetensors_synced", SaveBesideSyncedSafetensors},
    {"save_dcp", SaveBesideDcp},
    {"memory", ServerMemory},
};

std::string Keys() {
  std::string keys;
  for (const Entry& entry : kRows) keys += std::string(keys.empty() ? "" : ", ") + entry.key;
  return keys;
}

int Main(int argc, char** argv) {
  BenchOptions options;
  MeasureOptions measure;
  std::vector<std::string> chosen;
  CLI::App app("The data plane beside its peers");
  app.add_option("--server", options.server, "The ema-server binary")->required();
  app.add_option("--python", options.python, "A Python with Ray and torch; without: no such rows");
  app.add_option("--scripts", options.scripts, "The folder of the peers in Python")
      ->capture_default_str();
  app.add_option("--row", chosen, Keys() + "; repeatable; default: all");
  app.add_option("--megabytes", options.megabytes, "Size of the weights")
      ->check(CLI::Range(4, 4000))
      ->capture_default_str();
  app.add_option("--large-model", options.large_model_parameters, "Parameters of the large model")
      ->check(CLI::Range(int64_t{1'000'000}, int64_t{2'000'000'000}))
      ->capture_default_str();
  app.add_option("--checkpoint-megabytes", options.checkpoint_megabytes, "Size of what is saved")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app.add_option("--data-dir", options.data_dir, "On the disk that is measured; removed after")
      ->capture_default_str();
  app.add_option("--idle-commits", options.idle_commits, "Of the row `idle`")
      ->check(CLI::Range(1, 10'000))
      ->capture_default_str();
  app.add_option("--seconds", measure.seconds, "The longest that a row is measured")
      ->capture_default_str();
  app.add_option("--error", measure.error, "A row that is known so well ends before")
      ->capture_default_str();
  app.add_option("--rounds", measure.max_rounds, "The most rounds of a row")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  Bench bench(options);
  for (const auto& [key, make] : kRows) {
    if (!chosen.empty() && std::find(chosen.begin(), chosen.end(), key) == chosen.end()) continue;
    const Row row = make(bench);
    bench.NoteReservedBytes();
    const nlohmann::json result = Measure(row, measure);
    std::cout << result.dump() << std::endl;
    std::cerr << Summary(result) << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace ema::bench

int main(int argc, char** argv) { return ema::bench::Main(argc, argv); }
