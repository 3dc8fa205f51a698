// SPDX-License-Identifier: Apache-2.0
//
// Small files that lie beside a model's weights in its checkpoints.
#ifndef EMA_CLIENT_CLI_ATTACHED_FILES_H_
#define EMA_CLIENT_CLI_ATTACHED_FILES_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/commands.h"

namespace ema::cli {

// Contents by name; of a folder of the files that describe a model: .json (but no index of
// weights), .txt, .model and .jinja. NOT_FOUND: no such file. FAILED_PRECONDITION: larger than 64
// MiB.
absl::StatusOr<std::map<std::string, std::string>> ReadDescribingFiles(
    const std::vector<std::string>& paths);

// Puts what ReadDescribingFiles() finds beside the model's weights. The names. INVALID_ARGUMENT: a
// name that is refused.
absl::StatusOr<std::vector<std::string>> AttachFiles(const Session& session,
                                                     const std::string& model,
                                                     const std::vector<std::string>& paths);

absl::Status AddFiles(const Session& session, const std::string& model,
                      const std::vector<std::string>& paths);
absl::Status RemoveFile(const Session& session, const std::string& model, const std::string& name);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_ATTACHED_FILES_H_
