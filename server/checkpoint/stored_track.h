// SPDX-License-Identifier: Apache-2.0
//
// Reads a version where it is on the disk, without loading it into memory.
#ifndef EMA_SERVER_CHECKPOINT_STORED_TRACK_H_
#define EMA_SERVER_CHECKPOINT_STORED_TRACK_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "server/core/snapshot.h"
#include "server/format/file_system.h"
#include "server/format/manifest_json.h"

namespace ema {

// One track's weights. Every byte that Read() gives is verified: of a long tensor the pieces that
// the range touches, of a short one all. Holds the files open, so that removing the checkpoint does
// not hinder it, and up to 8 pieces in memory.
// `layout`: of the track in that checkpoint. NOT_FOUND, TRACK_NOT_FOUND: the checkpoint does not
// have it. DATA_LOSS, CHECKPOINT_CORRUPT. UNAVAILABLE: the disk failed. Blocks on the disk.
absl::StatusOr<std::shared_ptr<StoredTrack>> OpenStoredTrack(
    FileSystem& file_system, const std::string& path, const CheckpointManifest& checkpoint,
    std::string_view track_name, const StorageLayout& layout,
    std::function<void(const absl::Status& problem)> on_corrupt = nullptr);

// The checkpoint's version, with only that track, as the track was then. It is no track of a model:
// its id is of none, it has no memory reserved, and every block of it counts as changed since any
// version. `on_corrupt`, which may be empty, is told of each DATA_LOSS that reading it gives later,
// by the thread that reads. Errors as OpenStoredTrack().
absl::StatusOr<SnapshotRef> OpenStoredVersion(
    FileSystem& file_system, const std::string& path, const CheckpointManifest& checkpoint,
    std::string_view track_name,
    std::function<void(const absl::Status& problem)> on_corrupt = nullptr);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_STORED_TRACK_H_
