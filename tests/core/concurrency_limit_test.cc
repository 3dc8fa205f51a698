// SPDX-License-Identifier: Apache-2.0
#include "server/core/concurrency_limit.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace ema {
namespace {

TEST(ConcurrencyLimitTest, APermitThatIsGivenBackCanBeAcquiredAgain) {
  const auto limit = std::make_shared<ConcurrencyLimit>(2);
  ConcurrencyLimit::Permit first = limit->Acquire();
  const ConcurrencyLimit::Permit second = limit->Acquire();
  EXPECT_NE(first, nullptr);
  EXPECT_NE(second, nullptr);
  EXPECT_EQ(limit->Acquire(), nullptr);
  EXPECT_EQ(limit->used_count(), 2);
  first.reset();
  EXPECT_EQ(limit->used_count(), 1);
  EXPECT_NE(limit->Acquire(), nullptr);
}

TEST(ConcurrencyLimitTest, APermitOutlivesWhoeverMadeTheLimit) {
  auto limit = std::make_shared<ConcurrencyLimit>(1);
  ConcurrencyLimit::Permit permit = limit->Acquire();
  limit.reset();
  permit.reset();
}

TEST(ConcurrencyLimitTest, NeverAreMorePermitsInUseThanThereAre) {
  constexpr int kLimit = 3;
  const auto limit = std::make_shared<ConcurrencyLimit>(kLimit);
  std::atomic<int> held = 0;
  std::atomic<int> most = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10'000; ++i) {
        const ConcurrencyLimit::Permit permit = limit->Acquire();
        if (permit == nullptr) continue;
        const int now = ++held;
        for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
        }
        --held;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most, kLimit);
  EXPECT_EQ(limit->used_count(), 0);
}

}  // namespace
}  // namespace ema
