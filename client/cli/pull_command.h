// SPDX-License-Identifier: Apache-2.0
//
// `emactl pull`: writes an average to a file, or to a folder for Hugging Face's tools.
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

// Parses a box of a tensor in NumPy's form, with a range for each of the first dimensions:
// "head.weight[0:10,5:]". INVALID_ARGUMENT: another form, an unknown tensor, or a range that is
// empty or not inside it; the message quotes `text`.
absl::StatusOr<TensorSlice> ParseSlice(std::string_view text, const Manifest& manifest);

struct PullOptions {
  std::string model;
  std::string track;
  Client::PullOptions request;
  std::string version;  // For ParseVersionOrLabel(); goes into `request`. Empty: not given.
  std::string dtype;    // Empty: the server's dtypes.
  std::string overflow = "error";   // For ParseOverflowPolicy().
  std::vector<std::string> slices;  // For ParseSlice().
  // A file whose name ends in ".safetensors"; or a folder, if it is one or ends in "/".
  std::string output;
  // For a folder: the source of the small files that are copied beside the weights, as by
  // AttachFiles(). Empty: the files that are attached to the model.
  std::string config_from;
};
// Creates the folder if it does not exist. When all weights have arrived, writes the small files,
// and last renames the weights, one file, into place: model.safetensors, or
// diffusion_pytorch_model.safetensors if config.json is one of diffusers. INVALID_ARGUMENT: the
// output is neither a file nor a folder as above. FAILED_PRECONDITION: the folder has an index of
// sharded weights, which tools would read instead.
absl::Status Pull(const Session& session, const PullOptions& options);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_PULL_COMMAND_H_
