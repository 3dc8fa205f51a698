// SPDX-License-Identifier: Apache-2.0
//
// The commands of emactl that work on local checkpoints, without a server.
#ifndef EMA_CLIENT_CLI_LOCAL_CHECKPOINTS_H_
#define EMA_CLIENT_CLI_LOCAL_CHECKPOINTS_H_

#include <string>

#include "absl/status/status.h"

namespace ema::cli {

// Verifies every byte of the checkpoint at `directory`, or of all checkpoints in it (of all models,
// if it is a server's data directory), and prints a line for each track. Ignores a checkpoint that
// the server removes meanwhile. DATA_LOSS, CHECKPOINT_CORRUPT: a checkpoint is corrupt, or is
// missing though LATEST or a label names it (also printed). FAILED_PRECONDITION: a checkpoint was
// written by a newer server, or has unknown files. NOT_FOUND: there is no checkpoint.
absl::Status VerifyCheckpoints(const std::string& directory, bool json);

// Copies one checkpoint, verified, synced and read back, and prints a summary. After an error `to`
// is unchanged, unless the disk failed. ALREADY_EXISTS: `to` exists. Other errors as
// VerifyCheckpoints().
absl::Status CopyCheckpoint(const std::string& from, const std::string& to, bool json);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_LOCAL_CHECKPOINTS_H_
