// SPDX-License-Identifier: Apache-2.0
//
// CRC32C (Castagnoli, as in RFC 3720), by ISA-L.
#ifndef EMA_SERVER_BASE_CRC32C_H_
#define EMA_SERVER_BASE_CRC32C_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace ema {

// CRC32C of `crc`'s bytes followed by `data`; start with 0. Crc32c(0, "123456789") is 0xe3069283.
uint32_t Crc32c(uint32_t crc, std::span<const std::byte> data);

// CRC32C of two byte strings end to end, from that of each: `b_bytes` is the length of the second.
// O(log b_bytes), by squaring the matrix that appends zero bits (as zlib's crc32_combine).
uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, int64_t b_bytes);

}  // namespace ema

#endif  // EMA_SERVER_BASE_CRC32C_H_
