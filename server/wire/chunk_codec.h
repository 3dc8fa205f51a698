// SPDX-License-Identifier: Apache-2.0
//
// Chunks on the wire without protobuf copies: encodes and reads the bytes around `data` of a
// PushRequest.chunk or PullResponse.chunk (the two have the same form). The written bytes are those
// that protobuf would write. A message with another order of fields is left to protobuf.
#ifndef EMA_SERVER_WIRE_CHUNK_CODEC_H_
#define EMA_SERVER_WIRE_CHUNK_CODEC_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "server/base/chunk_header.h"

namespace ema {

// The longest prefix: two tags with lengths, offset, crc32c, the tag and length of `data`.
inline constexpr int kMaxChunkPrefixBytes = 40;

// The encoded bytes that go before `data`; data itself follows and ends the message.
struct ChunkPrefix {
  std::array<std::byte, kMaxChunkPrefixBytes> bytes;
  int size = 0;
};
ChunkPrefix EncodeChunkPrefix(const ChunkHeader& header);

// Reads the prefix of a chunk message of `message_bytes` that begins with `head` (its first
// kMaxChunkPrefixBytes bytes, or all if it is shorter). Gives the header and where `data` starts;
// data then reaches to the message's end. nullopt: not a chunk, or a chunk whose fields come in
// another order or with unknown ones; parse it with protobuf.
struct ParsedChunk {
  ChunkHeader header;
  int64_t data_start = 0;
};
std::optional<ParsedChunk> ParseChunkPrefix(std::span<const std::byte> head, int64_t message_bytes);

}  // namespace ema

#endif  // EMA_SERVER_WIRE_CHUNK_CODEC_H_
