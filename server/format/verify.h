// SPDX-License-Identifier: Apache-2.0
//
// Says whether a checkpoint is what was written. Needs neither a model nor a device.
#ifndef EMA_SERVER_FORMAT_VERIFY_H_
#define EMA_SERVER_FORMAT_VERIFY_H_

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/attached_file.h"
#include "server/core/model_config.h"
#include "server/format/checkpoint_name.h"
#include "server/format/file_system.h"
#include "server/format/manifest_json.h"

namespace ema {

// manifest.json of the checkpoint at `path`, with nothing in it that does not fit the rest.
// DATA_LOSS, CHECKPOINT_CORRUPT: missing, changed, or no regular file. FAILED_PRECONDITION: written
// by a newer server. UNAVAILABLE: the disk failed. Blocks on the disk.
absl::StatusOr<CheckpointManifest> ReadCheckpointManifest(FileSystem& file_system,
                                                          const std::string& path);

// OK: it is the checkpoint of that model and version, with all tracks or, `is_partial`, with some.
// DATA_LOSS, CHECKPOINT_CORRUPT: it is another one, which somebody has put there.
absl::Status CheckIdentity(const CheckpointManifest& checkpoint, std::string_view model_name,
                           const CheckpointId& id, bool is_partial);

// What CreateModel would be asked for to get the checkpoint's model, or the part of it that is
// there.
ModelConfig ConfigOf(const CheckpointManifest& checkpoint);

// The attached files, from the folder of the first track that has weights; empty: there is none.
// Errors as ReadCheckpointManifest(). Blocks on the disk.
absl::StatusOr<std::vector<AttachedFile>> ReadAttachedFiles(FileSystem& file_system,
                                                            const std::string& path,
                                                            const CheckpointManifest& checkpoint);

// Checks a track's index and attached files. Errors as ReadCheckpointManifest(). Blocks on the
// disk.
absl::Status VerifySmallFiles(FileSystem& file_system, const std::string& path,
                              const CheckpointManifest& checkpoint, const CheckpointTrack& track);

// Told of each track of `checkpoint` that has weights: OK, or what is wrong with it.
using TrackVerdict = std::function<void(const CheckpointManifest& checkpoint,
                                        const CheckpointTrack& track, const absl::Status& status)>;

using RestBetweenReads = std::function<absl::Status()>;

// Reads every byte of the checkpoint at `path`, from the disk where it can, and compares it with
// the checksums. Returns its manifest. DATA_LOSS, CHECKPOINT_CORRUPT: a byte is wrong or missing,
// or the folder has the name of another version's checkpoint; the message names track, and file or
// tensor. FAILED_PRECONDITION: written by a newer server. NOT_FOUND: there is nothing at `path`.
// UNAVAILABLE: the disk failed. Of several problems it is the first; with `on_track`, which may be
// empty, tracks after that are still read. Calls `rest`, if it is given, after every few MiB; an
// error of it ends the reading and is returned. Blocks on the disk for as long as it takes to read
// all.
absl::StatusOr<CheckpointManifest> VerifyCheckpoint(FileSystem& file_system,
                                                    const std::string& path,
                                                    const TrackVerdict& on_track = nullptr,
                                                    const RestBetweenReads& rest = nullptr);

// FAILED_PRECONDITION: there is a file in the folders of `checkpoint` that is no part of it, so
// that VerifyCheckpoint() says nothing of it; the message names it. Other errors as
// ReadCheckpointManifest(). Blocks on the disk.
absl::Status CheckNothingElse(FileSystem& file_system, const std::string& path,
                              const CheckpointManifest& checkpoint);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_VERIFY_H_
