// SPDX-License-Identifier: Apache-2.0
//
// The header of a chunk.
#ifndef EMA_SERVER_BASE_CHUNK_HEADER_H_
#define EMA_SERVER_BASE_CHUNK_HEADER_H_

#include <cstdint>

namespace ema {

struct ChunkHeader {
  int64_t offset = 0;  // In the bytes of the push or pull.
  uint32_t crc32c = 0;
  int64_t data_bytes = 0;
  // Not on the wire. The data came through shared memory of this host, which does not damage them,
  // so the receiver does not verify the checksum.
  bool skips_checksum = false;
};

}  // namespace ema

#endif  // EMA_SERVER_BASE_CHUNK_HEADER_H_
