// SPDX-License-Identifier: Apache-2.0
//
// Reads the files of one checkpoint back, verifying every byte.
#ifndef EMA_SERVER_CHECKPOINT_RESTORE_H_
#define EMA_SERVER_CHECKPOINT_RESTORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

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

// `status` with "model "m", checkpoint "c": " before its message. REQUIRES: it is not OK.
absl::Status LocateError(const absl::Status& status, std::string_view model,
                         std::string_view checkpoint);

// Told of the bytes [offset, offset + bytes.size()) of one tensor; the memory is used again after.
// An offset is a multiple of 4 MiB. An error ends the reading.
using TensorVisitor = std::function<absl::Status(int64_t tensor_index, int64_t offset,
                                                 std::span<const std::byte> bytes)>;

// Reads a track's file from its first to its last tensor, `tensor_count` of them, which lie in
// memory as `layout` says. `visit` sees bytes before their checksum is known: what it made of them
// is to be given up after an error. DATA_LOSS, CHECKPOINT_CORRUPT. UNAVAILABLE: the disk failed.
// Blocks on the disk.
absl::Status ReadTrackFile(FileSystem& file_system, const std::string& file_path,
                           const CheckpointFile& saved, const Manifest& manifest,
                           const StorageLayout& layout, size_t tensor_count,
                           const TensorVisitor& visit);

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
