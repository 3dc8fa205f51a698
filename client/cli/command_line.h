// SPDX-License-Identifier: Apache-2.0
//
// The command line of emactl: its commands and their options.
#ifndef EMA_CLIENT_CLI_COMMAND_LINE_H_
#define EMA_CLIENT_CLI_COMMAND_LINE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/bench.h"
#include "client/cli/commands.h"
#include "client/cli/exit_code.h"
#include "client/cli/explain.h"
#include "client/cli/import.h"
#include "client/cli/pull_command.h"
#include "ema/client.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11 calls it that.
class App;
}

namespace ema::cli {

// The parsed options of all commands.
struct Options {
  std::string server = "127.0.0.1:50051";
  Client::Tls tls;
  std::string token_file;
  bool json = false;
  std::string timeout = "60s";
  std::string model;
  bool yes = false;
  DeleteOptions remove;
  std::vector<std::string> tracks;
  CreateOptions create;
  ImportOptions import;
  Client::ModelChanges changes;
  WatchOptions watch;
  PullOptions pull;
  std::optional<int64_t> last;  // For `versions`.
  Client::StatisticsOptions statistics;
  Client::SynthesizeOptions synthesize;
  Client::CheckpointOptions save;
  std::string checkpoint;
  std::string directory;  // For `checkpoint verify` and `copy`.
  std::string to;         // For `checkpoint copy` and `rollback`.
  int64_t incarnation = 0;
  std::vector<std::string> paths;
  std::string file;
  std::string label;
  VersionId labelled;
  Client::Metric metric;
  std::vector<std::string> without;  // For `group rebalance` and `group replace`.
  std::string service;
  std::string log_level;
  BenchOptions bench;
  ExplainOptions explain;
};

// The command to run.
struct Command {
  std::function<absl::Status(const Session&)> run;
  bool needs_server = true;
  int (*exit_code)(const absl::Status&) = &ExitCode;
};

// Declares the commands. The given one is stored in `chosen`; it uses `options`, which must outlive
// it.
void AddCommands(CLI::App& app, Options& options, Command& chosen);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_COMMAND_LINE_H_
