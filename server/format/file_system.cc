// SPDX-License-Identifier: Apache-2.0
#include "server/format/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/heartbeat.h"

namespace ema {
namespace {

std::string_view WithoutEndSlash(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  return path;
}

constexpr mode_t kFileMode = 0644;
constexpr mode_t kDirectoryMode = 0755;

absl::Status NotRegular(const std::string& path) {
  return absl::FailedPreconditionError(
      absl::StrCat("\"", BaseName(path), "\" is not a regular file"));
}

// The Status of a failed system call. `operation` says what was tried: "write", "open". Of paths it
// has the last part: messages may reach clients.
absl::Status ErrnoStatus(int error, const char* operation, const std::string& path) {
  const std::string message = absl::StrCat(operation, " \"", BaseName(path),
                                           "\": ", std::generic_category().message(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EEXIST:
    case ENOTEMPTY:
      return absl::AlreadyExistsError(message);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(message);
    case ENOSPC:
    case EDQUOT:
      return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kDiskFull, message);
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return absl::ResourceExhaustedError(message);
    case EROFS:
      return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kStoreReadOnly, message);
    default:
      return absl::UnavailableError(message);
  }
}

// Closes a file descriptor when it goes.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

absl::StatusOr<Descriptor> OpenDescriptor(const std::string& path, int flags) {
  while (true) {
    const int fd = open(path.c_str(), flags | O_CLOEXEC, kFileMode);
    if (fd >= 0) return Descriptor(fd);
    if (errno == EINTR) continue;
    // O_NOFOLLOW met a link, or O_NONBLOCK a pipe or a socket.
    if ((flags & O_NOFOLLOW) && (errno == ELOOP || errno == ENXIO)) return NotRegular(path);
    return ErrnoStatus(errno, "open", path);
  }
}

absl::Status SyncDescriptor(int fd, const std::string& path) {
  Heartbeat::Beat();
  while (fsync(fd) != 0) {
    if (errno != EINTR) return ErrnoStatus(errno, "sync", path);
  }
  return absl::OkStatus();
}

class PosixWritableFile final : public WritableFile {
 public:
  PosixWritableFile(Descriptor fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  absl::Status Append(std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      Heartbeat::Beat();
      const ssize_t n = write(fd_.get(), bytes.data(), bytes.size());
      if (n < 0 && errno != EINTR) return ErrnoStatus(errno, "write", path_);
      if (n > 0) bytes = bytes.subspan(n);
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override { return SyncDescriptor(fd_.get(), path_); }

  absl::Status Close() override {
    // Linux has closed the descriptor even when it says EINTR.
    if (close(fd_.release()) != 0 && errno != EINTR) return ErrnoStatus(errno, "close", path_);
    return absl::OkStatus();
  }

 private:
  Descriptor fd_;
  const std::string path_;
};

class PosixRandomAccessFile final : public RandomAccessFile {
 public:
  PosixRandomAccessFile(Descriptor fd, int64_t size_bytes, std::string path)
      : fd_(std::move(fd)), size_bytes_(size_bytes), path_(std::move(path)) {}

  int64_t size_bytes() const override { return size_bytes_; }

  // pread, not mmap: if the file is truncated, SIGBUS must not kill the server.
  absl::Status Read(int64_t offset, std::span<std::byte> bytes) const override {
    while (!bytes.empty()) {
      Heartbeat::Beat();
      const ssize_t n = pread(fd_.get(), bytes.data(), bytes.size(), offset);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ErrnoStatus(errno, "read", path_);
      if (n == 0) {
        return absl::DataLossError(absl::StrCat("\"", BaseName(path_), "\" ends at byte ", offset,
                                                ", expected ", bytes.size(), " more"));
      }
      offset += n;
      bytes = bytes.subspan(n);
    }
    return absl::OkStatus();
  }

  void DropCache() const override { posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_DONTNEED); }

 private:
  const Descriptor fd_;
  const int64_t size_bytes_;
  const std::string path_;
};

class PosixFileLock final : public FileLock {
 public:
  PosixFileLock(Descriptor fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  absl::StatusOr<bool> IsInPlace() const override {
    struct stat held;
    struct stat there;
    if (fstat(fd_.get(), &held) != 0) return ErrnoStatus(errno, "stat", path_);
    if (lstat(path_.c_str(), &there) != 0) {
      if (errno == ENOENT || errno == ENOTDIR) return false;
      return ErrnoStatus(errno, "stat", path_);
    }
    return held.st_dev == there.st_dev && held.st_ino == there.st_ino;
  }

 private:
  const Descriptor fd_;  // Closing it frees the lock.
  const std::string path_;
};

// "process 42 on host a": what a lock file says of its holder.
std::string DescribeSelf() {
  char host[256] = "?";
  gethostname(host, sizeof(host) - 1);
  return absl::StrCat("process ", getpid(), " on host ", host);
}

class PosixFileSystemImpl final : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> NewWritableFile(const std::string& path) override {
    EMA_ASSIGN_OR_RETURN(Descriptor fd,
                         OpenDescriptor(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW));
    return std::make_unique<PosixWritableFile>(std::move(fd), path);
  }

  absl::StatusOr<std::unique_ptr<RandomAccessFile>> OpenFile(const std::string& path) override {
    // O_NONBLOCK: opening a pipe must not wait for its writer.
    EMA_ASSIGN_OR_RETURN(Descriptor fd, OpenDescriptor(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
    struct stat info;
    if (fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "stat", path);
    if (!S_ISREG(info.st_mode)) return NotRegular(path);
    return std::make_unique<PosixRandomAccessFile>(std::move(fd), info.st_size, path);
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) != 0) return ErrnoStatus(errno, "rename to", to);
    return absl::OkStatus();
  }

  absl::Status Exchange(const std::string& a, const std::string& b) override {
    if (renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) {
      return absl::OkStatus();
    }
    if (errno == EINVAL || errno == ENOSYS) return absl::UnimplementedError("exchange of names");
    return ErrnoStatus(errno, "rename to", b);
  }

  absl::Status SyncDirectory(const std::string& path) override {
    EMA_ASSIGN_OR_RETURN(const Descriptor fd, OpenDescriptor(path, O_RDONLY | O_DIRECTORY));
    return SyncDescriptor(fd.get(), path);
  }

  absl::Status CreateDirectory(const std::string& path) override {
    if (mkdir(path.c_str(), kDirectoryMode) != 0) return ErrnoStatus(errno, "make", path);
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<DirectoryEntry>> ListDirectory(const std::string& path) override {
    DIR* const directory = opendir(path.c_str());
    if (directory == nullptr) return ErrnoStatus(errno, "list", path);
    const absl::Cleanup close_directory = [directory] { closedir(directory); };
    std::vector<DirectoryEntry> entries;
    while (true) {
      errno = 0;
      const dirent* const entry = readdir(directory);
      if (entry == nullptr && errno != 0) return ErrnoStatus(errno, "list", path);
      if (entry == nullptr) break;
      const std::string name = entry->d_name;
      if (name == "." || name == "..") continue;
      unsigned char type = entry->d_type;
      struct stat info;
      if (type == DT_UNKNOWN &&  // Some file systems do not say.
          fstatat(dirfd(directory), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0) {
        type = IFTODT(info.st_mode);
      }
      entries.push_back({name, type == DT_DIR, type == DT_LNK});
    }
    std::sort(entries.begin(), entries.end(),
              [](const DirectoryEntry& a, const DirectoryEntry& b) { return a.name < b.name; });
    return entries;
  }

  absl::Status RemoveFile(const std::string& path) override {
    if (unlink(path.c_str()) != 0) return ErrnoStatus(errno, "remove", path);
    return absl::OkStatus();
  }

  absl::Status RemoveTree(const std::string& path) override {
    absl::StatusOr<std::vector<DirectoryEntry>> entries = ListDirectory(path);
    if (absl::IsNotFound(entries.status())) return absl::OkStatus();
    EMA_RETURN_IF_ERROR(entries.status());
    for (const DirectoryEntry& entry : *entries) {
      const std::string child = JoinPath(path, entry.name);
      EMA_RETURN_IF_ERROR(entry.is_directory ? RemoveTree(child) : RemoveFile(child));
    }
    if (rmdir(path.c_str()) != 0) return ErrnoStatus(errno, "remove", path);
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Exists(const std::string& path) override {
    struct stat info;
    if (lstat(path.c_str(), &info) == 0) return true;
    if (errno == ENOENT || errno == ENOTDIR) return false;
    return ErrnoStatus(errno, "stat", path);
  }

  absl::StatusOr<int64_t> FreeBytes(const std::string& path) override {
    struct statvfs info;
    while (statvfs(path.c_str(), &info) != 0) {
      if (errno != EINTR) return ErrnoStatus(errno, "stat", path);
    }
    int64_t bytes = 0;
    if (__builtin_mul_overflow(info.f_bavail, info.f_frsize, &bytes)) return INT64_MAX;
    return bytes;
  }

  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override {
    EMA_ASSIGN_OR_RETURN(Descriptor fd, OpenDescriptor(path, O_RDWR | O_CREAT | O_NOFOLLOW));
    while (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) return ErrnoStatus(errno, "lock", path);
      char holder[512];
      const ssize_t n = pread(fd.get(), holder, sizeof(holder), 0);
      return absl::AbortedError(
          absl::StrCat("\"", BaseName(path), "\" is held by ",
                       n > 0 ? std::string(holder, n) : std::string("another process")));
    }
    // Only for that message, so a failure does not matter.
    const std::string self = DescribeSelf();
    if (ftruncate(fd.get(), 0) != 0 || pwrite(fd.get(), self.data(), self.size(), 0) < 0) {
    }
    return std::make_unique<PosixFileLock>(std::move(fd), path);
  }
};

}  // namespace

absl::StatusOr<std::string> FileSystem::ReadSmallFile(const std::string& path, int64_t max_bytes) {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<RandomAccessFile> file, OpenFile(path));
  if (file->size_bytes() > max_bytes) {
    return absl::FailedPreconditionError(absl::StrCat("\"", BaseName(path), "\" has ",
                                                      file->size_bytes(), " bytes, at most ",
                                                      max_bytes, " expected"));
  }
  std::string text(file->size_bytes(), '\0');
  EMA_RETURN_IF_ERROR(file->Read(0, std::as_writable_bytes(std::span(text))));
  return text;
}

FileSystem& PosixFileSystem() {
  static PosixFileSystemImpl* const file_system = new PosixFileSystemImpl;
  return *file_system;
}

std::string JoinPath(std::string_view directory, std::string_view name) {
  std::string path(directory);
  if (!path.empty() && path.back() != '/') path += '/';
  path += name;
  return path;
}

std::string BaseName(std::string_view path) {
  const std::string_view trimmed = WithoutEndSlash(path);
  return std::string(trimmed.substr(trimmed.rfind('/') + 1));
}

std::string ParentPath(std::string_view path) {
  const std::string_view trimmed = WithoutEndSlash(path);
  const size_t slash = trimmed.rfind('/');
  if (slash == std::string_view::npos) return ".";
  const std::string_view parent = WithoutEndSlash(trimmed.substr(0, slash));
  return parent.empty() ? "/" : std::string(parent);
}

}  // namespace ema
