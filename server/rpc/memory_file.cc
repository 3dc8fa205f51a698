// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ema {
namespace {

absl::Status SystemError(absl::string_view what) {
  return absl::InternalError(absl::StrCat("file in memory: ", what, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<MemoryFile> MemoryFile::Make(std::string_view text, int64_t modified_seconds) {
  const int fd = memfd_create("ema-file", MFD_CLOEXEC);
  if (fd < 0) return SystemError("memfd_create");
  MemoryFile file(fd);
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written < 0 && errno != EINTR) return SystemError("write");
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
  }
  const timespec times[2] = {{modified_seconds, 0}, {modified_seconds, 0}};
  if (futimens(fd, times) != 0) return SystemError("futimens");
  return file;
}

MemoryFile::MemoryFile(MemoryFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

MemoryFile::~MemoryFile() {
  if (fd_ >= 0) close(fd_);
}

std::string MemoryFile::path() const { return absl::StrCat("/proc/self/fd/", fd_); }

absl::Status MemoryFile::ReplaceBy(MemoryFile other) {
  while (dup3(other.fd_, fd_, O_CLOEXEC) < 0) {
    if (errno != EINTR) return SystemError("dup3");
  }
  return absl::OkStatus();
}

}  // namespace ema
