// SPDX-License-Identifier: Apache-2.0
//
// `emactl tracks`: a model's averages and how they stand.
#ifndef EMA_CLIENT_CLI_TRACKS_COMMAND_H_
#define EMA_CLIENT_CLI_TRACKS_COMMAND_H_

#include <string>

#include "absl/status/status.h"
#include "client/cli/commands.h"
#include "ema/client.h"

namespace ema::cli {

// Of each track: schedule, what values are kept as, updates so far, the last one's weight, norm and
// distance as far as the server has computed them for the newest version, and what becomes of it
// with the next commit.
absl::Status Tracks(const Session& session, const std::string& model);

// As `Tracks` prints it.
std::string TrackTable(const ModelInfo& model);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_TRACKS_COMMAND_H_
