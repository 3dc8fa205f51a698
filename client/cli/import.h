// SPDX-License-Identifier: Apache-2.0
//
// A model that begins with weights from a file.
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
  std::string from;  // As WeightsFile::Open() reads it.
  std::vector<TrackConfig> tracks;
  Client::ModelOptions model_options;
  // Of the first version. Training time is there so many batches and iterations, and 0 in every
  // other unit that a track needs.
  int64_t step = 0;
  int64_t updates = 0;  // That the average is of; 0: not known.
};
// Makes the model, and its first version, in which every track has the file's values; a folder's
// small files are attached, as AttachFiles() chooses them. A push goes on after `step`.
// INVALID_ARGUMENT, BAD_SCHEDULE: a track would lose these values. ALREADY_EXISTS, MODEL_DIFFERS:
// the model has a version already, or other tensors or tracks.
absl::Status Import(const Session& session, const ImportOptions& options);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_IMPORT_H_
