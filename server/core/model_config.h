// SPDX-License-Identifier: Apache-2.0
//
// What a model is asked to be, at first and later.
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

// What CreateModel asks for.
struct ModelConfig {
  std::string name;
  std::shared_ptr<const Manifest> manifest;
  std::vector<TrackConfig> tracks;
  // Of a model that comes from a checkpoint: as CreateModel asked for them, where `tracks` have
  // been changed since.
  std::vector<TrackConfig> created_tracks = {};
  // Distinct versions that readers may hold at once; so many versions besides the current one are
  // kept.
  int64_t max_pinned_versions = 2;
  NonFinitePolicy non_finite = NonFinitePolicy::kReject;

  // INVALID_ARGUMENT: it cannot be; or to find what the rules of all its tracks match takes more
  // than `budget`, which only a request has: what has been granted and stored has none.
  absl::Status Validate(GlobBudget budget = GlobBudget::Unlimited()) const;
  // The first difference in words; empty if equal.
  std::string DifferenceFrom(const ModelConfig& there) const;
};

// What UpdateModel asks for; ema_service.proto says what each means.
struct TrackChanges {
  std::vector<TrackConfig> put;
  std::vector<std::string> remove;
  std::vector<std::string> pause;
  std::vector<std::string> resume;
};

inline constexpr int64_t kMaxTracks = 64;  // Of a model.
// INVALID_ARGUMENT, BAD_REQUEST: a model has 1 to kMaxTracks tracks.
absl::Status CheckTrackCount(size_t count);
// What a rule takes in a reply besides its pattern, in bytes; the few that have a schedule take
// more.
inline constexpr int64_t kBytesPerRule = 16;
// What a track's tensor_rules take in a reply, in bytes.
int64_t RuleBytes(const TrackConfig& track);
// Of all tracks of a model: what GetModel, OpenRun and Push say of it is to fit into one message.
// INVALID_ARGUMENT, BAD_REQUEST: more than 2 MiB.
absl::Status CheckRuleBytes(int64_t bytes);
// INVALID_ARGUMENT, BAD_NAME.
absl::Status TrackGivenTwice(std::string_view name);

}  // namespace ema

#endif  // EMA_SERVER_CORE_MODEL_CONFIG_H_
