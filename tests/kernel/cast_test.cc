// SPDX-License-Identifier: Apache-2.0
#include "server/kernel/cast.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace ema {
namespace {

// The float of every 16-bit pattern.
std::vector<float> Widened(Dtype dtype) {
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> floats(halves.size());
  CastScalar(dtype, reinterpret_cast<const std::byte*>(halves.data()), Dtype::kFloat32,
             reinterpret_cast<std::byte*>(floats.data()), static_cast<int64_t>(halves.size()));
  return floats;
}

uint16_t Narrowed(Dtype dtype, float value) {
  return dtype == Dtype::kFloat16 ? Float16Bits(value) : BFloat16Bits(value);
}

// Every 16-bit pattern's float, those half way between two, and their neighbours.
std::vector<float> EdgeValues(Dtype dtype) {
  const std::vector<float> grid = Widened(dtype);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {0.0f,
                               -0.0f,
                               kInfinity,
                               -kInfinity,
                               65504.0f,
                               65519.99f,
                               65520.0f,
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::denorm_min()};
  for (size_t i = 0; i + 1 < grid.size(); ++i) {
    const float middle = static_cast<float>((double{grid[i]} + double{grid[i + 1]}) / 2);
    for (const float value : {grid[i], middle}) {
      values.push_back(value);
      values.push_back(std::nextafter(value, kInfinity));
      values.push_back(std::nextafter(value, -kInfinity));
    }
  }
  return values;
}

class CastTest : public testing::TestWithParam<Dtype> {};

TEST_P(CastTest, EveryNarrowValueComesBack) {
  const std::vector<float> floats = Widened(GetParam());
  const int quiet = GetParam() == Dtype::kFloat16 ? 0x0200 : 0x0040;
  for (size_t i = 0; i < floats.size(); ++i) {
    // NaN becomes quiet, and keeps the rest.
    const size_t expected = std::isnan(floats[i]) ? i | quiet : i;
    ASSERT_EQ(Narrowed(GetParam(), floats[i]), expected) << floats[i];
  }
}

TEST_P(CastTest, IsToNearestTiesToEven) {
  // The positive finite values, in order, with one more in the place of infinity.
  std::vector<float> grid = Widened(GetParam());
  const bool is_half = GetParam() == Dtype::kFloat16;
  const size_t infinity = is_half ? 0x7c00 : 0x7f80;
  std::vector<double> exact(grid.begin(), grid.begin() + infinity);
  exact.push_back(2 * exact[infinity - 1] - exact[infinity - 2]);
  std::mt19937 random(5);
  for (int round = 0; round < 200'000; ++round) {
    const size_t below = random() % infinity;
    const double share = round % 3 == 0 ? 0.5 : static_cast<double>(random()) / 0x1p32;
    const float value =
        static_cast<float>(exact[below] + share * (exact[below + 1] - exact[below]));
    if (!std::isfinite(value)) continue;
    const double to_lower = double{value} - exact[below];
    const double to_upper = exact[below + 1] - double{value};
    const size_t expected = to_lower < to_upper   ? below
                            : to_upper < to_lower ? below + 1
                                                  : below + below % 2;
    ASSERT_EQ(Narrowed(GetParam(), value), expected) << value;
    ASSERT_EQ(Narrowed(GetParam(), -value), expected | 0x8000) << -value;
  }
}

TEST_P(CastTest, SimdGivesTheBitsOfTheDefinition) {
  std::vector<float> values = EdgeValues(GetParam());
  std::mt19937 random(6);
  for (int i = 0; i < 100'003; ++i) {
    const uint32_t bits = random();
    std::memcpy(&values.emplace_back(), &bits, sizeof(bits));
  }
  const auto count = static_cast<int64_t>(values.size());
  // Neither side aligned.
  std::vector<std::byte> from(values.size() * 4 + 1);
  std::memcpy(from.data() + 1, values.data(), values.size() * 4);
  std::vector<std::byte> fast(values.size() * 2 + 1);
  std::vector<std::byte> exact(values.size() * 2 + 1);
  CastOnCpu(Dtype::kFloat32, from.data() + 1, GetParam(), fast.data() + 1, count);
  CastScalar(Dtype::kFloat32, from.data() + 1, GetParam(), exact.data() + 1, count);
  for (int64_t i = 0; i < count; ++i) {
    ASSERT_EQ(std::memcmp(fast.data() + 1 + i * 2, exact.data() + 1 + i * 2, 2), 0) << values[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CastTest, testing::Values(Dtype::kFloat16, Dtype::kBFloat16),
                         [](const auto& tested) { return std::string(DtypeName(tested.param)); });

TEST(CastOnCpuTest, TheFirstInfiniteElementIsFoundAtEveryPosition) {
  constexpr int64_t kCount = 1100;
  for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32}) {
    for (const int64_t position : {0, 1, 511, 512, 513, 1099}) {
      std::vector<float> values(kCount, static_cast<float>(-LargestValue(dtype)));
      values[position] = -std::numeric_limits<float>::infinity();
      if (position > 0) values[position - 1] = std::numeric_limits<float>::quiet_NaN();
      std::vector<std::byte> cast(kCount * DtypeSize(dtype));
      CastOnCpu(Dtype::kFloat32, reinterpret_cast<const std::byte*>(values.data()), dtype,
                cast.data(), kCount);
      EXPECT_EQ(FindInfinity(dtype, cast.data(), 0, kCount), position);
      EXPECT_EQ(FindInfinity(dtype, cast.data(), position + 1, kCount), kCount);
    }
  }
}

TEST(CastOnCpuTest, OtherFloatsGoByWayOfFloat32) {
  const std::vector<double> doubles(5000, 1.0 + 0x1p-30);
  std::vector<float> floats(5000);
  const auto* from = reinterpret_cast<const std::byte*>(doubles.data());
  CastOnCpu(Dtype::kFloat64, from, Dtype::kFloat32, reinterpret_cast<std::byte*>(floats.data()),
            5000);
  EXPECT_EQ(floats, std::vector<float>(5000, 1.0f));
  std::vector<uint16_t> halves(5000);
  CastOnCpu(Dtype::kFloat64, from, Dtype::kBFloat16, reinterpret_cast<std::byte*>(halves.data()),
            5000);
  EXPECT_EQ(halves, std::vector<uint16_t>(5000, 0x3f80));
  std::vector<uint16_t> other(5000);
  CastOnCpu(Dtype::kBFloat16, reinterpret_cast<const std::byte*>(halves.data()), Dtype::kFloat16,
            reinterpret_cast<std::byte*>(other.data()), 5000);
  EXPECT_EQ(other, std::vector<uint16_t>(5000, 0x3c00));
}

}  // namespace
}  // namespace ema
