// SPDX-License-Identifier: Apache-2.0
//
// The commands of emactl about versions on the server's disk; see commands.h.
#ifndef EMA_CLIENT_CLI_CHECKPOINT_COMMANDS_H_
#define EMA_CLIENT_CLI_CHECKPOINT_COMMANDS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/commands.h"
#include "ema/client.h"

namespace ema::cli {

// A version as the user names it.
struct VersionOrLabel {
  VersionId id;
  std::string label;  // If not empty: the version with this label.
};
// A number above 0 is a version, counted in `incarnation` (0: any); any other text is a label.
// INVALID_ARGUMENT: BAD_NAME, neither; BAD_REQUEST, a number below 1, or a label with an
// incarnation.
absl::StatusOr<VersionOrLabel> ParseVersionOrLabel(std::string_view text, int64_t incarnation = 0);

absl::Status CreateCheckpoint(const Session& session, const std::string& model,
                              const Client::CheckpointOptions& request);
absl::Status ListCheckpoints(const Session& session, const std::string& model);
absl::Status ShowCheckpoint(const Session& session, const std::string& model,
                            const std::string& checkpoint);
absl::Status DeleteCheckpoint(const Session& session, const std::string& model,
                              const std::string& checkpoint);

// `to`, `incarnation`: as ParseVersionOrLabel() reads them.
absl::Status Rollback(const Session& session, const std::string& model, const std::string& to,
                      int64_t incarnation);

// `id`: all zero is the newest.
absl::Status SetLabel(const Session& session, const std::string& model, const std::string& label,
                      const VersionId& id);
absl::Status RemoveLabel(const Session& session, const std::string& model,
                         const std::string& label);
absl::Status ListLabels(const Session& session, const std::string& model);

absl::Status ReportMetric(const Session& session, const std::string& model,
                          const Client::Metric& metric);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_CHECKPOINT_COMMANDS_H_
