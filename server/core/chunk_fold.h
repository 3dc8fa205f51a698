// SPDX-License-Identifier: Apache-2.0
//
// Folds a pushed chunk into the next snapshot.
#ifndef EMA_SERVER_CORE_CHUNK_FOLD_H_
#define EMA_SERVER_CORE_CHUNK_FOLD_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/shard.h"
#include "server/core/coverage.h"
#include "server/core/next_snapshot.h"
#include "server/device/device.h"
#include "server/kernel/fold_op.h"

namespace ema {

// Walks the pieces of one chunk and the ranges of its rank's layout together. Tensors that are
// adjacent in the layout and in all tracks are folded as one run: folding small tensors one by one
// would cost more than reading their bytes. For one chunk, on one thread.
class ChunkFold {
 public:
  struct Result {
    uint32_t crc32c = 0;  // CRC32C of the chunk. 0 without `with_checksum`.
    // From the chunk's frozen tensors. The XOR over all chunks of a step identifies their values,
    // however the ranks shard them.
    uint32_t frozen_crc32c = 0;
    std::vector<NonFiniteElement> non_finite;  // At most one per tensor.
  };

  // Both outlive this object.
  ChunkFold(const NextSnapshot& next, DeviceStream& device_stream);

  // Folds the bytes `range` of a rank with `layout`; `pieces` are these bytes, end to end.
  // INTERNAL: the device failed.
  absl::StatusOr<Result> Fold(const RankLayout& layout, const Coverage::Range& range,
                              absl::Span<const std::span<const std::byte>> pieces,
                              bool with_checksum);

 private:
  // An element of a tensor.
  struct Place {
    int64_t tensor_index = 0;
    int64_t element = 0;
  };

  // Continues with the next piece that is not empty. The checksum is computed here, so that the
  // fold finds the bytes in the cache.
  void NextPiece();
  absl::Status FoldRange(const RankLayout& layout, const RankLayout::ContiguousRange& contiguous);
  // Adds up to `count` elements to the run, which may continue beyond the tensor's end. Returns how
  // many it has added.
  absl::StatusOr<int64_t> FoldElements(const Place& place, Dtype dtype, const std::byte* source,
                                       int64_t count);
  // Adds the `count` elements from `place` on, whose bytes are at `source`, to frozen_crc32c.
  void AddToFrozenDigest(const Place& place, int64_t element_size, const std::byte* source,
                         int64_t count);
  // The offset of an element in the bytes of track `t`.
  int64_t StoredOffset(size_t t, const Place& place) const;
  // Adds to `targets_` what an element does to track `t`. Returns how many elements are contiguous
  // there, of tensors before `end_tensor`.
  int64_t AddTargets(size_t t, const Place& place, int64_t end_tensor, Dtype source_dtype);
  // Whether `targets_`, for the bytes at `source`, continue where `run_` ends, in memory and in the
  // tracks. `offset`: of the first element in its track.
  bool ContinuesRun(Dtype dtype, const std::byte* source, int64_t offset) const;
  // Folds the run on the device, if it has elements.
  absl::Status EndRun();

  const NextSnapshot& next_;
  DeviceStream& device_stream_;
  std::vector<size_t> changing_tracks_;
  bool folds_tensors_separately_ = false;
  // The tracks that the current elements change, and the targets in them.
  std::vector<FoldTarget> targets_;
  std::vector<size_t> tracks_;
  FoldOp run_;              // Its elements are not folded yet.
  int64_t run_offset_ = 0;  // The offset of its first element in the run's first track.
  std::vector<FoldTarget> run_targets_;
  std::vector<size_t> run_tracks_;
  absl::Span<const std::span<const std::byte>> pieces_;  // After the current one.
  std::span<const std::byte> piece_;                     // The rest of the current one.
  bool with_checksum_ = true;
  Result result_;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_CHUNK_FOLD_H_
