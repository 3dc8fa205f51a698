// SPDX-License-Identifier: Apache-2.0
//
// The commands of emactl about a group of servers.
#ifndef EMA_CLIENT_CLI_GROUP_COMMANDS_H_
#define EMA_CLIENT_CLI_GROUP_COMMANDS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/commands.h"
#include "ema/group_info.h"

namespace ema::cli {

// Prints the group as the called server sees it. UNAVAILABLE: something is wrong with it, and the
// output says what. Waits for 10 s, or for the user's timeout.
absl::Status ShowGroup(const Session& session);
// The text that `group` prints.
std::string DescribeGroup(const GroupInfo& info);

// Spreads the tensors of a model evenly over the running servers, except `without`.
absl::Status RebalanceModel(const Session& session, const std::string& model,
                            const std::vector<std::string>& without);
// Moves all partitions of lost servers to the other servers. FAILED_PRECONDITION: one of the
// servers runs. If a model cannot be moved, moves the next ones all the same, and returns the first
// error.
absl::Status ReplaceMembers(const Session& session, const std::vector<std::string>& lost);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_GROUP_COMMANDS_H_
