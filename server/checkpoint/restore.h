// SPDX-License-Identifier: Apache-2.0
//
// Reads the files of one checkpoint back, verifying every byte.
#ifndef EMA_SERVER_CHECKPOINT_RESTORE_H_
#define EMA_SERVER_CHECKPOINT_RESTORE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/checkpoint/file_system.h"
#include "server/checkpoint/manifest_json.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"

namespace ema {

// manifest.json of the checkpoint at `path`. DATA_LOSS, CHECKPOINT_CORRUPT: missing, changed, or no
// regular file. FAILED_PRECONDITION: written by a newer server. UNAVAILABLE: the disk failed.
// Blocks on the disk.
absl::StatusOr<CheckpointManifest> ReadCheckpointManifest(FileSystem& file_system,
                                                          const std::string& path);

// What CreateModel would be asked for to get the checkpoint's model.
ModelConfig ConfigOf(const CheckpointManifest& checkpoint);

// The checkpoint's version in new blocks. REQUIRES: `model` was made with ConfigOf(checkpoint).
// DATA_LOSS, CHECKPOINT_CORRUPT: a byte is wrong or missing; the message names track and tensor.
// RESOURCE_EXHAUSTED: no memory. UNAVAILABLE: the disk failed. INTERNAL, DEVICE. Nothing stays
// allocated after an error. Blocks on the disk.
absl::StatusOr<std::shared_ptr<Snapshot>> ReadCheckpoint(FileSystem& file_system,
                                                         const std::string& path,
                                                         const CheckpointManifest& checkpoint,
                                                         Model& model);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_RESTORE_H_
