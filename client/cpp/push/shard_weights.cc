// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/shard_weights.h"

#include <cstring>

#include "client/cpp/push/gather.h"

namespace ema::client_internal {

void ShardWeights::CopyRange(int64_t shard, int64_t offset_in_shard, int64_t length_bytes,
                             std::byte* to) const {
  if (IsContiguous(shard)) {
    const std::span<const std::byte> from = ContiguousRange(shard, offset_in_shard, length_bytes);
    std::memcpy(to, from.data(), from.size());
    return;
  }
  const Shard& box = layout_->shards()[shard];
  const int64_t element_bytes = static_cast<int64_t>(bytes_[shard].size()) / box.element_count();
  Gather({.first = bytes_[shard].data(),
          .element_bytes = element_bytes,
          .extents = box.extents,
          .strides = strides_[shard]},
         RangeBytes(shard, offset_in_shard) / element_bytes,
         RangeBytes(shard, length_bytes) / element_bytes, to);
}

}  // namespace ema::client_internal
