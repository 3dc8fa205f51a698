// SPDX-License-Identifier: Apache-2.0
#include "server/format/checkpoint_files.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ema/error_reason.h"

namespace ema {
std::string TensorFileName(size_t index, size_t count, size_t weights) {
  const std::string stem = weights == 0 ? "model" : absl::StrCat("latest-", weights);
  if (count == 1) return stem + ".safetensors";
  return absl::StrFormat("%s-%05d-of-%05d.safetensors", stem, index + 1, count);
}

std::string TracksPath(std::string_view checkpoint_path) {
  return JoinPath(checkpoint_path, "tracks");
}

std::string TrackPath(std::string_view checkpoint_path, std::string_view track_name) {
  return JoinPath(TracksPath(checkpoint_path), track_name);
}

absl::Status CorruptCheckpoint(const std::string& problem) {
  return MakeError(absl::StatusCode::kDataLoss, ErrorReason::kCheckpointCorrupt, problem);
}

absl::Status ToCorruptionError(const absl::Status& status) {
  if (absl::IsNotFound(status) || absl::IsDataLoss(status) || absl::IsFailedPrecondition(status)) {
    return CorruptCheckpoint(std::string(status.message()));
  }
  return status;
}

}  // namespace ema
