// SPDX-License-Identifier: Apache-2.0
//
// `emactl bench`: measures the speed of pushes and pulls between this host and a server.
#ifndef EMA_CLIENT_CLI_BENCH_H_
#define EMA_CLIENT_CLI_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/commands.h"

namespace ema::cli {

struct BenchOptions {
  int64_t bytes = int64_t{256} << 20;  // Size of the weights: a multiple of 4, 4096 or more.
  int64_t rounds = 5;
};

// Creates a model with a random name, pushes and pulls it, and always deletes it, with a client
// that Ctrl-C does not interrupt. Errors: those of the calls. PERMISSION_DENIED: without the role
// that deletes models no model is created. RESOURCE_EXHAUSTED, MEMORY_BUDGET: this host does not
// have twice the bytes (no model is created), or the server has no room.
absl::Status Bench(const Session& session, const BenchOptions& options);

struct Speeds {
  double median = 0;
  double least = 0;
  double most = 0;
};
// REQUIRES: not empty.
Speeds SpeedsOf(std::vector<double> speeds);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_BENCH_H_
