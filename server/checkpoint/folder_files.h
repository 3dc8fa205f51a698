// SPDX-License-Identifier: Apache-2.0
//
// The folder of one model's checkpoints, models/<model>/checkpoints in the data directory:
//
//   LATEST                name of the newest complete checkpoint, and its CRC32C; if that one is
//                         gone, the newest by name takes its place
//   LABELS.json           the labels of versions: label_file.h
//   <name>/               manifest.json, tracks/<track>/model.safetensors
//   <name>/KEEP           an empty file: retention neither removes nor counts this checkpoint;
//                         operators may make or remove it
//   <name>-part-<8 digits>/
//                         some tracks of a version; never loaded at start
//   .corrupt-<name>       a checkpoint that failed verification, kept for an operator; for
//                         LABELS.json: while it is there, retention removes nothing
//   .abandoned-<name>     a checkpoint that a crash left newer than LATEST, kept for an operator; a
//                         save removes all but the newest without a KEEP file
//   .tmp-*                unfinished, or being removed
#ifndef EMA_SERVER_CHECKPOINT_FOLDER_FILES_H_
#define EMA_SERVER_CHECKPOINT_FOLDER_FILES_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/data_directory.h"
#include "server/checkpoint/partitioned_saves.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"
#include "server/format/checkpoint_name.h"
#include "server/format/file_system.h"
#include "server/format/label_file.h"
#include "server/format/manifest_json.h"

namespace ema {

// Reads and changes the files of one model's checkpoints. Remembers nothing: every answer comes
// from the disk. A change is durable once its call has returned, unless the call says otherwise.
//
// Thread-safe, but the caller serializes changes. Every call blocks on the disk.
class FolderFiles {
 public:
  // `data` outlives this.
  FolderFiles(DataDirectory& data, std::string_view model)
      : data_(data), path_(data.CheckpointsPath(model)) {}

  std::string Path(std::string_view name) const { return JoinPath(path_, name); }
  std::string TemporaryPath(std::string_view name) const {
    return Path(std::string(kTemporaryPrefix).append(name));
  }

  // --- Reading ---

  absl::StatusOr<bool> Exists() const { return disk().Exists(path_); }
  absl::StatusOr<bool> Has(std::string_view name) const { return disk().Exists(Path(name)); }
  absl::StatusOr<bool> IsKept(std::string_view name) const {
    return disk().Exists(JoinPath(Path(name), kKeepFileName));
  }
  // True if the checkpoint of that name, which may have been set aside, has a KEEP file, or the
  // disk failed.
  bool MayBeKept(std::string_view name) const;
  absl::StatusOr<std::vector<DirectoryEntry>> List() const { return disk().ListDirectory(path_); }
  absl::StatusOr<CheckpointManifest> ReadManifest(std::string_view name) const;
  // The complete checkpoints in the order in which a start tries them: the one that LATEST names,
  // then by falling name.
  absl::StatusOr<std::vector<CheckpointId>> FindCheckpoints() const;
  // The first of FindCheckpoints(); all zero: there is none.
  absl::StatusOr<CheckpointId> FindLatest() const;
  // nullopt: LATEST is missing or corrupt.
  absl::StatusOr<std::optional<std::string>> ReadLatestName() const;
  // DATA_LOSS, CHECKPOINT_CORRUPT; FAILED_PRECONDITION: written by a newer server.
  absl::StatusOr<LabelMap> ReadLabels() const;

  // --- Changes ---

  absl::Status Sync() { return data_.Sync(path_); }
  absl::Status ClearTemporary() { return data_.ClearTemporary(path_); }
  absl::Status WriteLatest(const CheckpointId& id);
  absl::Status RemoveLatest();
  absl::Status WriteLabels(const LabelMap& labels);
  // Makes the KEEP file of the checkpoint at `checkpoint_path`. OK if it is there.
  absl::Status Keep(const std::string& checkpoint_path);
  // Writes `snapshot` under the temporary name of `name`, with a KEEP file if `keep`, and reads it
  // back. `partitions`: null unless the model is on several servers. After an error nothing of it
  // is left, unless removing it failed, too. RESOURCE_EXHAUSTED, DISK_FULL: the free space is less
  // than the checkpoint needs, or less than twice that if `needs_room_for_another` for another one;
  // of a model on several servers this counts only the part of this server. Other errors:
  // WriteCheckpoint() or PartitionedSaves::Write(), VerifyCheckpoint().
  absl::StatusOr<CheckpointManifest> WriteTemporary(Model& model, const Snapshot& snapshot,
                                                    const std::string& name,
                                                    const WriteOptions& options,
                                                    PartitionedSaves* partitions, bool keep,
                                                    bool needs_room_for_another);
  // Three ways to rename between the name of a checkpoint and its temporary name. Durable after the
  // next Sync().
  absl::Status RenameFromTemporary(std::string_view name) {
    return disk().Rename(TemporaryPath(name), Path(name));
  }
  absl::Status RenameToTemporary(std::string_view name) {
    return disk().Rename(Path(name), TemporaryPath(name));
  }
  // UNIMPLEMENTED: the file system cannot exchange two folders.
  absl::Status ExchangeWithTemporary(std::string_view name) {
    return disk().Exchange(TemporaryPath(name), Path(name));
  }
  // Best effort: the next start clears it, too.
  void RemoveTemporary(std::string_view name) {
    disk().RemoveTree(TemporaryPath(name)).IgnoreError();
  }
  // Renames `old_prefix` + `name` to `prefix` + `name`, and appends a number if that name is in
  // use. Returns the new name.
  absl::StatusOr<std::string> SetAside(const std::string& name, std::string_view prefix,
                                       std::string_view old_prefix = "");

 private:
  FileSystem& disk() const { return data_.file_system(); }

  DataDirectory& data_;
  const std::string path_;
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_FOLDER_FILES_H_
