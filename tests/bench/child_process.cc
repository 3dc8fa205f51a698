// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "tests/bench/bench_util.h"

namespace ema::bench {

ChildProcess::ChildProcess(const std::vector<std::string>& argv, Stop stop)
    : name_(argv.front()), stop_(stop) {
  int input[2];
  int output[2];
  if (pipe2(input, O_CLOEXEC) != 0 || pipe2(output, O_CLOEXEC) != 0) Die("no pipe");
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  pid_ = fork();
  if (pid_ < 0) Die("cannot fork");
  if (pid_ == 0) {
    // Other threads hold locks that nobody gives back here: only system calls.
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    dup2(input[0], STDIN_FILENO);
    dup2(output[1], STDOUT_FILENO);
    execvp(arguments.front(), arguments.data());
    _exit(127);
  }
  close(input[0]);
  close(output[1]);
  to_ = fdopen(input[1], "w");
  from_ = fdopen(output[0], "r");
}

ChildProcess::~ChildProcess() {
  std::fclose(to_);
  if (stop_ == Stop::kTerminate) kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
  std::fclose(from_);
}

std::string ChildProcess::ReadLine() {
  std::string line;
  for (int c = std::fgetc(from_); c != '\n'; c = std::fgetc(from_)) {
    if (c == EOF) Die(absl::StrCat(name_, " has ended"));
    line.push_back(static_cast<char>(c));
  }
  return line;
}

void ChildProcess::WriteLine(const std::string& line) {
  std::fprintf(to_, "%s\n", line.c_str());
  std::fflush(to_);
}

std::string FindProgram(const std::string& name) {
  const char* const path = std::getenv("PATH");
  for (const absl::string_view folder : absl::StrSplit(path != nullptr ? path : "", ':')) {
    const std::string file = absl::StrCat(folder, "/", name);
    if (access(file.c_str(), X_OK) == 0) return file;
  }
  return "";
}

double CpuSeconds(pid_t pid) {
  clockid_t clock{};
  timespec used{};
  if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &used) != 0) {
    Die(absl::StrCat("no CPU clock of process ", pid));
  }
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

int64_t PeakResidentBytes(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  constexpr std::string_view kField = "VmHWM:";
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(kField)) return std::stoll(line.substr(kField.size())) * 1024;
  }
  Die(absl::StrCat("no VmHWM of process ", pid));
}

}  // namespace ema::bench
