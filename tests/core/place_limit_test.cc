// SPDX-License-Identifier: Apache-2.0
#include "server/core/place_limit.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace ema {
namespace {

TEST(PlaceLimitTest, APlaceThatIsGivenBackCanBeTakenAgain) {
  const auto limit = std::make_shared<PlaceLimit>(2);
  PlaceLimit::Place first = limit->Take();
  const PlaceLimit::Place second = limit->Take();
  EXPECT_NE(first, nullptr);
  EXPECT_NE(second, nullptr);
  EXPECT_EQ(limit->Take(), nullptr);
  EXPECT_EQ(limit->taken_count(), 2);
  first.reset();
  EXPECT_EQ(limit->taken_count(), 1);
  EXPECT_NE(limit->Take(), nullptr);
}

TEST(PlaceLimitTest, APlaceOutlivesWhoeverMadeTheLimit) {
  auto limit = std::make_shared<PlaceLimit>(1);
  PlaceLimit::Place place = limit->Take();
  limit.reset();
  place.reset();
}

TEST(PlaceLimitTest, NeverAreMoreTakenThanThereAre) {
  constexpr int kLimit = 3;
  const auto limit = std::make_shared<PlaceLimit>(kLimit);
  std::atomic<int> held = 0;
  std::atomic<int> most = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10'000; ++i) {
        const PlaceLimit::Place place = limit->Take();
        if (place == nullptr) continue;
        const int now = ++held;
        for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
        }
        --held;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most, kLimit);
  EXPECT_EQ(limit->taken_count(), 0);
}

}  // namespace
}  // namespace ema
