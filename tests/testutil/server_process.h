// SPDX-License-Identifier: Apache-2.0
//
// Other processes that a test runs: a real ema-server, and programs of its own.
#ifndef EMA_TESTS_TESTUTIL_SERVER_PROCESS_H_
#define EMA_TESTS_TESTUTIL_SERVER_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ema {

// A child process. Killed when this is destroyed. For one thread.
class ChildProcess {
 public:
  // Runs `arguments`, the first of which is the program's path; where EMA_TEST_PROGRAMS names a
  // folder, the program of that name there: on a machine that has not built it.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(std::vector<std::string> arguments);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  // SIGSTOP: returns when all its threads have stopped.
  void Signal(int signal) const;
  // Waits for its end, at most `timeout`. The status is as waitpid() gives it.
  absl::StatusOr<int> Wait(absl::Duration timeout);
  bool is_running() { return !Wait(absl::ZeroDuration()).ok(); }

 private:
  explicit ChildProcess(pid_t pid) : pid_(pid) {}

  const pid_t pid_;
  bool ended_ = false;
  int status_ = 0;
};

// An ema-server on a free port of 127.0.0.1.
class ServerProcess {
 public:
  // Serves when it returns. `options` are its command line, beside address, port file, log level,
  // and EMA_TEST_DEVICE, if that is set, as its device.
  static absl::StatusOr<std::unique_ptr<ServerProcess>> Start(const std::string& binary,
                                                              std::vector<std::string> options);

  int port() const { return port_; }
  std::string address() const;
  bool is_running() { return process_->is_running(); }
  void Signal(int signal) const { process_->Signal(signal); }
  // The number of its mappings of files whose names contain `name`.
  int64_t CountMappings(const std::string& name) const;
  // What of its memory is resident.
  int64_t resident_bytes() const;
  // Its open sockets.
  int64_t socket_count() const;
  // Ends it with SIGTERM, and waits. Its exit code; -1: it crashed, or had to be killed.
  int Stop();

 private:
  ServerProcess(std::unique_ptr<ChildProcess> process, int port)
      : process_(std::move(process)), port_(port) {}

  const std::unique_ptr<ChildProcess> process_;
  const int port_;
};

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_SERVER_PROCESS_H_
