// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/server_process.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

extern char** environ;

namespace ema {
namespace {

// A process tells its end and its port to nobody who waits: they are asked for.
constexpr absl::Duration kPollInterval = absl::Milliseconds(2);
// Sanitizers take their time.
constexpr absl::Duration kStartTimeout = absl::Seconds(60);
constexpr absl::Duration kStopTimeout = absl::Seconds(60);

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(
    std::vector<std::string> arguments) {
  if (const char* const folder = std::getenv("EMA_TEST_PROGRAMS"); folder != nullptr) {
    arguments[0] = std::filesystem::path(folder) / std::filesystem::path(arguments[0]).filename();
  }
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, argv[0], nullptr, nullptr, argv.data(), environ);
  if (error != 0) {
    return absl::InternalError(absl::StrCat(arguments[0], ": ", std::strerror(error)));
  }
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid));
}

ChildProcess::~ChildProcess() {
  if (ended_) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void ChildProcess::Signal(int signal) const {
  if (ended_) return;
  kill(pid_, signal);
  siginfo_t info = {};
  if (signal == SIGSTOP) waitid(P_PID, pid_, &info, WSTOPPED);
}

absl::StatusOr<int> ChildProcess::Wait(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!ended_) {
    if (waitpid(pid_, &status_, WNOHANG) == pid_) {
      ended_ = true;
      break;
    }
    if (absl::Now() >= deadline) return absl::DeadlineExceededError("the process still runs");
    absl::SleepFor(kPollInterval);
  }
  return status_;
}

absl::StatusOr<std::unique_ptr<ServerProcess>> ServerProcess::Start(
    const std::string& binary, std::vector<std::string> options) {
  const std::string port_file =
      (std::filesystem::temp_directory_path() / "ema-server-port.XXXXXX").string();
  std::string path = port_file;
  const int fd = mkstemp(path.data());
  if (fd < 0) return absl::InternalError("no temporary file");
  close(fd);
  std::vector<std::string> arguments = {binary, "--listen",    "127.0.0.1:0", "--port-file",
                                        path,   "--log-level", "error"};
  if (const char* const device = std::getenv("EMA_TEST_DEVICE"); device != nullptr) {
    arguments.emplace_back("--device");
    arguments.emplace_back(device);
  }
  arguments.insert(arguments.end(), options.begin(), options.end());
  absl::StatusOr<std::unique_ptr<ChildProcess>> process = ChildProcess::Start(arguments);
  if (!process.ok()) return process.status();
  const absl::Time deadline = absl::Now() + kStartTimeout;
  int port = 0;
  while (!(std::ifstream(path) >> port)) {
    if (!(*process)->is_running()) return absl::InternalError(absl::StrCat(binary, " has ended"));
    if (absl::Now() > deadline) return absl::DeadlineExceededError(binary);
    absl::SleepFor(kPollInterval);
  }
  unlink(path.c_str());
  return std::unique_ptr<ServerProcess>(new ServerProcess(*std::move(process), port));
}

std::string ServerProcess::address() const { return absl::StrCat("127.0.0.1:", port_); }

int64_t ServerProcess::resident_bytes() const {
  std::ifstream file(absl::StrCat("/proc/", process_->pid(), "/statm"));
  int64_t total_pages = 0;
  int64_t resident_pages = 0;
  file >> total_pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

int64_t ServerProcess::CountMappings(const std::string& name) const {
  std::ifstream maps(absl::StrCat("/proc/", process_->pid(), "/maps"));
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find(name) != std::string::npos ? 1 : 0;
  }
  return count;
}

int64_t ServerProcess::socket_count() const {
  std::error_code error;
  int64_t count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", process_->pid(), "/fd"), error)) {
    const std::filesystem::path target = std::filesystem::read_symlink(entry.path(), error);
    count += target.string().starts_with("socket:") ? 1 : 0;
  }
  return count;
}

int ServerProcess::Stop() {
  process_->Signal(SIGTERM);
  const absl::StatusOr<int> status = process_->Wait(kStopTimeout);
  return status.ok() && WIFEXITED(*status) ? WEXITSTATUS(*status) : -1;
}

}  // namespace ema
