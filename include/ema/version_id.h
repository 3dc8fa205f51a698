// SPDX-License-Identifier: Apache-2.0
//
// Identifies a version of a model.
#ifndef EMA_VERSION_ID_H_
#define EMA_VERSION_ID_H_

#include <compare>
#include <cstdint>

namespace ema {

// Identifies one commit, also across restarts of the server. Ordered by incarnation, then version,
// which is the order of the commits.
struct VersionId {
  int64_t version = 0;
  int64_t incarnation = 0;

  // True if this id, in which incarnation 0 means any, matches `other`.
  bool Matches(const VersionId& other) const {
    return version == other.version && (incarnation == 0 || incarnation == other.incarnation);
  }

  friend bool operator==(const VersionId&, const VersionId&) = default;
  friend std::strong_ordering operator<=>(const VersionId& a, const VersionId& b) {
    const auto order = a.incarnation <=> b.incarnation;
    return order != 0 ? order : a.version <=> b.version;
  }
};

}  // namespace ema

#endif  // EMA_VERSION_ID_H_
