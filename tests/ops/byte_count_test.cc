// SPDX-License-Identifier: Apache-2.0
#include "server/ops/byte_count.h"

#include <cstdint>

#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

TEST(ByteCountTest, KnowsPowersOf1024) {
  EXPECT_THAT(ParseByteCount("0"), IsOkAndHolds(0));
  EXPECT_THAT(ParseByteCount("4096"), IsOkAndHolds(4096));
  EXPECT_THAT(ParseByteCount("12B"), IsOkAndHolds(12));
  EXPECT_THAT(ParseByteCount("512k"), IsOkAndHolds(512 << 10));
  EXPECT_THAT(ParseByteCount("3MiB"), IsOkAndHolds(3 << 20));
  EXPECT_THAT(ParseByteCount("4gb"), IsOkAndHolds(int64_t{4} << 30));
  EXPECT_THAT(ParseByteCount("2T"), IsOkAndHolds(int64_t{2} << 40));
  for (const char* bad : {"", "x", "G", "4P", "1.5G", "-1", "+1", " 1", "1 G", "1ib", "1kk",
                          "99999999999999999999", "4611686018427387904", "8388608T"}) {
    EXPECT_THAT(ParseByteCount(bad), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(bad)));
  }
}

TEST(ByteCountTest, IsWrittenInTheLargestUnitThatFits) {
  EXPECT_EQ(FormatByteCount(0), "0");
  EXPECT_EQ(FormatByteCount(1000), "1000");
  EXPECT_EQ(FormatByteCount(1024), "1KiB");
  EXPECT_EQ(FormatByteCount(8 << 20), "8MiB");
  EXPECT_EQ(FormatByteCount((8 << 20) + 1024), "8193KiB");
  EXPECT_EQ(FormatByteCount(int64_t{3} << 40), "3TiB");
  EXPECT_EQ(FormatByteCount(int64_t{1} << 60), "1048576TiB");
  EXPECT_EQ(FormatByteCount(5'000'000'000), "5000000000");
}

TEST(ByteCountTest, IsReadAsItWasWritten) {
  for (int64_t bytes = 1; bytes < int64_t{1} << 61; bytes = bytes * 3 / 2 + 1024) {
    EXPECT_THAT(ParseByteCount(FormatByteCount(bytes)), IsOkAndHolds(bytes));
  }
}

}  // namespace
}  // namespace ema
