// SPDX-License-Identifier: Apache-2.0
#include "server/wire/chunk_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ema/v1/ema_service.pb.h"

namespace ema {
namespace {

struct Chunk {
  int64_t offset = 0;
  uint32_t crc32c = 0;
  std::string data;
};

std::string Encode(const Chunk& chunk) {
  const ChunkPrefix prefix =
      EncodeChunkPrefix({chunk.offset, chunk.crc32c, static_cast<int64_t>(chunk.data.size())});
  return std::string(reinterpret_cast<const char*>(prefix.bytes.data()), prefix.size) + chunk.data;
}

std::optional<ParsedChunk> Parse(const std::string& message) {
  const std::string_view head = std::string_view(message).substr(0, kMaxChunkPrefixBytes);
  return ParseChunkPrefix(std::as_bytes(std::span(head.data(), head.size())),
                          static_cast<int64_t>(message.size()));
}

template <typename Message>
Message ToProto(const Chunk& chunk) {
  Message message;
  message.mutable_chunk()->set_offset(chunk.offset);
  message.mutable_chunk()->set_crc32c(chunk.crc32c);
  message.mutable_chunk()->set_data(chunk.data);
  return message;
}

std::vector<Chunk> Chunks() {
  std::vector<Chunk> chunks = {
      {}, {0, 0, "x"}, {0, 7, ""}, {8, 0, "abc"}, {8, 7, std::string(9, '\0')}};
  std::mt19937_64 random(1);
  for (int i = 0; i < 2000; ++i) {
    Chunk chunk;
    chunk.offset = static_cast<int64_t>(random() >> (1 + random() % 63));
    chunk.crc32c = static_cast<uint32_t>(random() >> (random() % 64));
    chunk.data.resize(random() % (i % 100 == 0 ? 3'000'000 : 300));
    for (char& c : chunk.data) c = static_cast<char>(random());
    chunks.push_back(std::move(chunk));
  }
  chunks.push_back({std::numeric_limits<int64_t>::max(), 0xffffffff, "x"});
  return chunks;
}

TEST(ChunkCodecTest, WritesExactlyWhatProtobufWrites) {
  for (const Chunk& chunk : Chunks()) {
    const std::string encoded = Encode(chunk);
    ASSERT_EQ(encoded, ToProto<v1::PushRequest>(chunk).SerializeAsString()) << chunk.offset;
    ASSERT_EQ(encoded, ToProto<v1::PullResponse>(chunk).SerializeAsString()) << chunk.offset;
  }
}

TEST(ChunkCodecTest, ReadsWhatProtobufWrites) {
  for (const Chunk& chunk : Chunks()) {
    const std::string message = ToProto<v1::PullResponse>(chunk).SerializeAsString();
    const std::optional<ParsedChunk> parsed = Parse(message);
    ASSERT_TRUE(parsed.has_value());
    EXPECT_EQ(parsed->header.offset, chunk.offset);
    EXPECT_EQ(parsed->header.crc32c, chunk.crc32c);
    EXPECT_EQ(parsed->header.data_bytes, static_cast<int64_t>(chunk.data.size()));
    ASSERT_EQ(message.substr(parsed->data_start), chunk.data);
  }
}

TEST(ChunkCodecTest, LongestPrefixFits) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  // Longer data than any message, but the length of the whole must still be a number.
  const ChunkPrefix prefix = EncodeChunkPrefix({kMax, 0xffffffff, kMax - 100});
  EXPECT_LE(prefix.size, kMaxChunkPrefixBytes);
  const std::optional<ParsedChunk> parsed =
      ParseChunkPrefix(std::span(prefix.bytes).first(prefix.size), kMax - 100 + prefix.size);
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(parsed->header.offset, kMax);
  EXPECT_EQ(parsed->header.crc32c, 0xffffffffu);
  EXPECT_EQ(parsed->header.data_bytes, kMax - 100);
  EXPECT_EQ(parsed->data_start, prefix.size);
}

TEST(ChunkCodecTest, ReadsZerosThatAreWritten) {
  const std::optional<ParsedChunk> parsed =
      Parse(std::string("\x12\x07\x08\x00\x10\x00\x7a\x01x", 9));
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(parsed->header.offset, 0);
  EXPECT_EQ(parsed->header.crc32c, 0u);
  EXPECT_EQ(parsed->data_start, 8);
}

TEST(ChunkCodecTest, OtherMessagesAreLeftToProtobuf) {
  v1::PushRequest header;
  header.mutable_header()->set_model("m");
  EXPECT_FALSE(Parse(header.SerializeAsString()).has_value());
  v1::PullResponse trailer;
  trailer.mutable_trailer()->set_total_bytes(7);
  EXPECT_FALSE(Parse(trailer.SerializeAsString()).has_value());
  EXPECT_FALSE(Parse(v1::PushRequest().SerializeAsString()).has_value());
}

TEST(ChunkCodecTest, OtherOrdersAndFieldsAreLeftToProtobuf) {
  const std::string valid("\x12\x06\x08\x05\x10\x07\x7a\x00", 8);
  ASSERT_TRUE(Parse(valid).has_value());
  for (const std::string& message :
       {std::string("\x12\x05\x10\x07\x08\x05\x7a\x00", 8),   // Wrong length.
        std::string("\x12\x06\x10\x07\x08\x05\x7a\x00", 8),   // crc32c before offset.
        std::string("\x12\x06\x7a\x00\x08\x05\x10\x07", 8),   // data first.
        std::string("\x12\x06\x08\x05\x08\x05\x7a\x00", 8),   // offset twice.
        std::string("\x12\x06\x08\x05\x18\x07\x7a\x00", 8),   // An unknown field.
        std::string("\x12\x06\x08\x05\x10\x07\x7a\x01", 8),   // data cut short.
        std::string("\x12\x07\x08\x05\x10\x07\x7a\x00z", 9),  // Something after data.
        valid + valid,                                        // Two chunks, to be merged.
        std::string("\x18\x01", 2) + valid}) {                // An unknown field first.
    EXPECT_FALSE(Parse(message).has_value()) << testing::PrintToString(message);
  }
}

TEST(ChunkCodecTest, NumbersOutOfRangeAreLeftToProtobuf) {
  Chunk negative{-1, 7, "x"};
  EXPECT_FALSE(Parse(ToProto<v1::PushRequest>(negative).SerializeAsString()).has_value());
  v1::PushRequest large_crc = ToProto<v1::PushRequest>({1, 0, "x"});
  large_crc.mutable_chunk()->set_crc32c(int64_t{1} << 32);
  EXPECT_FALSE(Parse(large_crc.SerializeAsString()).has_value());
  large_crc.mutable_chunk()->set_crc32c(-1);
  EXPECT_FALSE(Parse(large_crc.SerializeAsString()).has_value());
  EXPECT_FALSE(ParseChunkPrefix({}, -1).has_value());
}

TEST(ChunkCodecTest, CutHeadsAreRefused) {
  const std::string message = Encode({int64_t{1} << 60, 0xdeadbeef, std::string(100, 'x')});
  const int64_t data_start = Parse(message)->data_start;
  for (int64_t size = 0; size <= static_cast<int64_t>(message.size()); ++size) {
    const std::vector<std::byte> head(  // Of its own, so that a sanitizer sees a read beyond it.
        reinterpret_cast<const std::byte*>(message.data()),
        reinterpret_cast<const std::byte*>(message.data()) + size);
    const auto message_bytes = static_cast<int64_t>(message.size());
    EXPECT_EQ(ParseChunkPrefix(head, message_bytes).has_value(), size >= data_start) << size;
    EXPECT_EQ(ParseChunkPrefix(head, size).has_value(), size == message_bytes) << size;
  }
}

// Whatever is read must be what protobuf reads.
template <typename Message>
void ExpectAgreesWithProtobuf(const std::string& bytes) {
  const std::optional<ParsedChunk> parsed = Parse(bytes);
  if (!parsed.has_value()) return;
  Message message;
  ASSERT_TRUE(message.ParseFromString(bytes)) << testing::PrintToString(bytes);
  EXPECT_EQ(message.chunk().offset(), parsed->header.offset);
  EXPECT_EQ(message.chunk().crc32c(), parsed->header.crc32c);
  EXPECT_EQ(message.chunk().data(), bytes.substr(parsed->data_start));
}

TEST(ChunkCodecTest, GarbageNeverCrashesOrDisagrees) {
  std::mt19937_64 random(2);
  const std::string likely("\x12\x08\x10\x7a\x00\x01\x02\x05\x7f\x80\xff", 11);
  for (int i = 0; i < 300000; ++i) {
    std::string bytes;
    if (i % 2 == 0) {
      bytes.resize(random() % 60);
      for (char& c : bytes) {
        c = random() % 4 != 0 ? likely[random() % likely.size()] : static_cast<char>(random());
      }
      // A right tag and length, or nothing further is read.
      if (bytes.size() > 2) {
        bytes[0] = '\x12';
        bytes[1] = static_cast<char>(bytes.size() - 2);
      }
    } else {
      bytes = Encode({static_cast<int64_t>(random() >> (1 + random() % 63)),
                      static_cast<uint32_t>(random()), std::string(random() % 50, 'x')});
      bytes[random() % std::min<size_t>(bytes.size(), 20)] = static_cast<char>(random());
    }
    ExpectAgreesWithProtobuf<v1::PushRequest>(bytes);
    ExpectAgreesWithProtobuf<v1::PullResponse>(bytes);
    if (testing::Test::HasFailure()) FAIL() << testing::PrintToString(bytes);
  }
}

}  // namespace
}  // namespace ema
