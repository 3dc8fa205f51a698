// SPDX-License-Identifier: Apache-2.0
//
// A file system in memory that remembers what has been synced, for tests: any operation can be made
// to fail, and the power can go at any moment.
#ifndef EMA_TESTS_TESTUTIL_FAKE_FILE_SYSTEM_H_
#define EMA_TESTS_TESTUTIL_FAKE_FILE_SYSTEM_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/format/file_system.h"

namespace ema {

// What is left of things that were not synced when the power goes.
enum class PowerLoss {
  kNone,       // All of it: only the process was killed.
  kNothing,    // None.
  kNamesOnly,  // All names, but the files have only the bytes that were synced.
  kAnything,  // Any part of it, by the seed: each change of each directory or not, and of each file
              // all, nothing, its first bytes, zeros, or some of its sectors and zeros.
};

// Operations of the file system are thread-safe; so are the others, but for the setters.
class FakeFileSystem final : public FileSystem {
 public:
  // Called before each operation, with its name ("create", "append", "sync", "close", "open",
  // "read", "rename", "exchange", "syncdir", "mkdir", "list", "remove", "exists", "free", "lock",
  // "place" of a lock) and path. If it gives an error the operation fails with that; half of an
  // append's bytes are written then.
  using Hook = std::function<absl::Status(const std::string& operation, const std::string& path)>;
  void set_hook(Hook hook) { hook_ = std::move(hook); }
  // Those of "sync", "syncdir" and "rename" for which it gives true say OK and do nothing: so a
  // test can see what comes of a step that is left out.
  using Ignored = std::function<bool(const std::string& operation, const std::string& path)>;
  void set_ignored(Ignored ignored) { ignored_ = std::move(ignored); }
  void set_free_bytes(int64_t bytes) { free_bytes_ = bytes; }

  // The files as they are after the machine has gone down now. Locks are free, the hook is gone.
  std::unique_ptr<FakeFileSystem> AfterCrash(PowerLoss loss, uint32_t seed = 0) const;

  // Everything that has been written so far is on the disk, as after sync(1).
  void SyncAll();

  // Equal if and only if all names and bytes are.
  std::string Fingerprint() const;

  // The bytes of a file, to look at or to damage. REQUIRES: it is there.
  std::string& FileBytes(const std::string& path);
  // All files and directories, as paths.
  std::vector<std::string> AllPaths() const;

  absl::StatusOr<std::unique_ptr<WritableFile>> NewWritableFile(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<RandomAccessFile>> OpenFile(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Exchange(const std::string& a, const std::string& b) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::Status CreateDirectory(const std::string& path) override;
  absl::StatusOr<std::vector<DirectoryEntry>> ListDirectory(const std::string& path) override;
  absl::Status RemoveFile(const std::string& path) override;
  // One operation ("remove") for each name that goes.
  absl::Status RemoveTree(const std::string& path) override;
  absl::StatusOr<bool> Exists(const std::string& path) override;
  absl::StatusOr<int64_t> FreeBytes(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override;

 private:
  class Writer;
  class Reader;
  class Holder;

  // A file or a directory. Numbered, so that a copy of the whole can be made.
  struct Node {
    bool is_directory = false;
    std::string bytes;
    std::string synced_bytes;
    std::map<std::string, int64_t> names;  // In a directory: numbers of nodes.
  };
  // A change of one directory: happens as a whole or not at all.
  struct Change {
    int64_t directory = 0;
    std::vector<std::pair<std::string, std::optional<int64_t>>> names;
    bool is_synced = false;
  };

  absl::Status Call(const std::string& operation, const std::string& path) const;
  bool IsIgnored(const std::string& operation, const std::string& path) const;
  std::optional<int64_t> Find(const std::string& path) const;
  // The directory that holds `path`, and its name there.
  absl::StatusOr<std::pair<int64_t, std::string>> FindParent(const std::string& path) const;
  void Apply(int64_t directory, std::vector<std::pair<std::string, std::optional<int64_t>>> names);
  absl::Status RemoveNode(const std::string& path);

  // Not held while the hook runs, which may look at the files or wait for another thread.
  using Held = std::lock_guard<std::recursive_mutex>;
  mutable std::recursive_mutex mu_;
  // The first is the root. None moves: FileBytes() refers to one.
  std::deque<Node> nodes_ = {{.is_directory = true}};
  std::vector<Change> changes_;  // Since the beginning.
  std::set<int64_t> locks_;      // Nodes.
  int64_t free_bytes_ = int64_t{1} << 40;
  Hook hook_;
  Ignored ignored_;
};

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_FAKE_FILE_SYSTEM_H_
