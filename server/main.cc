// SPDX-License-Identifier: Apache-2.0
//
// ema-server: options -> Server::Start -> wait for a signal -> Drain.
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "absl/strings/str_cat.h"
#include "server/ops/logging.h"
#include "server/ops/options.h"
#include "server/server.h"

int main(int argc, char** argv) {
  // gRPC frees and allocates read buffers all the time; with glibc's defaults the top of the heap
  // is given back and faulted in again, 20 to 30 thousand page faults a push.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, ema::Server::kKeptHeapBytes);
  mallopt(M_TOP_PAD, 64 << 20);

  // gRPC's experiment fills up to 4 MiB of small slices in one read; see kReadBytes in
  // rpc_server.cc.
  setenv("GRPC_EXPERIMENTS", "-tcp_read_chunks", /*overwrite=*/0);

  const ema::ParsedOptions parsed = ema::ParseOptions(argc, argv);
  if (parsed.should_exit) {
    std::fputs(parsed.text.c_str(), parsed.exit_code == 0 ? stdout : stderr);
    return parsed.exit_code;
  }
  ema::InitLogging(parsed.options.log_level);

  // Every connection is a descriptor.
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);

  // Blocked before any thread starts, so that they all inherit it and sigwait() gets every signal.
  signal(SIGPIPE, SIG_IGN);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  absl::StatusOr<std::unique_ptr<ema::Server>> server = ema::Server::Start(parsed.options);
  if (!server.ok()) {
    ema::LogError(absl::StrCat("cannot start: ", server.status().ToString()));
    return 1;
  }

  int signal_number = 0;
  sigwait(&signals, &signal_number);
  ema::LogInfo("draining");
  // A second signal ends the process at once.
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  signal(SIGTERM, SIG_DFL);
  signal(SIGINT, SIG_DFL);
  const absl::Status drained = (*server)->Drain();
  ema::LogInfo(absl::StrCat("stopped: ", drained.ToString()));
  return drained.ok() ? 0 : 1;
}
