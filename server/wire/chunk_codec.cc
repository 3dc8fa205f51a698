// SPDX-License-Identifier: Apache-2.0
#include "server/wire/chunk_codec.h"

#include <algorithm>
#include <limits>

namespace ema {
namespace {

// (field number << 3) | wire type, as in types and numbers of ema_service.proto.
constexpr uint8_t kChunkTag = (2 << 3) | 2;
constexpr uint8_t kOffsetTag = (1 << 3) | 0;
constexpr uint8_t kCrcTag = (2 << 3) | 0;
constexpr uint8_t kDataTag = (15 << 3) | 2;

constexpr int VarintBytes(uint64_t value) {
  int size = 1;
  for (; value >= 0x80; value >>= 7) ++size;
  return size;
}

static_assert(4 + 3 * VarintBytes(std::numeric_limits<int64_t>::max()) +
                  VarintBytes(std::numeric_limits<uint32_t>::max()) <=
              kMaxChunkPrefixBytes);

class Writer {
 public:
  explicit Writer(ChunkPrefix& prefix) : prefix_(prefix) {}

  void Tag(uint8_t tag) { prefix_.bytes[prefix_.size++] = std::byte{tag}; }

  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
      prefix_.bytes[prefix_.size++] = static_cast<std::byte>((value & 0x7f) | 0x80);
    }
    prefix_.bytes[prefix_.size++] = static_cast<std::byte>(value);
  }

 private:
  ChunkPrefix& prefix_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> head) : head_(head) {}

  int64_t position() const { return static_cast<int64_t>(position_); }

  bool TryTag(uint8_t tag) {
    if (position_ == head_.size() || head_[position_] != std::byte{tag}) return false;
    ++position_;
    return true;
  }

  // nullopt: cut short, or above what an int64 holds (negative numbers travel as such).
  std::optional<int64_t> Varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 63; shift += 7) {
      if (position_ == head_.size()) return std::nullopt;
      const uint64_t byte = std::to_integer<uint64_t>(head_[position_++]);
      value |= (byte & 0x7f) << shift;
      if (byte < 0x80) return static_cast<int64_t>(value);
    }
    return std::nullopt;
  }

 private:
  const std::span<const std::byte> head_;
  size_t position_ = 0;
};

}  // namespace

ChunkPrefix EncodeChunkPrefix(const ChunkHeader& header) {
  const uint64_t offset = static_cast<uint64_t>(header.offset);
  const uint64_t data_bytes = static_cast<uint64_t>(header.data_bytes);
  uint64_t chunk_bytes = 0;
  // As protobuf does, fields that are zero or empty are left out.
  if (offset != 0) chunk_bytes += 1 + VarintBytes(offset);
  if (header.crc32c != 0) chunk_bytes += 1 + VarintBytes(header.crc32c);
  if (data_bytes != 0) chunk_bytes += 1 + VarintBytes(data_bytes) + data_bytes;

  ChunkPrefix prefix;
  Writer writer(prefix);
  writer.Tag(kChunkTag);
  writer.Varint(chunk_bytes);
  if (offset != 0) {
    writer.Tag(kOffsetTag);
    writer.Varint(offset);
  }
  if (header.crc32c != 0) {
    writer.Tag(kCrcTag);
    writer.Varint(header.crc32c);
  }
  if (data_bytes != 0) {
    writer.Tag(kDataTag);
    writer.Varint(data_bytes);
  }
  return prefix;
}

std::optional<ParsedChunk> ParseChunkPrefix(std::span<const std::byte> head,
                                            int64_t message_bytes) {
  if (message_bytes < 0) return std::nullopt;
  head = head.first(std::min(head.size(), static_cast<size_t>(message_bytes)));
  Reader reader(head);

  if (!reader.TryTag(kChunkTag)) return std::nullopt;
  const std::optional<int64_t> chunk_bytes = reader.Varint();
  if (!chunk_bytes.has_value() || *chunk_bytes != message_bytes - reader.position()) {
    return std::nullopt;
  }

  ParsedChunk parsed;
  if (reader.TryTag(kOffsetTag)) {
    const std::optional<int64_t> offset = reader.Varint();
    if (!offset.has_value()) return std::nullopt;
    parsed.header.offset = *offset;
  }
  if (reader.TryTag(kCrcTag)) {
    const std::optional<int64_t> crc = reader.Varint();
    if (!crc.has_value() || *crc > std::numeric_limits<uint32_t>::max()) return std::nullopt;
    parsed.header.crc32c = static_cast<uint32_t>(*crc);
  }
  if (reader.TryTag(kDataTag)) {
    const std::optional<int64_t> data_bytes = reader.Varint();
    if (!data_bytes.has_value()) return std::nullopt;
    parsed.header.data_bytes = *data_bytes;
  }
  parsed.data_start = reader.position();
  // Anything else than data up to the end is a field that came late, or an unknown one.
  if (parsed.header.data_bytes != message_bytes - parsed.data_start) return std::nullopt;
  return parsed;
}

}  // namespace ema
