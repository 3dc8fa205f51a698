// SPDX-License-Identifier: Apache-2.0
//
// One average of a model, as CreateModel takes it.
#ifndef EMA_TRACK_H_
#define EMA_TRACK_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "ema/manifest.h"
#include "ema/schedule.h"
#include "ema/tensor_spec.h"

namespace ema {

// Tensors of which a name (or alias) is `pattern` or matches it as a glob: `*` is any text, `?` any
// character, as fnmatch(3) without flags.
struct TensorRule {
  std::string pattern;
  TensorAction action = TensorAction::kAverage;
  friend bool operator==(const TensorRule&, const TensorRule&) = default;
};

struct TrackConfig {
  std::string name;
  Schedule schedule;
  // The first that matches decides.
  std::vector<TensorRule> tensor_rules;
  // For buffers (TensorSpec::is_buffer) that no rule matches: kAverage or kCopy.
  TensorAction buffers = TensorAction::kAverage;
  // Keeps two float32 per averaged element, whose sum is the average: small weights do not stall.
  // Twice the memory. Readers get the first, which is the average rounded to float32.
  bool compensated = false;
  // Pushes do not change it.
  bool paused = false;

  friend bool operator==(const TrackConfig&, const TrackConfig&) = default;
};

// What becomes of a step in which a pushed float is not finite. Numbers are those of
// ema.v1.NonFinitePolicy, which says what each means.
enum class NonFinitePolicy : int { kReject = 1, kSkipTensor = 2, kAllow = 3 };

// INVALID_ARGUMENT: a bad name, an empty pattern, buffers that are neither averaged nor copied, a
// copy track that is compensated, more than 256 patterns with wildcards, or (BAD_SCHEDULE) a rule
// that matches no tensor of `manifest`.
absl::Status ValidateTrack(const TrackConfig& track, const Manifest& manifest);

// What the track does with each tensor of the manifest. A copy track copies what it does not
// ignore; only floats are averaged.
std::vector<TensorAction> ActionsOf(const TrackConfig& track, const Manifest& manifest);

// The track without the rules that match no tensor of the manifest, which ValidateTrack() refuses.
TrackConfig WithoutIdleRules(TrackConfig track, const Manifest& manifest);

// Such as "half_life=200ba, update_interval=5ba; compensated; head.* ignore": the schedule and what
// is not at its default; of many rules their number.
std::string TrackText(const TrackConfig& track);

}  // namespace ema

#endif  // EMA_TRACK_H_
