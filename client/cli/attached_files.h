// SPDX-License-Identifier: Apache-2.0
//
// The commands about files that are attached to a model.
#ifndef EMA_CLIENT_CLI_ATTACHED_FILES_H_
#define EMA_CLIENT_CLI_ATTACHED_FILES_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/commands.h"

namespace ema::cli {

// Reads files: contents by name. For a folder, reads the files in it that describe a model: .json
// (except an index of weights), .txt, .model and .jinja. NOT_FOUND: no such file.
// FAILED_PRECONDITION: a file is larger than 64 MiB.
absl::StatusOr<std::map<std::string, std::string>> ReadDescribingFiles(
    const std::vector<std::string>& paths);

// Attaches the files that ReadDescribingFiles() finds to the model. Returns their names.
// INVALID_ARGUMENT: a name is rejected.
absl::StatusOr<std::vector<std::string>> AttachFiles(const Session& session,
                                                     const std::string& model,
                                                     const std::vector<std::string>& paths);

absl::Status AddFiles(const Session& session, const std::string& model,
                      const std::vector<std::string>& paths);
absl::Status RemoveAttachedFile(const Session& session, const std::string& model,
                                const std::string& name);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_ATTACHED_FILES_H_
