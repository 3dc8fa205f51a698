// SPDX-License-Identifier: Apache-2.0
//
// manifest.json of a checkpoint: all that is not weights, and the checksums of what is.
#ifndef EMA_SERVER_CHECKPOINT_MANIFEST_JSON_H_
#define EMA_SERVER_CHECKPOINT_MANIFEST_JSON_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "ema/schedule.h"
#include "ema/track.h"
#include "server/core/push_session.h"
#include "server/core/snapshot.h"

namespace ema {

// What this build writes, and the newest that it reads. 1: a track had one schedule, its `state`
// and `last_step`.
inline constexpr int64_t kCheckpointFormatVersion = 2;

// A safetensors file of a checkpoint.
struct CheckpointFile {
  int64_t file_bytes = 0;
  // Of the file's bytes before the data section, and of each tensor's bytes, as the manifest's
  // tensors (0 for those that are not in the file): together of every byte.
  uint32_t header_crc32c = 0;
  std::vector<uint32_t> tensor_crc32c;

  friend bool operator==(const CheckpointFile&, const CheckpointFile&) = default;
};

// One track of a checkpoint. Without `weights` it has no value yet.
struct CheckpointTrack {
  TrackConfig config;
  TrackState state;
  std::vector<int64_t> last_steps;  // As `state`.
  std::optional<CheckpointFile> weights;
  std::optional<CheckpointFile> low_parts;  // Of a compensated track.

  friend bool operator==(const CheckpointTrack&, const CheckpointTrack&) = default;
};

// A checkpoint without its weights.
struct CheckpointManifest {
  std::string model_name;
  Manifest manifest;
  int64_t max_pinned_versions = 0;
  NonFinitePolicy non_finite = NonFinitePolicy::kReject;
  // As CreateModel asked for them; `tracks` are what UpdateModel has made of them.
  std::vector<TrackConfig> created_tracks;
  // record.tracks is as `tracks`. Its commit_time is kept to the microsecond.
  VersionRecord record;
  std::vector<CheckpointTrack> tracks;
  // Of all tracks' files.
  int64_t total_bytes = 0;
};

// The file's text: JSON, whose first member is a CRC32C of all that follows, so that a changed byte
// is noticed (an editor breaks it, too). Numbers are written so that they are read back exactly.
std::string EncodeCheckpointManifest(const CheckpointManifest& manifest);

// FAILED_PRECONDITION: written by a newer server; the message names both format versions.
// DATA_LOSS, CHECKPOINT_CORRUPT: the checksum is wrong, or anything is missing, doubled or out of
// range.
absl::StatusOr<CheckpointManifest> ParseCheckpointManifest(std::string_view text);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_MANIFEST_JSON_H_
