// SPDX-License-Identifier: Apache-2.0
//
// Copies checkpoints, such as to a folder that is mounted from an object store.
#ifndef EMA_CLIENT_CLI_CHECKPOINT_COPY_H_
#define EMA_CLIENT_CLI_CHECKPOINT_COPY_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/format/file_system.h"
#include "server/format/manifest_json.h"

namespace ema::cli {

// Copies the checkpoint at `from` to `to` under a name beside `to` that begins with ".tmp-", syncs
// the copy, reads it back, and renames it. ALREADY_EXISTS: `to` exists. DATA_LOSS,
// CHECKPOINT_CORRUPT: `from` is corrupt, or the copy is, and then the message says that. Other
// errors as VerifyCheckpoint() and CheckNoUnknownFiles(), and RESOURCE_EXHAUSTED, DISK_FULL. After
// an error nothing is left, unless the disk fails. Blocks.
absl::StatusOr<CheckpointManifest> CopyVerified(FileSystem& file_system, const std::string& from,
                                                const std::string& to);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_CHECKPOINT_COPY_H_
