// SPDX-License-Identifier: Apache-2.0
//
// What is said of a chunk beside its data.
#ifndef EMA_SERVER_BASE_CHUNK_HEADER_H_
#define EMA_SERVER_BASE_CHUNK_HEADER_H_

#include <cstdint>

namespace ema {

struct ChunkHeader {
  int64_t offset = 0;  // In the bytes of its push or pull.
  uint32_t crc32c = 0;
  int64_t data_bytes = 0;
  // Not on the wire. The data have come through memory of this host, where nothing damages them:
  // the checksum tells what was sent, and is not compared with what has come.
  bool is_undamaged = false;
};

}  // namespace ema

#endif  // EMA_SERVER_BASE_CHUNK_HEADER_H_
