// SPDX-License-Identifier: Apache-2.0
#include "server/core/model_config.h"

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {

absl::Status CheckTrackCount(size_t count) {
  if (count >= 1 && static_cast<int64_t>(count) <= kMaxTracks) return absl::OkStatus();
  return BadRequest(absl::StrCat("tracks: ", count, " given; a model has 1 to ", kMaxTracks));
}

int64_t RuleBytes(const TrackConfig& track) {
  int64_t bytes = 0;
  for (const TensorRule& rule : track.tensor_rules) {
    bytes += static_cast<int64_t>(rule.pattern.size()) + kBytesPerRule;
  }
  return bytes;
}

absl::Status CheckRuleBytes(int64_t bytes) {
  constexpr int64_t kMaxBytes = int64_t{2} << 20;
  if (bytes <= kMaxBytes) return absl::OkStatus();
  return BadRequest(absl::StrCat("tensor_rules: the rules of all tracks take ", bytes,
                                 " bytes, expected at most ", kMaxBytes,
                                 "; use patterns with wildcards that match many tensors"));
}

absl::Status TrackGivenTwiceError(std::string_view name) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadName,
                   absl::StrCat("track \"", std::string(name), "\" is given twice"));
}

absl::Status ModelConfig::Validate(GlobBudget budget) const {
  constexpr int64_t kMaxPinnedVersions = 64;
  EMA_RETURN_IF_ERROR(ValidateName("model", name));
  if (max_pinned_versions < 1 || max_pinned_versions > kMaxPinnedVersions) {
    return BadRequest(absl::StrCat("max_pinned_versions: ", max_pinned_versions,
                                   " given, expected 1 to ", kMaxPinnedVersions));
  }
  EMA_RETURN_IF_ERROR(CheckTrackCount(tracks.size()));
  absl::flat_hash_set<std::string_view> names;
  for (const TrackConfig& track : tracks) {
    EMA_RETURN_IF_ERROR(ValidateTrack(track, *manifest, budget));
    if (!names.insert(track.name).second) return TrackGivenTwiceError(track.name);
  }
  return absl::OkStatus();
}

std::string ModelConfig::DifferenceFrom(const ModelConfig& there) const {
  if (std::string difference = manifest->DifferenceFrom(*there.manifest); !difference.empty()) {
    return difference;
  }
  if (tracks.size() != there.tracks.size()) {
    return absl::StrCat(tracks.size(), " tracks here, ", there.tracks.size(), " there");
  }
  for (size_t t = 0; t < tracks.size(); ++t) {
    if (tracks[t] == there.tracks[t]) continue;
    return absl::StrCat("track \"", tracks[t].name, "\" (", TrackText(tracks[t]), ") here, \"",
                        there.tracks[t].name, "\" (", TrackText(there.tracks[t]), ") there");
  }
  if (max_pinned_versions != there.max_pinned_versions) {
    return absl::StrCat("max_pinned_versions ", max_pinned_versions, " here, ",
                        there.max_pinned_versions, " there");
  }
  if (non_finite != there.non_finite) {
    return absl::StrCat("non_finite ", std::string(NonFinitePolicyName(non_finite)), " here, ",
                        std::string(NonFinitePolicyName(there.non_finite)), " there");
  }
  return "";
}

}  // namespace ema
