// SPDX-License-Identifier: Apache-2.0
//
// The weights of a model as other tools leave them on a disk.
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

// Where links lead: caches of models are full of them, and our file system follows none. `path`
// itself if there is nothing.
std::string RealPath(const std::string& path);

// Of a file here, whose `path` goes before: UNKNOWN for UNAVAILABLE, which would mean the server.
absl::Status FileError(const std::string& path, const absl::Status& status);

// What tools call the weights of a folder, by the text of its config.json (empty: it has none):
// diffusers diffusion_pytorch_model.safetensors, others model.safetensors.
std::string WeightsName(const std::string& config);
inline constexpr char kConfigName[] = "config.json";
// Of a folder; empty: there is none, or it cannot be read, which tells tools nothing either.
std::string ReadConfig(const std::string& folder);

// A safetensors file, or a Hugging Face folder: what WeightsName() says, else the other one, whole
// or in the pieces that its .index.json names. Nothing executable is read. Not thread-safe.
class WeightsFile {
 public:
  // Reads the headers. NOT_FOUND: there is none. INVALID_ARGUMENT: not what the format says; the
  // message names the file.
  static absl::StatusOr<WeightsFile> Open(const std::string& path);

  // In the files' order.
  const Manifest& manifest() const { return manifest_; }

  // The tensors' bytes in the manifest's order.
  struct Weights {
    std::unique_ptr<std::byte[]> memory;  // That of all of them.
    std::vector<std::span<const std::byte>> tensors;
  };
  // Takes manifest().total_bytes() of memory. `on_progress` is told the bytes so far; false ends
  // it: CANCELLED. Errors as RandomAccessFile::Read().
  absl::StatusOr<Weights> Read(const std::function<bool(int64_t)>& on_progress) const;

 private:
  struct Place {
    int64_t file = 0;    // Index into files_.
    int64_t offset = 0;  // In the file.
  };

  // Adds the tensors of one file that `is_wanted`.
  absl::Status Add(const std::string& path,
                   const std::function<bool(const std::string&)>& is_wanted);
  absl::Status AddPieces(const std::string& folder, const std::string& index_path);

  std::vector<std::unique_ptr<RandomAccessFile>> files_;
  std::vector<TensorSpec> specs_;
  std::vector<Place> places_;  // As the tensors.
  Manifest manifest_;
};

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_WEIGHTS_FILE_H_
