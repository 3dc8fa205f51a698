// SPDX-License-Identifier: Apache-2.0
//
// The exit codes of emactl.
#ifndef EMA_CLIENT_CLI_EXIT_CODE_H_
#define EMA_CLIENT_CLI_EXIT_CODE_H_

#include "absl/status/status.h"

namespace ema::cli {

// Documented in --help.
inline constexpr int kExitOk = 0;
inline constexpr int kExitOther = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitNotFound = 3;
inline constexpr int kExitRefused = 4;
inline constexpr int kExitNoServer = 5;
inline constexpr int kExitInterrupted = 130;

int ExitCode(const absl::Status& status);
// For a command without a server, where UNAVAILABLE means a disk.
int LocalExitCode(const absl::Status& status);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_EXIT_CODE_H_
