// SPDX-License-Identifier: Apache-2.0
//
// `emactl tracks`: shows the state of a model's averages.
#ifndef EMA_CLIENT_CLI_TRACKS_COMMAND_H_
#define EMA_CLIENT_CLI_TRACKS_COMMAND_H_

#include <string>

#include "absl/status/status.h"
#include "client/cli/commands.h"
#include "ema/client.h"

namespace ema::cli {

// Prints for each track: schedule, storage format, number of updates, weight of the last update,
// norm and distance (if the server has computed them for the newest version), and its state after
// the next commit.
absl::Status Tracks(const Session& session, const std::string& model);

// The table that Tracks() prints.
std::string TrackTable(const ModelInfo& model);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_TRACKS_COMMAND_H_
