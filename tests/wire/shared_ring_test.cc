// SPDX-License-Identifier: Apache-2.0
#include "server/wire/shared_ring.h"

#include <sched.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "absl/time/clock.h"
#include "server/wire/shared_memory.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

constexpr absl::Duration kLong = absl::Seconds(20);
constexpr absl::Duration kShort = absl::Milliseconds(5);

// The two ends, each with a mapping of its own, as in two processes.
class SharedRingTest : public testing::Test {
 protected:
  void SetUp() override {
    EMA_ASSERT_OK_AND_ASSIGN(written_, SharedMemory::Create(SharedRing::kBytes));
    EMA_ASSERT_OK_AND_ASSIGN(read_, SharedMemory::Map(dup(written_->fd()), SharedRing::kBytes));
    writer_.emplace(written_->data(), /*may_move=*/true);
    reader_.emplace(read_->data(), /*may_move=*/true);
  }

  // Publishes a slot of `length` bytes of the value `kind`.
  bool Write(int32_t kind, int32_t length = 8) {
    const std::span<std::byte> slot = writer_->WaitForFree(kLong);
    if (slot.empty()) return false;
    std::memset(slot.data(), kind, length);
    writer_->Publish({.kind = kind, .length_bytes = length, .offset = int64_t{kind} << 40});
    return true;
  }

  std::unique_ptr<SharedMemory> written_;
  std::unique_ptr<SharedMemory> read_;
  std::optional<SharedRing> writer_;
  std::optional<SharedRing> reader_;
};

TEST_F(SharedRingTest, SlotsComeInOrderWithTheirLabels) {
  for (int32_t kind = 1; kind <= 3; ++kind) ASSERT_TRUE(Write(kind, kind * 1000));
  for (int32_t kind = 1; kind <= 3; ++kind) {
    const auto filled = reader_->WaitForFilled(kLong);
    ASSERT_TRUE(filled.has_value());
    EXPECT_EQ(filled->label.kind, kind);
    EXPECT_EQ(filled->label.offset, int64_t{kind} << 40);
    ASSERT_EQ(filled->bytes.size(), kind * 1000);
    EXPECT_EQ(filled->bytes.back(), std::byte(kind));
    reader_->Release();
  }
  EXPECT_FALSE(reader_->WaitForFilled(kShort).has_value());
  EXPECT_FALSE(reader_->is_broken());
}

TEST_F(SharedRingTest, AWriterWaitsForASlotToBeReleased) {
  for (uint32_t i = 0; i < SharedRing::kSlotCount; ++i) ASSERT_TRUE(Write(1));
  EXPECT_TRUE(writer_->WaitForFree(kShort).empty());
  std::thread reading([this] {
    EXPECT_TRUE(reader_->WaitForFilled(kLong).has_value());
    reader_->Release();
  });
  EXPECT_FALSE(writer_->WaitForFree(kLong).empty());
  reading.join();
}

TEST_F(SharedRingTest, NothingIsLostBetweenTwoThatSleepAndWake) {
  constexpr int kCount = 20'000;
  std::thread writing([this] {
    for (int i = 0; i < kCount; ++i) {
      const std::span<std::byte> slot = writer_->WaitForFree(kLong);
      ASSERT_FALSE(slot.empty());
      std::memcpy(slot.data(), &i, sizeof(i));
      writer_->Publish({.kind = i, .length_bytes = sizeof(i)});
      if (i % 1000 == 0) absl::SleepFor(absl::Milliseconds(1));  // So that the reader sleeps, too.
    }
  });
  for (int i = 0; i < kCount; ++i) {
    const auto filled = reader_->WaitForFilled(kLong);
    ASSERT_TRUE(filled.has_value());
    int value = -1;
    std::memcpy(&value, filled->bytes.data(), sizeof(value));
    ASSERT_EQ(value, i);
    ASSERT_EQ(filled->label.kind, i);
    reader_->Release();
    if (i % 1700 == 0) absl::SleepFor(absl::Milliseconds(1));
  }
  writing.join();
}

TEST_F(SharedRingTest, EndsThatMoveMayRunWhereTheyMightBefore) {
  const auto affinity = [] {
    cpu_set_t allowed;
    EXPECT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    return allowed;
  };
  // One processor for both, so that each is in the other's way; then the choice among all.
  const cpu_set_t all = affinity();
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  for (const cpu_set_t& allowed : {one, all}) {
    ASSERT_EQ(sched_setaffinity(0, sizeof(allowed), &allowed), 0);
    std::thread writing([&] {
      for (int i = 1; i <= 200; ++i) ASSERT_TRUE(Write(i));
      const cpu_set_t after = affinity();
      EXPECT_TRUE(CPU_EQUAL(&after, &allowed));
    });
    for (int i = 1; i <= 200; ++i) {
      const auto filled = reader_->WaitForFilled(kLong);
      ASSERT_TRUE(filled.has_value());
      ASSERT_EQ(filled->label.kind, i);
      reader_->Release();
    }
    writing.join();
    const cpu_set_t after = affinity();
    EXPECT_TRUE(CPU_EQUAL(&after, &allowed));
  }
}

TEST_F(SharedRingTest, NonsenseInTheMemoryIsNoticed) {
  // Counters that no right writer can have.
  std::memset(written_->data(), 0xee, 4096);
  EXPECT_FALSE(reader_->WaitForFilled(kShort).has_value());
  EXPECT_TRUE(reader_->is_broken());
  EXPECT_TRUE(writer_->WaitForFree(kShort).empty());
  EXPECT_TRUE(writer_->is_broken());
  EXPECT_FALSE(reader_->WaitForFilled(kShort).has_value());
}

TEST_F(SharedRingTest, ALengthThatIsNoneIsNoticed) {
  ASSERT_TRUE(Write(1));
  for (int32_t* word = reinterpret_cast<int32_t*>(written_->data() + 256);
       word < reinterpret_cast<int32_t*>(written_->data() + 4096); ++word) {
    *word = -5;
  }
  EXPECT_FALSE(reader_->WaitForFilled(kShort).has_value());
  EXPECT_TRUE(reader_->is_broken());
}

}  // namespace
}  // namespace ema
