// SPDX-License-Identifier: Apache-2.0
#include "server/core/trainer_run.h"

#include <set>

#include "tests/core/test_model.h"
#include "tests/include/shard_testing.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

class RunTest : public testing::Test {
 protected:
  RankLayout Rows(int64_t begin, int64_t count) {
    return *RankLayout::Create(*manifest_, {{0, {begin, 0}, {count, 3}}});
  }
  const std::shared_ptr<const Manifest> manifest_ =
      MakeManifest({{"weight", Dtype::kFloat32, {4, 3}}});
};

TEST_F(RunTest, IsReadyWhenAllRanksCoverTheManifestOnce) {
  EMA_ASSERT_OK_AND_ASSIGN(auto run, TrainerRun::Create(manifest_.get(), "launch", 1, 2));
  EXPECT_THAT(run->Join(1, 2, Rows(2, 2)), IsOk());
  EXPECT_FALSE(run->is_ready());
  EXPECT_THAT(run->MissingRanks(16), ElementsAre(0));
  EXPECT_THAT(run->Join(0, 2, Rows(0, 2)), IsOk());
  EXPECT_TRUE(run->is_ready());
}

TEST_F(RunTest, JoiningAgainWithTheSameLayoutIsOk) {
  EMA_ASSERT_OK_AND_ASSIGN(auto run, TrainerRun::Create(manifest_.get(), "launch", 1, 2));
  EXPECT_THAT(run->Join(0, 2, Rows(0, 2)), IsOk());
  EXPECT_THAT(run->Join(0, 2, Rows(0, 2)), IsOk());
  EXPECT_THAT(run->Join(0, 2, Rows(0, 1)), ReasonIs(ErrorReason::kBadLayout));
  EXPECT_FALSE(run->is_ready());
}

TEST_F(RunTest, RankAndWorldSizeOutOfRangeAreRefused) {
  EXPECT_THAT(TrainerRun::Create(manifest_.get(), "", 1, 1), ReasonIs(ErrorReason::kBadRequest));
  EXPECT_THAT(TrainerRun::Create(manifest_.get(), "launch", 1, 0),
              ReasonIs(ErrorReason::kBadRequest));
  EXPECT_THAT(TrainerRun::Create(manifest_.get(), "launch", 1, 1 << 20),
              ReasonIs(ErrorReason::kBadRequest));
  EMA_ASSERT_OK_AND_ASSIGN(auto run, TrainerRun::Create(manifest_.get(), "launch", 1, 2));
  EXPECT_THAT(run->Join(2, 2, Rows(0, 2)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rank: 2")));
  EXPECT_THAT(run->Join(-1, 2, Rows(0, 2)), ReasonIs(ErrorReason::kBadRequest));
  EXPECT_THAT(run->Join(0, 3, Rows(0, 2)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("world_size: 3")));
}

// --- The layouts of all ranks together ---

// Joins the ranks in order. The status of the last one; the others are OK.
absl::Status JoinAll(TrainerRun& run, const Manifest& manifest,
                     const std::vector<std::vector<Shard>>& ranks) {
  const auto world_size = static_cast<int64_t>(ranks.size());
  for (int64_t rank = 0; rank + 1 < world_size; ++rank) {
    EXPECT_THAT(run.Join(rank, world_size, *RankLayout::Create(manifest, ranks[rank])), IsOk());
  }
  EXPECT_FALSE(run.is_ready());
  return run.Join(world_size - 1, world_size, *RankLayout::Create(manifest, ranks.back()));
}

absl::Status JoinAll(const Manifest& manifest, const std::vector<std::vector<Shard>>& ranks) {
  const auto run = *TrainerRun::Create(&manifest, "launch", 1, static_cast<int64_t>(ranks.size()));
  const absl::Status status = JoinAll(*run, manifest, ranks);
  EXPECT_EQ(run->is_ready(), status.ok());
  return status;
}

bool HasDoubleElement(const Manifest& manifest, const std::vector<Shard>& shards) {
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const Element& element : NaiveElements(manifest, shards)) {
    if (!seen.insert({element.tensor_index, element.tensor_element}).second) return true;
  }
  return false;
}

TEST(RunLayoutsTest, FindsExactlyTheSharedElements) {
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
    const bool is_double = HasDoubleElement(manifest, shards);
    overlap_count += is_double ? 1 : 0;
    EXPECT_EQ(RankLayout::Create(manifest, shards).ok(), !is_double);
    std::vector<std::vector<Shard>> ranks;
    for (const Shard& shard : shards) ranks.push_back({shard});
    const absl::Status status = JoinAll(manifest, ranks);
    if (is_double) {
      ASSERT_THAT(status, ReasonIs(ErrorReason::kLayoutOverlap));
    } else if (!status.ok()) {
      ASSERT_THAT(status, ReasonIs(ErrorReason::kLayoutHole));
    }
  }
  EXPECT_GT(overlap_count, 500);
}

TEST(RunLayoutsTest, ARefusalNamesTensorAndRanksAndJoinsNothing) {
  const Manifest manifest = Make({{"a", Dtype::kInt8, {4}}, {"w", Dtype::kInt8, {4, 6}}});
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, TrainerRun::Create(&manifest, "launch", 1, 2));
  const Shard a = WholeTensor(manifest, 0);
  const std::vector<Shard> first = {{1, {0, 0}, {4, 3}}};
  const absl::Status overlap = JoinAll(*run, manifest, {first, {a, {1, {3, 2}, {1, 4}}}});
  EXPECT_THAT(overlap, StatusIs(kInvalid, StartsWith("tensor \"w\": [0:4, 0:3] of rank 0 and "
                                                     "[3:4, 2:6] of rank 1 share elements")));
  EXPECT_THAT(overlap, ReasonIs(ErrorReason::kLayoutOverlap));
  const auto join = [&](int64_t rank, const std::vector<Shard>& shards) {
    return run->Join(rank, 2, *RankLayout::Create(manifest, shards));
  };
  // The rank that waits for the other.
  EXPECT_EQ(join(0, first), overlap);
  const absl::Status hole = join(1, {{1, {0, 3}, {4, 3}}});
  EXPECT_THAT(hole, StatusIs(kInvalid, "tensor \"a\": 4 of its 4 elements are in no shard"));
  EXPECT_THAT(hole, ReasonIs(ErrorReason::kLayoutHole));
  EXPECT_EQ(join(0, first), hole);
  EXPECT_THAT(join(1, {a, {1, {0, 3}, {4, 3}}}), IsOk());
  EXPECT_TRUE(run->is_ready());
  EXPECT_THAT(join(0, first), IsOk());
}

TEST(RunLayoutsTest, AnyPartitionIsCompleteAndAnyHoleIsFound) {
  Random random(3);
  for (int round = 0; round < 500; ++round) {
    const Manifest manifest = RandomManifest(random);
    std::vector<Shard> shards;
    for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
      CutAtRandom(random, WholeTensor(manifest, i), shards);
    }
    const size_t left_out = Below(random, static_cast<int64_t>(shards.size()));
    std::vector<std::vector<Shard>> ranks(5);
    for (size_t i = 0; i < shards.size(); ++i) {
      if (i != left_out) ranks[Below(random, 4)].push_back(shards[i]);
    }
    const Shard& hole = shards[left_out];
    if (hole.element_count() > 0) {
      const std::string message =
          absl::StrCat("tensor \"t", hole.tensor_index, "\": ", hole.element_count(), " of its ",
                       manifest.tensor(hole.tensor_index).element_count(), " elements");
      ASSERT_THAT(JoinAll(manifest, ranks), StatusIs(kInvalid, StartsWith(message)));
    }
    ranks[4] = {hole};
    ASSERT_THAT(JoinAll(manifest, ranks), IsOk());
  }
}

TEST(RunLayoutsTest, RanksThatTakeTurnsAreQuick) {
  constexpr int64_t kCount = 100'000;
  const Manifest manifest = Make({{"w", Dtype::kBFloat16, {2, kCount}}});
  std::vector<std::vector<Shard>> ranks(2);
  for (int64_t i = 0; i < kCount; ++i) ranks[i % 2].push_back({0, {0, i}, {2, 1}});
  EXPECT_THAT(JoinAll(manifest, ranks), IsOk());
  ranks.push_back({{0, {1, 7}, {1, 1}}});
  EXPECT_THAT(JoinAll(manifest, ranks), ReasonIs(ErrorReason::kLayoutOverlap));
}

// In the time of one call, as a model is locked meanwhile.
TEST(RunLayoutsTest, ThousandsOfRanksAreQuick) {
  constexpr int64_t kRanks = 10'000;
  constexpr int64_t kTensors = 20;
  const Manifest manifest = Make([] {
    std::vector<TensorSpec> tensors;
    for (int64_t i = 0; i < kTensors; ++i) {
      tensors.push_back({absl::StrCat("t", i), Dtype::kInt8, {2 * kRanks - 7, 30}});
    }
    return tensors;
  }());
  const Manifest one = Make({{"t", Dtype::kInt8, {2 * kRanks - 7, 30}}});
  std::vector<std::vector<Shard>> ranks(kRanks);
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    EMA_ASSERT_OK_AND_ASSIGN(const RankShare share, EvenShare(one, {}, {}, rank, kRanks));
    for (int64_t i = 0; i < kTensors; ++i) {
      for (Shard shard : share.shards) {
        shard.tensor_index = i;
        ranks[rank].push_back(std::move(shard));
      }
    }
  }
  EXPECT_THAT(JoinAll(manifest, ranks), IsOk());
}

TEST(RunLayoutsTest, WhatIsCutTooIrregularlyIsRefused) {
  constexpr int64_t kSize = 140;
  const Manifest manifest = Make({{"w", Dtype::kInt8, {kSize, kSize, kSize}}});
  EXPECT_THAT(RankLayout::Create(manifest, Bars(kSize)).status(),
              AllOf(ReasonIs(ErrorReason::kBadLayout),
                    StatusIs(kInvalid, StartsWith("tensor \"w\": its shards are cut"))));
}

TEST(RunLayoutsTest, ATensorIsFrozenOnAllRanksOrOnNone) {
  const Manifest manifest = Make({{"w", Dtype::kFloat32, {4}}});
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, TrainerRun::Create(&manifest, "launch", 1, 2));
  ASSERT_THAT(run->Join(0, 2, *RankLayout::Create(manifest, {{0, {0}, {2}}}, 1)), IsOk());
  const Shard rest = {0, {2}, {2}};
  EXPECT_THAT(run->Join(1, 2, *RankLayout::Create(manifest, {rest})),
              StatusIs(kInvalid, HasSubstr("tensor \"w\": frozen on rank 0, but not on rank 1")));
  EXPECT_THAT(run->Join(1, 2, *RankLayout::Create(manifest, {rest}, 1)), IsOk());
  EXPECT_TRUE(run->is_frozen(0));
}

}  // namespace
}  // namespace ema
