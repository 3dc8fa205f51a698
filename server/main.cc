// SPDX-License-Identifier: Apache-2.0
//
// ema-server: options -> Server::Start -> wait for a signal -> Drain.
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/base/standard_files.h"
#include "server/base/steady_wait.h"
#include "server/ops/heap.h"
#include "server/ops/logging.h"
#include "server/ops/options.h"
#include "server/rpc/library_log.h"
#include "server/server.h"

namespace {

// To look costs a walk over the free parts of the heap.
constexpr absl::Duration kTrimInterval = absl::Seconds(10);
// A start makes 23 on two cores, beside those for each core and queue. Of those it lacks gRPC
// aborts, and others are waited for without end.
constexpr int64_t kStartThreads = 32;

// What asks the server to stop: SIGHUP, too, when its terminal is closed, unless nohup ignores it.
sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  struct sigaction hang_up {};
  if (sigaction(SIGHUP, nullptr, &hang_up) != 0 || hang_up.sa_handler != SIG_IGN) {
    sigaddset(&signals, SIGHUP);
  }
  return signals;
}

// The kernel forgets a signal that a container's first process neither blocks nor handles, and
// libraries' constructors take time, and may take descriptors: before them, and before any thread.
// What is left is the 5 ms in which the libraries are mapped. None is ready then, nor is a
// sanitizer.
[[gnu::no_sanitize_address, gnu::no_sanitize_thread]] void BeforeLibraries() {
  ema::OccupyStandardFiles();
  static constexpr uint64_t kMask = (1u << (SIGTERM - 1)) | (1u << (SIGINT - 1));
  syscall(SYS_rt_sigprocmask, SIG_BLOCK, &kMask, nullptr, sizeof(kMask));
}
[[gnu::section(".preinit_array"), gnu::used]] void (*const kBeforeLibraries)() = &BeforeLibraries;

// Starts `count` threads at once and ends them. False: the system does not allow this many threads,
// or has no memory for them.
bool CanMakeThreads(int64_t count) {
  std::vector<std::thread> threads;
  std::atomic<bool> has_memory = true;  // For each of them; read when all have ended.
  absl::Notification all_tried;
  try {
    while (std::ssize(threads) < count) {
      threads.emplace_back([&] {
        // A thread's heap is address space that ulimit -v counts, like its stack.
        void* volatile memory =
            std::malloc(1);  // volatile: a compiler may leave out an unused one.
        if (memory == nullptr) has_memory = false;
        all_tried.WaitForNotification();
        std::free(memory);
      });
    }
  } catch (const std::system_error&) {  // Their number shows it.
  }
  all_tried.Notify();
  for (std::thread& thread : threads) thread.join();
  return has_memory && std::ssize(threads) == count;
}

// Prints that the server cannot start. Returns the exit code.
int FailWithoutThreads() {
  // The log needs a thread, too.
  std::fputs(
      "cannot start: the system does not allow the process enough threads; check ulimit -u and -v, "
      "and the container's limits of pids and memory\n",
      stderr);
  return 1;
}

std::string NameOf(int signal_number) { return absl::StrCat("SIG", sigabbrev_np(signal_number)); }

// Waits until the server is asked to stop: by a signal, for which a thread of its own waits, or by
// a client, whom a signal may follow: `docker stop` or a probe that finds the server not serving. A
// second signal ends the process at once, but for SIGHUP: of a terminal that is closed it comes
// twice, and after a Ctrl-C it does not mean haste.
class StopRequest {
 public:
  // `signals` are blocked in all threads.
  explicit StopRequest(const sigset_t& signals) : thread_([this, signals] { Run(signals); }) {}
  ~StopRequest() {
    is_over_ = true;
    // Its thread waits for it, blocked.
    pthread_kill(thread_.native_handle(), SIGTERM);  // NOLINT(bugprone-bad-signal-to-kill-thread)
    thread_.join();
  }

  // From here on there may be something to save: the first signal ends only Wait().
  void SetRecovered() { is_recovered_ = true; }

  // Requests a stop, as a signal does. False: a stop was requested before.
  bool Ask(std::string by) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (!asked_by_.empty()) return false;
    asked_by_ = std::move(by);
    asked_.WakeAll();
    return true;
  }
  // Waits until a stop is requested, and returns by what. Empty: `max_wait` has passed.
  std::string Wait(absl::Duration max_wait) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto is_asked = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !asked_by_.empty(); };
    asked_.AwaitUntil(mu_, ema::After(ema::SteadyNow(), max_wait), is_asked);
    return asked_by_;
  }

 private:
  void Run(const sigset_t& signals) {
    int number = 0;
    bool is_first = true;
    do {
      sigwait(&signals, &number);
      if (is_over_) return;
      if (!is_recovered_) {
        // A start changes nothing that a crash would spoil, and may wait for the disk for long.
        ema::Log(ema::LogLevel::kInfo, "stopped before the checkpoints had been read",
                 {{"signal", NameOf(number)}});
        ema::FlushLog();
        std::_Exit(0);
      }
      Ask(NameOf(number));
    } while (std::exchange(is_first, false) || number == SIGHUP);
    signal(number, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    raise(number);
    // The kernel leaves that out for a container's first process.
    _exit(128 + number);
  }

  std::atomic<bool> is_recovered_ = false;
  std::atomic<bool> is_over_ = false;
  absl::Mutex mu_;
  std::string asked_by_ ABSL_GUARDED_BY(mu_);  // Empty: no stop was requested.
  ema::SteadyWait asked_;                      // Woken when that changes.
  std::thread thread_;                         // The last: it uses the others.
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
  // A write beyond the file size limit, or to a pipe without a reader, fails instead of ending the
  // process. The log may be such a file or pipe.
  signal(SIGXFSZ, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);

  ema::SetUpHeap();

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

  // Blocked before any thread starts, so that they all inherit it and sigwait() gets every signal.
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  if (!CanMakeThreads(kStartThreads + parsed.options.thread_count +
                      std::thread::hardware_concurrency())) {
    return FailWithoutThreads();
  }
  // What is left of the address space may still be too little when the server starts its threads.
  const std::terminate_handler usual_handler = std::set_terminate([] {
    const std::exception_ptr error = std::current_exception();
    try {
      if (error != nullptr) std::rethrow_exception(error);
    } catch (const std::system_error& failed) {
      if (failed.code() == std::errc::resource_unavailable_try_again) {
        std::_Exit(FailWithoutThreads());
      }
    } catch (...) {  // Not of a thread.
    }
    std::abort();
  });
  LogStart(parsed);
  ema::SendLibraryLogTo([](const ema::LogEvent& event) { ema::Log(event); }, &ema::FlushLog);

  // Every connection is a descriptor.
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);

  StopRequest stop(signals);
  absl::StatusOr<std::unique_ptr<ema::Server>> server = ema::Server::Start(
      parsed.options, {.on_recovered = [&stop] { stop.SetRecovered(); },
                       .on_drain_requested = [&stop] { return stop.Ask("Drain"); }});
  if (!server.ok()) {
    ema::Log(ema::LogLevel::kError, "cannot start", {{"error", server.status()}});
    return 1;
  }
  std::set_terminate(usual_handler);
  ema::HeapTrimmer freed;
  std::string asked_by;
  while ((asked_by = stop.Wait(kTrimInterval)).empty()) freed.TrimHeap();
  ema::Log(ema::LogLevel::kInfo, "draining",
           {{"asked_by", asked_by},
            {"delay", parsed.options.drain_delay},
            {"grace", parsed.options.drain_grace}});
  const absl::Status drained = (*server)->Drain();
  if (drained.ok()) {
    ema::Log(ema::LogLevel::kInfo, "stopped");
  } else {
    ema::Log(ema::LogLevel::kError, "stopped", {{"error", drained}});
  }
  return drained.ok() ? 0 : 1;
}
