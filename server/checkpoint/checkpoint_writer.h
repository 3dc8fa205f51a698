// SPDX-License-Identifier: Apache-2.0
//
// Writes the files of one checkpoint.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/checkpoint/file_system.h"
#include "server/checkpoint/manifest_json.h"
#include "server/checkpoint/sync_latch.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"

namespace ema {

inline constexpr std::string_view kManifestFileName = "manifest.json";
inline constexpr int64_t kMaxManifestFileBytes = int64_t{512} << 20;

// Paths of a track's weights inside a checkpoint, and of the low parts of a compensated one.
std::string TrackFilePath(std::string_view checkpoint_path, std::string_view track_name);
std::string LowPartsFilePath(std::string_view checkpoint_path, std::string_view track_name);

// The data of all tracks in bytes: what a checkpoint of `snapshot` takes at least.
int64_t CheckpointDataBytes(const Snapshot& snapshot);

// Makes the directory `path` and everything in it, synced; its own name in the parent is not yet.
// The weights go from the snapshot's blocks to the file without a copy. Blocks on the disk.
// ALREADY_EXISTS: there is something at `path`. FAILED_PRECONDITION: the format cannot hold
// the tensors' names. Else errors of FileSystem and ReadBlocks(); what is written by then stays
// there.
absl::StatusOr<CheckpointManifest> WriteCheckpoint(FileSystem& file_system, SyncLatch& latch,
                                                   const std::string& path, Model& model,
                                                   const Snapshot& snapshot);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_WRITER_H_
