// SPDX-License-Identifier: Apache-2.0
//
// Memory that two processes of one host share.
#ifndef EMA_SERVER_WIRE_SHARED_MEMORY_H_
#define EMA_SERVER_WIRE_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"

namespace ema {

// A mapped memfd. Its size is sealed, so that a peer cannot truncate it while it is read. Movable
// between threads; the mapping itself is as safe as its users are.
class SharedMemory {
 public:
  // Makes zeroed memory that both processes may write. INTERNAL: the system refuses, or
  // RLIMIT_FSIZE is too small.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create(int64_t size_bytes);
  // Maps memory that Create() has made in another process. Takes ownership of `fd`.
  // INVALID_ARGUMENT: it has another size, or is not sealed.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Map(int fd, int64_t size_bytes);

  // Makes memory that only this process may write: a window. All its pages exist when this returns.
  // A forked child inherits the descriptor, but not the mapping. Errors as Create().
  static absl::StatusOr<std::unique_ptr<SharedMemory>> CreateWindow(int64_t size_bytes);
  // Called with the size of a window. False: do not map it. Null counts as false.
  using Admit = std::function<bool(int64_t size_bytes)>;
  // Maps a window of another process, only for reading. Takes ownership of `fd`. Null: `admit` has
  // returned false. INVALID_ARGUMENT: its size can change, it can get new writers, or some of its
  // pages do not exist, so that reading them would allocate memory here. INTERNAL: the system
  // refuses; `admit` may have returned true.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> MapWindow(int fd, const Admit& admit);

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  int fd() const { return fd_; }
  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  SharedMemory(int fd, std::byte* data, int64_t size_bytes)
      : fd_(fd), data_(data), size_bytes_(size_bytes) {}
  // Maps all of the file. `protection`: as for mmap(). Takes ownership of `fd`.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> MapFile(int fd, int64_t size_bytes,
                                                               int protection);

  const int fd_;
  std::byte* const data_;
  const int64_t size_bytes_;
};

}  // namespace ema

#endif  // EMA_SERVER_WIRE_SHARED_MEMORY_H_
