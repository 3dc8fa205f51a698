// SPDX-License-Identifier: Apache-2.0
//
// The places of the weights of a push.
#ifndef EMA_CLIENT_CPP_PUSH_SHARD_WEIGHTS_H_
#define EMA_CLIENT_CPP_PUSH_SHARD_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/types/span.h"
#include "ema/client.h"
#include "ema/shard.h"

namespace ema::client_internal {

// A rank's weights, by shard, in host or GPU memory. Parts of a shard are given in bytes as sent,
// which are half of the bytes in memory if weights are rounded for the wire. A view: all arguments
// outlive it. The weights are as Run::StartPush() describes.
class ShardWeights {
 public:
  ShardWeights(const RankLayout* layout, absl::Span<const std::span<const std::byte>> bytes,
               absl::Span<const Strides> strides)
      : layout_(layout), bytes_(bytes), strides_(strides) {}

  // False: the shard has to be gathered.
  bool IsContiguous(int64_t shard) const { return strides_.empty() || strides_[shard].empty(); }

  // A part of a shard in memory; offset and length are in bytes as sent. REQUIRES:
  // IsContiguous(shard).
  std::span<const std::byte> ContiguousRange(int64_t shard, int64_t offset_in_shard,
                                             int64_t length_bytes) const {
    const int64_t scale = Scale(shard);
    return bytes_[shard].subspan(offset_in_shard * scale, length_bytes * scale);
  }

  // The length of such a part in memory.
  int64_t RangeBytes(int64_t shard, int64_t length_bytes) const {
    return length_bytes * Scale(shard);
  }
  // Copies a range to `to`, which has room for RangeBytes(), row-major. REQUIRES: it begins and
  // ends between elements, and is in host memory.
  void CopyRange(int64_t shard, int64_t offset_in_shard, int64_t length_bytes, std::byte* to) const;

 private:
  int64_t Scale(int64_t shard) const {
    const int64_t sent_bytes = layout_->shard_start(shard + 1) - layout_->shard_start(shard);
    return static_cast<int64_t>(bytes_[shard].size()) / sent_bytes;
  }

  const RankLayout* const layout_;
  const absl::Span<const std::span<const std::byte>> bytes_;
  const absl::Span<const Strides> strides_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_SHARD_WEIGHTS_H_
