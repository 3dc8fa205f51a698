// SPDX-License-Identifier: Apache-2.0
//
// manifest.json of a checkpoint: everything but the weights, and the weights' checksums.
#ifndef EMA_SERVER_FORMAT_MANIFEST_JSON_H_
#define EMA_SERVER_FORMAT_MANIFEST_JSON_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "ema/schedule.h"
#include "ema/track.h"
#include "ema/version.h"

namespace ema {

// The format that this build writes and reads; earlier ones were never released. A later format
// keeps the checksum as its first member, and its format_version, so that it is rejected by version
// instead of being taken for damage.
inline constexpr int64_t kCheckpointFormatVersion = 6;

// A tensor longer than this has a checksum for each piece of this size, so that a part of it can be
// read and verified without the rest.
inline constexpr int64_t kPieceBytes = int64_t{1} << 20;

// One safetensors file of a track.
struct TensorFile {
  std::string name;
  int64_t file_bytes = 0;
  uint32_t header_crc32c = 0;  // Of the bytes before the data section.

  friend bool operator==(const TensorFile&, const TensorFile&) = default;
};

// A file that is read as a whole.
struct SmallFile {
  std::string name;
  int64_t file_bytes = 0;
  uint32_t crc32c = 0;

  friend bool operator==(const SmallFile&, const SmallFile&) = default;
};

// The tensors of a track, or of weights that it keeps, in one or more safetensors files; each is in
// one file only.
struct TensorFiles {
  std::vector<TensorFile> files;   // Named by TensorFileName().
  std::optional<SmallFile> index;  // If there is more than one file, but not of kept weights.
  // CRC32C of each tensor, in the manifest's order; 0 for tensors that are not in the files.
  std::vector<uint32_t> tensor_crc32c;
  // CRC32C of each kPieceBytes of a tensor that is longer than that; else empty.
  std::vector<std::vector<uint32_t>> piece_crc32c;
  // CRC32C of all tensors' bytes in the manifest's order, so that equal weights have equal digests
  // however they are split.
  uint32_t digest = 0;
  // The files also have tensors that are not in the manifest: see PartOf(). Not in manifest.json.
  bool has_other_tensors = false;

  friend bool operator==(const TensorFiles&, const TensorFiles&) = default;
};

// One track of a checkpoint. Without `weights` it has no value yet.
struct CheckpointTrack {
  TrackConfig config;
  TrackState state;
  std::vector<int64_t> last_steps;  // Parallel to `state`.
  int64_t frozen_digest = 0;        // See TrackSnapshot.
  std::optional<TensorFiles> weights;
  std::vector<TensorFiles> latest_weights;  // See TrackSnapshot.

  // The files of the average, then those of the kept weights. REQUIRES: it has weights.
  std::vector<const TensorFiles*> all_files() const {
    std::vector<const TensorFiles*> all = {&*weights};
    for (const TensorFiles& files : latest_weights) all.push_back(&files);
    return all;
  }

  friend bool operator==(const CheckpointTrack&, const CheckpointTrack&) = default;
};

// A checkpoint without its weights.
struct CheckpointManifest {
  std::string model_name;
  Manifest manifest;
  int64_t max_pinned_versions = 0;
  NonFinitePolicy non_finite = NonFinitePolicy::kReject;
  // As CreateModel asked for them; UpdateModel may have changed them to `tracks`.
  std::vector<TrackConfig> created_tracks;
  // Its `tracks` has all tracks of the version, also if the checkpoint is partial.
  Version record;
  std::vector<CheckpointTrack> tracks;
  // The version has more tracks with a value than are in `tracks`.
  bool is_partial = false;
  // Each is in the folder of every track that has weights.
  std::vector<SmallFile> attached_files;
  // Of all files in the tracks' folders.
  int64_t total_bytes = 0;

  // Null: there is no such track.
  const CheckpointTrack* Find(std::string_view track_name) const;
  // Of all files in the folder of one of `tracks`.
  int64_t FolderBytes(const CheckpointTrack& track) const;
};

// The text of a file as json_file.h says.
std::string EncodeCheckpointManifest(const CheckpointManifest& manifest);

enum class ManifestScope {
  kWhole,  // All files of a checkpoint.
  kPart,   // What WritePart() returns: consecutive files of a checkpoint, maybe none, and no index.
};

// FAILED_PRECONDITION: written in another format; the message names both. DATA_LOSS,
// CHECKPOINT_CORRUPT: the checksum is wrong, or a field is missing, unknown, doubled or out of
// range, or the files are not those of `scope`. Does not check that checksums fit the tensors'
// sizes and each other: ReadCheckpointManifest() does.
absl::StatusOr<CheckpointManifest> ParseCheckpointManifest(
    std::string_view text, ManifestScope scope = ManifestScope::kWhole);

// The error DATA_LOSS, CHECKPOINT_CORRUPT: "manifest.json: " and `problem`.
absl::Status CorruptManifest(const std::string& problem);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_MANIFEST_JSON_H_
