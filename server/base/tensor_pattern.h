// SPDX-License-Identifier: Apache-2.0
//
// Tensors that are named by what a user writes: a name, an alias, or a pattern of fnmatch(3).
#ifndef EMA_SERVER_BASE_TENSOR_PATTERN_H_
#define EMA_SERVER_BASE_TENSOR_PATTERN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/manifest.h"

namespace ema {

// Costs a comparison with every name of a manifest; other patterns only match themselves.
bool IsGlob(const std::string& pattern);

// INVALID_ARGUMENT: `pattern` is no pattern; the message names it.
absl::Status ValidatePattern(const std::string& pattern);

// By ascending index; empty: none. A glob is compared with names and aliases.
std::vector<int64_t> MatchingTensors(const std::string& pattern, const Manifest& manifest);

// The same, of which there must be some. INVALID_ARGUMENT: as ValidatePattern(), or there are none:
// `pattern "haed.*" matches no tensor; the nearest name is "head.weight"`.
absl::StatusOr<std::vector<int64_t>> FindTensors(const std::string& pattern,
                                                 const Manifest& manifest);

}  // namespace ema

#endif  // EMA_SERVER_BASE_TENSOR_PATTERN_H_
