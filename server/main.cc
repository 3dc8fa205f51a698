// SPDX-License-Identifier: Apache-2.0
//
// ema-server: options -> Server::Start -> wait for a signal -> Drain.
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "server/ops/logging.h"
#include "server/ops/options.h"
#include "server/server.h"

namespace {

// Waits for SIGTERM or SIGINT in a thread of its own.
class StopSignal {
 public:
  // `signals` are blocked in all threads.
  explicit StopSignal(const sigset_t& signals) : thread_([this, signals] { Run(signals); }) {}
  // A server that could not start is not asked to stop.
  ~StopSignal() {
    if (!thread_.joinable()) return;
    is_recovered_ = true;
    pthread_kill(thread_.native_handle(), SIGTERM);
    thread_.join();
  }

  // From here on there may be something to save: a signal ends only Wait().
  void SetRecovered() { is_recovered_ = true; }
  void Wait() { thread_.join(); }

 private:
  void Run(const sigset_t& signals) {
    int signal_number = 0;
    sigwait(&signals, &signal_number);
    if (is_recovered_) return;
    // A start changes nothing that a crash would spoil, and may wait for the disk for long.
    ema::LogInfo("stopped before the checkpoints had been read");
    std::_Exit(0);
  }

  std::atomic<bool> is_recovered_ = false;
  std::thread thread_;
};

}  // namespace

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

  StopSignal stop(signals);
  absl::StatusOr<std::unique_ptr<ema::Server>> server =
      ema::Server::Start(parsed.options, [&stop] { stop.SetRecovered(); });
  if (!server.ok()) {
    ema::LogError(absl::StrCat("cannot start: ", server.status().ToString()));
    return 1;
  }
  stop.Wait();
  ema::LogInfo("draining");
  // A second signal ends the process at once.
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  signal(SIGTERM, SIG_DFL);
  signal(SIGINT, SIG_DFL);
  const absl::Status drained = (*server)->Drain();
  ema::LogInfo(absl::StrCat("stopped: ", drained.ToString()));
  return drained.ok() ? 0 : 1;
}
