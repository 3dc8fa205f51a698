// SPDX-License-Identifier: Apache-2.0
//
// Writes the files of one checkpoint.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_

#include <cstdint>
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
  // Names of the tracks to write. Empty: all. If one is left out that has a value, the checkpoint
  // is partial.
  std::vector<std::string> tracks;
  // Bytes of tensors in one file of a track, at most; a larger tensor has a file of its own.
  // Default: that of Hugging Face's tools.
  int64_t max_file_bytes = 5'000'000'000;
};

// The least size of a checkpoint of `snapshot`, in bytes.
int64_t CheckpointDataBytes(const Model& model, const Snapshot& snapshot,
                            const WriteOptions& options);

// Makes the directory `path` and everything in it, the model's attached files included, synced. The
// directory's entry in its parent is not synced, and nothing is read back (see VerifyCheckpoint()).
// Weights go from the snapshot's blocks to the file without a copy. Blocks on the disk, and rests
// while `model` is being pushed (pacer.h).
// ALREADY_EXISTS: `path` exists. NOT_FOUND, TRACK_NOT_FOUND: the model, or the snapshot, has no
// such track. FAILED_PRECONDITION: the format cannot hold the tensors' names. Other errors of
// FileSystem and ReadBlocks(). After an error, files that are already written stay there.
absl::StatusOr<CheckpointManifest> WriteCheckpoint(FileSystem& file_system, SyncLatch& latch,
                                                   const std::string& path, Model& model,
                                                   const Snapshot& snapshot,
                                                   const WriteOptions& options);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_
