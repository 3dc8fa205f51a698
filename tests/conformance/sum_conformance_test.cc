// SPDX-License-Identifier: Apache-2.0
//
// Sums of squares on every device, beside the same in long double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "server/device/device.h"
#include "server/kernel/cast.h"
#include "tests/conformance/device_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

// Elements of a few sizes, each of which shows in the sum.
Bytes NormalElements(Dtype dtype, int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(count);
  for (double& value : values) value = normal(random);
  Bytes elements(count * DtypeSize(dtype));
  const auto* const from = reinterpret_cast<const std::byte*>(values.data());
  if (dtype == Dtype::kFloat64) {
    std::copy_n(from, elements.size(), elements.begin());
  } else if (dtype == Dtype::kFloat32) {
    CastScalar(Dtype::kFloat64, from, dtype, elements.data(), count);
  } else {
    const Bytes floats = NormalElements(Dtype::kFloat32, count, seed);
    CastScalar(Dtype::kFloat32, floats.data(), dtype, elements.data(), count);
  }
  return elements;
}

// What the sums must be, and how near they must come: additions in any order lose at most half a
// unit each, and so do the three operations before each.
class Expectation {
 public:
  void Add(const Bytes& average, Dtype raw_dtype, const Bytes& raw, int64_t count,
           Dtype average_dtype = Dtype::kFloat32) {
    count_ += count;
    for (int64_t i = 0; i < count; ++i) {
      const long double value =
          DoubleOf(average_dtype, average.data() + i * DtypeSize(average_dtype));
      average_ += value * value;
      if (raw.empty()) continue;
      const long double difference =
          DoubleOf(raw_dtype, raw.data() + i * DtypeSize(raw_dtype)) - value;
      difference_ += difference * difference;
    }
  }
  void Check(const absl::StatusOr<SquareSums>& sums) const {
    ASSERT_THAT(sums, IsOk());
    const double share = (count_ + 8) * 0x1p-53;
    EXPECT_NEAR(sums->average, static_cast<double>(average_), share * average_);
    EXPECT_NEAR(sums->difference, static_cast<double>(difference_), share * difference_);
  }

 private:
  long double average_ = 0;
  long double difference_ = 0;
  int64_t count_ = 0;
};

class SumConformanceTest : public DeviceTest {
 protected:
  // Where `bytes` are in device memory, so many behind the start of a block.
  const std::byte* Put(const Bytes& bytes, int64_t offset_bytes = 0) {
    const int64_t size_bytes = static_cast<int64_t>(bytes.size());
    blocks_.push_back(device_->Allocate(offset_bytes + size_bytes).value());
    std::byte* const data = blocks_.back()->data() + offset_bytes;
    const std::unique_ptr<DeviceStream> stream = device_->NewStream().value();
    EXPECT_THAT(stream->CopyFromHost(data, bytes.data(), size_bytes), IsOk());
    EXPECT_THAT(stream->Synchronize(), IsOk());
    return data;
  }

  absl::StatusOr<SquareSums> Sum(const SumRun& run) { return device_->SumSquares({&run, 1}); }

  std::vector<std::shared_ptr<Block>> blocks_;
};

INSTANTIATE_TEST_SUITE_P(All, SumConformanceTest, testing::ValuesIn(AllDevices()),
                         [](const auto& test) { return test.param.name; });

TEST_P(SumConformanceTest, SumsAreThoseOfEveryElement) {
  for (const Dtype dtype : kFloatDtypes) {
    for (const int64_t count :
         {0,   1,   2,   3,    7,    8,    15,   16,   17,   31,   33,   63,     65,
          255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 6145, 100'003}) {
      SCOPED_TRACE(absl::StrCat(std::string(DtypeName(dtype)), ", ", count, " elements"));
      const Bytes average = NormalElements(Dtype::kFloat32, count, 41);
      const Bytes raw = NormalElements(dtype, count, 42);
      const int64_t offset = count % 4;
      const SumRun run = {Put(average, offset * sizeof(float)), count,
                          Put(raw, offset * DtypeSize(dtype)), dtype};
      Expectation both;
      both.Add(average, dtype, raw, count);
      both.Check(Sum(run));
      Expectation alone;
      alone.Add(average, dtype, {}, count);
      alone.Check(Sum({run.average, count}));

      const Bytes wide = NormalElements(Dtype::kFloat64, count, 41);
      SumRun wide_run = run;
      wide_run.average = Put(wide, offset * sizeof(double));
      wide_run.average_dtype = Dtype::kFloat64;
      Expectation wide_both;
      wide_both.Add(wide, dtype, raw, count, Dtype::kFloat64);
      wide_both.Check(Sum(wide_run));
      wide_run.raw = nullptr;
      Expectation wide_alone;
      wide_alone.Add(wide, dtype, {}, count, Dtype::kFloat64);
      wide_alone.Check(Sum(wide_run));
    }
  }
}

TEST_P(SumConformanceTest, ValuesOfAnySizeAreSummed) {
  constexpr int64_t kCount = 10'000;
  const Bytes average = RandomElements(Dtype::kFloat32, kCount, 43);
  const std::byte* const device_average = Put(average);
  for (const Dtype dtype : kFloatDtypes) {
    SCOPED_TRACE(DtypeName(dtype));
    const Bytes raw = RandomElements(dtype, kCount, 44);
    Expectation expected;
    expected.Add(average, dtype, raw, kCount);
    expected.Check(Sum({device_average, kCount, Put(raw), dtype}));
  }
}

// More runs than one table of the accelerator's takes, most of them shorter than a vector.
TEST_P(SumConformanceTest, ManyRunsAreOneSum) {
  constexpr int64_t kRuns = 5000;
  constexpr int64_t kMost = 6000;
  const Bytes average = NormalElements(Dtype::kFloat32, kMost, 45);
  const std::byte* const device_average = Put(average);
  std::vector<Bytes> raws;
  std::vector<const std::byte*> device_raws;
  for (const Dtype dtype : kFloatDtypes) {
    raws.push_back(NormalElements(dtype, kMost, 46));
    device_raws.push_back(Put(raws.back()));
  }
  std::mt19937_64 random(47);
  std::vector<SumRun> runs;
  Expectation expected;
  for (int64_t r = 0; r < kRuns; ++r) {
    const int64_t count = static_cast<int64_t>(random() % (r % 100 == 0 ? kMost : 20));
    const size_t d = random() % std::size(kFloatDtypes);
    const bool has_raw = random() % 4 != 0;
    runs.push_back({device_average, count, has_raw ? device_raws[d] : nullptr, kFloatDtypes[d]});
    expected.Add(average, kFloatDtypes[d], has_raw ? raws[d] : Bytes(), count);
  }
  expected.Check(device_->SumSquares(runs));
}

TEST_P(SumConformanceTest, NothingSumsToZero) {
  const SumRun none = {Put(Bytes(64)), 0};
  for (const size_t run_count : {0, 1, 3}) {
    const std::vector<SumRun> runs(run_count, none);
    EMA_ASSERT_OK_AND_ASSIGN(const SquareSums sums, device_->SumSquares(runs));
    EXPECT_EQ(sums.average, 0);
    EXPECT_EQ(sums.difference, 0);
  }
}

TEST_P(SumConformanceTest, WhatIsNotFiniteShowsInTheSumsThatItIsIn) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t count : {1, 5, 33, 3000}) {
    const Bytes finite = NormalElements(Dtype::kFloat32, count, 48);
    const auto with = [&](float value, int64_t index) {
      Bytes bytes = finite;
      std::memcpy(bytes.data() + index * sizeof(float), &value, sizeof(value));
      return bytes;
    };
    for (const int64_t index : {int64_t{0}, count / 2, count - 1}) {
      EMA_ASSERT_OK_AND_ASSIGN(const SquareSums raw_is_bad,
                               Sum({Put(finite), count, Put(with(kNan, index))}));
      EXPECT_TRUE(std::isfinite(raw_is_bad.average));
      EXPECT_TRUE(std::isnan(raw_is_bad.difference));
      EMA_ASSERT_OK_AND_ASSIGN(const SquareSums average_is_bad,
                               Sum({Put(with(-kInfinity, index)), count, Put(finite)}));
      EXPECT_EQ(average_is_bad.average, kInfinity);
      EXPECT_EQ(average_is_bad.difference, kInfinity);
      const std::byte* const infinite = Put(with(kInfinity, index));
      EMA_ASSERT_OK_AND_ASSIGN(const SquareSums both_are_bad, Sum({infinite, count, infinite}));
      EXPECT_TRUE(std::isnan(both_are_bad.difference));
      EMA_ASSERT_OK_AND_ASSIGN(const SquareSums alone, Sum({Put(with(kNan, index)), count}));
      EXPECT_TRUE(std::isnan(alone.average));
      EXPECT_EQ(alone.difference, 0);
    }
  }
}

TEST_P(SumConformanceTest, TheSameRunsGiveTheSameBits) {
  constexpr int64_t kCount = 100'003;
  const std::byte* const average = Put(NormalElements(Dtype::kFloat32, kCount, 49));
  const std::byte* const raw = Put(NormalElements(Dtype::kBFloat16, kCount, 50));
  const std::vector<SumRun> runs = {{average, kCount, raw, Dtype::kBFloat16},
                                    {average, 12'345},
                                    {average, 999, average, Dtype::kFloat32}};
  EMA_ASSERT_OK_AND_ASSIGN(const SquareSums first, device_->SumSquares(runs));
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        const absl::StatusOr<SquareSums> again = device_->SumSquares(runs);
        ASSERT_THAT(again, IsOk());
        EXPECT_EQ(again->average, first.average);
        EXPECT_EQ(again->difference, first.difference);
      }
    });
  }
}

}  // namespace
}  // namespace ema
