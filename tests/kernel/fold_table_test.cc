// SPDX-License-Identifier: Apache-2.0
//
// The body of the GPU's kernel, walked over the whole grid on the CPU, beside the definition.
#include "server/kernel/fold_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/device/fold_batch.h"
#include "server/kernel/fold.h"
#include "tests/testutil/walk_grid.h"

namespace ema {
namespace {

constexpr int64_t kCapacity = int64_t{4} << 20;

void WalkTable(const FoldTable& table, std::mt19937_64& random) {
  WalkGrid(table.tile_count, kFoldThreads, random,
           [&table](int64_t tile, int thread) { FoldOfThread(table, tile, thread); });
}

struct AlignedDelete {
  void operator()(std::byte* data) const { ::operator delete[](data, std::align_val_t(64)); }
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedDelete>;
AlignedBytes NewBytes(int64_t size_bytes) {
  return AlignedBytes(new (std::align_val_t(64)) std::byte[size_bytes]);
}

// Memory of one target: current and next, with room before and behind them.
struct Averages {
  static constexpr int64_t kMargin = 64;
  Averages(int64_t size_bytes, int64_t shift, std::mt19937_64& random)
      : total_bytes(size_bytes + shift + 2 * kMargin) {
    for (AlignedBytes* bytes : {&current, &next}) *bytes = NewBytes(total_bytes);
    std::normal_distribution<float> normal;
    // Pairs of them are float64s of ordinary sizes, too.
    for (int64_t i = 0; i + 4 <= total_bytes; i += 4) {
      const float value = normal(random);
      std::memcpy(&current[i], &value, 4);
    }
    std::fill_n(next.get(), total_bytes, std::byte{0xa5});
    offset = kMargin + shift;
  }

  int64_t total_bytes;
  int64_t offset = 0;
  AlignedBytes current, next;
};

struct Case {
  Dtype dtype;
  FoldKind kind;
  int64_t count;
  int64_t source_shift = 0;  // In bytes.
  int64_t stored_shift = 0;  // In elements.
};

int64_t StoredBytes(FoldKind kind, Dtype dtype) {
  return FoldTarget{.kind = kind}.StoredBytes(DtypeSize(dtype));
}

std::vector<std::byte> Pushed(Dtype dtype, int64_t count, std::mt19937_64& random,
                              bool with_specials) {
  std::vector<std::byte> bytes(count * DtypeSize(dtype));
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < count; ++i) {
    double value = normal(random);
    if (with_specials && i % 97 == 13) value = 0x1p-130;  // Subnormal as float32.
    if (with_specials && i % 101 == 50) value = -0.0;
    std::byte* const to = &bytes[i * DtypeSize(dtype)];
    const float rounded = static_cast<float>(value);
    const uint16_t top = static_cast<uint16_t>(std::bit_cast<uint32_t>(rounded) >> 16);
    const uint64_t any = random();
    switch (dtype) {
      case Dtype::kFloat32:
        std::memcpy(to, &rounded, 4);
        break;
      case Dtype::kFloat64:
        std::memcpy(to, &value, 8);
        break;
      case Dtype::kBFloat16:
        std::memcpy(to, &top, 2);
        break;
      case Dtype::kFloat16: {
        // Any finite bits, subnormal ones too.
        const uint16_t half = static_cast<uint16_t>(any) & 0xbbff;
        std::memcpy(to, &half, 2);
        break;
      }
      default:
        std::memcpy(to, &any, DtypeSize(dtype));
    }
  }
  return bytes;
}

// One op by the definition and by the table, compared byte for byte, margins too.
class FoldTableTest : public testing::Test {
 protected:
  struct Pair {
    Averages expected;
    Averages got;
  };

  void AddCase(const Case& c) {
    const std::vector<std::byte> pushed = Pushed(c.dtype, c.count, random_, true);
    sources_.push_back(NewBytes(static_cast<int64_t>(pushed.size()) + 64 + c.source_shift));
    std::byte* const source = sources_.back().get() + c.source_shift;
    std::copy(pushed.begin(), pushed.end(), source);
    const int64_t stored = StoredBytes(c.kind, c.dtype);
    const uint64_t seed = random_();
    std::mt19937_64 first(seed);
    std::mt19937_64 second(seed);
    pairs_.push_back(
        std::make_unique<Pair>(Pair{Averages(c.count * stored, c.stored_shift * stored, first),
                                    Averages(c.count * stored, c.stored_shift * stored, second)}));
    Pair& pair = *pairs_.back();
    const double weight = std::uniform_real_distribution<double>(0, 1)(random_);
    Fold(c, source, pair.expected, weight, [](const FoldOp& op) { FoldScalar(op); });
    Fold(c, source, pair.got, weight, [this](const FoldOp& op) { AddToBatch(op); });
  }

  template <typename Do>
  static void Fold(const Case& c, const std::byte* source, Averages& averages, double weight,
                   const Do& fold) {
    FoldTarget target{
        .kind = c.kind, .update_weight = weight, .next = averages.next.get() + averages.offset};
    if (IsAverage(c.kind)) target.current = averages.current.get() + averages.offset;
    fold(FoldOp{c.dtype, source, c.count, std::span(&target, 1)});
  }

  void AddToBatch(const FoldOp& op) {
    for (int64_t first = 0; first < op.element_count;) {
      const int64_t count = batch_.Add(op, first, kCapacity);
      if (count == 0) Launch();
      first += count;
    }
  }

  void Launch() {
    ASSERT_FALSE(batch_.empty());
    const FoldTable table = batch_.Finish();
    const int64_t size_bytes = batch_.size_bytes();
    ASSERT_LE(size_bytes, kCapacity);
    std::copy_n(host_.get(), size_bytes, device_.get());
    // What is read after the copy is the copy.
    const std::vector<std::byte> host(host_.get(), host_.get() + size_bytes);
    std::fill_n(host_.get(), size_bytes, std::byte{0xee});
    WalkTable(table, random_);
    std::copy(host.begin(), host.end(), host_.get());
    batch_.ForEachNonFinite([this](const NonFiniteElement& found) { found_.push_back(found); });
    batch_.Clear();
    ++launch_count_;
  }

  void ExpectEqual() {
    if (!batch_.empty()) Launch();
    for (size_t i = 0; i < pairs_.size(); ++i) {
      const auto& [expected, got] = *pairs_[i];
      ASSERT_EQ(std::memcmp(expected.next.get(), got.next.get(), got.total_bytes), 0) << i;
    }
    pairs_.clear();
    sources_.clear();
  }

  std::mt19937_64 random_{7};
  AlignedBytes host_ = NewBytes(kCapacity);
  AlignedBytes device_ = NewBytes(kCapacity);
  FoldBatch batch_{host_.get(), device_.get(), kCapacity};
  std::vector<NonFiniteElement> found_;
  int launch_count_ = 0;
  std::vector<AlignedBytes> sources_;
  std::vector<std::unique_ptr<Pair>> pairs_;
};

constexpr Dtype kFloats[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat64};
constexpr Dtype kOthers[] = {Dtype::kInt8,  Dtype::kInt16, Dtype::kInt32,
                             Dtype::kInt64, Dtype::kUInt8, Dtype::kBool};
constexpr FoldKind kKinds[] = {FoldKind::kAverage, FoldKind::kAssign, FoldKind::kCopy,
                               FoldKind::kAverageFloat64, FoldKind::kAssignFloat64};
const std::vector<int64_t> kSizes = {0,
                                     1,
                                     2,
                                     3,
                                     4,
                                     5,
                                     7,
                                     8,
                                     1023,
                                     1024,
                                     1025,
                                     kFoldTileElements - 4,
                                     kFoldTileElements - 1,
                                     kFoldTileElements,
                                     kFoldTileElements + 1,
                                     3 * kFoldTileElements + 5};

TEST_F(FoldTableTest, IsTheDefinitionForEveryDtypeKindAndSize) {
  for (const Dtype dtype : kFloats) {
    for (const FoldKind kind : kKinds) {
      for (const int64_t count : kSizes) AddCase({dtype, kind, count});
    }
  }
  for (const Dtype dtype : kOthers) {
    for (const int64_t count : kSizes) AddCase({dtype, FoldKind::kCopy, count});
  }
  ExpectEqual();
  EXPECT_TRUE(found_.empty());
}

TEST_F(FoldTableTest, AnyAlignmentWillDo) {
  for (const Dtype dtype : kFloats) {
    for (const FoldKind kind : kKinds) {
      for (int64_t shift = 0; shift < 8; ++shift) {
        AddCase({dtype, kind, kFoldTileElements + 9, shift * 3, shift});
      }
    }
  }
  for (const Dtype dtype : kOthers) {
    for (int64_t shift = 0; shift < 17; ++shift) {
      AddCase({dtype, FoldKind::kCopy, 70, shift, shift});
    }
  }
  ExpectEqual();
}

TEST_F(FoldTableTest, ManySmallOnesShareALaunch) {
  for (int i = 0; i < 3'000; ++i) {
    AddCase({kFloats[i % 4], kKinds[i % 5], static_cast<int64_t>(random_() % 40), i % 5, i % 3});
  }
  ExpectEqual();
  EXPECT_EQ(launch_count_, 1);
}

TEST_F(FoldTableTest, WhatDoesNotFitGoesOnInTheNextLaunch) {
  AddCase({Dtype::kFloat32, FoldKind::kAverage, 3 * kCapacity / 4 + 7, 0, 1});
  ExpectEqual();
  EXPECT_GE(launch_count_, 4);
}

TEST_F(FoldTableTest, OneReadOfTheSourceFeedsAllTargets) {
  constexpr int64_t kCount = 5'001;
  const std::vector<std::byte> source = Pushed(Dtype::kFloat16, kCount, random_, false);
  std::vector<std::unique_ptr<Pair>> pairs;
  std::vector<FoldTarget> expected, got;
  for (int64_t t = 0; t < 10; ++t) {
    const FoldKind kind = kKinds[t % 5];
    const int64_t stored = StoredBytes(kind, Dtype::kFloat16);
    std::mt19937_64 first(t), second(t);
    // Every other one lies differently from the first.
    pairs.push_back(
        std::make_unique<Pair>(Pair{Averages(kCount * stored, t % 2 * stored, first),
                                    Averages(kCount * stored, t % 2 * stored, second)}));
    const Case c{Dtype::kFloat16, kind, kCount};
    Fold(c, source.data(), pairs.back()->expected, 0.1 * static_cast<double>(t),
         [&](const FoldOp& op) { expected.push_back(op.targets[0]); });
    Fold(c, source.data(), pairs.back()->got, 0.1 * static_cast<double>(t),
         [&](const FoldOp& op) { got.push_back(op.targets[0]); });
  }
  FoldScalar({Dtype::kFloat16, source.data(), kCount, expected});
  AddToBatch({Dtype::kFloat16, source.data(), kCount, got});
  Launch();
  for (const auto& pair : pairs) {
    EXPECT_EQ(std::memcmp(pair->expected.next.get(), pair->got.next.get(), pair->got.total_bytes),
              0);
  }
}

// Each between two other targets.
TEST_F(FoldTableTest, AMeanReadsAllItsEarlierWeights) {
  for (const Dtype dtype : kFloats) {
    for (const FoldKind kind : {FoldKind::kMean, FoldKind::kMeanFloat64}) {
      for (const size_t weight_count : {1, 2, kMaxEarlierWeights}) {
        for (const int64_t count : kSizes) {
          if (count == 0) continue;
          const std::vector<std::byte> source = Pushed(dtype, count, random_, true);
          const int64_t stored = StoredBytes(kind, dtype);
          const auto new_averages = [&] {
            return std::make_unique<Averages>(count * stored, count % 2 * stored, random_);
          };
          std::vector<std::unique_ptr<Averages>> weights(weight_count);
          for (auto& of_update : weights) of_update = new_averages();
          std::vector<std::unique_ptr<Averages>> results(6);
          for (auto& result : results) result = new_averages();
          const auto targets_of = [&](size_t first) {
            const auto next = [&](size_t i) {
              return results[first + i]->next.get() + results[first + i]->offset;
            };
            const FoldKind assign = IsFloat64(kind) ? FoldKind::kAssignFloat64 : FoldKind::kAssign;
            std::vector<FoldTarget> targets = {{.kind = assign, .next = next(0)}};
            for (const auto& of_update : weights) {
              targets.push_back({.kind = kind, .current = of_update->current.get()});
              targets.back().current += of_update->offset;
            }
            targets[1].next = next(1);
            targets.push_back({.kind = assign, .next = next(2)});
            return targets;
          };
          const std::vector<FoldTarget> expected = targets_of(0);
          const std::vector<FoldTarget> got = targets_of(3);
          FoldScalar({dtype, source.data(), count, expected});
          AddToBatch({dtype, source.data(), count, got});
          Launch();
          for (size_t i = 0; i < 3; ++i) {
            ASSERT_EQ(std::memcmp(results[i]->next.get(), results[i + 3]->next.get(),
                                  results[i]->total_bytes),
                      0)
                << "target " << i << ", " << weight_count << " weights of " << count;
          }
        }
      }
    }
  }
  EXPECT_TRUE(found_.empty());
}

// Small tensors of a model with several tracks: each is at the same place in all of them, or not.
TEST_F(FoldTableTest, NeighboursShareTheirTargets) {
  constexpr int64_t kPiece = 101;
  constexpr int64_t kPieces = 200;
  for (const bool is_one_apart : {false, true}) {
    const std::vector<std::byte> source = Pushed(Dtype::kFloat32, kPiece * kPieces, random_, false);
    std::vector<FoldTarget> expected, got;
    for (const FoldKind kind : {FoldKind::kAverage, FoldKind::kAverageFloat64, FoldKind::kCopy}) {
      std::mt19937_64 first(3), second(3);
      const int64_t size_bytes = (kPieces + 1) * kPiece * StoredBytes(kind, Dtype::kFloat32);
      pairs_.push_back(std::make_unique<Pair>(
          Pair{Averages(size_bytes, 0, first), Averages(size_bytes, 0, second)}));
      const Case c{Dtype::kFloat32, kind, kPiece};
      Fold(c, nullptr, pairs_.back()->expected, 0.25,
           [&](const FoldOp& op) { expected.push_back(op.targets[0]); });
      Fold(c, nullptr, pairs_.back()->got, 0.25,
           [&](const FoldOp& op) { got.push_back(op.targets[0]); });
    }
    std::vector<int64_t> pieces(kPieces);
    std::iota(pieces.begin(), pieces.end(), 0);
    std::shuffle(pieces.begin(), pieces.end(), random_);
    for (const int64_t piece : pieces) {
      const auto targets_of = [&](std::vector<FoldTarget> targets) {
        for (FoldTarget& target : targets) {
          // Of the second half the last track has a gap before it.
          const bool is_apart =
              is_one_apart && target.kind == FoldKind::kCopy && piece >= kPieces / 2;
          const int64_t bytes =
              (piece * kPiece + (is_apart ? 3 : 0)) * StoredBytes(target.kind, Dtype::kFloat32);
          target.next += bytes;
          if (target.current != nullptr) target.current += bytes;
        }
        return targets;
      };
      const std::byte* const from = source.data() + piece * kPiece * 4;
      const std::vector<FoldTarget> expected_targets = targets_of(expected);
      const std::vector<FoldTarget> got_targets = targets_of(got);
      FoldScalar({Dtype::kFloat32, from, kPiece, expected_targets});
      AddToBatch({Dtype::kFloat32, from, kPiece, got_targets});
    }
    const FoldTable table = batch_.Finish();
    const int64_t targets_bytes =
        device_.get() + batch_.size_bytes() - reinterpret_cast<const std::byte*>(table.targets);
    constexpr int64_t kOnce = 3 * static_cast<int64_t>(sizeof(DeviceFoldTarget));
    if (is_one_apart) {
      EXPECT_GT(targets_bytes, kOnce);
    } else {
      EXPECT_EQ(targets_bytes, kOnce);
    }
    ExpectEqual();
  }
}

TEST_F(FoldTableTest, NeighboursInOrderAreOneRun) {
  constexpr int64_t kPiece = 101;
  constexpr int64_t kPieces = 200;
  for (const int64_t shift : {0, 1, 3}) {
    for (const FoldKind kind : kKinds) {
      std::vector<std::byte> source = Pushed(Dtype::kFloat32, kPiece * kPieces, random_, true);
      // In two pieces that are neither the first nor the last, and not neighbours.
      const float nan = std::numeric_limits<float>::quiet_NaN();
      std::memcpy(&source[(50 * kPiece + 7) * 4], &nan, 4);
      std::memcpy(&source[(120 * kPiece + 100) * 4], &nan, 4);
      const int64_t stored = StoredBytes(kind, Dtype::kFloat32);
      const int64_t size_bytes = kPieces * kPiece * stored;
      std::mt19937_64 first(3), second(3);
      pairs_.push_back(std::make_unique<Pair>(Pair{Averages(size_bytes, shift * stored, first),
                                                   Averages(size_bytes, shift * stored, second)}));
      const Case c{Dtype::kFloat32, kind, kPieces * kPiece};
      Fold(c, source.data(), pairs_.back()->expected, 0.25,
           [](const FoldOp& op) { FoldScalar(op); });
      Fold(c, source.data(), pairs_.back()->got, 0.25, [this, stored](const FoldOp& whole) {
        for (int64_t piece = 0; piece < kPieces; ++piece) {
          FoldTarget target = whole.targets[0];
          if (target.current != nullptr) target.current += piece * kPiece * stored;
          target.next += piece * kPiece * stored;
          AddToBatch({Dtype::kFloat32, whole.source + piece * kPiece * 4, kPiece,
                      std::span(&target, 1), piece, 1000});
        }
      });
      EXPECT_EQ(batch_.Finish().tile_count,
                FoldTileCount(kPieces * kPiece, static_cast<int>(shift)));
      found_.clear();
      ExpectEqual();
      EXPECT_EQ(found_, std::vector<NonFiniteElement>({{50, 1007}, {120, 1100}}));
    }
  }
}

TEST_F(FoldTableTest, WhatIsNotFiniteIsNoticedWhereverItIs) {
  for (const Dtype dtype : kFloats) {
    for (const int64_t count : {int64_t{1}, int64_t{6}, kFoldTileElements + 3}) {
      for (const int64_t at : {int64_t{0}, count / 2, count - 1}) {
        std::vector<std::byte> source = Pushed(dtype, count, random_, false);
        // All ones in the exponent's bits of any format.
        for (int64_t b = DtypeSize(dtype) - 2; b < DtypeSize(dtype); ++b) {
          source[at * DtypeSize(dtype) + b] = std::byte{0x7f} | std::byte{0xf0};
        }
        found_.clear();
        // Without targets, it is only looked at.
        AddToBatch({dtype, source.data(), at, {}, 1, 0});  // There is nothing in it.
        AddToBatch({dtype, source.data(), count, {}, 2, 100});
        Launch();
        EXPECT_EQ(found_, std::vector<NonFiniteElement>({{2, 100 + at}}))
            << DtypeName(dtype) << " " << count << " " << at;
      }
    }
  }
  // Finite, but too large for a float32 average. In whole vectors and beside them.
  const std::vector<double> large(kFoldTileElements + 1, 1e300);
  const auto* const source = reinterpret_cast<const std::byte*>(large.data());
  std::vector<double> next(large.size());
  for (const FoldKind kind : kKinds) {
    for (const size_t count : {size_t{1}, large.size()}) {
      found_.clear();
      const FoldTarget target = {.kind = kind,
                                 .current = reinterpret_cast<const std::byte*>(large.data()),
                                 .next = reinterpret_cast<std::byte*>(next.data())};
      AddToBatch({Dtype::kFloat64, source, static_cast<int64_t>(count), std::span(&target, 1)});
      AddToBatch({Dtype::kFloat64, source, static_cast<int64_t>(count), {}, 5});
      Launch();
      const std::vector<NonFiniteElement> first = {{0, 0}};
      EXPECT_EQ(found_, IsFloat32(kind) ? first : std::vector<NonFiniteElement>())
          << static_cast<int>(kind) << " " << count;
    }
  }
}

TEST_F(FoldTableTest, ARunMayHaveMoreThanTwoToThe31Elements) {
  constexpr int64_t kCount = (int64_t{1} << 31) + 5 * kFoldTileElements + 3;
  // Only the pages that are touched take memory.
  const auto map = [] {
    void* const memory = mmap(nullptr, kCount, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(memory, MAP_FAILED);
    return static_cast<std::byte*>(memory);
  };
  std::byte* const source = map();
  std::byte* const next = map();
  const DeviceFoldTarget target{.next = next, .kind = FoldKind::kCopy};
  std::vector<FoldTile> tiles;
  ForEachFoldTile({.source = source,
                   .target_count = 1,
                   .format = SourceFormat::kNoFloat,
                   .element_bytes = 1,
                   .is_aligned = true},
                  kCount, [&](const FoldTile& tile) { tiles.push_back(tile); });
  const FoldTable table{
      .tiles = tiles.data(), .targets = &target, .tile_count = static_cast<int64_t>(tiles.size())};
  EXPECT_EQ(table.tile_count, (kCount + kFoldTileElements - 1) / kFoldTileElements);
  for (const int64_t tile :
       {int64_t{0}, (int64_t{1} << 31) / kFoldTileElements, table.tile_count - 1}) {
    const int64_t begin = tile * kFoldTileElements;
    const int64_t end = std::min(begin + kFoldTileElements, kCount);
    for (int64_t i = begin; i < end; ++i) source[i] = static_cast<std::byte>(i % 251);
    for (int thread = 0; thread < kFoldThreads; ++thread) FoldOfThread(table, tile, thread);
    EXPECT_EQ(std::memcmp(source + begin, next + begin, end - begin), 0) << tile;
  }
  munmap(source, kCount);
  munmap(next, kCount);
}

}  // namespace
}  // namespace ema
