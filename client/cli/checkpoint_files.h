// SPDX-License-Identifier: Apache-2.0
//
// What emactl does with checkpoints that lie on a disk: no server takes part.
#ifndef EMA_CLIENT_CLI_CHECKPOINT_FILES_H_
#define EMA_CLIENT_CLI_CHECKPOINT_FILES_H_

#include <string>

#include "absl/status/status.h"

namespace ema::cli {

// Verifies every byte of the checkpoint at `directory`, or of all checkpoints in it (or in a
// server's data directory, of all models; one that the server removes meanwhile is passed over),
// and prints what it found of each track. DATA_LOSS, CHECKPOINT_CORRUPT: one or more are not what
// was written, or not there, though LATEST or a label names them (also printed).
// FAILED_PRECONDITION: written by a newer server, or with a file too many. NOT_FOUND: there is no
// checkpoint.
absl::Status VerifyCheckpoints(const std::string& directory, bool json);

// Copies one checkpoint, verified, synced and read back, and prints what it has copied. Nothing is
// at `to` after an error. ALREADY_EXISTS: something was. Other errors as VerifyCheckpoints().
absl::Status CopyCheckpoint(const std::string& from, const std::string& to, bool json);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_CHECKPOINT_FILES_H_
