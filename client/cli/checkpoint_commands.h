// SPDX-License-Identifier: Apache-2.0
//
// The commands of emactl about versions on the server's disk, as those of commands.h.
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

// Which version the user means.
struct VersionOrLabel {
  VersionId id;
  std::string label;  // If not empty: the one that has it.
};
// A number above 0 is a version, counted in `incarnation` (0: any), anything else a label.
// INVALID_ARGUMENT, BAD_NAME: neither. INVALID_ARGUMENT, BAD_REQUEST: a label, of an incarnation.
absl::StatusOr<VersionOrLabel> ParseVersionOrLabel(std::string_view text, int64_t incarnation = 0);

struct CheckpointOptions {
  std::string model;
  std::string checkpoint;             // Of `show` and `delete`.
  Client::CheckpointOptions request;  // Of `create`.
};
absl::Status CreateCheckpoint(const Session& session, const CheckpointOptions& options);
absl::Status ListCheckpoints(const Session& session, const CheckpointOptions& options);
absl::Status ShowCheckpoint(const Session& session, const CheckpointOptions& options);
absl::Status DeleteCheckpoint(const Session& session, const CheckpointOptions& options);

struct RollbackOptions {
  std::string model;
  std::string to;  // As ParseVersionOrLabel() reads it.
  int64_t incarnation = 0;
};
absl::Status Rollback(const Session& session, const RollbackOptions& options);

struct LabelOptions {
  std::string model;
  std::string label;
  VersionId id;  // Of `set`; all zero: the newest.
};
absl::Status SetLabel(const Session& session, const LabelOptions& options);
absl::Status RemoveLabel(const Session& session, const LabelOptions& options);
absl::Status ListLabels(const Session& session, const LabelOptions& options);

struct MetricOptions {
  std::string model;
  Client::Metric metric;
};
absl::Status ReportMetric(const Session& session, const MetricOptions& options);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_CHECKPOINT_COMMANDS_H_
