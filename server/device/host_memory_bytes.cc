// SPDX-License-Identifier: Apache-2.0
#include "server/device/host_memory_bytes.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace ema {
namespace {

// The number in a file; nothing if there is none, as in "max".
std::optional<int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  file >> text;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// The least memory limit of a control group and the groups above it. `group` is a path such as
// "/a/b"; inside a container it may be the host's, and then only `root` itself exists.
int64_t LimitOfGroup(const std::string& root, std::string group, const std::string& file) {
  int64_t limit = std::numeric_limits<int64_t>::max();
  while (true) {
    limit = std::min(limit, ReadNumber(absl::StrCat(root, group, "/", file)).value_or(limit));
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos) return limit;
    group.resize(slash);
  }
}

int64_t MemoryLimitOfControlGroups() {
  int64_t limit = std::numeric_limits<int64_t>::max();
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "4:memory:/a/b"; version 2: "0::/a/b".
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      limit = std::min({limit, LimitOfGroup("/sys/fs/cgroup", group, "memory.max"),
                        LimitOfGroup("/sys/fs/cgroup/unified", group, "memory.max")});
    } else if (absl::StrCat(",", controllers, ",").find(",memory,") != std::string::npos) {
      limit =
          std::min(limit, LimitOfGroup("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes"));
    }
  }
  return limit;
}

}  // namespace

int64_t HostMemoryBytes() {
  const int64_t physical = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return std::min(physical, MemoryLimitOfControlGroups());
}

}  // namespace ema
