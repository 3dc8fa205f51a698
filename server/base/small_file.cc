// SPDX-License-Identifier: Apache-2.0
#include "server/base/small_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace ema {
namespace {

absl::Status NotReadable() {
  return absl::InvalidArgumentError(absl::StrCat("cannot be read: ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, int64_t max_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return NotReadable();
  const absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat about {};
  if (fstat(fd, &about) != 0) return NotReadable();
  if (!S_ISREG(about.st_mode)) return absl::InvalidArgumentError("is no regular file");
  std::string text;
  char buffer[4096];
  while (true) {
    const ssize_t count = read(fd, buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return NotReadable();
    if (count == 0) return text;
    text.append(buffer, static_cast<size_t>(count));
    if (static_cast<int64_t>(text.size()) > max_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("longer than ", max_bytes, " bytes"));
    }
  }
}

}  // namespace ema
