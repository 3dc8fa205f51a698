// SPDX-License-Identifier: Apache-2.0
#include "server/core/coverage.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "server/base/crc32c.h"

namespace ema {
namespace {

// The entry of `map` (by offset, never overlapping) that shares a byte with `range`; end() if none
// does.
template <typename Map>
typename Map::const_iterator FindOverlap(const Map& map, const Coverage::Range& range) {
  auto it = map.upper_bound(range.offset);
  if (it != map.begin()) {
    auto before = std::prev(it);
    if (before->first + before->second.length_bytes > range.offset) return before;
  }
  if (it != map.end() && it->first < range.offset + range.length_bytes) return it;
  return map.end();
}

}  // namespace

absl::StatusOr<Coverage::ClaimResult> Coverage::Claim(Range range, uint32_t crc32c) {
  if (auto it = FindOverlap(covered_, range); it != covered_.end()) {
    if (it->first == range.offset && it->second.length_bytes == range.length_bytes &&
        it->second.crc32c == crc32c) {
      return ClaimResult::kDuplicate;
    }
    return MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kChunkOverlap,
        absl::StrCat("bytes [", range.offset, ", ", range.offset + range.length_bytes,
                     ") overlap [", it->first, ", ", it->first + it->second.length_bytes,
                     "), which arrived before with other bounds or content"));
  }
  if (FindOverlap(claimed_, range) != claimed_.end()) {
    return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kRangeBusy,
                     absl::StrCat("bytes [", range.offset, ", ", range.offset + range.length_bytes,
                                  ") are being folded by another stream of this rank"));
  }
  const auto covered_count = static_cast<int64_t>(covered_.size());
  if (covered_count + static_cast<int64_t>(claimed_.size()) >= max_ranges_) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kBadChunk,
        absl::StrCat("the rank has sent ", covered_count, " chunks of ",
                     covered_bytes_ / std::max<int64_t>(covered_count, 1),
                     " bytes on average, the maximum number of chunks; send larger ones"));
  }
  claimed_[range.offset] = {range.length_bytes, 0};
  return ClaimResult::kClaimed;
}

void Coverage::Cover(Range range, uint32_t crc32c) {
  claimed_.erase(range.offset);
  covered_[range.offset] = {range.length_bytes, crc32c};
  covered_bytes_ += range.length_bytes;
  for (auto it = covered_.find(digested_bytes_); it != covered_.end(); ++it) {
    const auto& [offset, extent] = *it;
    if (offset != digested_bytes_) break;
    digest_ = Crc32cCombine(digest_, extent.crc32c, extent.length_bytes);
    digested_bytes_ += extent.length_bytes;
  }
}

void Coverage::Release(Range range) { claimed_.erase(range.offset); }

std::vector<Coverage::Range> Coverage::Missing(int64_t limit) const {
  std::vector<Range> missing;
  int64_t end = 0;
  const auto add_gap = [&](int64_t next) {
    if (next > end && static_cast<int64_t>(missing.size()) < limit) {
      missing.push_back({end, next - end});
    }
  };
  for (const auto& [offset, extent] : covered_) {
    add_gap(offset);
    end = offset + extent.length_bytes;
  }
  add_gap(total_bytes_);
  return missing;
}

}  // namespace ema
