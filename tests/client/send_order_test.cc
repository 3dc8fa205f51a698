// SPDX-License-Identifier: Apache-2.0
//
// The order in which a rank sends to the servers of a group.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/group/group_run.h"
#include "client/cpp/push/group_part.h"
#include "client/cpp/transport/interrupt.h"

namespace ema {
namespace {

using ::testing::ElementsAre;

TEST(FirstPartTest, RanksBeginWithDifferentServers) {
  const auto of_ranks = [](int64_t world_size, int64_t servers) {
    std::vector<int64_t> first;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      first.push_back(client_internal::FirstPart(rank, world_size, servers));
    }
    return first;
  };
  EXPECT_THAT(of_ranks(4, 8), ElementsAre(0, 2, 4, 6));
  EXPECT_THAT(of_ranks(4, 2), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(of_ranks(3, 4), ElementsAre(0, 1, 2));
  EXPECT_THAT(of_ranks(1, 8), ElementsAre(0));
}

TEST(SendSlotsTest, TheLowestPositionIsNext) {
  client_internal::SendSlots slots(1);
  client_internal::Interrupt interrupt;
  ASSERT_TRUE(slots.Acquire(0, SteadyTime::max(), &interrupt));
  EXPECT_FALSE(slots.Acquire(1, SteadyNow(), &interrupt));
  std::vector<int64_t> order;
  absl::Mutex mu;
  absl::BlockingCounter missing_waiters(3);
  std::vector<std::jthread> threads;
  for (const int64_t position : {5, 3, 4}) {
    threads.emplace_back([&, position] {
      // Acquire() calls it while it waits.
      const std::function<bool()> count_once = [&, is_counted = false]() mutable {
        if (!std::exchange(is_counted, true)) missing_waiters.DecrementCount();
        return false;
      };
      client_internal::Interrupt polled(&count_once);
      ASSERT_TRUE(slots.Acquire(position, SteadyTime::max(), &polled));
      {
        absl::MutexLock lock(&mu);
        order.push_back(position);
      }
      slots.Release();
    });
  }
  missing_waiters.Wait();
  slots.Release();
  threads.clear();
  EXPECT_THAT(order, ElementsAre(3, 4, 5));
  interrupt.Fire();
  ASSERT_TRUE(slots.Acquire(0, SteadyTime::max(), &interrupt));
  EXPECT_FALSE(slots.Acquire(1, SteadyTime::max(), &interrupt));
}

}  // namespace
}  // namespace ema
