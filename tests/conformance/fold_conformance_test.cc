// SPDX-License-Identifier: Apache-2.0
//
// Every device's folds equal the scalar definition bit for bit, and tell which value was not
// finite. The CPU device runs once for each family of processors that its kernel is compiled for
// and that this machine supports, down to the one without a fused multiply-add.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "server/device/device.h"
#include "server/kernel/fold.h"
#include "tests/conformance/device_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

// Each test goes through all dtypes.
class FoldConformanceTest : public DeviceTest {
 protected:
  Folder folder_{*device_};
};

INSTANTIATE_TEST_SUITE_P(All, FoldConformanceTest, testing::ValuesIn(AllDevices()),
                         [](const auto& test) { return test.param.name; });

// Around the ends of vectors, cache lines, tiles, and where stores past the caches begin.
std::vector<int64_t> Sizes() {
  std::vector<int64_t> sizes;
  for (int64_t size = 0; size <= 33; ++size) sizes.push_back(size);
  for (const int64_t size : {48, 64, 100, 128, 256, 1024, 2048, 2064, 4096, 16384, 32768, 65536}) {
    sizes.insert(sizes.end(), {size - 1, size, size + 1});
  }
  return sizes;
}

TEST_P(FoldConformanceTest, EverySizeAndAlignmentOfTheSourceEqualsTheDefinition) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const Bytes source = RandomElements(dtype, 65537, 1);
    const Bytes current = RandomElements(Dtype::kFloat32, 65537, 2);
    for (const int64_t count : Sizes()) {
      for (int64_t misalignment = 0; misalignment < 8; ++misalignment) {
        if (count > 5000 && misalignment != count % 8) continue;
        for (const Kind kind : kAllKinds) {
          const std::vector<Target> targets = {{kind, 0.1f}};
          const Folded folded = folder_.Fold(dtype, source, count, current, targets, misalignment);
          ASSERT_EQ(Misses(folded, dtype, source, count, current, targets), "")
              << "kind " << static_cast<int>(kind) << ", misalignment " << misalignment;
          ASSERT_EQ(folded.non_finite, std::nullopt);
        }
      }
    }
  }
}

TEST_P(FoldConformanceTest, EveryAlignmentOfTheTargetEqualsTheDefinition) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const Bytes source = RandomElements(dtype, 16500, 3);
    const Bytes current = RandomElements(Dtype::kFloat32, 16500, 4);
    for (const int64_t count : {5, 40, 2047, 2048, 16384, 16500}) {
      for (int64_t offset = 0; offset < 33; ++offset) {
        for (const Kind kind : kAllKinds) {
          const std::vector<Target> targets = {{kind, 0.25f, offset}};
          const Folded folded = folder_.Fold(dtype, source, count, current, targets, offset % 3);
          ASSERT_EQ(Misses(folded, dtype, source, count, current, targets), "")
              << "kind " << static_cast<int>(kind) << ", offset " << offset;
        }
      }
    }
  }
}

TEST_P(FoldConformanceTest, ManyTargetsAtOnceEqualTheDefinition) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const Bytes source = RandomElements(dtype, 70000, 5);
    const Bytes current = RandomElements(Dtype::kFloat32, 70000, 6);
    const std::vector<Target> targets = {
        {Kind::kAverage, 1e-4, 3}, {Kind::kCopy, 1, 1},   {Kind::kAverageFloat64, 1e-4, 3},
        {Kind::kAverage, 0.5, 0},  {Kind::kAssign, 1, 3}, {Kind::kAssignFloat64, 1, 5},
        {Kind::kAverage, 0.9, 5},  {Kind::kAssign, 1, 0}, {Kind::kAverageFloat64, 0.9, 0}};
    for (const int64_t count : {1, 15, 1000, 2050, 16384, 70000}) {
      const Folded folded = folder_.Fold(dtype, source, count, current, targets, 1);
      ASSERT_EQ(Misses(folded, dtype, source, count, current, targets), "");
    }
  }
}

// newest + sum(weight - newest) / n in float64, from the oldest on, and rounded once.
TEST_P(FoldConformanceTest, AMeanEqualsTheDefinition) {
  for (const Dtype dtype : kFloatDtypes) {
    for (const Kind kind : {Kind::kMean, Kind::kMeanFloat64}) {
      for (const int earlier_count : {1, 2, kMaxEarlierWeights}) {
        for (const int64_t count : {1, 5, 16, 33, 2050, 16389}) {
          SCOPED_TRACE(testing::Message() << DtypeName(dtype) << ", kind " << static_cast<int>(kind)
                                          << ", " << earlier_count << " weights of " << count);
          const int64_t size = StoredSize(kind, dtype);
          const int64_t offset = count % 3;
          Bytes source = RandomElements(dtype, count, 40);
          std::vector<Bytes> earlier;
          for (int i = 0; i < earlier_count; ++i) {
            const Bytes weights = RandomElements(Dtype::kFloat32, count, 41 + i);
            earlier.push_back(FirstAverages(kind, weights, count));
          }
          const Folded folded = folder_.FoldMean(kind, dtype, source, count, earlier, offset);
          ASSERT_EQ(folded.non_finite, std::nullopt);
          const Bytes& next = folded.next[0];
          ASSERT_EQ(GuardMisses(next, offset * size, (offset + count) * size), "");
          for (int64_t i = 0; i < count; ++i) {
            const std::byte* const element = source.data() + i * DtypeSize(dtype);
            const double newest =
                IsFloat64(kind) ? DoubleOf(dtype, element) : ValueOf(dtype, element);
            double differences = 0;
            for (const Bytes& weights : earlier) {
              differences += AverageAt(kind, weights.data() + i * size) - newest;
            }
            double expected = newest + differences / (earlier_count + 1);
            if (!IsFloat64(kind)) expected = static_cast<float>(expected);
            const double got = AverageAt(kind, next.data() + (offset + i) * size);
            ASSERT_TRUE(IsSame(expected, got)) << i << ": expected " << expected << ", got " << got;
          }
          const Bytes infinity = NonFiniteElements(dtype)[0];
          std::copy(infinity.begin(), infinity.end(), source.end() - std::ssize(infinity));
          EXPECT_EQ(folder_.FoldMean(kind, dtype, source, count, earlier, offset).non_finite,
                    count - 1);
        }
      }
    }
  }
}

TEST_P(FoldConformanceTest, EveryWeightEqualsTheDefinition) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const Bytes source = RandomElements(dtype, 20000, 7);
    const Bytes current = RandomElements(Dtype::kFloat32, 20000, 8);
    for (const double weight : {0.0, 1e-300, 1e-45, 1e-40, 1e-30, 0x1p-25, 0x1p-24, 1e-6, 1 / 3.0,
                                0.5, 0.9999, 0x1.fffffep-1, 1 - 0x1p-53, 1.0}) {
      const std::vector<Target> targets = {{Kind::kAverage, weight},
                                           {Kind::kAverageFloat64, weight}};
      const Folded folded = folder_.Fold(dtype, source, 20000, current, targets);
      ASSERT_EQ(Misses(folded, dtype, source, 20000, current, targets), "");
    }
  }
}

TEST_P(FoldConformanceTest, InPlaceEqualsTheDefinition) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const Bytes source = RandomElements(dtype, 70000, 30);
    const Bytes current = RandomElements(Dtype::kFloat32, 70000, 31);
    for (const Kind kind : {Kind::kAverage, Kind::kAverageFloat64}) {
      for (const int64_t count : Sizes()) {
        for (const int64_t offset : {0, 1, 16}) {
          const std::vector<Target> targets = {{kind, 0.1, offset}};
          const Folded folded =
              folder_.Fold(dtype, source, count, current, targets, count % 8, {}, true);
          ASSERT_EQ(Misses(folded, dtype, source, count, current, targets), "")
              << "kind " << static_cast<int>(kind) << ", offset " << offset;
        }
      }
    }
  }
}

// Every pair of an average and a pushed value of a kind of its own.
TEST_P(FoldConformanceTest, SpecialAveragesEqualTheDefinition) {
  const float specials[] = {0.0f,
                            -0.0f,
                            0x1p-149f,  // The least.
                            -0x1.fffffcp-127f,
                            0x1p-126f,
                            1.0f,
                            -0x1.fffffep0f,
                            0x1.fffffep127f,  // The largest.
                            -0x1.fffffep127f,
                            HUGE_VALF,
                            -HUGE_VALF,
                            NAN};
  Bytes current;
  Bytes float_source;
  Bytes double_source;
  const auto append = [](Bytes& bytes, const Bytes& value) {
    bytes.insert(bytes.end(), value.begin(), value.end());
  };
  for (const float ema : specials) {
    for (const float param : specials) {
      for (int repeats = 0; repeats < 20; ++repeats) {  // Each with another float64.
        append(current, BytesOf(ema));
        append(float_source, BytesOf(param));
        // Next to it, or half-way to the next float32; beyond the largest that is infinite.
        const double step = std::ldexp(static_cast<double>(param), repeats < 10 ? -25 : -53);
        append(double_source, BytesOf(static_cast<double>(param) + (repeats % 3 - 1) * step));
      }
    }
  }
  const int64_t count = std::ssize(current) / int64_t{sizeof(float)};
  for (const double weight : {0.0, 1e-6, 0.5, 1.0}) {
    std::vector<Target> targets;
    for (const Kind kind : kAllKinds) targets.push_back({kind, weight});
    ASSERT_EQ(Misses(folder_.Fold(Dtype::kFloat32, float_source, count, current, targets),
                     Dtype::kFloat32, float_source, count, current, targets),
              "");
    ASSERT_EQ(Misses(folder_.Fold(Dtype::kFloat64, double_source, count, current, targets),
                     Dtype::kFloat64, double_source, count, current, targets),
              "");
  }
}

TEST_P(FoldConformanceTest, ResultsDoNotDependOnHowTheRangeIsCut) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const int64_t count = 60000;
    const Bytes source = RandomElements(dtype, count, 9);
    const Bytes current = RandomElements(Dtype::kFloat32, count, 10);
    const std::vector<Target> targets = {
        {Kind::kAverage, 0.01, 2}, {Kind::kCopy, 1, 0}, {Kind::kAverageFloat64, 0.01, 1}};
    const Folded whole = folder_.Fold(dtype, source, count, current, targets);
    std::mt19937_64 random(11);
    for (int round = 0; round < 20; ++round) {
      std::vector<int64_t> cuts;
      const int64_t largest = int64_t{1} << (4 + round % 12);
      for (int64_t cut = 0; (cut += static_cast<int64_t>(random() % largest)) < count;) {
        cuts.push_back(cut);
      }
      const Folded pieces = folder_.Fold(dtype, source, count, current, targets, round % 8, cuts);
      ASSERT_EQ(pieces.next, whole.next) << cuts.size() << " cuts";
    }
  }
}

TEST_P(FoldConformanceTest, ErrorAgainstFloat64IsThatOfTwoRoundings) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const int64_t count = 20000;
    std::mt19937_64 random(12);
    Bytes source(count * DtypeSize(dtype));
    Bytes current(count * sizeof(float));
    std::uniform_real_distribution<double> weights(-2, 2);
    for (int64_t i = 0; i < count; ++i) {
      const float ema = static_cast<float>(weights(random));
      std::memcpy(current.data() + i * sizeof(float), &ema, sizeof(ema));
      do {
        PutRandomElement(dtype, random, source.data() + i * DtypeSize(dtype));
      } while (std::abs(ValueOf(dtype, source.data() + i * DtypeSize(dtype))) > 1e30f);
    }
    for (const float weight : {1e-6f, 1e-3f, 0.1f, 0.9f}) {
      const Folded folded = folder_.Fold(dtype, source, count, current, {{Kind::kAverage, weight}});
      for (int64_t i = 0; i < count; ++i) {
        const double ema = Get<float>(current.data() + i * sizeof(float));
        const double param = ValueOf(dtype, source.data() + i * DtypeSize(dtype));
        const double exact = ema + double{weight} * (param - ema);
        const double bound =
            1.0001 * 0x1p-24 * (std::abs(weight * (param - ema)) + std::abs(exact));
        ASSERT_NEAR(Get<float>(folded.next[0].data() + i * sizeof(float)), exact, bound + 0x1p-149)
            << "element " << i << ", weight " << weight;
      }
    }
  }
}

TEST_P(FoldConformanceTest, AnAverageOfItsOwnValueStaysBitForBit) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const int64_t count = 10000;
    Bytes source = RandomElements(dtype, count, 13);
    Bytes current(count * sizeof(float));
    for (int64_t i = 0; i < count; ++i) {
      std::byte* element = source.data() + i * DtypeSize(dtype);
      // Zeros become +0: -0 - -0 is +0.
      if (ValueOf(dtype, element) == 0) std::memset(element, 0, DtypeSize(dtype));
      const float value = ValueOf(dtype, element);
      std::memcpy(current.data() + i * sizeof(float), &value, sizeof(value));
    }
    for (const float weight : {1e-45f, 1e-4f, 0.3f, 1.0f}) {
      Folded folded = folder_.Fold(dtype, source, count, current, {{Kind::kAverage, weight}});
      folded.next[0].resize(current.size());
      ASSERT_EQ(folded.next[0], current) << weight;
    }
  }
}

TEST_P(FoldConformanceTest, AFloat64AverageOfItsOwnValueStaysBitForBit) {
  constexpr int64_t kCount = 10000;
  constexpr int64_t kSizeBytes = kCount * int64_t{sizeof(double)};
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Block> block, device_->Allocate(2 * kSizeBytes));
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DeviceStream> stream, device_->NewStream());
  std::byte* const next = block->data() + kSizeBytes;
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    Bytes source = RandomElements(dtype, kCount, 28);
    for (int64_t i = 0; i < kCount; ++i) {
      std::byte* element = source.data() + i * DtypeSize(dtype);
      if (DoubleOf(dtype, element) == 0) std::memset(element, 0, DtypeSize(dtype));  // As above.
    }
    const FoldTarget first = {Kind::kAssignFloat64, 1, nullptr, block->data()};
    ASSERT_THAT(stream->Fold({dtype, source.data(), kCount, {&first, 1}}), IsOk());
    ASSERT_THAT(stream->Synchronize(), IsOk());
    for (const double weight : {1e-300, 1e-9, 1e-4, 0.3, 1.0}) {
      const FoldTarget update = {Kind::kAverageFloat64, weight, block->data(), next};
      ASSERT_THAT(stream->Fold({dtype, source.data(), kCount, {&update, 1}}), IsOk());
      ASSERT_THAT(stream->Synchronize(), IsOkAndHolds(testing::IsEmpty()));
      EMA_ASSERT_OK_AND_ASSIGN(const auto before,
                               DeviceBytes(*device_, *stream, block->data(), kSizeBytes));
      EMA_ASSERT_OK_AND_ASSIGN(const auto after, DeviceBytes(*device_, *stream, next, kSizeBytes));
      ASSERT_EQ(std::memcmp(before.get(), after.get(), kSizeBytes), 0) << weight;
    }
  }
}

TEST_P(FoldConformanceTest, CopyKeepsBitsAndAssignKeepsValuesOfEveryPattern) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    // All patterns of two bytes; of larger elements those at the ends of the range, with NaNs.
    const int64_t count = 65536;
    const int64_t size = DtypeSize(dtype);
    std::mt19937_64 random(14);
    Bytes source(count * size);
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t high = static_cast<uint64_t>(i) << (8 * size - 16);
      const uint64_t bits = high | (size == 2 ? 0 : random() >> (64 - (8 * size - 16)));
      std::memcpy(source.data() + i * size, &bits, size);
    }
    const std::vector<Target> targets = {
        {Kind::kAssign, 1, 1}, {Kind::kCopy, 1, 3}, {Kind::kAssignFloat64, 1, 0}};
    const Folded folded = folder_.Fold(dtype, source, count, {}, targets);
    EXPECT_EQ(Misses(folded, dtype, source, count, {}, targets), "");
    EXPECT_TRUE(folded.non_finite.has_value());
  }
}

// ---- Values that are not finite ----------------------------------------------------------------

TEST_P(FoldConformanceTest, AValueThatIsNotFiniteIsReportedAtEveryPosition) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const int64_t size = DtypeSize(dtype);
    const Bytes finite = RandomElements(dtype, 5000, 15);
    const Bytes current = RandomElements(Dtype::kFloat32, 5000, 16);
    const std::vector<std::vector<Target>> target_lists = {{},
                                                           {{Kind::kAverage, 0.1f, 1}},
                                                           {{Kind::kAssign}},
                                                           {{Kind::kCopy}},
                                                           {{Kind::kAverageFloat64, 0.1, 1}},
                                                           {{Kind::kAssignFloat64}},
                                                           {{Kind::kCopy}, {Kind::kAverage}}};
    for (const int64_t count : {1, 17, 70, 5000}) {
      for (const std::vector<Target>& targets : target_lists) {
        for (int64_t index = 0; index<count; index += count> 100 ? 97 : 1) {
          Bytes source = finite;
          const std::vector<Bytes> bad = NonFiniteElements(dtype);
          std::memcpy(source.data() + index * size, bad[index % bad.size()].data(), size);
          const Folded folded = folder_.Fold(dtype, source, count, current, targets, index % 8);
          const bool is_reported = IsReported(dtype, bad[index % bad.size()], targets);
          ASSERT_EQ(folded.non_finite, is_reported ? std::optional(index) : std::nullopt);
          ASSERT_EQ(Misses(folded, dtype, source, count, current, targets), "");
        }
      }
    }
  }
}

TEST_P(FoldConformanceTest, EachKindOfValueThatIsNotFiniteIsReported) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const int64_t size = DtypeSize(dtype);
    for (const Bytes& bad : NonFiniteElements(dtype)) {
      Bytes source = RandomElements(dtype, 40, 17);
      std::memcpy(source.data() + 21 * size, bad.data(), size);
      for (const Kind kind : {Kind::kAssign, Kind::kCopy, Kind::kAssignFloat64}) {
        const bool is_reported = IsReported(dtype, bad, {{kind}});
        EXPECT_EQ(folder_.Fold(dtype, source, 40, source, {{kind}}).non_finite,
                  is_reported ? std::optional<int64_t>(21) : std::nullopt);
      }
    }
  }
}

TEST_P(FoldConformanceTest, OfSeveralValuesThatAreNotFiniteTheFirstIsReported) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const int64_t size = DtypeSize(dtype);
    const int64_t count = 40000;
    const Bytes bad = NonFiniteElements(dtype).front();
    for (const std::vector<int64_t>& indices : std::vector<std::vector<int64_t>>{
             {0, 1}, {14, 15, 16}, {16383, 16384}, {16384, 39999}, {20000, 20003, 39999}}) {
      Bytes source = RandomElements(dtype, count, 18);
      for (const int64_t index : indices) {
        std::memcpy(source.data() + index * size, bad.data(), size);
      }
      EXPECT_EQ(folder_.Fold(dtype, source, count, {}, {{Kind::kAssign, 1, 7}}).non_finite,
                indices.front());
      EXPECT_EQ(folder_.Fold(dtype, source, count, {}, {}).non_finite, indices.front());
    }
  }
}

TEST_P(FoldConformanceTest, TheLargestFiniteValuesAreNotReported) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    Bytes largest;
    switch (dtype) {
      case Dtype::kFloat16:
        largest = BytesOf<uint16_t>(0xfbff);
        break;
      case Dtype::kBFloat16:
        largest = BytesOf<uint16_t>(0xff7f);
        break;
      case Dtype::kFloat64:  // The largest double that float32 rounds to a finite value.
        largest = BytesOf(-0x1.fffffefffffffp127);
        break;
      default:
        largest = BytesOf<uint32_t>(0xff7fffff);
        break;
    }
    Bytes source;
    for (int i = 0; i < 100; ++i) source.insert(source.end(), largest.begin(), largest.end());
    const Folded folded = folder_.Fold(dtype, source, 100, {}, {{Kind::kAssign}});
    EXPECT_EQ(folded.non_finite, std::nullopt);
  }
  // Without float32 averages, the largest double.
  Bytes source;
  for (int i = 0; i < 100; ++i) {
    const Bytes largest = BytesOf(-std::numeric_limits<double>::max());
    source.insert(source.end(), largest.begin(), largest.end());
  }
  for (const std::vector<Target>& targets :
       {std::vector<Target>(), {{Kind::kCopy}}, {{Kind::kAssignFloat64}, {Kind::kCopy}}}) {
    const Folded folded = folder_.Fold(Dtype::kFloat64, source, 100, {}, targets);
    EXPECT_EQ(folded.non_finite, std::nullopt);
    EXPECT_EQ(Misses(folded, Dtype::kFloat64, source, 100, {}, targets), "");
  }
}

// An average may overflow though the pushed value is finite: that is the value of the definition,
// and the check is of what was pushed.
TEST_P(FoldConformanceTest, AnOverflowingAverageIsNotReported) {
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const Bytes source = RandomElements(dtype, 64, 19);
    Bytes current;
    for (int i = 0; i < 64; ++i) {
      const Bytes value = BytesOf(i % 2 == 0 ? 3.4e38f : -3.4e38f);
      current.insert(current.end(), value.begin(), value.end());
    }
    const std::vector<Target> targets = {{Kind::kAverage, 2.5}, {Kind::kAverageFloat64, 2.5}};
    const Folded folded = folder_.Fold(dtype, source, 64, current, targets);
    EXPECT_EQ(Misses(folded, dtype, source, 64, current, targets), "");
    EXPECT_EQ(folded.non_finite, std::nullopt);
  }
}

// ---- The scalar reference and the choice of a device --------------------------------------------

TEST(FoldScalarTest, EqualsTheDefinition) {
  for (const Dtype dtype : kFloatDtypes) {
    const int64_t count = 3000;
    Bytes source = RandomElements(dtype, count, 26);
    const Bytes bad = NonFiniteElements(dtype).back();
    std::copy(bad.begin(), bad.end(), source.begin() + 2000 * DtypeSize(dtype));
    const Bytes current = RandomElements(Dtype::kFloat32, count, 27);
    std::vector<Target> targets;
    for (const Kind kind : kAllKinds) targets.push_back({kind, 0.3});
    Folded folded;
    std::vector<Bytes> averages;
    std::vector<FoldTarget> fold_targets;
    for (const Target& target : targets) {
      Bytes& next = folded.next.emplace_back(
          (count + kGuardElements) * StoredSize(target.kind, dtype), kGuard);
      averages.push_back(FirstAverages(target.kind, current, count));
      fold_targets.push_back(
          {target.kind, target.update_weight, averages.back().data(), next.data()});
    }
    EXPECT_EQ(FoldScalar({dtype, source.data(), count, fold_targets}), 2000);
    EXPECT_EQ(Misses(folded, dtype, source, count, current, targets), "");
  }
}

}  // namespace
}  // namespace ema
