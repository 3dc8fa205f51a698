// SPDX-License-Identifier: Apache-2.0
#include "server/device/block_pool.h"

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::HasSubstr;

// Counts the memory that is out, and refuses to give more than `capacity`.
struct FakeSystem {
  int64_t capacity = int64_t{1} << 40;
  std::atomic<int64_t> held_bytes = 0;
  std::atomic<int> allocation_count = 0;

  class Memory : public BlockPool::Memory {
   public:
    Memory(FakeSystem* system, int64_t size_bytes) : system_(system), bytes_(size_bytes) {
      system_->held_bytes += size_bytes;
      ++system_->allocation_count;
    }
    ~Memory() override { system_->held_bytes -= static_cast<int64_t>(bytes_.size()); }
    std::byte* data() override { return bytes_.data(); }

   private:
    FakeSystem* const system_;
    std::vector<std::byte> bytes_;
  };

  BlockPool::Allocator allocator() {
    return [this](int64_t size_bytes) -> absl::StatusOr<std::unique_ptr<BlockPool::Memory>> {
      if (held_bytes + size_bytes > capacity) {
        return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget, "full");
      }
      return std::make_unique<Memory>(this, size_bytes);
    };
  }
};

TEST(BlockPoolTest, AFreedBlockIsUsedAgain) {
  FakeSystem system;
  BlockPool pool(system.allocator(), 1000);
  EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<Block> block, pool.Allocate(100));
  const std::byte* data = block->data();
  EXPECT_EQ(block->size_bytes(), 100);
  EXPECT_EQ(pool.free_bytes(), 0);
  block.reset();
  EXPECT_EQ(pool.free_bytes(), 100);

  EMA_ASSERT_OK_AND_ASSIGN(block, pool.Allocate(100));
  EXPECT_EQ(block->data(), data);
  EXPECT_EQ(pool.free_bytes(), 0);
  EXPECT_EQ(system.allocation_count, 1);
}

TEST(BlockPoolTest, ABlockIsNotFreedWhileOneReferenceIsLeft) {
  FakeSystem system;
  BlockPool pool(system.allocator(), 0);
  EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<Block> block, pool.Allocate(100));
  BlockRef reader = block;
  block.reset();
  EXPECT_EQ(system.held_bytes, 100);
  reader.reset();
  EXPECT_EQ(system.held_bytes, 0);
}

TEST(BlockPoolTest, OnlyABlockOfTheVerySizeIsUsedAgain) {
  FakeSystem system;
  BlockPool pool(system.allocator(), 1000);
  ASSERT_THAT(pool.Allocate(100), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<Block> smaller, pool.Allocate(99));
  EXPECT_EQ(smaller->size_bytes(), 99);
  EXPECT_EQ(system.allocation_count, 2);
  EXPECT_EQ(pool.free_bytes(), 100);
}

TEST(BlockPoolTest, KeepsNoMoreThanItsLimit) {
  FakeSystem system;
  BlockPool pool(system.allocator(), 250);
  std::vector<std::shared_ptr<Block>> blocks(4);
  for (auto& block : blocks) {
    EMA_ASSERT_OK_AND_ASSIGN(block, pool.Allocate(100));
  }
  for (auto& block : blocks) {
    block.reset();
    EXPECT_LE(pool.free_bytes(), 250);
  }
  EXPECT_EQ(pool.free_bytes(), 200);
  EXPECT_EQ(system.held_bytes, 200);
}

TEST(BlockPoolTest, ABlockAboveTheLimitIsFreedAtOnceAndPushesNothingOut) {
  FakeSystem system;
  BlockPool pool(system.allocator(), 250);
  ASSERT_THAT(pool.Allocate(200), IsOk());
  ASSERT_THAT(pool.Allocate(251), IsOk());
  EXPECT_EQ(pool.free_bytes(), 200);
  EXPECT_EQ(system.held_bytes, 200);
}

TEST(BlockPoolTest, SizesOutOfUseMakeRoomForThoseInUse) {
  FakeSystem system;
  BlockPool pool(system.allocator(), 300);
  ASSERT_THAT(pool.Allocate(10), IsOk());
  ASSERT_THAT(pool.Allocate(290), IsOk());
  // The oldest goes first.
  ASSERT_THAT(pool.Allocate(5), IsOk());
  EXPECT_EQ(pool.free_bytes(), 295);
  ASSERT_THAT(pool.Allocate(100), IsOk());
  EXPECT_EQ(pool.free_bytes(), 105);
  EXPECT_EQ(system.held_bytes, 105);
}

TEST(BlockPoolTest, ALimitOfZeroKeepsNothing) {
  FakeSystem system;
  BlockPool pool(system.allocator(), 0);
  ASSERT_THAT(pool.Allocate(100), IsOk());
  EXPECT_EQ(pool.free_bytes(), 0);
  EXPECT_EQ(system.held_bytes, 0);
}

TEST(BlockPoolTest, TrimFreesWhatIsKept) {
  FakeSystem system;
  BlockPool pool(system.allocator(), 1000);
  EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<Block> used, pool.Allocate(100));
  ASSERT_THAT(pool.Allocate(200), IsOk());
  ASSERT_THAT(pool.Allocate(300), IsOk());
  EXPECT_EQ(pool.free_bytes(), 500);
  pool.Trim(0);
  EXPECT_EQ(pool.free_bytes(), 0);
  EXPECT_EQ(system.held_bytes, 100);
  used.reset();
  EXPECT_EQ(pool.free_bytes(), 100);
}

TEST(BlockPoolTest, TrimFreesWhatWasKeptLongestUntilAllIsSoMuch) {
  FakeSystem system;
  BlockPool pool(system.allocator(), 1000);
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Block> used, pool.Allocate(100));
  for (const int64_t size_bytes : {200, 300, 400}) ASSERT_THAT(pool.Allocate(size_bytes), IsOk());
  pool.Trim(1000);
  EXPECT_EQ(pool.free_bytes(), 900);
  pool.Trim(799);
  EXPECT_FALSE(pool.HasFree(200));
  EXPECT_FALSE(pool.HasFree(300));
  EXPECT_TRUE(pool.HasFree(400));
  pool.Trim(99);
  EXPECT_EQ(system.held_bytes, 100);
}

TEST(BlockPoolTest, KeptMemoryIsGivenUpWhenTheSystemHasNoMore) {
  FakeSystem system{.capacity = 300};
  BlockPool pool(system.allocator(), 300);
  ASSERT_THAT(pool.Allocate(200), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<Block> block, pool.Allocate(250));
  EXPECT_EQ(pool.free_bytes(), 0);
  EXPECT_EQ(system.held_bytes, 250);
}

TEST(BlockPoolTest, TheAllocatorsErrorIsGivenWhenThereIsReallyNoMore) {
  FakeSystem system{.capacity = 300};
  BlockPool pool(system.allocator(), 300);
  EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<Block> block, pool.Allocate(200));
  const absl::StatusOr<std::shared_ptr<Block>> refused = pool.Allocate(200);
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("full")));
  EXPECT_THAT(refused, ReasonIs(ErrorReason::kMemoryBudget));
  EXPECT_EQ(system.held_bytes, 200);
  block.reset();
  EXPECT_THAT(pool.Allocate(200), IsOk());
}

TEST(BlockPoolTest, ABlockMayOutliveThePool) {
  FakeSystem system;
  auto pool = std::make_unique<BlockPool>(system.allocator(), 1000);
  EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<Block> block, pool->Allocate(100));
  ASSERT_THAT(pool->Allocate(200), IsOk());
  EXPECT_EQ(system.held_bytes, 300);
  pool.reset();
  EXPECT_EQ(system.held_bytes, 100);
  block->data()[99] = std::byte{1};
  block.reset();
  EXPECT_EQ(system.held_bytes, 0);
}

TEST(BlockPoolTest, ManyThreadsNeverShareABlock) {
  FakeSystem system;
  BlockPool pool(system.allocator(), 8 * 64);
  std::atomic<int> shared_count = 0;
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&pool, &shared_count, thread] {
        for (int round = 0; round < 2000; ++round) {
          auto block = pool.Allocate(64 + round % 3);
          if (!block.ok()) {
            ++shared_count;
            return;
          }
          std::byte* data = (*block)->data();
          data[0] = static_cast<std::byte>(thread);
          if (round % 100 == 0) pool.Trim(0);
          if (data[0] != static_cast<std::byte>(thread)) ++shared_count;
        }
      });
    }
  }
  EXPECT_EQ(shared_count, 0);
  EXPECT_LE(pool.free_bytes(), 8 * 64);
  EXPECT_EQ(system.held_bytes, pool.free_bytes());
}

}  // namespace
}  // namespace ema
