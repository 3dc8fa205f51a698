// SPDX-License-Identifier: Apache-2.0
//
// A file in memory, for libraries that read files by name.
#ifndef EMA_SERVER_RPC_MEMORY_FILE_H_
#define EMA_SERVER_RPC_MEMORY_FILE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ema {

// Readers in this process open it by its path, which processes of other users cannot. Movable; not
// thread-safe, except for reading.
class MemoryFile {
 public:
  // `modified_seconds`: its time of modification, since the epoch. INTERNAL: a system call failed.
  static absl::StatusOr<MemoryFile> Make(std::string_view text, int64_t modified_seconds);
  MemoryFile(MemoryFile&& other) noexcept;
  MemoryFile& operator=(MemoryFile&&) = delete;
  ~MemoryFile();

  // Valid as long as this lives.
  std::string path() const;
  // Atomically puts `other` at this path; readers that have opened the previous file keep reading
  // it. INTERNAL: a system call failed; nothing has changed.
  absl::Status ReplaceBy(MemoryFile other);

 private:
  explicit MemoryFile(int fd) : fd_(fd) {}

  int fd_;  // -1: moved from.
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_MEMORY_FILE_H_
