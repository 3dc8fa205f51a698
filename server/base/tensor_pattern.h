// SPDX-License-Identifier: Apache-2.0
//
// Tensors that are named by what a user writes: a name, an alias, or a pattern of fnmatch(3).
#ifndef EMA_SERVER_BASE_TENSOR_PATTERN_H_
#define EMA_SERVER_BASE_TENSOR_PATTERN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ema/manifest.h"

namespace ema {

// Costs a comparison with every name of a manifest; other patterns only match themselves.
bool IsGlob(const std::string& pattern);

// By ascending index; empty: none. A glob is compared with names and aliases.
std::vector<int64_t> MatchingTensors(const std::string& pattern, const Manifest& manifest);

// What is wrong with a pattern, such as `pattern "haed.*" matches no tensor; the nearest name is
// "head.weight"`; absent: nothing, it matches some.
std::optional<std::string> PatternProblem(const std::string& pattern, const Manifest& manifest);

}  // namespace ema

#endif  // EMA_SERVER_BASE_TENSOR_PATTERN_H_
