// SPDX-License-Identifier: Apache-2.0
//
// Verifies checkpoints. Needs neither a model nor a device.
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

// Reads manifest.json of the checkpoint at `path`, and checks that its parts fit each other.
// DATA_LOSS, CHECKPOINT_CORRUPT: missing, changed, or not a regular file. FAILED_PRECONDITION:
// written by a newer server. UNAVAILABLE: the disk failed. Waits for the disk.
absl::StatusOr<CheckpointManifest> ReadCheckpointManifest(FileSystem& file_system,
                                                          const std::string& path);

// The same for a part of a checkpoint in a folder of its own: FinishPart().
absl::StatusOr<CheckpointManifest> ReadPartManifest(FileSystem& file_system,
                                                    const std::string& path);
// The same for the text of such a manifest.json. Does not block.
absl::StatusOr<CheckpointManifest> ParsePartManifest(std::string_view text);

// OK: it is the checkpoint of that model and version, with all tracks or, if `is_partial`, with
// some. DATA_LOSS, CHECKPOINT_CORRUPT: it is another one, put there from outside.
absl::Status CheckIdentity(const CheckpointManifest& checkpoint, std::string_view model_name,
                           const CheckpointId& id, bool is_partial);

// The config that creates the checkpoint's model, or the part of it that the checkpoint has.
ModelConfig ConfigOf(const CheckpointManifest& checkpoint);

// The attached files, from the folder of the first track that has weights; empty: no track has.
// Errors as ReadCheckpointManifest(). Waits for the disk.
absl::StatusOr<std::vector<AttachedFile>> ReadAttachedFiles(FileSystem& file_system,
                                                            const std::string& path,
                                                            const CheckpointManifest& checkpoint);

// Checks a track's index and attached files. Errors as ReadCheckpointManifest(). Waits for the
// disk.
absl::Status VerifySmallFiles(FileSystem& file_system, const std::string& path,
                              const CheckpointManifest& checkpoint, const CheckpointTrack& track);

// Called with each track of `checkpoint` that has weights, and OK or its problem.
using TrackVerdict = std::function<void(const CheckpointManifest& checkpoint,
                                        const CheckpointTrack& track, const absl::Status& status)>;

// Called between reads. It may sleep, to leave the disk to others; an error ends the reading.
using PauseHook = std::function<absl::Status()>;

// Reads every byte of the checkpoint at `path`, where possible from the disk and not from the
// system's cache, and compares it with the checksums. Returns its manifest. DATA_LOSS,
// CHECKPOINT_CORRUPT: a byte is wrong or missing, or the folder has the name of another version's
// checkpoint; the message names track, and file or tensor. FAILED_PRECONDITION: written by a newer
// server. NOT_FOUND: there is nothing at `path`. UNAVAILABLE: the disk failed. Of several problems,
// returns the first; with `on_track`, which may be empty, the later tracks are still read. Calls
// `pause`, if given, after every few MiB, and returns its error. Waits for the disk until
// everything has been read.
absl::StatusOr<CheckpointManifest> VerifyCheckpoint(FileSystem& file_system,
                                                    const std::string& path,
                                                    const TrackVerdict& on_track = nullptr,
                                                    const PauseHook& pause = nullptr);

// --- The two halves of VerifyCheckpoint(), for a checkpoint that several servers write ---

// Reads the weights of `part`, one part of the checkpoint at `path`. Does not need manifest.json.
absl::Status VerifyPart(FileSystem& file_system, const std::string& path,
                        const CheckpointManifest& part, const PauseHook& pause);
// Everything else: the weights' files must exist, but are not read.
absl::StatusOr<CheckpointManifest> VerifyAllButWeights(FileSystem& file_system,
                                                       const std::string& path);

// FAILED_PRECONDITION: the folders of `checkpoint` contain a file that is not part of it, which
// VerifyCheckpoint() ignores; the message names it. Other errors as ReadCheckpointManifest().
// Waits for the disk.
absl::Status CheckNoUnknownFiles(FileSystem& file_system, const std::string& path,
                                 const CheckpointManifest& checkpoint);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_VERIFY_H_
