// SPDX-License-Identifier: Apache-2.0
#include "server/base/small_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace ema {

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, int64_t max_bytes) {
  const auto not_readable = [](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("cannot be read: ", why));
  };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return not_readable(std::strerror(errno));
  const absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat about {};
  if (fstat(fd, &about) != 0) return not_readable(std::strerror(errno));
  if (!S_ISREG(about.st_mode)) return not_readable("not a regular file");
  // One byte more than its size shows whether the file is growing.
  std::string text(std::min<int64_t>(about.st_size, max_bytes) + 1, '\0');
  size_t size = 0;
  while (true) {
    const ssize_t got = read(fd, text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return not_readable(std::strerror(errno));
    if (got == 0) break;
    size += static_cast<size_t>(got);
    if (static_cast<int64_t>(size) > max_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("longer than ", max_bytes, " bytes"));
    }
    if (size == text.size()) text.resize(std::min<size_t>(2 * size, max_bytes + 1));
  }
  text.resize(size);
  return text;
}

}  // namespace ema
