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
#include "server/format/manifest_parts.h"

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
  EMA_ASSIGN_OR_RETURN(Manifest part,
                       SliceManifest(*whole.manifest, place.first_tensor, place.tensor_count));
  ModelConfig config = whole;
  config.manifest = std::make_shared<const Manifest>(std::move(part));
  return config;
}

}  // namespace ema::group
