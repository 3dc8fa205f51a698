// SPDX-License-Identifier: Apache-2.0
//
// The commands of emactl about the server itself, except `bench` and `health`.
#ifndef EMA_CLIENT_CLI_SERVER_COMMANDS_H_
#define EMA_CLIENT_CLI_SERVER_COMMANDS_H_

#include <string>

#include "absl/status/status.h"
#include "client/cli/commands.h"
#include "ema/client.h"

namespace ema::cli {

absl::Status Info(const Session& session);
// The text that `info` prints.
std::string DescribeServer(const Client::ServerInfo& info, absl::Time now);

// If `level` is empty, prints the current level.
absl::Status SetLogLevel(const Session& session, const std::string& level);

absl::Status Drain(const Session& session);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_SERVER_COMMANDS_H_
