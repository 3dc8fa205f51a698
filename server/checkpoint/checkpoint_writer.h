// SPDX-License-Identifier: Apache-2.0
//
// Writes the files of one checkpoint, or of the part that one partition of a model has.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/checkpoint/sync_latch.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"
#include "server/format/file_system.h"
#include "server/format/manifest_json.h"
#include "server/format/verify.h"

namespace ema {

struct WriteOptions {
  // Names of the tracks to write. Empty: all. If a track that has a value is omitted, the
  // checkpoint is partial.
  std::vector<std::string> tracks;
  // Bytes of tensors in one file of a track, at most; a larger tensor has a file of its own.
  // Default: that of Hugging Face's tools.
  int64_t max_file_bytes = 5'000'000'000;
  // The numbers of a partition's files of one track among those of all partitions.
  struct FileNumbers {
    size_t first = 0;
    size_t count = 0;  // The number of files of all partitions together.
  };
  // By track, for one partition of a model on several servers. Empty: the files are all.
  std::map<std::string, FileNumbers> file_numbers;
  // For one partition: the checkpoint has the tracks after this change, see TrackTable::After().
  // Nullopt: after the newest one.
  std::optional<int64_t> tracks_revision;
};

// The number of files of each track of a model, or of a partition: `config` then has its tensors
// only. 0: the track ignores all of the partition's tensors.
std::map<std::string, size_t> FileCounts(const ModelConfig& config, int64_t max_file_bytes);

// The least size of a checkpoint of `snapshot`, in bytes.
int64_t CheckpointDataBytes(const Model& model, const Snapshot& snapshot,
                            const WriteOptions& options);

// Makes the directory `path` and everything in it, the model's attached files included, synced. The
// directory's entry in its parent is not synced, and nothing is read back (see VerifyCheckpoint()).
// Weights go from the snapshot's blocks to the file without a copy. Waits for the disk, and rests
// while `model` is being pushed (pacer.h).
// ALREADY_EXISTS: `path` exists. NOT_FOUND, TRACK_NOT_FOUND: the model, or the snapshot, has no
// such track. FAILED_PRECONDITION: the format cannot hold the tensors' names. Other errors of
// FileSystem and ReadBlocks(). After an error, files that are already written stay there.
absl::StatusOr<CheckpointManifest> WriteCheckpoint(FileSystem& file_system, SyncLatch& latch,
                                                   const std::string& path, Model& model,
                                                   const Snapshot& snapshot,
                                                   const WriteOptions& options);

// --- The steps of WriteCheckpoint(), for a model on several servers ---
//
// All servers see the same `path`. Errors and blocking are those of WriteCheckpoint().

// Makes the directory `path` and those of the tracks.
absl::Status MakeCheckpointFolders(FileSystem& file_system, const std::string& path,
                                   const Model& model, const Snapshot& snapshot,
                                   const WriteOptions& options);

// Writes only the weights of `model`, one partition, into these directories, which may have files
// of other partitions. Returns the manifest of the part; as the text of EncodeCheckpointManifest()
// it can be sent to another server, which parses it with ManifestScope::kPart. NOT_FOUND: the
// directories do not exist. ALREADY_EXISTS: a file of the partition exists. INTERNAL, BUG: the
// partition has more files than options.file_numbers leaves for it.
absl::StatusOr<CheckpointManifest> WritePart(FileSystem& file_system, SyncLatch& latch,
                                             const std::string& path, Model& model,
                                             const Snapshot& snapshot, const WriteOptions& options);

// Makes the part at `path` readable without the others, for ReadPartManifest(): writes the attached
// files of `model`, which only the first partition has, and manifest.json. Returns the manifest
// with these files.
absl::StatusOr<CheckpointManifest> FinishPart(FileSystem& file_system, SyncLatch& latch,
                                              const std::string& path, const Model& model,
                                              CheckpointManifest part);

// Makes one checkpoint of the parts, which are in the order of the partitions: writes the indexes,
// the attached files of `model`, and manifest.json. Returns the manifest of the whole. Errors also
// as MergeManifests(). DATA_LOSS, CHECKPOINT_CORRUPT: a file of a part is missing, or is not as its
// manifest says. REQUIRES: there is a part.
absl::StatusOr<CheckpointManifest> MergeParts(FileSystem& file_system, SyncLatch& latch,
                                              const std::string& path, const Model& model,
                                              std::vector<CheckpointManifest> parts);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_
