// SPDX-License-Identifier: Apache-2.0
//
// Tensors that a user selects by a name, an alias, or a pattern as in fnmatch(3).
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

// True if `pattern` has wildcards. Other patterns match only a tensor with that name or alias.
bool IsGlob(const std::string& pattern);

// Bounds the time to match the patterns of one request, since the thread also serves others. RE2
// takes time linear in the name; a pattern with `?` or brackets after a `*` may take time
// proportional to the pattern as well. The default is about a second of one core: ten patterns for
// each of 200,000 tensors, or 256 patterns for each of 10,000.
struct GlobBudget {
  int64_t steps = int64_t{1} << 27;

  static GlobBudget Unlimited() { return {.steps = std::numeric_limits<int64_t>::max()}; }
};

// The tensors that `pattern` matches, by ascending index. A glob is compared with names and
// aliases.
std::vector<int64_t> MatchingTensors(const std::string& pattern, const Manifest& manifest);

// MatchingTensors() for untrusted patterns. INVALID_ARGUMENT: the pattern is empty, has a zero byte
// or more than kMaxTensorNameBytes, or exceeds `budget`, from which its steps are subtracted.
absl::StatusOr<std::vector<int64_t>> MatchTensors(const std::string& pattern,
                                                  const Manifest& manifest, GlobBudget& budget);

// MatchTensors(), and INVALID_ARGUMENT if nothing matches:
// `pattern "haed.*" matches no tensor; the nearest name is "head.weight"`.
absl::StatusOr<std::vector<int64_t>> FindTensors(const std::string& pattern,
                                                 const Manifest& manifest, GlobBudget& budget);

// ValidateTrack() of ema/track.h for one of several tracks that share `budget`.
absl::Status ValidateTrack(const TrackConfig& track, const Manifest& manifest, GlobBudget& budget);

}  // namespace ema

#endif  // EMA_INTERNAL_TENSOR_PATTERN_H_
