// SPDX-License-Identifier: Apache-2.0
#include "server/ops/process_stats.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

namespace ema {
namespace {

// When the machine started, in seconds since the epoch.
double BootTime() {
  std::ifstream file("/proc/stat");
  std::string word;
  while (file >> word) {
    double seconds = 0;
    if (word == "btime" && file >> seconds) return seconds;
  }
  return 0;
}

double StartTime() {
  std::ifstream file("/proc/self/stat");
  std::string text;
  std::getline(file, text);
  // The program's name, in parentheses, may hold anything; the start is the 20th field behind it.
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string field;
  for (int i = 0; i < 20; ++i) fields >> field;
  if (field.empty()) return 0;
  return BootTime() + std::stod(field) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double SecondsOf(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

}  // namespace

int64_t PrivateBytes() {
  int64_t pages = 0;
  int64_t resident_pages = 0;
  int64_t shared_pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident_pages >> shared_pages;
  return (resident_pages - shared_pages) * sysconf(_SC_PAGESIZE);
}

int64_t ResidentBytes() {
  int64_t pages = 0;
  int64_t resident_pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

ProcessStats ReadProcessStats() {
  static const double start_time = StartTime();
  ProcessStats stats{.start_time_seconds = start_time};
  stats.resident_bytes = ResidentBytes();
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator("/proc/self/fd", error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    ++stats.open_fds;
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) stats.max_fds = static_cast<int64_t>(limit.rlim_cur);
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) == 0) {
    stats.cpu_seconds = SecondsOf(usage.ru_utime) + SecondsOf(usage.ru_stime);
  }
  return stats;
}

}  // namespace ema
