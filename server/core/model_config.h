// SPDX-License-Identifier: Apache-2.0
//
// The configuration of a model, and changes to its tracks.
#ifndef EMA_SERVER_CORE_MODEL_CONFIG_H_
#define EMA_SERVER_CORE_MODEL_CONFIG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "ema/manifest.h"
#include "ema/track.h"
#include "include/ema/internal/tensor_pattern.h"

namespace ema {

// The settings in a CreateModel request.
struct ModelConfig {
  std::string name;
  std::shared_ptr<const Manifest> manifest;
  std::vector<TrackConfig> tracks;
  // For a model from a checkpoint: the tracks that CreateModel asked for; `tracks` may have changed
  // since.
  std::vector<TrackConfig> created_tracks = {};
  // The number of different versions that readers may pin at once. As many are kept besides the
  // current one, and one more with a data directory.
  int64_t max_pinned_versions = 2;
  NonFinitePolicy non_finite = NonFinitePolicy::kReject;

  // INVALID_ARGUMENT: a setting is not valid, or matching the rules of all tracks would exceed
  // `budget`. Only requests have a budget: a stored config was accepted before.
  absl::Status Validate(GlobBudget budget = GlobBudget::Unlimited()) const;
  // The first difference in words; empty if equal.
  std::string DifferenceFrom(const ModelConfig& there) const;
};

// The changes in an UpdateModel request; ema_service.proto says what each field means.
struct TrackChanges {
  std::vector<TrackConfig> put;
  std::vector<std::string> remove;
  std::vector<std::string> pause;
  std::vector<std::string> resume;
};

inline constexpr int64_t kMaxTracks = 64;  // Per model.
// INVALID_ARGUMENT, BAD_REQUEST: a model has 1 to kMaxTracks tracks.
absl::Status CheckTrackCount(size_t count);
// Bytes of a rule in a reply, besides its pattern. The few rules with a schedule take more.
inline constexpr int64_t kBytesPerRule = 16;
// Bytes of a track's tensor_rules in a reply.
int64_t RuleBytes(const TrackConfig& track);
// Checks RuleBytes() of all tracks of a model together: replies of GetModel, OpenRun and Push must
// fit into one message. INVALID_ARGUMENT, BAD_REQUEST: more than 2 MiB.
absl::Status CheckRuleBytes(int64_t bytes);
// The error INVALID_ARGUMENT, BAD_NAME.
absl::Status TrackGivenTwiceError(std::string_view name);

}  // namespace ema

#endif  // EMA_SERVER_CORE_MODEL_CONFIG_H_
