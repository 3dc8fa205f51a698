// SPDX-License-Identifier: Apache-2.0
//
// A peer that is a Python program. It is told the weights' size as `--megabytes` and `--tensors`,
// prints "CLIENT_PID SERVER_PID" when it is ready (0: there is no such process), and does one round
// for each line it reads, whose seconds it prints.
#ifndef EMA_TESTS_BENCH_PEERS_PYTHON_PEER_H_
#define EMA_TESTS_BENCH_PEERS_PYTHON_PEER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tests/bench/bench.h"

namespace ema::bench {

class PythonPeer {
 public:
  // `script`: in the folder of the peers. `flags`: besides `--tensors` and `--megabytes`. REQUIRES:
  // options.python is there.
  PythonPeer(const BenchOptions& options, const std::string& script, int64_t megabytes,
             const std::vector<std::string>& flags = {});

  // Seconds.
  double RunRound();

  pid_t client_pid() const { return client_pid_; }
  pid_t server_pid() const { return server_pid_; }

 private:
  ChildProcess process_;
  pid_t client_pid_ = 0;
  pid_t server_pid_ = 0;
};

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_PEERS_PYTHON_PEER_H_
