// SPDX-License-Identifier: Apache-2.0
//
// `emactl bench`: how fast pushes and pulls are from here to a server.
#ifndef EMA_CLIENT_CLI_BENCH_H_
#define EMA_CLIENT_CLI_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/commands.h"

namespace ema::cli {

struct BenchOptions {
  int64_t bytes = int64_t{256} << 20;  // Of weights; a multiple of 4 from 4096 on.
  int64_t rounds = 5;
};

// Makes a model of a random name, pushes and pulls it, and deletes it, whatever happens meanwhile,
// by a client that Ctrl-C does not end. Errors as those calls'; PERMISSION_DENIED: without the role
// that deletes models, nothing is made. RESOURCE_EXHAUSTED, MEMORY_BUDGET: neither, this host has
// not twice the bytes, or the server has no room.
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
