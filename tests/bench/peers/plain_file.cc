// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/peers/plain_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "tests/bench/bench_util.h"

namespace ema::bench {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;

int OpenOrDie(const std::string& path, int flags) {
  const int fd = open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (fd < 0) Die("cannot open " + path);
  return fd;
}

}  // namespace

void WritePlainFile(const std::string& path, std::span<const std::byte> bytes) {
  const int fd = OpenOrDie(path, O_WRONLY | O_CREAT | O_EXCL);
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), std::min(kBufferBytes, bytes.size()));
    if (n <= 0) Die("cannot write " + path);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  if (fsync(fd) != 0 || close(fd) != 0) Die("cannot sync " + path);
}

void ReadPlainFile(const std::string& path) {
  static std::vector<std::byte> buffer(kBufferBytes);
  const int fd = OpenOrDie(path, O_RDONLY);
  ssize_t n = 0;
  do {
    n = read(fd, buffer.data(), buffer.size());
  } while (n > 0);
  if (n < 0) Die("cannot read " + path);
  close(fd);
}

void DropCache(const std::string& path) {
  if (std::filesystem::is_directory(path)) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) DropCache(entry.path());
    return;
  }
  const int fd = OpenOrDie(path, O_RDONLY);
  if (posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) Die("cannot drop the cache of " + path);
  close(fd);
}

}  // namespace ema::bench
