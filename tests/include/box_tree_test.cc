// SPDX-License-Identifier: Apache-2.0
#include "include/ema/internal/box_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/include/shard_testing.h"

namespace ema {
namespace {

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

std::vector<BoxTree::Entry> EntriesOf(const std::vector<Shard>& boxes) {
  std::vector<BoxTree::Entry> entries;
  for (const Shard& box : boxes) entries.push_back({&box, static_cast<int64_t>(entries.size())});
  return entries;
}

TEST(BoxTreeTest, FindsExactlyWhatSharesAnElement) {
  Random random(1);
  int pair_count = 0;
  int found_count = 0;
  for (int round = 0; round < 3000; ++round) {
    const size_t rank = 1 + Below(random, 4);
    const int64_t size = 2 + Below(random, 30);
    std::vector<Shard> boxes;  // Apart from each other, and maybe one more.
    const int64_t tries = 1 + Below(random, 120);
    for (int64_t i = 0; i < tries; ++i) {
      Shard box = RandomBox(random, rank, size, 1 + Below(random, 6));
      const bool is_apart =
          std::none_of(boxes.begin(), boxes.end(), [&](const Shard& b) { return Overlap(b, box); });
      if (is_apart) boxes.push_back(std::move(box));
    }
    const auto tree = BoxTree::Make(EntriesOf(boxes));
    ASSERT_TRUE(tree.has_value());
    EXPECT_FALSE(tree->FindPair().has_value());
    EXPECT_EQ(tree->Entries().size(), boxes.size());
    const Shard asked = RandomBox(random, rank, size, size);
    const bool is_held =
        std::any_of(boxes.begin(), boxes.end(), [&](const Shard& b) { return Overlap(b, asked); });
    int64_t steps = 1'000'000;
    const BoxTree::Entry* const found = tree->Find(asked, steps);
    ASSERT_EQ(found != nullptr, is_held);
    if (found != nullptr) {
      EXPECT_TRUE(Overlap(*found->box, asked));
    }
    found_count += is_held ? 1 : 0;

    boxes.push_back(asked);
    const auto with_asked = BoxTree::Make(EntriesOf(boxes));
    ASSERT_TRUE(with_asked.has_value());
    const auto pair = with_asked->FindPair();
    ASSERT_EQ(pair.has_value(), is_held);
    if (pair.has_value()) {
      EXPECT_TRUE(Overlap(*pair->first.box, *pair->second.box));
      ++pair_count;
    }
  }
  EXPECT_GT(pair_count, 500);
  EXPECT_GT(3000 - found_count, 100);
}

TEST(BoxTreeTest, OfAllTheSameAnyTwoAreAPair) {
  for (const size_t rank : {0, 1, 3}) {
    const std::vector<Shard> boxes(
        100, Shard{0, std::vector<int64_t>(rank, 1), std::vector<int64_t>(rank, 2)});
    const auto tree = BoxTree::Make(EntriesOf(boxes));
    ASSERT_TRUE(tree.has_value());
    EXPECT_TRUE(tree->FindPair().has_value());
  }
}

// How ranks cut tensors: cheap, whatever the dimensions.
TEST(BoxTreeTest, RegularCutsAreDividedCleanly) {
  std::vector<Shard> cells;
  for (int64_t i = 0; i < 200'000; ++i) {
    Shard cell{0, {}, std::vector<int64_t>(8, 1)};
    for (int64_t rest = i; cell.offsets.size() < 8; rest /= 5) cell.offsets.push_back(rest % 5);
    cells.push_back(std::move(cell));
  }
  const auto tree = BoxTree::Make(EntriesOf(cells));
  ASSERT_TRUE(tree.has_value());
  EXPECT_FALSE(tree->FindPair().has_value());
  int64_t steps = 256 * 200'000;
  for (const Shard& cell : cells) ASSERT_NE(tree->Find(cell, steps), nullptr);
  EXPECT_GT(steps, 0);
}

TEST(BoxTreeTest, GivesUpOnWhatNoPlaneDivides) {
  const std::vector<Shard> bars = Bars(140);
  EXPECT_FALSE(BoxTree::Make(EntriesOf(bars)).has_value());
}

TEST(BoxTreeTest, ASearchEndsWithItsSteps) {
  std::vector<Shard> rows;
  for (int64_t i = 0; i < 1000; ++i) rows.push_back({0, {2 * i, 0}, {1, 4}});
  const auto tree = BoxTree::Make(EntriesOf(rows));
  ASSERT_TRUE(tree.has_value());
  int64_t steps = 3;
  EXPECT_EQ(tree->Find({0, {0, 4}, {2000, 1}}, steps), nullptr);
  EXPECT_LT(steps, 0);
}

}  // namespace
}  // namespace ema
