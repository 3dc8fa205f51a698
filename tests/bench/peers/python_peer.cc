// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/peers/python_peer.h"

#include <cstdio>

#include "absl/strings/str_cat.h"

namespace ema::bench {
namespace {

std::vector<std::string> CommandLine(const BenchOptions& options, const std::string& script,
                                     int64_t megabytes, const std::vector<std::string>& flags) {
  std::vector<std::string> line = {options.python, absl::StrCat(options.scripts, "/", script),
                                   "--megabytes",  absl::StrCat(megabytes),
                                   "--tensors",    "400"};
  line.insert(line.end(), flags.begin(), flags.end());
  return line;
}

}  // namespace

PythonPeer::PythonPeer(const BenchOptions& options, const std::string& script, int64_t megabytes,
                       const std::vector<std::string>& flags)
    : process_(CommandLine(options, script, megabytes, flags), ChildProcess::Stop::kEndOfInput) {
  const std::string pids = process_.ReadLine();
  if (std::sscanf(pids.c_str(), "%d %d", &client_pid_, &server_pid_) != 2) {
    Die(absl::StrCat(script, " says ", pids));
  }
}

double PythonPeer::RunRound() {
  process_.WriteLine("round");
  return std::stod(process_.ReadLine());
}

}  // namespace ema::bench
