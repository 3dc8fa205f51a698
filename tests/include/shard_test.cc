// SPDX-License-Identifier: Apache-2.0
#include "ema/shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/crc32c.h"
#include "server/core/trainer_run.h"
#include "tests/include/shard_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

std::vector<RankLayout::ContiguousRange> Runs(const RankLayout& layout, int64_t offset,
                                              int64_t length_bytes) {
  std::vector<RankLayout::ContiguousRange> runs;
  layout.ForEachRange(offset, length_bytes, [&](const RankLayout::ContiguousRange& run) {
    runs.push_back(run);
    return true;
  });
  return runs;
}

std::vector<RankLayout::ContiguousRange> Runs(const RankLayout& layout) {
  return Runs(layout, 0, layout.total_bytes());
}

std::vector<Element> Expand(const Manifest& manifest,
                            const std::vector<RankLayout::ContiguousRange>& runs) {
  std::vector<Element> elements;
  for (const RankLayout::ContiguousRange& run : runs) {
    const int64_t size = DtypeSize(manifest.tensor(run.tensor_index).dtype);
    for (int64_t i = 0; i < run.element_count; ++i) {
      elements.push_back({run.tensor_index, run.byte_offset + i * size, run.tensor_element + i});
    }
  }
  return elements;
}

TEST(RankLayoutTest, RefusesShardsThatDoNotFit) {
  const Manifest manifest = Make({{"w", Dtype::kFloat32, {4, 6}}, {"s", Dtype::kInt8, {}}});
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  for (const Shard& shard :
       {Shard{0, {0}, {4}}, Shard{0, {0, 0, 0}, {1, 1, 1}}, Shard{0, {0, 0}, {4}},
        Shard{0, {0, 0}, {5, 6}}, Shard{0, {1, 0}, {4, 6}}, Shard{0, {-1, 0}, {1, 6}},
        Shard{0, {0, 0}, {4, -1}}, Shard{0, {5, 0}, {0, 6}}, Shard{0, {kMax, 0}, {kMax, 6}},
        Shard{0, {2, 0}, {kMax, 6}}, Shard{0, {kMin, 0}, {kMin, 6}},
        Shard{0, std::vector<int64_t>(100000, 7), {}}}) {
    const absl::StatusOr<RankLayout> layout = RankLayout::Create(manifest, {shard});
    ASSERT_THAT(layout, StatusIs(kInvalid, AllOf(StartsWith("tensor \"w\": shard with offsets ["),
                                                 HasSubstr("is not inside float32[4, 6]"))));
    EXPECT_THAT(layout, ReasonIs(ErrorReason::kBadLayout));
    EXPECT_LT(layout.status().message().size(), 300u);
  }
  EXPECT_THAT(RankLayout::Create(manifest, {Shard{1, {0}, {1}}}),
              StatusIs(kInvalid, HasSubstr("tensor \"s\"")));
  for (const int64_t tensor_index : {int64_t{-1}, int64_t{2}, kMax}) {
    EXPECT_THAT(RankLayout::Create(manifest, {Shard{tensor_index, {}, {}}}),
                StatusIs(kInvalid, HasSubstr("the manifest has tensors 0 to 1")));
  }
}

TEST(RankLayoutTest, RefusesSharedElements) {
  const Manifest manifest = Make({{"w", Dtype::kFloat32, {4, 6}}, {"s", Dtype::kInt8, {}}});
  const absl::StatusOr<RankLayout> layout =
      RankLayout::Create(manifest, {{1, {}, {}}, {0, {0, 0}, {2, 6}}, {0, {1, 5}, {3, 1}}});
  EXPECT_THAT(
      layout,
      StatusIs(kInvalid,
               StartsWith("tensor \"w\": [0:2, 0:6] of shard 1 and [1:4, 5:6] of shard 2")));
  EXPECT_THAT(layout, ReasonIs(ErrorReason::kLayoutOverlap));
  EXPECT_THAT(RankLayout::Create(manifest, {{1, {}, {}}, {1, {}, {}}}),
              StatusIs(kInvalid, HasSubstr("tensor \"s\": [] of shard 0 and [] of shard 1")));
}

TEST(RankLayoutTest, MayHoldNothing) {
  const Manifest manifest = Make({{"w", Dtype::kFloat32, {4}}});
  EMA_ASSERT_OK_AND_ASSIGN(const RankLayout layout, RankLayout::Create(manifest, {}));
  EXPECT_EQ(layout.total_bytes(), 0);
  EXPECT_TRUE(layout.IsElementBoundary(0));
  EXPECT_FALSE(layout.IsElementBoundary(1));
  EXPECT_THAT(Runs(layout), IsEmpty());
  EXPECT_EQ(layout.digest(), 0);
}

TEST(RankLayoutTest, DigestIsAsTheHeaderSays) {
  const Manifest manifest = Make({{"s", Dtype::kInt8, {}}, {"w", Dtype::kInt8, {300, 2}}});
  EMA_ASSERT_OK_AND_ASSIGN(const RankLayout layout,
                           RankLayout::Create(manifest, {{1, {258, 0}, {3, 2}}, {0, {}, {}}}));
  std::string bytes;
  for (const int64_t value : {1, 258, 0, 3, 2, 0}) {
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> (8 * i));
  }
  EXPECT_EQ(layout.digest(), int64_t{Crc32c(0, std::as_bytes(std::span(bytes)))});
}

TEST(RankLayoutTest, FindsShardsAndElementBoundaries) {
  const Manifest manifest = Make({{"w", Dtype::kFloat64, {4}}, {"b", Dtype::kInt16, {3}}});
  EMA_ASSERT_OK_AND_ASSIGN(
      const RankLayout layout,
      RankLayout::Create(
          manifest, {{0, {0}, {0}}, {1, {0}, {3}}, {0, {1}, {0}}, {0, {2}, {2}}, {1, {3}, {0}}}));
  EXPECT_EQ(layout.total_bytes(), 22);
  EXPECT_EQ(layout.FindShard(0), 1);
  EXPECT_EQ(layout.FindShard(5), 1);
  EXPECT_EQ(layout.FindShard(6), 3);
  EXPECT_EQ(layout.FindShard(21), 3);
  std::vector<int64_t> boundaries;
  for (int64_t offset = -3; offset < 30; ++offset) {
    if (layout.IsElementBoundary(offset)) boundaries.push_back(offset);
  }
  EXPECT_THAT(boundaries, ElementsAre(0, 2, 4, 6, 14, 22));
}

TEST(RankLayoutTest, WholeTensorsAreOneRun) {
  const Manifest manifest = Make({{"w", Dtype::kFloat32, {4, 1, 6}}, {"s", Dtype::kInt8, {}}});
  EMA_ASSERT_OK_AND_ASSIGN(
      const RankLayout layout,
      RankLayout::Create(manifest, {WholeTensor(manifest, 1), WholeTensor(manifest, 0)}));
  const std::vector<RankLayout::ContiguousRange> runs = Runs(layout);
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0].element_count, 1);
  EXPECT_EQ(runs[1].byte_offset, 1);
  EXPECT_EQ(runs[1].element_count, 24);
}

TEST(RankLayoutTest, VisitorMayStop) {
  const Manifest manifest = Make({{"w", Dtype::kFloat32, {4, 6}}});
  EMA_ASSERT_OK_AND_ASSIGN(const RankLayout layout,
                           RankLayout::Create(manifest, {{0, {0, 1}, {4, 2}}}));
  int count = 0;
  layout.ForEachRange(0, layout.total_bytes(),
                      [&](const RankLayout::ContiguousRange&) { return ++count < 2; });
  EXPECT_EQ(count, 2);
}

TEST(RankLayoutTest, RunsAreThoseOfTheNaiveModel) {
  Random random(1);
  for (int round = 0; round < 1500; ++round) {
    const Manifest manifest = RandomManifest(random);
    std::vector<Shard> shards;
    for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
      CutAtRandom(random, WholeTensor(manifest, i), shards);
    }
    std::shuffle(shards.begin(), shards.end(), random);
    shards.resize(Below(random, static_cast<int64_t>(shards.size()) + 1));
    const std::vector<Element> naive = NaiveElements(manifest, shards);
    EMA_ASSERT_OK_AND_ASSIGN(const RankLayout layout, RankLayout::Create(manifest, shards));

    const std::vector<RankLayout::ContiguousRange> runs = Runs(layout);
    ASSERT_EQ(Expand(manifest, runs), naive) << "round " << round;
    for (size_t i = 1; i < runs.size(); ++i) {
      const bool could_be_one =
          runs[i].tensor_index == runs[i - 1].tensor_index &&
          runs[i].tensor_element == runs[i - 1].tensor_element + runs[i - 1].element_count &&
          layout.FindShard(runs[i].byte_offset) == layout.FindShard(runs[i - 1].byte_offset);
      ASSERT_FALSE(could_be_one) << "round " << round;
    }
    for (int i = 0; i < 10 && !naive.empty(); ++i) {
      const int64_t begin = Below(random, static_cast<int64_t>(naive.size()));
      const int64_t end = begin + Below(random, static_cast<int64_t>(naive.size()) - begin + 1);
      const int64_t end_byte =
          end == static_cast<int64_t>(naive.size()) ? layout.total_bytes() : naive[end].byte_offset;
      const int64_t begin_byte = naive[begin].byte_offset;
      ASSERT_EQ(Expand(manifest, Runs(layout, begin_byte, end_byte - begin_byte)),
                std::vector<Element>(naive.begin() + begin, naive.begin() + end))
          << "round " << round;
    }
  }
}

TEST(RankLayoutTest, NeighboursThatAreWholeTensorsAreJoined) {
  Random random(2);
  int64_t joined_count = 0;
  for (int round = 0; round < 1500; ++round) {
    const Manifest manifest = RandomManifest(random);
    std::vector<Shard> shards;
    for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
      const int64_t what = Below(random, 6);
      if (what == 0) continue;
      if (what == 1) {
        CutAtRandom(random, WholeTensor(manifest, i), shards);
      } else {
        shards.push_back(WholeTensor(manifest, i));
      }
    }
    const std::vector<Element> naive = NaiveElements(manifest, shards);
    EMA_ASSERT_OK_AND_ASSIGN(const RankLayout layout, RankLayout::Create(manifest, shards));
    if (naive.empty()) continue;
    const int64_t begin = Below(random, static_cast<int64_t>(naive.size()));
    const int64_t begin_byte = naive[begin].byte_offset;
    std::vector<Element> elements;
    std::vector<RankLayout::ContiguousRange> ranges;
    layout.ForEachJoinedRange(
        begin_byte, layout.total_bytes() - begin_byte,
        [&](const RankLayout::ContiguousRange& range) {
          ranges.push_back(range);
          const int64_t size = DtypeSize(range.dtype);
          for (int64_t i = 0; i < range.element_count; ++i) {
            const int64_t byte = range.byte_offset + i * size;
            const int64_t shard = layout.FindShard(byte);
            const int64_t tensor = layout.shards()[shard].tensor_index;
            const bool is_first = shard == range.shard_index;
            elements.push_back(
                {tensor, byte,
                 is_first ? range.tensor_element + i : (byte - layout.shard_start(shard)) / size});
            joined_count += is_first ? 0 : 1;
          }
          EXPECT_EQ(layout.FindShard(range.byte_offset), range.shard_index);
          return true;
        });
    ASSERT_EQ(elements, std::vector<Element>(naive.begin() + begin, naive.end()))
        << "round " << round;
    const auto is_whole = [&](int64_t i) {
      return shards[i] == WholeTensor(manifest, shards[i].tensor_index);
    };
    for (size_t i = 1; i < ranges.size(); ++i) {
      const int64_t shard = ranges[i].shard_index;
      const bool could_be_one = is_whole(shard) && is_whole(shard - 1) &&
                                shards[shard - 1].tensor_index + 1 == shards[shard].tensor_index &&
                                ranges[i].dtype == ranges[i - 1].dtype;
      ASSERT_FALSE(could_be_one && shards[shard - 1].element_count() > 0) << "round " << round;
    }
  }
  EXPECT_GT(joined_count, 0);
}

// Compared each with each, as many shards as a message holds would block a server for minutes.
TEST(RankLayoutTest, SixtyThousandShardsAreQuick) {
  constexpr int64_t kCount = 60'000;
  const Manifest manifest =
      Make({{"w", Dtype::kBFloat16, {kCount, 16}}, {"v", Dtype::kBFloat16, {16, kCount}}});
  std::vector<Shard> rows, columns;
  for (int64_t i = 0; i < kCount; ++i) {
    rows.push_back({0, {i, 0}, {1, 16}});
    columns.push_back({1, {0, i}, {16, 1}});
  }
  EMA_ASSERT_OK_AND_ASSIGN(const RankLayout by_row, RankLayout::Create(manifest, rows));
  EMA_ASSERT_OK_AND_ASSIGN(const RankLayout by_column, RankLayout::Create(manifest, columns));
  int64_t element_count = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    by_column.ForEachRange(32 * i, 32, [&](const RankLayout::ContiguousRange& run) {
      element_count += run.element_count;
      return true;
    });
  }
  EXPECT_EQ(element_count, 16 * kCount);
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, TrainerRun::Create(&manifest, "launch", 1, kCount + 1));
  for (int64_t i = 0; i < kCount; ++i) {
    ASSERT_THAT(run->Join(i, kCount + 1, *RankLayout::Create(manifest, {rows[i]})), IsOk());
  }
  EXPECT_THAT(run->Join(kCount, kCount + 1, by_column), IsOk());
  EXPECT_TRUE(run->is_ready());
}

struct ShareCase {
  Manifest manifest;
  std::array<bool, 12> rank0_flags = {};
  int64_t rank0_bytes = 0;

  absl::Span<const bool> rank0_only() const {
    return absl::MakeConstSpan(rank0_flags).first(manifest.tensor_count());
  }
};

ShareCase RandomShareCase(Random& random) {
  ShareCase c{RandomManifest(random)};
  const int64_t rarity = 1 + Below(random, 8);
  for (int64_t i = 0; i < c.manifest.tensor_count(); ++i) {
    c.rank0_flags[i] = Below(random, rarity + 1) == rarity;
    if (c.rank0_flags[i]) c.rank0_bytes += c.manifest.tensor(i).byte_count();
  }
  return c;
}

// Each box is contiguous, and no tensor is cut into more of them than it needs.
void ExpectFewContiguousBoxes(const Manifest& manifest, const RankLayout& layout) {
  EXPECT_EQ(Runs(layout).size(), layout.shards().size());
  std::map<int64_t, size_t> counts;
  for (const Shard& shard : layout.shards()) ++counts[shard.tensor_index];
  for (const auto& [tensor_index, count] : counts) {
    const size_t rank = manifest.tensor(tensor_index).shape.size();
    EXPECT_LE(count, std::max<size_t>(1, 2 * rank - std::min<size_t>(rank, 1)));
  }
}

TEST(EvenShareTest, RanksHoldEachElementOnceAndAsEvenlyAsCanBe) {
  Random random(4);
  for (int round = 0; round < 600; ++round) {
    const ShareCase c = RandomShareCase(random);
    const int64_t total = c.manifest.total_bytes();
    for (int64_t world_size = 1; world_size <= 9; ++world_size) {
      SCOPED_TRACE(absl::StrCat("round ", round, ", world_size ", world_size));
      EMA_ASSERT_OK_AND_ASSIGN(const auto run,
                               TrainerRun::Create(&c.manifest, "launch", 1, world_size));
      for (int64_t rank = 0; rank < world_size; ++rank) {
        EMA_ASSERT_OK_AND_ASSIGN(RankShare share,
                                 EvenShare(c.manifest, c.rank0_only(), {}, rank, world_size));
        EMA_ASSERT_OK_AND_ASSIGN(const RankLayout layout,
                                 RankLayout::Create(c.manifest, std::move(share.shards)));
        ASSERT_THAT(run->Join(rank, world_size, layout), IsOk());
        ExpectFewContiguousBoxes(c.manifest, layout);
        for (const Shard& shard : layout.shards()) {
          EXPECT_TRUE(rank == 0 || !c.rank0_flags[shard.tensor_index]);
        }
        const double even = static_cast<double>(total) / static_cast<double>(world_size);
        if (static_cast<double>(c.rank0_bytes) <= even) {
          EXPECT_LE(std::abs(static_cast<double>(layout.total_bytes()) - even), 8);
        } else if (rank > 0) {
          const double rest =
              static_cast<double>(total - c.rank0_bytes) / static_cast<double>(world_size - 1);
          EXPECT_LE(std::abs(static_cast<double>(layout.total_bytes()) - rest), 8);
        }
      }
      ASSERT_TRUE(run->is_ready());
    }
  }
}

TEST(EvenShareTest, BoxesAreSplitAmongThoseWhoHoldThem) {
  const Manifest manifest =
      Make({{"w", Dtype::kFloat32, {6, 5}}, {"v", Dtype::kFloat64, {4}}, {"u", Dtype::kInt8, {9}}});
  // Columns 1 to 3 of some rows, which are not contiguous in their tensor; some of another.
  const std::vector<Shard> boxes = {{0, {2, 1}, {3, 3}}, {1, {1}, {2}}};
  for (int64_t world_size = 1; world_size <= 4; ++world_size) {
    EMA_ASSERT_OK_AND_ASSIGN(const auto run,
                             TrainerRun::Create(&manifest, "launch", 1, world_size));
    int64_t elements = 0;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      SCOPED_TRACE(absl::StrCat(rank, " of ", world_size));
      EMA_ASSERT_OK_AND_ASSIGN(const RankShare share,
                               EvenShare(manifest, boxes, {}, {}, rank, world_size));
      EMA_ASSERT_OK_AND_ASSIGN(const RankLayout layout, RankLayout::Create(manifest, share.shards));
      // No element twice, but those outside the boxes are missing; 36 + 16 bytes, evenly.
      const absl::Status join = run->Join(rank, world_size, layout);
      if (rank + 1 < world_size) {
        ASSERT_THAT(join, IsOk());
      } else {
        ASSERT_THAT(join, ReasonIs(ErrorReason::kLayoutHole));
      }
      EXPECT_NEAR(layout.total_bytes(), 52.0 / static_cast<double>(world_size), 8);
      for (const Shard& shard : share.shards) {
        elements += shard.element_count();
        const Shard& box = boxes[shard.tensor_index];
        for (size_t d = 0; d < box.offsets.size(); ++d) {
          EXPECT_GE(shard.offsets[d], box.offsets[d]);
          EXPECT_LE(shard.offsets[d] + shard.extents[d], box.offsets[d] + box.extents[d]);
        }
      }
    }
    EXPECT_EQ(elements, 9 + 2);
  }
  EXPECT_THAT(EvenShare(manifest, boxes, {}, {}, 0, 1)->shards, testing::ElementsAreArray(boxes));
  EXPECT_THAT(EvenShare(manifest, {{1, {3}, {2}}}, {}, {}, 0, 1),
              StatusIs(kInvalid, HasSubstr("tensor \"v\": shard with offsets [3]")));
}

TEST(EvenShareTest, WithoutFlagsNothingIsRankZerosOnly) {
  const Manifest manifest = Make({{"w", Dtype::kFloat32, {3, 4}}});
  EXPECT_THAT(EvenShare(manifest, {}, {}, 0, 2)->shards,
              ElementsAre(Shard{0, {0, 0}, {1, 4}}, Shard{0, {1, 0}, {1, 2}}));
  EXPECT_THAT(EvenShare(manifest, {}, {}, 1, 2)->shards,
              ElementsAre(Shard{0, {1, 2}, {1, 2}}, Shard{0, {2, 0}, {1, 4}}));
  EXPECT_THAT(EvenShare(manifest, {}, {}, 0, 1)->shards, ElementsAre(WholeTensor(manifest, 0)));
}

TEST(EvenShareTest, FrozenTensorsComeLastAndAreSplitToo) {
  Random random(5);
  for (int round = 0; round < 200; ++round) {
    const ShareCase c = RandomShareCase(random);
    const auto flags = std::make_unique<bool[]>(c.manifest.tensors().size());
    for (size_t i = 0; i < c.manifest.tensors().size(); ++i) flags[i] = Below(random, 2) == 1;
    const TensorSet frozen = absl::MakeConstSpan(flags.get(), c.manifest.tensors().size());
    for (int64_t world_size = 1; world_size <= 5; ++world_size) {
      SCOPED_TRACE(absl::StrCat("round ", round, ", world_size ", world_size));
      EMA_ASSERT_OK_AND_ASSIGN(const auto run,
                               TrainerRun::Create(&c.manifest, "launch", 1, world_size));
      int64_t least = std::numeric_limits<int64_t>::max();
      int64_t most = 0;
      for (int64_t rank = 0; rank < world_size; ++rank) {
        EMA_ASSERT_OK_AND_ASSIGN(RankShare share,
                                 EvenShare(c.manifest, c.rank0_only(), frozen, rank, world_size));
        EMA_ASSERT_OK_AND_ASSIGN(
            const RankLayout layout,
            RankLayout::Create(c.manifest, std::move(share.shards), share.frozen_shard_count));
        ASSERT_THAT(run->Join(rank, world_size, layout), IsOk());
        for (const Shard& shard : layout.frozen_shards()) {
          EXPECT_TRUE(frozen[shard.tensor_index] && !c.rank0_flags[shard.tensor_index]);
        }
        least = std::min(least, layout.total_bytes() - layout.trained_bytes());
        most = std::max(most, layout.total_bytes() - layout.trained_bytes());
      }
      ASSERT_TRUE(run->is_ready());
      EXPECT_LE(most - least, 16);
      for (int64_t i = 0; i < c.manifest.tensor_count(); ++i) {
        const bool is_frozen = frozen[i] && !c.rank0_flags[i];
        EXPECT_EQ(run->is_frozen(i), is_frozen && c.manifest.tensor(i).element_count() > 0);
      }
    }
  }
}

TEST(RankLayoutTest, FrozenShardsAreTheLastAndOfWholeTensors) {
  const Manifest manifest = Make({{"w", Dtype::kFloat32, {4}}, {"v", Dtype::kFloat64, {3}}});
  const std::vector<Shard> shards = {WholeTensor(manifest, 1), WholeTensor(manifest, 0)};
  EMA_ASSERT_OK_AND_ASSIGN(const RankLayout live, RankLayout::Create(manifest, shards));
  EMA_ASSERT_OK_AND_ASSIGN(const RankLayout layout, RankLayout::Create(manifest, shards, 1));
  EXPECT_EQ(live.trained_bytes(), 40);
  EXPECT_EQ(layout.trained_bytes(), 24);
  EXPECT_EQ(layout.total_bytes(), 40);
  EXPECT_NE(layout.digest(), live.digest());
  EXPECT_THAT(layout.frozen_shards(), ElementsAre(WholeTensor(manifest, 0)));
  for (const int64_t count : {-1, 3}) {
    EXPECT_THAT(RankLayout::Create(manifest, shards, count),
                StatusIs(kInvalid, HasSubstr("frozen_shard_count: ")));
  }
  EXPECT_THAT(RankLayout::Create(manifest, {{0, {0}, {2}}, {0, {2}, {2}}}, 1),
              StatusIs(kInvalid, HasSubstr("tensor \"w\": shard [2:4] is frozen, another is not")));
}

TEST(EvenShareTest, LargestModelDoesNotOverflow) {
  const int64_t elements = int64_t{1} << 61;
  const Manifest manifest =
      Make({{"w", Dtype::kInt8, {elements}}, {"v", Dtype::kInt8, {elements}}});
  EMA_ASSERT_OK_AND_ASSIGN(const RankShare share, EvenShare(manifest, {}, {}, 65535, 65536));
  ASSERT_EQ(share.shards.size(), 1u);
  EXPECT_EQ(share.shards[0].element_count(), int64_t{1} << 46);
}

TEST(EvenShareTest, RefusesWhatIsNoRank) {
  const Manifest manifest = Make({{"w", Dtype::kFloat32, {3}}, {"v", Dtype::kFloat32, {3}}});
  for (const auto& [rank, world_size] :
       {std::pair<int64_t, int64_t>{-1, 2}, {2, 2}, {0, 0}, {0, -1}, {0, 65537}}) {
    EXPECT_THAT(EvenShare(manifest, {}, {}, rank, world_size),
                StatusIs(kInvalid, HasSubstr("expected 0 <= rank < world_size <= 65536")));
  }
  const bool flags[] = {true};
  EXPECT_THAT(EvenShare(manifest, flags, {}, 0, 2),
              StatusIs(kInvalid, HasSubstr("rank0_only has 1 entries; expected none or 2")));
  EXPECT_THAT(EvenShare(manifest, {}, flags, 0, 2),
              StatusIs(kInvalid, HasSubstr("frozen has 1 entries; expected none or 2")));
}

}  // namespace
}  // namespace ema
