// SPDX-License-Identifier: Apache-2.0
//
// Reads a model's weights from files of other tools.
#ifndef EMA_CLIENT_CLI_WEIGHTS_FILE_H_
#define EMA_CLIENT_CLI_WEIGHTS_FILE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "server/format/file_system.h"

namespace ema::cli {

// Resolves symbolic links, which caches of models use a lot and our file system does not follow.
// Returns `path` itself if nothing is there.
std::string RealPath(const std::string& path);

// An error of a local file, prefixed with `path`. UNAVAILABLE becomes UNKNOWN, since it would mean
// the server.
absl::Status FileError(const std::string& path, const absl::Status& status);

// The file name of the weights in a folder with this config.json (empty: it has none):
// diffusion_pytorch_model.safetensors for diffusers, otherwise model.safetensors.
std::string WeightsName(const std::string& config);
inline constexpr char kConfigName[] = "config.json";
// The text of config.json in a folder; empty: there is none, or it cannot be read, which is the
// same for tools.
std::string ReadConfig(const std::string& folder);

// A safetensors file, or a Hugging Face folder with WeightsName(), else the other name: one file,
// or the files that its .index.json lists. Reads nothing executable. Not thread-safe.
class WeightsFile {
 public:
  // Reads the headers. NOT_FOUND: no such file. INVALID_ARGUMENT: a malformed file; the message
  // names it.
  static absl::StatusOr<WeightsFile> Open(const std::string& path);

  // In the order of the files; names are without the prefixes of wrappers ("_orig_mod.",
  // "module."), as attach() has them.
  const Manifest& manifest() const { return manifest_; }

  // The tensors' bytes in the manifest's order.
  struct Weights {
    std::unique_ptr<std::byte[]> memory;  // Holds all tensors.
    std::vector<std::span<const std::byte>> tensors;
  };
  // Allocates manifest().total_bytes(). `on_progress` receives the number of bytes read so far; if
  // it returns false, the call ends with CANCELLED. Errors as RandomAccessFile::Read(), but UNKNOWN
  // for UNAVAILABLE.
  absl::StatusOr<Weights> Read(const std::function<bool(int64_t)>& on_progress) const;

 private:
  struct Place {
    int64_t file = 0;    // Index into files_.
    int64_t offset = 0;  // In the file.
  };

  // Adds the tensors of one file for which `is_wanted` is true.
  absl::Status Add(const std::string& path,
                   const std::function<bool(const std::string&)>& is_wanted);
  absl::Status AddPieces(const std::string& folder, const std::string& index_path);

  std::vector<std::unique_ptr<RandomAccessFile>> files_;
  std::vector<TensorSpec> specs_;
  std::vector<Place> places_;  // In the order of the tensors.
  Manifest manifest_;
};

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_WEIGHTS_FILE_H_
