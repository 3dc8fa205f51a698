// SPDX-License-Identifier: Apache-2.0
//
// The copies of versions that a server of a group has outside the data directory, in --copy-dir:
//
//   <group>/<member>/<model>/<version>/   one copy, named as a checkpoint of that version
//     manifest.json                       of the whole model, without its weights
//     part-00001/                         one partition: manifest.json and tracks/, as FinishPart()
//                                         leaves them
//
// A member has the part of its own partition, and that of the partition before it; before the first
// one is the last one. So two members have each part. Nothing marks a copy as complete: only the
// copy that the model's record names is loaded, and every byte of it is verified then.
#ifndef EMA_SERVER_GROUP_COPY_DIRECTORY_H_
#define EMA_SERVER_GROUP_COPY_DIRECTORY_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/sync_latch.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"
#include "server/format/checkpoint_name.h"
#include "server/format/file_system.h"
#include "server/format/manifest_json.h"

namespace ema::group {

// The copy of one version of a model.
struct CopyId {
  std::string model;
  CheckpointId version;
};

// A file of a copy.
struct CopyFile {
  CopyId copy;
  std::optional<int64_t> partition;  // Nullopt: manifest.json of the model; the rest is empty.
  std::string track;                 // Empty: manifest.json of the partition.
  std::string name;
};

// The files of one member. Thread-safe, but the caller writes no part twice at the same time. Calls
// block on the disk, and their errors include those of FileSystem.
class CopyDirectory {
 public:
  // Makes the directories. `file_system` outlives the result.
  static absl::StatusOr<std::unique_ptr<CopyDirectory>> Open(FileSystem& file_system,
                                                             std::string_view path,
                                                             std::string_view group,
                                                             std::string_view member);

  FileSystem& file_system() { return file_system_; }
  // INVALID_ARGUMENT, BAD_REQUEST or BAD_NAME: a name in `file`, which may be anything, would lead
  // out of the copy. Does not block.
  absl::StatusOr<std::string> PathOf(const CopyFile& file) const;
  std::string PartPath(const CopyId& copy, int64_t partition) const;

  // Replaces the part by the tensors of `model`, that partition, in `snapshot`. Returns the part's
  // manifest. RESOURCE_EXHAUSTED, DISK_FULL: there is no space. Errors also as ema::WritePart().
  absl::StatusOr<CheckpointManifest> WritePart(const CopyId& copy, int64_t partition, Model& model,
                                               const Snapshot& snapshot,
                                               const WriteOptions& options);
  // Makes the empty folders of `part` for files from another server. What was there is removed.
  absl::Status MakePartFolders(const CopyId& copy, int64_t partition,
                               const CheckpointManifest& part);
  // Writes the manifest of the model: `whole` without its weights.
  absl::Status WriteManifest(const CopyId& copy, CheckpointManifest whole);
  // Writes a small file, in place of one that may be there.
  absl::Status WriteText(const CopyFile& file, std::string_view text);

  // NOT_FOUND, or DATA_LOSS, CHECKPOINT_CORRUPT: missing, or not that of the copy.
  absl::StatusOr<CheckpointManifest> ReadManifest(const CopyId& copy);
  absl::StatusOr<CheckpointManifest> ReadPart(const CopyId& copy, int64_t partition);

  // Removes the copies of all models, or only of `model`, of which `is_needed` is false.
  absl::Status RemoveUnneeded(absl::FunctionRef<bool(const CopyId&)> is_needed)
      ABSL_LOCKS_EXCLUDED(remove_mu_);
  absl::Status RemoveUnneededOf(const std::string& model,
                                absl::FunctionRef<bool(const CopyId&)> is_needed)
      ABSL_LOCKS_EXCLUDED(remove_mu_);

 private:
  CopyDirectory(FileSystem& file_system, std::string path)
      : file_system_(file_system), path_(std::move(path)) {}

  std::string CopyPath(const CopyId& copy) const;
  // Makes a directory and those above it, down from path_.
  absl::Status MakeDirectory(const std::string& path);

  FileSystem& file_system_;
  const std::string path_;
  SyncLatch latch_;
  // Serializes removals: two threads that remove the same folder would disturb each other.
  absl::Mutex remove_mu_;
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_COPY_DIRECTORY_H_
