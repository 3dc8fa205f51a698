// SPDX-License-Identifier: Apache-2.0
//
// `emactl pull`: averages as a file, or as a folder that Hugging Face's tools read.
#ifndef EMA_CLIENT_CLI_PULL_COMMAND_H_
#define EMA_CLIENT_CLI_PULL_COMMAND_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/commands.h"
#include "ema/client.h"
#include "ema/manifest.h"
#include "ema/selection.h"

namespace ema::cli {

// Reads a box of a tensor as NumPy writes it, with a range for each of the first dimensions:
// "head.weight[0:10,5:]". INVALID_ARGUMENT: anything else, an unknown tensor, or a range that is
// empty or not inside it; the message quotes `text`.
absl::StatusOr<TensorSlice> ParseSlice(std::string_view text, const Manifest& manifest);

struct PullOptions {
  std::string model;
  std::string track;
  Client::PullOptions request;
  std::string version;  // As ParseVersionOrLabel() reads it, into `request`. Empty: not given.
  std::string dtype;    // Empty: as the server keeps them.
  std::vector<std::string> slices;  // As ParseSlice() reads them.
  // A file, of a name that ends in ".safetensors", or a folder if it is one or ends in "/".
  std::string output;
  // Of a folder: whose small files are copied beside the weights, as AttachFiles() chooses them.
  // Empty: those that are attached to the model.
  std::string config_from;
};
// Makes the folder if it is not there; its small files are written when all weights have come, and
// these, one file, take their place last: model.safetensors, or, where config.json is one of
// diffusers, diffusion_pytorch_model.safetensors. INVALID_ARGUMENT: the output is neither.
// FAILED_PRECONDITION: the folder has weights in pieces, which would be read in place of ours.
absl::Status Pull(const Session& session, const PullOptions& options);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_PULL_COMMAND_H_
