// SPDX-License-Identifier: Apache-2.0
//
// Which files a checkpoint has:
//
//   manifest.json                             all that is not weights; see manifest_json.h
//   KEEP                                      maybe; see folder_files.h
//   tracks/<track>/model.safetensors          or model-00001-of-00003.safetensors, ... and
//                  model.safetensors.index.json
//   tracks/<track>/latest-1.safetensors       of a mean of the last k: the weights that it keeps,
//                                             the oldest first, in as many files as the average
//   tracks/<track>/<attached>                 small files of the trainer's, such as config.json
//
// A track's folder has the layout that Hugging Face's tools write and read.
#ifndef EMA_SERVER_FORMAT_CHECKPOINT_FILES_H_
#define EMA_SERVER_FORMAT_CHECKPOINT_FILES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/format/file_system.h"

namespace ema {

inline constexpr std::string_view kManifestFileName = "manifest.json";
inline constexpr int64_t kMaxManifestFileBytes = int64_t{512} << 20;
inline constexpr std::string_view kIndexFileName = "model.safetensors.index.json";
inline constexpr int64_t kMaxIndexFileBytes = int64_t{512} << 20;

// "model-00002-of-00003.safetensors" for `index` 1 of 3; "model.safetensors" for the only one.
// `weights`: 0 for the average, else the number of the kept weights, as in "latest-1.safetensors".
std::string TensorFileName(size_t index, size_t count, size_t weights = 0);
// The `index` and `count` of a name that TensorFileName() has made; absent: it is another name.
struct FileNumber {
  size_t index = 0;
  size_t count = 0;
};
std::optional<FileNumber> ParseTensorFileName(std::string_view name, size_t weights);

std::string TracksPath(std::string_view checkpoint_path);
std::string TrackPath(std::string_view checkpoint_path, std::string_view track_name);

// The error DATA_LOSS, CHECKPOINT_CORRUPT.
absl::Status CorruptCheckpoint(const std::string& problem);

// Converts an error that is the checkpoint's fault to CorruptCheckpoint(): a file of it is missing,
// short or not a regular file. Returns other errors, which are the disk's fault, unchanged.
absl::Status ToCorruptionError(const absl::Status& status);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_CHECKPOINT_FILES_H_
