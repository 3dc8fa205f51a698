// SPDX-License-Identifier: Apache-2.0
#include "server/group/partition_config.h"

#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/track_table.h"
#include "server/core/version_history.h"

namespace ema::group {

absl::StatusOr<std::vector<int64_t>> TensorBytes(const ModelConfig& config) {
  MemoryBudget unlimited(std::numeric_limits<int64_t>::max());
  EMA_ASSIGN_OR_RETURN(const std::vector<std::shared_ptr<Track>> tracks,
                       MakeTracks(config.tracks, *config.manifest, unlimited));
  const int64_t versions = VersionHistory::VersionCount(config.max_pinned_versions);
  std::vector<int64_t> bytes(static_cast<size_t>(config.manifest->tensor_count()));
  int64_t total = 0;
  for (const std::shared_ptr<Track>& track : tracks) {
    const int64_t copies = versions * (1 + track->config().schedule.kept_weights_count());
    for (size_t i = 0; i < bytes.size(); ++i) {
      int64_t of_track = 0;
      if (__builtin_mul_overflow(track->layout().entry(static_cast<int64_t>(i)).length_bytes,
                                 copies, &of_track) ||
          __builtin_add_overflow(total, of_track, &total)) {
        return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget,
                         absl::StrCat("model \"", config.name, "\" needs more than 2^63 bytes"));
      }
      bytes[i] += of_track;
    }
  }
  return bytes;
}

absl::StatusOr<ModelConfig> PartitionConfig(const ModelConfig& whole, const Partition& place) {
  const Manifest& manifest = *whole.manifest;
  if (place.first_tensor < 0 || place.tensor_count < 1 ||
      place.first_tensor > manifest.tensor_count() - place.tensor_count) {
    return BadRequest(absl::StrCat("tensors: ", place.tensor_count, " from ", place.first_tensor,
                                   " on given, the model has ", manifest.tensor_count()));
  }
  const auto tensors = manifest.tensors().subspan(static_cast<size_t>(place.first_tensor),
                                                  static_cast<size_t>(place.tensor_count));
  EMA_ASSIGN_OR_RETURN(Manifest part, Manifest::Create({tensors.begin(), tensors.end()}));
  ModelConfig config = whole;
  config.manifest = std::make_shared<const Manifest>(std::move(part));
  return config;
}

}  // namespace ema::group
