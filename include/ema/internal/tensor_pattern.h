// SPDX-License-Identifier: Apache-2.0
//
// Tensors that are named by what a user writes: a name, an alias, or a pattern of fnmatch(3).
#ifndef EMA_INTERNAL_TENSOR_PATTERN_H_
#define EMA_INTERNAL_TENSOR_PATTERN_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "ema/track.h"

namespace ema {

// Is compared with every name of a manifest; other patterns only match themselves.
bool IsGlob(const std::string& pattern);

// What may still be spent on the globs of one request, in steps of Glob: 150 to 400 ms, as it may
// be the time of a thread that serves others, too; the rules of a track are looked for up to four
// times until it is made. Enough for a dozen globs in the largest manifest, some fifty if their
// text is at the ends, and for all that a track may have in one of a thousand tensors.
struct GlobBudget {
  int64_t steps = 100'000'000;

  static GlobBudget Unlimited() { return {.steps = std::numeric_limits<int64_t>::max()}; }
};

// By ascending index; empty: none. A glob is compared with names and aliases.
std::vector<int64_t> MatchingTensors(const std::string& pattern, const Manifest& manifest);

// The same of a pattern from outside. INVALID_ARGUMENT: it is none, or takes more than `budget`
// allows; the message names it.
absl::StatusOr<std::vector<int64_t>> MatchTensors(const std::string& pattern,
                                                  const Manifest& manifest, GlobBudget& budget);

// The same, of which there must be some. INVALID_ARGUMENT: likewise, or there are none:
// `pattern "haed.*" matches no tensor; the nearest name is "head.weight"`.
absl::StatusOr<std::vector<int64_t>> FindTensors(const std::string& pattern,
                                                 const Manifest& manifest, GlobBudget& budget);

// As in ema/track.h, of one of several tracks that share `budget`.
absl::Status ValidateTrack(const TrackConfig& track, const Manifest& manifest, GlobBudget& budget);

}  // namespace ema

#endif  // EMA_INTERNAL_TENSOR_PATTERN_H_
