// SPDX-License-Identifier: Apache-2.0
#include "server/core/layout_coverage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/include/shard_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

bool HasDoubleElement(const Manifest& manifest, const std::vector<Shard>& shards) {
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const Element& element : NaiveElements(manifest, shards)) {
    if (!seen.insert({element.tensor_index, element.tensor_element}).second) return true;
  }
  return false;
}

TEST(LayoutCoverageTest, FindsExactlyTheSharedElements) {
  Random random(2);
  int overlap_count = 0;
  for (int round = 0; round < 3000; ++round) {
    const Manifest manifest = RandomManifest(random);
    std::vector<Shard> shards(1 + Below(random, 8));
    for (Shard& shard : shards) {
      shard = WholeTensor(manifest, Below(random, manifest.tensor_count()));
      for (size_t d = 0; d < shard.offsets.size(); ++d) {
        shard.offsets[d] = Below(random, shard.extents[d] + 1);
        shard.extents[d] = Below(random, shard.extents[d] - shard.offsets[d] + 1);
      }
    }
    LayoutCoverage coverage(&manifest);
    std::vector<Shard> added;
    for (size_t i = 0; i < shards.size(); ++i) {
      std::vector<Shard> joined = added;
      joined.push_back(shards[i]);
      const bool is_double = HasDoubleElement(manifest, joined);
      overlap_count += is_double ? 1 : 0;
      EXPECT_EQ(RankLayout::Create(manifest, joined).ok(), !is_double);
      EMA_ASSERT_OK_AND_ASSIGN(const RankLayout layout, RankLayout::Create(manifest, {shards[i]}));
      ASSERT_EQ(coverage.Add(static_cast<int64_t>(i), Shared(layout)).ok(), !is_double);
      if (!is_double) added = joined;
    }
  }
  EXPECT_GT(overlap_count, 500);
}

TEST(LayoutCoverageTest, NamesTensorAndBothRanksAndAddsNothing) {
  const Manifest manifest = Make({{"a", Dtype::kInt8, {4}}, {"w", Dtype::kInt8, {4, 6}}});
  LayoutCoverage coverage(&manifest);
  const RankLayout first = *RankLayout::Create(manifest, {{1, {0, 0}, {4, 3}}});
  const RankLayout bad =
      *RankLayout::Create(manifest, {WholeTensor(manifest, 0), {1, {3, 2}, {1, 4}}});
  const RankLayout rest =
      *RankLayout::Create(manifest, {WholeTensor(manifest, 0), {1, {0, 3}, {4, 3}}});
  EXPECT_THAT(coverage.Add(5, Shared(first)), IsOk());
  const absl::Status status = coverage.Add(7, Shared(bad));
  EXPECT_THAT(status, StatusIs(kInvalid, StartsWith("tensor \"w\": [3:4, 2:6] of rank 7 and "
                                                    "[0:4, 0:3] of rank 5 share elements")));
  EXPECT_THAT(status, ReasonIs(ErrorReason::kLayoutOverlap));

  const absl::Status hole = coverage.CheckComplete();
  EXPECT_THAT(hole, StatusIs(kInvalid, "tensor \"a\": 4 of its 4 elements are in no shard"));
  EXPECT_THAT(hole, ReasonIs(ErrorReason::kLayoutHole));
  EXPECT_THAT(coverage.Add(7, Shared(rest)), IsOk());
  EXPECT_THAT(coverage.CheckComplete(), IsOk());
}

TEST(LayoutCoverageTest, AnyPartitionIsCompleteAndAnyHoleIsFound) {
  Random random(3);
  for (int round = 0; round < 500; ++round) {
    const Manifest manifest = RandomManifest(random);
    std::vector<Shard> shards;
    for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
      CutAtRandom(random, WholeTensor(manifest, i), shards);
    }
    const size_t left_out = Below(random, static_cast<int64_t>(shards.size()));
    std::vector<std::vector<Shard>> ranks(4);
    for (size_t i = 0; i < shards.size(); ++i) {
      if (i != left_out) ranks[Below(random, 4)].push_back(shards[i]);
    }
    LayoutCoverage coverage(&manifest);
    for (int64_t rank = 0; rank < 4; ++rank) {
      ASSERT_THAT(coverage.Add(rank, Shared(*RankLayout::Create(manifest, ranks[rank]))), IsOk());
    }
    const int64_t hole = shards[left_out].element_count();
    if (hole > 0) {
      const std::string message =
          absl::StrCat("tensor \"t", shards[left_out].tensor_index, "\": ", hole, " of its ",
                       manifest.tensor(shards[left_out].tensor_index).element_count(), " elements");
      ASSERT_THAT(coverage.CheckComplete(), StatusIs(kInvalid, StartsWith(message)));
    }
    ASSERT_THAT(coverage.Add(4, Shared(*RankLayout::Create(manifest, {shards[left_out]}))), IsOk());
    ASSERT_THAT(coverage.CheckComplete(), IsOk());
  }
}

TEST(LayoutCoverageTest, RanksThatTakeTurnsAreQuick) {
  constexpr int64_t kCount = 100'000;
  const Manifest manifest = Make({{"w", Dtype::kBFloat16, {2, kCount}}});
  LayoutCoverage coverage(&manifest);
  for (int64_t rank = 0; rank < 2; ++rank) {
    std::vector<Shard> columns;
    for (int64_t i = rank; i < kCount; i += 2) columns.push_back({0, {0, i}, {2, 1}});
    ASSERT_THAT(coverage.Add(rank, Shared(*RankLayout::Create(manifest, columns))), IsOk());
  }
  EXPECT_THAT(coverage.CheckComplete(), IsOk());
  EXPECT_THAT(coverage.Add(2, Shared(*RankLayout::Create(manifest, {{0, {1, 7}, {1, 1}}}))),
              ReasonIs(ErrorReason::kLayoutOverlap));
}

TEST(LayoutCoverageTest, WhatIsCutTooIrregularlyIsRefused) {
  constexpr int64_t kSize = 140;
  const Manifest manifest = Make({{"w", Dtype::kInt8, {kSize, kSize, kSize}}});
  EXPECT_THAT(RankLayout::Create(manifest, Bars(kSize)).status(),
              AllOf(ReasonIs(ErrorReason::kBadLayout),
                    StatusIs(kInvalid, StartsWith("tensor \"w\": its shards are cut"))));
}

TEST(LayoutCoverageTest, ATensorIsFrozenOnAllRanksOrOnNone) {
  const Manifest manifest = Make({{"w", Dtype::kFloat32, {4}}});
  LayoutCoverage coverage(&manifest);
  ASSERT_THAT(coverage.Add(0, Shared(*RankLayout::Create(manifest, {{0, {0}, {2}}}, 1))), IsOk());
  const Shard rest = {0, {2}, {2}};
  EXPECT_THAT(coverage.Add(1, Shared(*RankLayout::Create(manifest, {rest}))),
              StatusIs(kInvalid, HasSubstr("tensor \"w\": frozen on rank 0, but not on rank 1")));
  EXPECT_THAT(coverage.Add(1, Shared(*RankLayout::Create(manifest, {rest}, 1))), IsOk());
  EXPECT_THAT(coverage.CheckComplete(), IsOk());
}

}  // namespace
}  // namespace ema
