// SPDX-License-Identifier: Apache-2.0
//
// All file access of the server, behind one small interface, so that tests can make any operation
// fail.
#ifndef EMA_SERVER_FORMAT_FILE_SYSTEM_H_
#define EMA_SERVER_FORMAT_FILE_SYSTEM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ema {

// A new file that is written from its start to its end. Not thread-safe. Every call may block on
// the disk. Destroying it without Close() closes it and ignores the error.
class WritableFile {
 public:
  virtual ~WritableFile() = default;

  // Writes all of `bytes`, or fails; then any part of them may have been written.
  // RESOURCE_EXHAUSTED, DISK_FULL. UNAVAILABLE: the disk failed.
  virtual absl::Status Append(std::span<const std::byte> bytes) = 0;

  // Returns when everything appended so far is on the disk. After an error it is unknown which
  // bytes are: the file must be discarded, not synced again (Linux reports such an error once).
  // RESOURCE_EXHAUSTED, DISK_FULL. UNAVAILABLE.
  virtual absl::Status Sync() = 0;

  // Ends the file; no other call may follow. Errors as Append().
  virtual absl::Status Close() = 0;
};

// A file that is read at any offset. Thread-safe. Every call may block on the disk.
class RandomAccessFile {
 public:
  virtual ~RandomAccessFile() = default;

  // The file's size when it was opened.
  virtual int64_t size_bytes() const = 0;

  // Fills all of `bytes` from `offset` on. DATA_LOSS: the file ends before that. UNAVAILABLE: the
  // disk failed. After an error `bytes` holds anything.
  virtual absl::Status Read(int64_t offset, std::span<std::byte> bytes) const = 0;

  // Asks the system to forget what it holds of the file in memory, so that the next Read() comes
  // from the disk. Best effort: bytes that are not synced stay, and not every system can.
  virtual void DropCache() const {}
};

// Holds an exclusive lock on a file until destroyed. The kernel frees it when the process ends,
// however it does.
class FileLock {
 public:
  virtual ~FileLock() = default;

  // False: the path names another file by now, or none, so another process may hold a lock there.
  // Errors as FileSystem's.
  virtual absl::StatusOr<bool> IsInPlace() const = 0;
};

struct DirectoryEntry {
  std::string name;
  bool is_directory = false;  // False for a symbolic link to one.
  bool is_link = false;
};

// Files and directories by path. Thread-safe. Every call may block on the disk.
//
// Errors of all calls, besides those named at each: NOT_FOUND: a part of the path is missing.
// PERMISSION_DENIED. RESOURCE_EXHAUSTED, DISK_FULL: no space or quota left. UNAVAILABLE,
// STORE_READ_ONLY: mounted read-only. RESOURCE_EXHAUSTED: too many files are open, or no memory is
// left. UNAVAILABLE: any other failure of the disk or the system.
// Messages hold the last part of the path, never more of it.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // Creates a file. ALREADY_EXISTS: the path exists, possibly as a symbolic link.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> NewWritableFile(
      const std::string& path) = 0;

  // FAILED_PRECONDITION: not a regular file (a directory, a pipe, a device, a symbolic link: none
  // is followed or opened).
  virtual absl::StatusOr<std::unique_ptr<RandomAccessFile>> OpenFile(const std::string& path) = 0;

  // Atomically renames `from` to `to`, replacing a file, or a directory that is empty (else
  // ALREADY_EXISTS). Durable only after SyncDirectory() of the parents.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;

  // Atomically exchanges the names of two existing files or directories; durable as Rename().
  // UNIMPLEMENTED: the file system cannot.
  virtual absl::Status Exchange(const std::string& a, const std::string& b) = 0;

  // Returns when the directory's list of names is on the disk.
  virtual absl::Status SyncDirectory(const std::string& path) = 0;

  // Makes one directory. ALREADY_EXISTS: something has that name.
  virtual absl::Status CreateDirectory(const std::string& path) = 0;

  // Sorted by name, without "." and "..".
  virtual absl::StatusOr<std::vector<DirectoryEntry>> ListDirectory(const std::string& path) = 0;

  virtual absl::Status RemoveFile(const std::string& path) = 0;

  // Removes a directory and all in it; follows no symbolic link. OK if it does not exist. After an
  // error some of it is left.
  virtual absl::Status RemoveTree(const std::string& path) = 0;

  virtual absl::StatusOr<bool> Exists(const std::string& path) = 0;

  // Bytes that this process may still write to the file system that holds `path`.
  virtual absl::StatusOr<int64_t> FreeBytes(const std::string& path) = 0;

  // Locks the file `path`, made if need be, without waiting. ABORTED: another holder has locked it.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) = 0;

  // --- In terms of the above ---

  // Reads a whole file. FAILED_PRECONDITION: it has more than `max_bytes`, or is not a regular
  // file.
  absl::StatusOr<std::string> ReadSmallFile(const std::string& path, int64_t max_bytes);
};

// The file system of the machine. Lives until the process ends.
FileSystem& PosixFileSystem();

// "a/b" from "a" and "b".
std::string JoinPath(std::string_view directory, std::string_view name);
// "b" from "a/b" and from "a/b/".
std::string BaseName(std::string_view path);
// "a" from "a/b" and from "a/b/", "/" from "/b", "." from "b".
std::string ParentPath(std::string_view path);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_FILE_SYSTEM_H_
