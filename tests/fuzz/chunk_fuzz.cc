// SPDX-License-Identifier: Apache-2.0
//
// Chunks of pushes and pulls. What our reader accepts, protobuf reads alike; and it accepts what
// protobuf writes.
#include <limits>
#include <optional>
#include <span>

#include "ema/v1/ema_service.pb.h"
#include "server/wire/chunk_codec.h"
#include "tests/fuzz/fuzz.h"

namespace ema {
namespace {

std::optional<ParsedChunk> Parse(std::string_view message, size_t head_bytes) {
  const std::string_view head = message.substr(0, head_bytes);
  return ParseChunkPrefix(std::as_bytes(std::span(head.data(), head.size())),
                          static_cast<int64_t>(message.size()));
}

bool IsEqual(const ParsedChunk& a, const ParsedChunk& b) {
  return a.header.offset == b.header.offset && a.header.crc32c == b.header.crc32c &&
         a.header.data_bytes == b.header.data_bytes && a.data_start == b.data_start;
}

template <typename Message>
void CompareWithProtobuf(std::string_view bytes, const std::optional<ParsedChunk>& parsed) {
  Message message;
  const bool is_message = message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  if (!parsed.has_value()) {
    const bool is_in_range = message.chunk().offset() >= 0 && message.chunk().crc32c() >= 0 &&
                             message.chunk().crc32c() <= std::numeric_limits<uint32_t>::max();
    message.DiscardUnknownFields();
    EMA_FUZZ_CHECK(!is_message || !message.has_chunk() || !is_in_range ||
                   message.SerializeAsString() != bytes);
    return;
  }
  const std::string_view data = bytes.substr(parsed->data_start);
  EMA_FUZZ_CHECK(is_message && message.chunk().data() == data);
  EMA_FUZZ_CHECK(message.chunk().offset() == parsed->header.offset);
  EMA_FUZZ_CHECK(message.chunk().crc32c() == parsed->header.crc32c);
  const ChunkPrefix prefix = EncodeChunkPrefix(parsed->header);
  std::string written(reinterpret_cast<const char*>(prefix.bytes.data()), prefix.size);
  EMA_FUZZ_CHECK(message.SerializeAsString() == written.append(data));
}

}  // namespace
}  // namespace ema

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes = ema::FuzzInput(data, size).rest();
  const std::optional<ema::ParsedChunk> parsed = ema::Parse(bytes, ema::kMaxChunkPrefixBytes);
  const std::optional<ema::ParsedChunk> from_all = ema::Parse(bytes, bytes.size());
  EMA_FUZZ_CHECK(parsed.has_value() == from_all.has_value());
  EMA_FUZZ_CHECK(!parsed.has_value() || ema::IsEqual(*parsed, *from_all));
  ema::CompareWithProtobuf<ema::v1::PushRequest>(bytes, parsed);
  ema::CompareWithProtobuf<ema::v1::PullResponse>(bytes, parsed);
  return 0;
}
