// SPDX-License-Identifier: Apache-2.0
#include "server/wire/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// Later mappings are read-only, and no process can punch holes. The maker's mapping stays writable.
constexpr int kWindowSeals = kSizeSeals | F_SEAL_FUTURE_WRITE;

absl::Status MemoryError(const char* what, int error = errno) {
  return absl::InternalError(absl::StrCat("shared memory: ", what, ": ", std::strerror(error)));
}

bool HasSeals(int fd, int seals) {
  const int present = fcntl(fd, F_GET_SEALS);
  return present >= 0 && (present & seals) == seals;
}

// Returns the descriptor of an empty file in memory that may grow to `size_bytes`. /proc shows
// `name`.
absl::StatusOr<int> MakeFile(const char* name, int64_t size_bytes) {
  // Where files may not be so long, growing one ends a process that does not ignore SIGXFSZ.
  rlimit files{};
  if (getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur < static_cast<rlim_t>(size_bytes)) {
    return absl::InternalError(absl::StrCat("shared memory: the process may write files of ",
                                            files.rlim_cur, " bytes, expected at least ",
                                            size_bytes));
  }
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return MemoryError("memfd_create");
  return fd;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(int64_t size_bytes) {
  EMA_ASSIGN_OR_RETURN(const int fd, MakeFile("ema-lane", size_bytes));
  if (ftruncate(fd, size_bytes) != 0 || fcntl(fd, F_ADD_SEALS, kSizeSeals) != 0) {
    absl::Status status = MemoryError("setting the size of a memfd");
    close(fd);
    return status;
  }
  return Map(fd, size_bytes);
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Map(int fd, int64_t size_bytes) {
  struct stat about {};
  if (!HasSeals(fd, kSizeSeals) || fstat(fd, &about) != 0 || about.st_size != size_bytes) {
    close(fd);
    return absl::InvalidArgumentError(absl::StrCat("shared memory: expected a memfd of ",
                                                   size_bytes, " bytes with a sealed size"));
  }
  return MapFile(fd, size_bytes, PROT_READ | PROT_WRITE);
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::CreateWindow(int64_t size_bytes) {
  EMA_ASSIGN_OR_RETURN(const int fd, MakeFile("ema-window", size_bytes));
  // A lack of shared memory is an error here; later it would be a signal.
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(fd, 0, size_bytes);
  if (error != 0) {
    close(fd);
    return MemoryError("allocating a window", error);
  }
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<SharedMemory> window,
                       MapFile(fd, size_bytes, PROT_READ | PROT_WRITE));
  if (madvise(window->data(), static_cast<size_t>(size_bytes), MADV_DONTFORK) != 0 ||
      fcntl(fd, F_ADD_SEALS, kWindowSeals) != 0) {
    return MemoryError("sealing a window");
  }
  return window;
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::MapWindow(int fd, const Admit& admit) {
  struct stat about {};
  struct statfs system {};
  // A hole would be filled with this process's memory. In a file of huge pages, it could end this
  // process with a signal.
  if (!HasSeals(fd, kWindowSeals) || fstat(fd, &about) != 0 || about.st_size <= 0 ||
      fstatfs(fd, &system) != 0 || system.f_type != TMPFS_MAGIC ||
      lseek(fd, 0, SEEK_HOLE) != about.st_size) {
    close(fd);
    return absl::InvalidArgumentError(
        "shared memory: expected a memfd that is allocated completely, and is sealed against other "
        "sizes and new writers");
  }
  if (!admit || !admit(about.st_size)) {
    close(fd);
    return nullptr;
  }
  return MapFile(fd, about.st_size, PROT_READ);
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::MapFile(int fd, int64_t size_bytes,
                                                                    int protection) {
  void* const data =
      mmap(nullptr, static_cast<size_t>(size_bytes), protection, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (data == MAP_FAILED) {
    absl::Status status = MemoryError("mmap");
    close(fd);
    return status;
  }
  return std::unique_ptr<SharedMemory>(
      new SharedMemory(fd, static_cast<std::byte*>(data), size_bytes));
}

SharedMemory::~SharedMemory() {
  munmap(data_, static_cast<size_t>(size_bytes_));
  close(fd_);
}

}  // namespace ema
