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

#include "server/ops/logging.h"
#include "server/ops/options.h"
#include "server/ops/version.h"
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
  // Which it was.
  int Wait() {
    thread_.join();
    return signal_number_;
  }

 private:
  void Run(const sigset_t& signals) {
    sigwait(&signals, &signal_number_);
    if (is_recovered_) return;
    // A start changes nothing that a crash would spoil, and may wait for the disk for long.
    ema::Log(ema::LogLevel::kInfo, "stopped before the checkpoints had been read",
             {{"signal", signal_number_}});
    std::_Exit(0);
  }

  std::atomic<bool> is_recovered_ = false;
  int signal_number_ = 0;  // The thread's, until it has ended.
  std::thread thread_;
};

// From here on the log is as the options say.
void LogStart(const ema::ParsedOptions& parsed) {
  const ema::ServerOptions& options = parsed.options;
  ema::SetLogLevel(*ema::ParseLogLevel(options.log_level));
  ema::SetLogFormat(options.log_format == "json" ? ema::LogFormat::kJson : ema::LogFormat::kText);
  ema::Log(ema::LogLevel::kInfo, "starting",
           {{"version", ema::ServerVersion()},
            {"config", parsed.config_file},
            {"data_dir", options.data_dir},
            {"device", options.device}});
  for (const ema::LogEvent& warning : parsed.warnings) ema::Log(warning);
}

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
    for (const ema::LogEvent& warning : parsed.warnings) {
      std::fprintf(stderr, "%s\n", ema::ToText(warning).c_str());
    }
    std::fputs(parsed.text.c_str(), parsed.exit_code == 0 ? stdout : stderr);
    return parsed.exit_code;
  }
  LogStart(parsed);

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
    ema::Log(ema::LogLevel::kError, "cannot start", {{"error", server.status()}});
    return 1;
  }
  const int signal_number = stop.Wait();
  ema::Log(ema::LogLevel::kInfo, "draining",
           {{"signal", signal_number}, {"grace", parsed.options.drain_grace}});
  // A second signal ends the process at once.
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  struct sigaction now = {};
  // Not the default action, which the kernel leaves out for a container's first process.
  now.sa_handler = [](int number) { _exit(128 + number); };
  sigaction(SIGTERM, &now, nullptr);
  sigaction(SIGINT, &now, nullptr);
  const absl::Status drained = (*server)->Drain();
  if (drained.ok()) {
    ema::Log(ema::LogLevel::kInfo, "stopped");
  } else {
    ema::Log(ema::LogLevel::kError, "stopped", {{"error", drained}});
  }
  return drained.ok() ? 0 : 1;
}
