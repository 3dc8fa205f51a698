// SPDX-License-Identifier: Apache-2.0
//
// A file that is in memory only, for libraries that want the name of one.
#ifndef EMA_SERVER_RPC_MEMORY_FILE_H_
#define EMA_SERVER_RPC_MEMORY_FILE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ema {

// Readers in this process open it by its path; no other may who is not this user. Movable; not
// thread-safe, but for those who read.
class MemoryFile {
 public:
  // `modified_seconds`: its time of modification, since the epoch. INTERNAL: the system refuses.
  static absl::StatusOr<MemoryFile> Make(std::string_view text, int64_t modified_seconds);
  MemoryFile(MemoryFile&& other) noexcept;
  MemoryFile& operator=(MemoryFile&&) = delete;
  ~MemoryFile();

  // Valid as long as this lives.
  std::string path() const;
  // At this path is `other` from here on, all at once: who has opened what was there reads that.
  // INTERNAL: the system refuses; nothing has changed.
  absl::Status ReplaceBy(MemoryFile other);

 private:
  explicit MemoryFile(int fd) : fd_(fd) {}

  int fd_;  // -1: moved from.
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_MEMORY_FILE_H_
