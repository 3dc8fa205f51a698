// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/gather.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace ema::client_internal {
namespace {

// A dense box in some order of its dimensions, as a permuted tensor lies, with `gap` elements
// between the rows of its outermost dimension.
std::vector<int64_t> PermutedStrides(const std::vector<int64_t>& extents, std::mt19937& rng,
                                     int64_t gap) {
  std::vector<size_t> order(extents.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), rng);
  std::vector<int64_t> strides(extents.size());
  int64_t stride = 1;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i + 1 == order.size()) stride += gap;
    strides[order[i]] = stride;
    stride *= extents[order[i]];
  }
  return strides;
}

std::vector<std::byte> Expected(const StridedBox& box, int64_t begin, int64_t count) {
  std::vector<std::byte> bytes;
  for (int64_t element = begin; element < begin + count; ++element) {
    int64_t rest = element;
    int64_t place = 0;
    for (size_t i = box.extents.size(); i > 0; --i) {
      place += rest % box.extents[i - 1] * box.strides[i - 1];
      rest /= box.extents[i - 1];
    }
    const std::byte* from = box.first + place * box.element_bytes;
    bytes.insert(bytes.end(), from, from + box.element_bytes);
  }
  return bytes;
}

TEST(GatherTest, AnyRangeOfAnyOrderIsWhatItsIndicesSay) {
  std::mt19937 rng(7);
  const auto below = [&](int64_t end) {
    return std::uniform_int_distribution<int64_t>(0, end - 1)(rng);
  };
  std::vector<std::byte> memory(2 << 20);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(rng());
  for (int round = 0; round < 500; ++round) {
    std::vector<int64_t> extents(below(5));
    for (int64_t& extent : extents) extent = 1 + below(extents.size() < 3 ? 400 : 9);
    const std::vector<int64_t> strides = PermutedStrides(extents, rng, below(3));
    const StridedBox box = {.first = memory.data(),
                            .element_bytes = int64_t{1} << below(4),
                            .extents = extents,
                            .strides = strides};
    int64_t size = 1;
    for (const int64_t extent : extents) size *= extent;
    const int64_t begin = below(size + 1);
    const int64_t count = below(size - begin + 1);
    std::vector<std::byte> got(count * box.element_bytes + 1, std::byte{42});
    Gather(box, begin, count, got.data());
    EXPECT_EQ(got.back(), std::byte{42}) << "written behind the end, in round " << round;
    got.pop_back();
    ASSERT_EQ(got, Expected(box, begin, count)) << "round " << round;
  }
}

TEST(GatherTest, ElementsMayBeReadTwiceAndBackwards) {
  const float memory[] = {0, 1, 2, 3, 4, 5};
  const int64_t extents[] = {2, 3};
  const int64_t strides[] = {0, -2};
  float got[6];
  Gather({.first = reinterpret_cast<const std::byte*>(memory + 5),
          .element_bytes = sizeof(float),
          .extents = extents,
          .strides = strides},
         0, 6, reinterpret_cast<std::byte*>(got));
  const float expected[] = {5, 3, 1, 5, 3, 1};
  EXPECT_EQ(std::memcmp(got, expected, sizeof(got)), 0);
}

}  // namespace
}  // namespace ema::client_internal
