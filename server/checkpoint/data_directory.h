// SPDX-License-Identifier: Apache-2.0
//
// A server's data directory:
//
//   LOCK                                  locked by the one server that uses the directory; if the
//                                         file is missing or was replaced, that server writes
//                                         nothing
//   INCARNATION                           durable counter, raised at each start
//   SCRUBBED                              when all checkpoints were last read again
//   models/<model>/checkpoints/           one model's checkpoints: folder_files.h
//   models/.deleted-*-<model>             a deleted model, never loaded again
//   .tmp-*                                (in any of these folders) unfinished, or being removed;
//                                         cleared at start
//
// The servers of a group share one directory:
//
//   GROUP/ID                              the group's name, and a random id of the directory;
//                                         written by the first server
//   members/<member>/                     LOCK, INCARNATION and SCRUBBED of each server
//   models/                               as above; the server that has partition 0 of a model
//                                         changes its folder, and clears .tmp-* there when it saves
#ifndef EMA_SERVER_CHECKPOINT_DATA_DIRECTORY_H_
#define EMA_SERVER_CHECKPOINT_DATA_DIRECTORY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/checkpoint/sync_latch.h"
#include "server/format/file_system.h"

namespace ema {

// The incarnation of a server without a data directory: microseconds since 1970, so that it grows
// from start to start.
int64_t IncarnationWithoutStore(absl::Time now = absl::Now());

// A locked data directory, or one member's access to the directory of a group. Every change but the
// removal of temporary files is durable once the call has returned. It knows the names of models
// and nothing of their content.
//
// Thread-safe. Calls may block on the disk, unless they say otherwise.
class DataDirectory {
 public:
  // Makes the directory if it is not there, locks it, clears what a crash has left, and raises the
  // incarnation. `file_system` outlives the result. `log` gets a line when the directory becomes
  // read-only, and when it is writable again. `member`: the name of this server in its group, which
  // shares the directory; empty: no other server uses it. FAILED_PRECONDITION: another server, or
  // another process of this member, uses the directory (the message names it), it cannot be
  // written, or a model's folder is a symbolic link. INVALID_ARGUMENT, BAD_NAME: `member` cannot be
  // the name of a folder. RESOURCE_EXHAUSTED, DISK_FULL. UNAVAILABLE: the disk failed. After an
  // error the lock is free.
  static absl::StatusOr<std::unique_ptr<DataDirectory>> Open(FileSystem& file_system,
                                                             std::string path, LogSink log,
                                                             absl::Time now,
                                                             std::string member = "");

  // Reads the random id that the directory at `path`, which need not be open, has from the first
  // server of `group`. Changes nothing. If two servers of the group find different ids, they do not
  // share one directory. NOT_FOUND: no server has used the directory. FAILED_PRECONDITION: it
  // belongs to another group, or to a server without a group. INVALID_ARGUMENT, BAD_NAME: `group`
  // is not a name.
  static absl::StatusOr<std::string> FindGroupId(FileSystem& file_system, const std::string& path,
                                                 std::string_view group);
  // FindGroupId() of this directory. If this is the first server of `group`, writes the id.
  // REQUIRES: opened with a member's name.
  absl::StatusOr<std::string> GroupId(std::string_view group);

  // The number of this start of the server, larger than all numbers that earlier starts have used.
  int64_t incarnation() const { return incarnation_; }
  // Each start of the server reserves this many numbers from incarnation() on: each new model uses
  // one as its incarnation, each new run one as its epoch. They suffice for a run per minute during
  // three months. Only the first one is on the disk, so the next start begins after the last of
  // them, even if the clock was set back. The numbers are microseconds since 1970, and a server
  // waits until the clock has passed its first one. So the numbers of two starts differ even if the
  // file is lost, unless the clock was set back.
  static constexpr int64_t kIncarnationsPerStart = int64_t{1} << 17;

  FileSystem& file_system() const { return file_system_; }
  std::string ModelPath(std::string_view model) const { return JoinPath(ModelsPath(), model); }
  std::string CheckpointsPath(std::string_view model) const {
    return JoinPath(ModelPath(model), "checkpoints");
  }
  // Folders with a model's name. FAILED_PRECONDITION: one is a symbolic link.
  absl::StatusOr<std::vector<std::string>> ModelNames() const;

  // The highest incarnation in the names of a model's checkpoints, also of those set aside; 0:
  // there are none.
  absl::StatusOr<int64_t> NewestIncarnation(std::string_view model) const;

  // --- Health ---

  // OK, or UNAVAILABLE, STORE_READ_ONLY: sync_error(), or the last write that NoteWritten()
  // recorded has failed. Never blocks on the disk.
  absl::Status health() const;
  // OK, or the failed sync that has latched: UNAVAILABLE, STORE_READ_ONLY until the next start.
  absl::Status sync_error() const { return latch_.status(); }
  SyncLatch& latch() { return latch_; }
  // UNAVAILABLE, STORE_READ_ONLY: the directory is gone, or another one has taken its place.
  absl::Status CheckPlace() const;
  // CheckPlace() and sync_error(), before something is changed.
  absl::Status CheckMayWrite() const;
  // CheckMayWrite(), and creates and removes a file; passes the result to NoteWritten().
  absl::Status CheckWritable();
  // Reports how a write has ended, for health().
  void NoteWritten(const absl::Status& status);
  // `status` with the reason that callers of a save get: UNAVAILABLE, STORE_READ_ONLY where the
  // directory is gone, UNAVAILABLE, DISK_FAILED where a file cannot be used.
  absl::Status AsSaveError(const absl::Status& status) const;
  // The free bytes at the last UpdateFreeBytes(). Absent: it was not called, or failed. Never
  // blocks on the disk.
  std::optional<int64_t> free_bytes() const;
  void UpdateFreeBytes();

  // --- Changes ---

  absl::Status Sync(const std::string& directory) {
    return latch_.Check(file_system_.SyncDirectory(directory));
  }
  // Makes the folder of a model's checkpoints; syncs it and its parents also if they are there.
  absl::Status MakeCheckpointsFolder(std::string_view model);
  // Replaces a small file atomically.
  absl::Status ReplaceFile(const std::string& directory, std::string_view name,
                           const std::string& text);
  // Removes everything whose name starts with kTemporaryPrefix.
  absl::Status ClearTemporary(const std::string& directory);
  // Renames a deleted model's folder, so that the model is not loaded again. OK if it is not there.
  absl::Status SetAsideModel(std::string_view model);
  // Removes the folders that SetAsideModel() has renamed for all models of that name. After an
  // error some of them may be left.
  absl::Status PurgeDeleted(std::string_view model);

  // When all checkpoints were last read again, by this server or an earlier one. NOT_FOUND: no time
  // was written. Other errors: the file cannot be read.
  absl::StatusOr<absl::Time> ReadScrubTime() const;
  // Not to be called by two threads at once.
  absl::Status WriteScrubTime(absl::Time time);

 private:
  DataDirectory(FileSystem& file_system, std::string path, LogSink log, std::string member);

  bool is_shared() const { return own_path_ != path_; }
  std::string ModelsPath() const { return JoinPath(path_, "models"); }
  absl::Status Start(absl::Time now);
  // Locks the folders of all members, so that no server of a group can use the directory as well.
  absl::Status LockMembers();
  absl::Status ClearAllTemporary();
  // OK also if another server has just done it.
  absl::Status WriteGroupId(std::string_view group);
  absl::Status RaiseIncarnation(absl::Time now);

  FileSystem& file_system_;
  const std::string path_;
  const std::string own_path_;  // The folder of LOCK, INCARNATION and SCRUBBED.
  const LogSink log_;
  // Constant after Open(), like incarnation_.
  std::unique_ptr<FileLock> lock_;
  std::vector<std::unique_ptr<FileLock>> member_locks_;  // LockMembers().
  int64_t incarnation_ = 0;
  SyncLatch latch_;
  std::atomic<int64_t> probe_count_ = 0;  // Names CheckWritable()'s files. Relaxed: a counter.

  mutable absl::Mutex mu_;                        // Never held across a call of file_system_.
  absl::Status unwritable_ ABSL_GUARDED_BY(mu_);  // Never an error of `latch_`.
  std::optional<int64_t> free_bytes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_DATA_DIRECTORY_H_
