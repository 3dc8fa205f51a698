// SPDX-License-Identifier: Apache-2.0
#include "include/ema/internal/box_overlap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/include/shard_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::StartsWith;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

Shard RandomBox(Random& random, size_t rank, int64_t size, int64_t longest) {
  Shard box;
  for (size_t d = 0; d < rank; ++d) {
    box.offsets.push_back(Below(random, size));
    box.extents.push_back(1 + Below(random, std::min(longest, size - box.offsets.back())));
  }
  return box;
}

bool Overlap(const Shard& a, const Shard& b) {
  for (size_t d = 0; d < a.offsets.size(); ++d) {
    if (a.offsets[d] >= b.offsets[d] + b.extents[d]) return false;
    if (b.offsets[d] >= a.offsets[d] + a.extents[d]) return false;
  }
  return true;
}

Manifest OneTensor(size_t rank) {
  return Make({{"w", Dtype::kInt8, std::vector<int64_t>(rank, 10'000)}});
}

// The index of a box is its holder.
absl::Status Check(const Manifest& manifest, const std::vector<Shard>& shards) {
  std::vector<HeldBox> boxes;
  for (const Shard& shard : shards) {
    boxes.push_back({&shard, static_cast<int64_t>(boxes.size())});
  }
  return CheckDisjoint(manifest, boxes, "rank");
}

// Boxes at random places cannot be cut apart; the search is exact for them, too.
TEST(BoxOverlapTest, FindsExactlyTheSharedElements) {
  Random random(1);
  int overlap_count = 0;
  for (int round = 0; round < 2000; ++round) {
    const size_t rank = 1 + Below(random, 4);
    const int64_t size = 2 + Below(random, 30);
    const Manifest manifest = OneTensor(rank);
    std::vector<Shard> boxes;  // Apart from each other, and maybe one more.
    const int64_t tries = 1 + Below(random, 120);
    for (int64_t i = 0; i < tries; ++i) {
      Shard box = RandomBox(random, rank, size, 1 + Below(random, 6));
      const bool is_apart =
          std::none_of(boxes.begin(), boxes.end(), [&](const Shard& b) { return Overlap(b, box); });
      if (is_apart) boxes.push_back(std::move(box));
    }
    ASSERT_THAT(Check(manifest, boxes), IsOk());
    const Shard added = RandomBox(random, rank, size, size);
    const auto first = std::find_if(boxes.begin(), boxes.end(),
                                    [&](const Shard& box) { return Overlap(box, added); });
    const bool is_held = first != boxes.end();
    boxes.push_back(added);
    const absl::Status status = Check(manifest, boxes);
    ASSERT_EQ(status.ok(), !is_held);
    if (!is_held) continue;
    ++overlap_count;
    EXPECT_THAT(status, ReasonIs(ErrorReason::kLayoutOverlap));
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr(absl::StrCat(" and ", BoxText(added), " of rank ",
                                                boxes.size() - 1, " share elements")));
  }
  EXPECT_GT(overlap_count, 500);
}

TEST(BoxOverlapTest, NamesTensorBoxesAndHolders) {
  const Manifest manifest =
      Make({{"s", Dtype::kInt8, {}}, {"v", Dtype::kInt8, {4}}, {"w", Dtype::kInt8, {4, 6}}});
  EXPECT_THAT(Check(manifest, {{2, {3, 2}, {1, 4}}, {1, {0}, {4}}, {2, {0, 0}, {4, 3}}}),
              StatusIs(kInvalid, StartsWith("tensor \"w\": [3:4, 2:6] of rank 0 and [0:4, 0:3] of "
                                            "rank 2 share elements")));
  EXPECT_THAT(
      Check(manifest, {{0, {}, {}}, {1, {0}, {4}}, {0, {}, {}}}),
      StatusIs(kInvalid, StartsWith("tensor \"s\": [] of rank 0 and [] of rank 2 share elements")));
}

// Rows of 10,000 ranks, of which one holds all: the search does not compare all rows.
TEST(BoxOverlapTest, FindsOneLargeBoxAmongMany) {
  const Manifest manifest = OneTensor(2);
  std::vector<Shard> boxes;
  for (int64_t i = 0; i < 10'000; ++i) boxes.push_back({0, {i, 0}, {1, 10}});
  EXPECT_THAT(Check(manifest, boxes), IsOk());
  boxes[7000] = {0, {0, 0}, {10'000, 10}};
  EXPECT_THAT(Check(manifest, boxes), ReasonIs(ErrorReason::kLayoutOverlap));
}

TEST(BoxOverlapTest, FindsAPairOfEqualBoxes) {
  for (const size_t rank : {0, 1, 3}) {
    const std::vector<Shard> boxes(
        10'000, Shard{0, std::vector<int64_t>(rank, 1), std::vector<int64_t>(rank, 2)});
    EXPECT_THAT(Check(OneTensor(rank), boxes), ReasonIs(ErrorReason::kLayoutOverlap));
  }
}

// How ranks cut tensors: cheap, whatever the dimensions.
TEST(BoxOverlapTest, RegularCutsAreQuick) {
  std::vector<Shard> cells;
  for (int64_t i = 0; i < 200'000; ++i) {
    Shard cell{0, {}, std::vector<int64_t>(8, 1)};
    for (int64_t rest = i; cell.offsets.size() < 8; rest /= 5) cell.offsets.push_back(rest % 5);
    cells.push_back(std::move(cell));
  }
  const Manifest manifest = Make({{"w", Dtype::kInt8, std::vector<int64_t>(8, 5)}});
  EXPECT_THAT(Check(manifest, cells), IsOk());
}

TEST(BoxOverlapTest, ThousandsOfInterleavedBoxesAreRefused) {
  const std::vector<Shard> bars = Bars(140);
  EXPECT_THAT(Check(OneTensor(3), bars), ReasonIs(ErrorReason::kBadLayout));
}

}  // namespace
}  // namespace ema
