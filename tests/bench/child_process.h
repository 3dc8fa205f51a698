// SPDX-License-Identifier: Apache-2.0
//
// The other process of a row, and what the kernel says of it.
#ifndef EMA_TESTS_BENCH_CHILD_PROCESS_H_
#define EMA_TESTS_BENCH_CHILD_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace ema::bench {

// Its standard input and output are pipes to us. It gets SIGTERM if we die.
class ChildProcess {
 public:
  // How it is told to end.
  enum class Stop { kTerminate, kEndOfInput };
  // `argv[0]` is a path, or looked for in PATH.
  ChildProcess(const std::vector<std::string>& argv, Stop stop);
  ~ChildProcess();  // Waits for its end.
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // The next line that it prints, without its end.
  std::string ReadLine();
  void WriteLine(const std::string& line);

  pid_t pid() const { return pid_; }

 private:
  const std::string name_;
  const Stop stop_;
  pid_t pid_ = 0;
  std::FILE* to_ = nullptr;
  std::FILE* from_ = nullptr;
};

// The program's path; empty: it is not in PATH.
std::string FindProgram(const std::string& name);

// User and system time of all of a process's threads so far.
double CpuSeconds(pid_t pid);

// The most memory that a process ever had.
int64_t PeakResidentBytes(pid_t pid);

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_CHILD_PROCESS_H_
