// SPDX-License-Identifier: Apache-2.0
//
// A file in memory, for readers that are called with a path.
#ifndef EMA_TESTS_FUZZ_MEMORY_TEXT_FILE_H_
#define EMA_TESTS_FUZZ_MEMORY_TEXT_FILE_H_

#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <string_view>

#include "tests/fuzz/fuzz.h"

namespace ema {

class MemoryTextFile {
 public:
  MemoryTextFile() : fd_(memfd_create("fuzz", MFD_CLOEXEC)) { EMA_FUZZ_CHECK(fd_ >= 0); }
  ~MemoryTextFile() { close(fd_); }
  MemoryTextFile(const MemoryTextFile&) = delete;
  MemoryTextFile& operator=(const MemoryTextFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

  void Write(std::string_view text) {
    EMA_FUZZ_CHECK(ftruncate(fd_, 0) == 0);
    EMA_FUZZ_CHECK(pwrite(fd_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  }

 private:
  const int fd_;
};

}  // namespace ema

#endif  // EMA_TESTS_FUZZ_MEMORY_TEXT_FILE_H_
