// SPDX-License-Identifier: Apache-2.0
//
// Which of one rank's bytes have arrived in a session.
#ifndef EMA_SERVER_CORE_COVERAGE_H_
#define EMA_SERVER_CORE_COVERAGE_H_

#include <cstdint>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"

namespace ema {

// Ranges of bytes in three states: missing, claimed (being folded), covered (folded, checksum
// right). Not thread-safe: its session locks it.
class Coverage {
 public:
  struct Range {
    int64_t offset = 0;
    int64_t length_bytes = 0;
  };
  enum class ClaimResult {
    kClaimed,    // Fold it, then Cover() or Release().
    kDuplicate,  // Covered by the very same range and checksum: do not fold.
  };

  // At most `max_ranges` are covered or claimed at a time: each takes about 40 bytes.
  Coverage(int64_t total_bytes, int64_t max_ranges)
      : total_bytes_(total_bytes), max_ranges_(max_ranges) {}

  // Claims a range before it is folded. REQUIRES: inside the total, not empty. INVALID_ARGUMENT,
  // CHUNK_OVERLAP: some of it is covered by a range with other bounds, or by the same range with
  // another checksum; BAD_CHUNK: there are `max_ranges` already. UNAVAILABLE, RANGE_BUSY: some of
  // it is claimed. On an error nothing changes.
  absl::StatusOr<ClaimResult> Claim(Range range, uint32_t crc32c);

  // Ends a claim. REQUIRES: `range` is claimed.
  void Cover(Range range, uint32_t crc32c);
  void Release(Range range);

  int64_t total_bytes() const { return total_bytes_; }
  int64_t covered_bytes() const { return covered_bytes_; }
  bool is_complete() const { return covered_bytes_ == total_bytes_; }

  // Ranges that are not covered, in order, at most `limit`.
  std::vector<Range> Missing(int64_t limit) const;

  // CRC32C of all bytes in order. REQUIRES: is_complete().
  uint32_t Digest() const { return digest_; }

 private:
  struct Extent {
    int64_t length_bytes = 0;
    uint32_t crc32c = 0;  // Set if the range is covered.
  };
  const int64_t total_bytes_;
  const int64_t max_ranges_;
  absl::btree_map<int64_t, Extent> covered_;  // By offset; never overlap.
  absl::btree_map<int64_t, Extent> claimed_;
  int64_t covered_bytes_ = 0;
  // The contiguous covered bytes from offset 0 on, and their CRC32C: kept up to date, so that a
  // commit computes nothing.
  int64_t digested_bytes_ = 0;
  uint32_t digest_ = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_COVERAGE_H_
