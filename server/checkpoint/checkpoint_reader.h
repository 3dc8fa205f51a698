// SPDX-License-Identifier: Apache-2.0
//
// Reads a checkpoint into a model, or opens it for reading from the disk.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_READER_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_READER_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"
#include "server/format/file_system.h"
#include "server/format/manifest_json.h"
#include "server/format/verify.h"

namespace ema {

// `status` with "model "m", checkpoint "c": " before its message. REQUIRES: it is not OK.
absl::Status LocateError(const absl::Status& status, std::string_view model,
                         std::string_view checkpoint);

// Reads the checkpoint's version into new blocks of `model`, a model of the same tensors: one that
// was made with ConfigOf(checkpoint), or one that is to be rolled back to it. The result has only
// those of the model's current tracks that are in the checkpoint with a value and in the same form
// (Track::HasFormOf()). Every byte of their files is verified. DATA_LOSS, CHECKPOINT_CORRUPT: a
// byte is wrong or missing; the message names track and tensor. FAILED_PRECONDITION, MODEL_DIFFERS:
// other tensors. RESOURCE_EXHAUSTED: no memory. UNAVAILABLE: the disk failed. INTERNAL, DEVICE.
// Calls `pause`, if given, like VerifyCheckpoint(), but from several threads. Nothing stays
// allocated after an error. Waits for the disk.
absl::StatusOr<std::shared_ptr<Snapshot>> ReadCheckpoint(FileSystem& file_system,
                                                         const std::string& path,
                                                         const CheckpointManifest& checkpoint,
                                                         Model& model,
                                                         const PauseHook& pause = nullptr);

// Opens one track's weights. Every byte that Read() returns is verified: for a long tensor the
// pieces that the range touches, for a short tensor all of it. Holds the files open, so removing
// the checkpoint does not affect it, and up to 8 pieces in memory. `layout`: of the track in that
// checkpoint. NOT_FOUND, TRACK_NOT_FOUND: the checkpoint does not have it. DATA_LOSS,
// CHECKPOINT_CORRUPT. UNAVAILABLE: the disk failed. Waits for the disk.
absl::StatusOr<std::shared_ptr<StoredTrack>> OpenStoredTrack(
    FileSystem& file_system, const std::string& path, const CheckpointManifest& checkpoint,
    std::string_view track_name, const StorageLayout& layout,
    std::function<void(const absl::Status& problem)> on_corrupt = nullptr);

// The checkpoint's version with only that track, as the track was then. The track belongs to no
// model: it has no id and no reserved memory, and every block of it counts as changed since any
// version. `on_corrupt`, which may be empty, is called with each later DATA_LOSS of a read, on the
// reading thread. Errors as OpenStoredTrack().
absl::StatusOr<SnapshotRef> OpenStoredVersion(
    FileSystem& file_system, const std::string& path, const CheckpointManifest& checkpoint,
    std::string_view track_name,
    std::function<void(const absl::Status& problem)> on_corrupt = nullptr);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_READER_H_
