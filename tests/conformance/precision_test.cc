// SPDX-License-Identifier: Apache-2.0
//
// What is left of an average after 10^5 updates: float32 and float64, against the exact one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/device/device.h"
#include "server/kernel/fold.h"
#include "tests/conformance/device_testing.h"

namespace ema {
namespace {

constexpr int64_t kCount = 64;
constexpr int kUpdates = 100'000;

struct PrecisionCase {
  std::string name;
  double decay;
  bool is_step;  // All weights go from 1 to 1.01 at once and stay. Else: each walks at random.

  friend void PrintTo(const PrecisionCase& test, std::ostream* out) { *out << test.name; }
};

class PrecisionTest : public testing::TestWithParam<PrecisionCase> {};

INSTANTIATE_TEST_SUITE_P(All, PrecisionTest,
                         testing::ValuesIn(std::vector<PrecisionCase>{
                             {"Walk4Nines", 0.9999, false},
                             {"Walk5Nines", 0.99999, false},
                             {"Walk6Nines", 0.999999, false},
                             {"Step4Nines", 0.9999, true},
                             {"Step5Nines", 0.99999, true},
                             {"Step6Nines", 0.999999, true}}),
                         [](const auto& test) { return test.param.name; });

TEST_P(PrecisionTest, Float64AveragesDoNotStall) {
  const auto& [name, decay, is_step] = GetParam();
  const double weight = 1 - decay;
  std::vector<float> params(kCount, 1.0f);
  std::vector<float> plain = params;
  std::vector<double> wide(kCount, 1.0);
  std::vector<long double> exact(kCount, 1.0L);
  if (is_step) std::fill(params.begin(), params.end(), 1.01f);

  const auto bytes = [](auto& values) { return reinterpret_cast<std::byte*>(values.data()); };
  const FoldTarget targets[] = {{Kind::kAverage, weight, bytes(plain), bytes(plain)},
                                {Kind::kAverageFloat64, weight, bytes(wide), bytes(wide)}};
  std::mt19937 random(29);
  std::uniform_real_distribution<float> steps(-1e-3f, 1e-3f);
  for (int update = 0; update < kUpdates; ++update) {
    for (int64_t i = 0; i < kCount; ++i) {
      if (!is_step) params[i] += steps(random);
      exact[i] += static_cast<long double>(weight) * (params[i] - exact[i]);
    }
    FoldOnCpu({Dtype::kFloat32, bytes(params), kCount, targets});
  }

  double plain_error = 0;
  double wide_error = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const auto error_of = [&](long double value) {
      return static_cast<double>(std::abs(value - exact[i]) / std::abs(exact[i]));
    };
    plain_error = std::max(plain_error, error_of(plain[i]));
    wide_error = std::max(wide_error, error_of(wide[i]));
  }
  RecordProperty("float32_relative_error", absl::StrCat(plain_error));
  RecordProperty("float64_relative_error", absl::StrCat(wide_error));
  std::cout << name << ": largest relative error after " << kUpdates << " updates: float32 "
            << plain_error << ", float64 " << wide_error << "\n";
  EXPECT_LT(wide_error, 1e-11);
  // Else this test shows nothing.
  EXPECT_GT(plain_error, decay < 0.99999 ? 1e-7 : 1e-5);
}

}  // namespace
}  // namespace ema
