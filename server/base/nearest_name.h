// SPDX-License-Identifier: Apache-2.0
//
// Finds the name that a user probably meant, for error messages.
#ifndef EMA_SERVER_BASE_NEAREST_NAME_H_
#define EMA_SERVER_BASE_NEAREST_NAME_H_

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace ema {

// The number of bytes that `name` and `candidate` share at both ends. Unlike an edit distance it
// takes linear time: a manifest may have 200'000 names.
inline size_t SharedEnds(std::string_view name, std::string_view candidate) {
  const size_t limit = std::min(name.size(), candidate.size());
  size_t prefix = 0;
  while (prefix < limit && name[prefix] == candidate[prefix]) ++prefix;
  size_t suffix = 0;
  while (suffix < limit - prefix &&
         name[name.size() - 1 - suffix] == candidate[candidate.size() - 1 - suffix]) {
    ++suffix;
  }
  return prefix + suffix;
}

// The name among `items` (`name_of` returns an item's name) that shares the most bytes with `name`;
// of equal ones the nearest in length. REQUIRES: `items` is not empty.
template <typename Items, typename NameOf>
std::string_view NearestName(std::string_view name, const Items& items, const NameOf& name_of) {
  std::string_view best;
  size_t best_shared = 0;
  const auto gap = [name](std::string_view other) {
    return std::max(name.size(), other.size()) - std::min(name.size(), other.size());
  };
  for (const auto& item : items) {
    const std::string_view candidate = name_of(item);
    const size_t shared = SharedEnds(name, candidate);
    const bool is_better =
        shared > best_shared || (shared == best_shared && gap(candidate) < gap(best));
    if (!best.empty() && !is_better) continue;
    best = candidate;
    best_shared = shared;
  }
  return best;
}

}  // namespace ema

#endif  // EMA_SERVER_BASE_NEAREST_NAME_H_
