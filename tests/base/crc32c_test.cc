// SPDX-License-Identifier: Apache-2.0
#include "server/base/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string_view>
#include <vector>

#include "server/base/stream_copy.h"

namespace ema {
namespace {

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Bit by bit, as RFC 3720 defines it.
uint32_t NaiveCrc32c(std::span<const std::byte> data) {
  uint32_t crc = 0xffffffff;
  for (const std::byte byte : data) {
    crc ^= std::to_integer<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0u);
  }
  return ~crc;
}

std::vector<std::byte> RandomBytes(std::mt19937_64& random, size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0xff);
  return bytes;
}

TEST(Crc32cTest, CheckValues) {
  EXPECT_EQ(Crc32c(0, Bytes("123456789")), 0xe3069283u);
  EXPECT_EQ(Crc32c(0, {}), 0u);
  EXPECT_EQ(Crc32c(0x12345678, {}), 0x12345678u);
  // RFC 3720, B.4.
  EXPECT_EQ(Crc32c(0, std::vector<std::byte>(32, std::byte{0})), 0x8a9136aau);
  EXPECT_EQ(Crc32c(0, std::vector<std::byte>(32, std::byte{0xff})), 0x62a8ab43u);
}

TEST(Crc32cTest, UnalignedInputOfAnyLength) {
  std::mt19937_64 random(1);
  const std::vector<std::byte> bytes = RandomBytes(random, 5000);
  for (size_t start = 0; start < 17; ++start) {
    for (const size_t size : {0, 1, 2, 3, 7, 8, 9, 15, 16, 63, 64, 65, 255, 1024, 3000, 4097}) {
      const std::span<const std::byte> piece = std::span(bytes).subspan(start, size);
      ASSERT_EQ(Crc32c(0, piece), NaiveCrc32c(piece)) << start << " " << size;
    }
  }
}

TEST(Crc32cTest, PiecesGoOnAndCombine) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 500; ++i) {
    const std::vector<std::byte> bytes = RandomBytes(random, random() % 3000);
    const size_t cut = random() % (bytes.size() + 1);
    const std::span<const std::byte> a = std::span(bytes).first(cut);
    const std::span<const std::byte> b = std::span(bytes).subspan(cut);
    const uint32_t whole = Crc32c(0, bytes);
    ASSERT_EQ(Crc32c(Crc32c(0, a), b), whole);
    ASSERT_EQ(Crc32cCombine(Crc32c(0, a), Crc32c(0, b), static_cast<int64_t>(b.size())), whole);
  }
}

TEST(Crc32cTest, LongInputIsReadInSeveralPlacesAtOnce) {
  std::mt19937_64 random(5);
  const std::vector<std::byte> bytes = RandomBytes(random, 300'000);
  for (const size_t size : {12'287, 12'288, 12'289, 16'384, 24'575, 24'576, 49'152, 65'537, 196'608,
                            262'144, 299'990}) {
    for (const size_t start : {0, 1, 7}) {
      const std::span<const std::byte> piece = std::span(bytes).subspan(start, size);
      ASSERT_EQ(Crc32c(0x1234, piece), Crc32cCombine(0x1234, NaiveCrc32c(piece), piece.size()))
          << start << " " << size;
    }
  }
}

TEST(Crc32cTest, CopiesWhatItChecks) {
  std::mt19937_64 random(6);
  const std::vector<std::byte> bytes = RandomBytes(random, 300'000);
  for (const size_t size : {0, 1, 63, 64, 4095, 4096, 4097, 12'288, 12'351, 100'000, 262'144}) {
    for (const size_t start : {0, 3}) {
      constexpr std::byte kUntouched{0xa5};
      std::vector<std::byte> copy(size + 2, kUntouched);
      const std::span<const std::byte> piece = std::span(bytes).subspan(start, size);
      ASSERT_EQ(CopyWithCrc32c(77, piece, copy.data() + 1), Crc32c(77, piece)) << size;
      ASSERT_TRUE(std::equal(piece.begin(), piece.end(), copy.begin() + 1)) << size;
      ASSERT_EQ(copy.front(), kUntouched) << size;
      ASSERT_EQ(copy.back(), kUntouched) << size;
    }
  }
}

TEST(StreamCopyTest, CopiesAnyLengthFromAndToAnyAddress) {
  std::mt19937_64 random(7);
  const std::vector<std::byte> bytes = RandomBytes(random, 100'000);
  for (const size_t size :
       {0, 1, 15, 16, 63, 64, 65, 127, 128, 1000, 4096, 12'287, 12'288, 12'543, 99'900}) {
    for (const size_t from : {0, 1, 13}) {
      for (const size_t to : {0, 1, 16, 63}) {
        for (const auto copy_bytes : {&StreamCopy, &FetchCopy}) {
          constexpr std::byte kUntouched{0xa5};
          std::vector<std::byte> copy(size + 66, kUntouched);
          const std::span<const std::byte> piece = std::span(bytes).subspan(from, size);
          copy_bytes(piece, copy.data() + 1 + to);
          ASSERT_TRUE(std::equal(piece.begin(), piece.end(), copy.begin() + 1 + to));
          ASSERT_EQ(copy[to], kUntouched);
          ASSERT_EQ(copy[1 + to + size], kUntouched);
        }
      }
    }
  }
}

TEST(Crc32cTest, CombinesLengthsThatNobodyCouldHold) {
  // Appending a + b zero bytes is appending a, then b.
  std::mt19937_64 random(3);
  for (int i = 0; i < 500; ++i) {
    const uint32_t crc = static_cast<uint32_t>(random());
    const int64_t a = static_cast<int64_t>(random() >> 2);
    const int64_t b = static_cast<int64_t>(random() >> 2);
    ASSERT_EQ(Crc32cCombine(Crc32cCombine(crc, 0, a), 0, b), Crc32cCombine(crc, 0, a + b));
  }
  EXPECT_EQ(Crc32cCombine(0x1234, 0, 0), 0x1234u);
}

TEST(Crc32cTest, CombinationIsAssociative) {
  std::mt19937_64 random(4);
  const std::vector<std::byte> bytes = RandomBytes(random, 900);
  const auto crc = [&](size_t begin, size_t size) {
    return Crc32c(0, std::span(bytes).subspan(begin, size));
  };
  const uint32_t left =
      Crc32cCombine(Crc32cCombine(crc(0, 300), crc(300, 300), 300), crc(600, 300), 300);
  const uint32_t right =
      Crc32cCombine(crc(0, 300), Crc32cCombine(crc(300, 300), crc(600, 300), 300), 600);
  EXPECT_EQ(left, right);
  EXPECT_EQ(left, crc(0, 900));
}

}  // namespace
}  // namespace ema
