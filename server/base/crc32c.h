// SPDX-License-Identifier: Apache-2.0
//
// CRC32C (Castagnoli, as in RFC 3720): ISA-L, and a faster loop for bytes that are not in a cache.
#ifndef EMA_SERVER_BASE_CRC32C_H_
#define EMA_SERVER_BASE_CRC32C_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace ema {

// CRC32C of `crc`'s bytes followed by `data`; start with 0. Crc32c(0, "123456789") is 0xe3069283.
uint32_t Crc32c(uint32_t crc, std::span<const std::byte> data);

// Crc32c() of `from`, which is copied to `to` in the same pass. The two must not overlap. For a
// destination that is read soon.
uint32_t CopyWithCrc32c(uint32_t crc, std::span<const std::byte> from, std::byte* to);

// CRC32C of two byte strings end to end, from that of each: `b_bytes` is the length of the second.
// O(log b_bytes), by squaring the matrix that appends zero bits (as zlib's crc32_combine).
uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, int64_t b_bytes);

}  // namespace ema

#endif  // EMA_SERVER_BASE_CRC32C_H_
