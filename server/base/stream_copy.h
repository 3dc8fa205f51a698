// SPDX-License-Identifier: Apache-2.0
//
// Copies between memory that is in the caches and memory that is not.
#ifndef EMA_SERVER_BASE_STREAM_COPY_H_
#define EMA_SERVER_BASE_STREAM_COPY_H_

#include <cstddef>
#include <span>

namespace ema {

// memcpy() for a cached source, and a destination that is neither cached nor read soon: stores past
// the caches, which avoids reading the old lines (11 GB/s instead of 8 to 9 into 400 MB). Other
// threads see the bytes as after plain stores.
void StreamCopy(std::span<const std::byte> from, std::byte* to);

// memcpy() for an uncached source and a cached destination: reads at three places in turn, with
// prefetches (14 to 16 GB/s instead of 11 out of 400 MB).
void FetchCopy(std::span<const std::byte> from, std::byte* to);

}  // namespace ema

#endif  // EMA_SERVER_BASE_STREAM_COPY_H_
