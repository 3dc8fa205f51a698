// SPDX-License-Identifier: Apache-2.0
//
// Copies between memory that is in the caches and memory that is not.
#ifndef EMA_SERVER_BASE_STREAM_COPY_H_
#define EMA_SERVER_BASE_STREAM_COPY_H_

#include <cstddef>
#include <span>

namespace ema {

// memcpy() for a source that is in the caches and a destination that is not and is not read soon:
// stores past the caches, which spares reading the old lines (11 GB/s instead of 8 to 9 into 400
// MB). Other threads see the bytes as they do plain stores.
void StreamCopy(std::span<const std::byte> from, std::byte* to);

// memcpy() for a source that is in no cache and a destination that is: reads in three places at
// once and asks for lines early (14 to 16 GB/s instead of 11 out of 400 MB).
void FetchCopy(std::span<const std::byte> from, std::byte* to);

}  // namespace ema

#endif  // EMA_SERVER_BASE_STREAM_COPY_H_
