// SPDX-License-Identifier: Apache-2.0
#include "server/core/coverage.h"

#include <random>

#include "server/base/crc32c.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMany = 1000;  // Ranges, as many as a test has.

TEST(CoverageTest, EmptyTotalIsCompleteFromTheStart) {
  const Coverage coverage(0, kMany);
  EXPECT_TRUE(coverage.is_complete());
  EXPECT_EQ(coverage.Digest(), 0u);
  EXPECT_TRUE(coverage.Missing(10).empty());
}

TEST(CoverageTest, SameRangeAndChecksumIsADuplicate) {
  Coverage coverage(100, kMany);
  ASSERT_THAT(coverage.Claim({0, 40}, 5), IsOk());
  coverage.Cover({0, 40}, 5);
  EXPECT_THAT(coverage.Claim({0, 40}, 5), IsOkAndHolds(Coverage::ClaimResult::kDuplicate));
  EXPECT_EQ(coverage.covered_bytes(), 40);
}

TEST(CoverageTest, OtherContentOrBoundsOfCoveredBytesAreRefused) {
  Coverage coverage(100, kMany);
  ASSERT_THAT(coverage.Claim({20, 40}, 5), IsOk());
  coverage.Cover({20, 40}, 5);
  for (const auto& [range, crc32c] : {std::pair<Coverage::Range, uint32_t>{{20, 40}, 6},
                                      {{20, 39}, 5},
                                      {{19, 2}, 5},
                                      {{59, 1}, 5},
                                      {{0, 100}, 5}}) {
    const auto claim = coverage.Claim(range, crc32c);
    EXPECT_THAT(claim, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("[20, 60)")));
    EXPECT_THAT(claim, ReasonIs(ErrorReason::kChunkOverlap));
  }
  EXPECT_THAT(coverage.Claim({60, 40}, 5), IsOk());
  EXPECT_THAT(coverage.Claim({0, 20}, 5), IsOk());
}

TEST(CoverageTest, ClaimedBytesAreBusyUntilReleased) {
  Coverage coverage(100, kMany);
  ASSERT_THAT(coverage.Claim({0, 50}, 1), IsOk());
  EXPECT_THAT(coverage.Claim({49, 10}, 1), ReasonIs(ErrorReason::kRangeBusy));
  coverage.Release({0, 50});
  EXPECT_THAT(coverage.Claim({49, 10}, 1), IsOkAndHolds(Coverage::ClaimResult::kClaimed));
  EXPECT_EQ(coverage.covered_bytes(), 0);
}

TEST(CoverageTest, OneRangeTooManyIsRefused) {
  Coverage coverage(100, 3);
  coverage.Claim({0, 1}, 0).IgnoreError();
  coverage.Cover({0, 1}, 0);
  EXPECT_THAT(coverage.Claim({2, 1}, 0), IsOk());
  EXPECT_THAT(coverage.Claim({4, 1}, 0), IsOk());
  EXPECT_THAT(coverage.Claim({6, 1}, 0), ReasonIs(ErrorReason::kBadChunk));
  // What is there already takes no more, and one that is let go of makes room.
  EXPECT_THAT(coverage.Claim({0, 1}, 0), IsOkAndHolds(Coverage::ClaimResult::kDuplicate));
  coverage.Release({2, 1});
  EXPECT_THAT(coverage.Claim({6, 1}, 0), IsOk());
}

TEST(CoverageTest, OneTooManySaysHowLongTheOthersAre) {
  Coverage coverage(100, 4);
  for (const Coverage::Range range : {Coverage::Range{0, 10}, Coverage::Range{10, 20}}) {
    ASSERT_THAT(coverage.Claim(range, 0), IsOk());
    coverage.Cover(range, 0);
  }
  ASSERT_THAT(coverage.Claim({30, 1}, 0), IsOk());
  ASSERT_THAT(coverage.Claim({31, 1}, 0), IsOk());
  EXPECT_THAT(coverage.Claim({32, 1}, 0), StatusIs(absl::StatusCode::kInvalidArgument,
                                                   HasSubstr("2 chunks of 15 bytes on average")));
  // None is there yet.
  Coverage small(100, 1);
  ASSERT_THAT(small.Claim({0, 1}, 0), IsOk());
  EXPECT_THAT(small.Claim({1, 1}, 0), ReasonIs(ErrorReason::kBadChunk));
}

// Against a bitmap: random ranges, some claimed and released, some covered.
TEST(CoverageTest, AgreesWithABitmapOnRandomRanges) {
  std::mt19937 random(20240611);
  for (int round = 0; round < 300; ++round) {
    const int64_t total = 1 + static_cast<int64_t>(random() % 200);
    std::vector<std::byte> content(total);
    for (std::byte& b : content) b = static_cast<std::byte>(random());
    Coverage coverage(total, kMany);
    std::vector<bool> covered(total);
    for (int i = 0; i < 60; ++i) {
      const int64_t offset = static_cast<int64_t>(random() % total);
      const int64_t length = 1 + static_cast<int64_t>(random() % (total - offset));
      bool free = true;
      for (int64_t k = offset; k < offset + length; ++k) free = free && !covered[k];
      const uint32_t crc32c = Crc32c(0, {content.data() + offset, static_cast<size_t>(length)});
      const auto claim = coverage.Claim({offset, length}, crc32c);
      ASSERT_EQ(free, claim.ok() && *claim == Coverage::ClaimResult::kClaimed);
      if (!free) continue;
      if (random() % 4 == 0) {
        coverage.Release({offset, length});
        continue;
      }
      coverage.Cover({offset, length}, crc32c);
      for (int64_t k = offset; k < offset + length; ++k) covered[k] = true;
    }
    for (const Coverage::Range& range : coverage.Missing(1000)) {
      const std::span<const std::byte> gap(content.data() + range.offset, range.length_bytes);
      ASSERT_THAT(coverage.Claim(range, 0), IsOk());
      coverage.Cover(range, Crc32c(0, gap));
      for (int64_t k = range.offset; k < range.offset + range.length_bytes; ++k) {
        ASSERT_FALSE(covered[k]);
        covered[k] = true;
      }
    }
    ASSERT_TRUE(coverage.is_complete());
    ASSERT_EQ(coverage.Digest(), Crc32c(0, content));
  }
}

}  // namespace
}  // namespace ema
