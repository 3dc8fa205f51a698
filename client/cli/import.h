// SPDX-License-Identifier: Apache-2.0
//
// `emactl import`: starts a model with weights from a file.
#ifndef EMA_CLIENT_CLI_IMPORT_H_
#define EMA_CLIENT_CLI_IMPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/commands.h"
#include "ema/client.h"

namespace ema::cli {

struct ImportOptions {
  std::string model;
  std::string from;  // For WeightsFile::Open().
  std::vector<TrackConfig> tracks;
  Client::ModelOptions model_options;
  // Step of the first version. Its training time has the units that the tracks need: `step` batches
  // and iterations, and 0 in all others.
  int64_t step = 0;
  int64_t updates = 0;  // Number of updates in the average; 0: unknown.
};
// Creates the model and its first version, in which every track has the file's values; small files
// of a folder are attached, as by AttachFiles(). Pushes continue after `step`. INVALID_ARGUMENT,
// BAD_SCHEDULE: a track would overwrite these values. ALREADY_EXISTS, MODEL_DIFFERS: the model has
// a version already, or other tensors or tracks.
absl::Status Import(const Session& session, const ImportOptions& options);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_IMPORT_H_
