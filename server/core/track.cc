// SPDX-License-Identifier: Apache-2.0
#include "server/core/track.h"

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {

absl::Status ValidateTracks(const std::vector<TrackConfig>& tracks) {
  constexpr size_t kMaxTracks = 64;
  if (tracks.empty() || tracks.size() > kMaxTracks) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kBadRequest,
        absl::StrCat("tracks: ", tracks.size(), " given; a model has 1 to ", kMaxTracks));
  }
  absl::flat_hash_set<std::string_view> names;
  for (const TrackConfig& track : tracks) {
    EMA_RETURN_IF_ERROR(ValidateName("track", track.name));
    if (!names.insert(track.name).second) {
      return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadName,
                       absl::StrCat("track \"", track.name, "\" is given twice"));
    }
  }
  return absl::OkStatus();
}

}  // namespace ema
