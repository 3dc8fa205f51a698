// SPDX-License-Identifier: Apache-2.0
//
// Copies of a device's blocks for readers: shared, kept, and within the memory that they may have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "tests/device/accelerator_harness.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

TEST(HostCopiesTest, ReadersShareOneHostCopyWhichIsKeptForAWhile) {
  // Of those that nobody reads, there is room for none beside the one that was used last.
  Harness harness({.max_delay_us = 100}, /*kept_host_bytes=*/kBytes - 1);
  const auto stream = *harness.device->NewStream();
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  const std::shared_ptr<Block> second = *harness.device->Allocate(kBytes);
  ASSERT_THAT(Assign(*stream, *block, 5), IsOk());
  ASSERT_THAT(Assign(*stream, *second, 6), IsOk());
  ASSERT_THAT(stream->Synchronize(), IsOk());
  const int64_t before = harness.accelerator->copies_to_host();
  {
    std::vector<std::jthread> readers;
    for (int i = 0; i < 8; ++i) {
      readers.emplace_back([&] {
        EXPECT_THAT(ValuesOf(*harness.device->HostView(block, std::nullopt)), Each(5.0f));
      });
    }
  }
  EXPECT_THAT(ValuesOf(*harness.device->HostView(block, std::nullopt)), Each(5.0f));
  EXPECT_EQ(harness.accelerator->copies_to_host(), before + 1);
  { const auto view = *harness.device->HostView(second, std::nullopt); }
  { const auto view = *harness.device->HostView(second, std::nullopt); }
  EXPECT_EQ(harness.accelerator->copies_to_host(), before + 2);
  { const auto view = *harness.device->HostView(block, std::nullopt); }
  EXPECT_EQ(harness.accelerator->copies_to_host(), before + 3);
}

TEST(HostCopiesTest, WhetherAHostCopyIsThereIsKnown) {
  Harness harness({});
  const auto stream = *harness.device->NewStream();
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  ASSERT_THAT(Assign(*stream, *block, 5), IsOk());
  ASSERT_THAT(stream->Synchronize(), IsOk());
  EXPECT_FALSE(harness.device->HasHostView(block, std::nullopt));
  ASSERT_THAT(harness.device->HostView(block, std::nullopt), IsOk());
  EXPECT_TRUE(harness.device->HasHostView(block, std::nullopt));
  EXPECT_FALSE(harness.device->HasHostView(block, Dtype::kBFloat16));
  // One that is on its way is not.
  const std::shared_ptr<Block> other = *harness.device->Allocate(kBytes);
  harness.accelerator->HoldCopiesToHost(true);
  const int64_t copies = harness.accelerator->copies_to_host();
  std::jthread reader([&] { EXPECT_THAT(harness.device->HostView(other, std::nullopt), IsOk()); });
  while (harness.accelerator->copies_to_host() == copies) std::this_thread::yield();
  EXPECT_FALSE(harness.device->HasHostView(other, std::nullopt));
  harness.accelerator->HoldCopiesToHost(false);
}

// As one version follows the other: their copies, and what is kept of those that have gone.
TEST(HostCopiesTest, PinnedMemoryStaysWithinWhatIsKeptAndRead) {
  constexpr int64_t kKept = 4 * kBytes;
  Harness harness({}, /*kept_host_bytes=*/kKept);
  const auto pinned_bytes = [&] { return harness.device->memory_use().host_copy_bytes; };
  std::vector<std::shared_ptr<Block>> version;
  for (int round = 0; round < 4; ++round) {
    version.clear();
    for (int i = 0; i < 3; ++i) version.push_back(*harness.device->Allocate(kBytes));
    std::vector<std::shared_ptr<const std::byte>> read;
    for (const auto& block : version) {
      read.push_back(*harness.device->HostView(block, std::nullopt));
      EXPECT_LE(pinned_bytes(), kKept) << round;
    }
    read.clear();
    for (const auto& block : version) {
      ASSERT_THAT(harness.device->HostView(block, Dtype::kFloat16), IsOk());
      EXPECT_LE(pinned_bytes(), kKept + kBytes / 2) << round;
    }
  }
}

TEST(HostCopiesTest, ACopyThatCouldNotBeMadeCountsAsNoMemory) {
  // What is asked for after it: others, or the same once more.
  for (const std::vector<int>& then : {std::vector{0, 2, 3}, std::vector{0, 2, 1}}) {
    Harness harness({}, /*kept_host_bytes=*/2 * kBytes);
    std::vector<std::shared_ptr<Block>> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(*harness.device->Allocate(kBytes));
    const auto read = [&](int i) { return harness.device->HostView(blocks[i], {}).status(); };
    harness.accelerator->LimitPinned(kBytes);
    ASSERT_THAT(read(0), IsOk());
    ASSERT_THAT(read(1), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no memory")));
    harness.accelerator->LimitPinned(kBytes * 4);
    for (const int i : then) ASSERT_THAT(read(i), IsOk());
    EXPECT_EQ(harness.device->memory_use().host_copy_bytes, 2 * kBytes);
  }
}

// Pinning costs more than the copy, and unpinning waits for the whole device.
TEST(HostCopiesTest, ReadingMoreThanIsKeptPinsNothingAnew) {
  constexpr int kKept = 16;
  Harness harness({}, /*kept_host_bytes=*/kKept * kBytes);
  std::vector<std::shared_ptr<Block>> blocks;
  for (int i = 0; i < 2 * kKept; ++i) blocks.push_back(*harness.device->Allocate(kBytes));
  const auto read_all = [&] {
    for (const auto& block : blocks)
      ASSERT_THAT(harness.device->HostView(block, std::nullopt), IsOk());
  };
  read_all();
  const int64_t pin_count = harness.accelerator->pin_count();
  EXPECT_EQ(pin_count, kKept);
  read_all();
  EXPECT_EQ(harness.accelerator->pin_count(), pin_count);
  EXPECT_EQ(harness.accelerator->pinned_bytes(), kKept * kBytes);
}

TEST(HostCopiesTest, CopiesOfWhatWasReadLastStay) {
  constexpr int kKept = 16;
  Harness harness({}, /*kept_host_bytes=*/kKept * kBytes);
  const auto new_version = [&](int block_count) {
    std::vector<std::shared_ptr<Block>> blocks;
    for (int i = 0; i < block_count; ++i) {
      blocks.push_back(*harness.device->Allocate(kBytes));
    }
    return blocks;
  };
  const auto read = [&](const std::vector<std::shared_ptr<Block>>& blocks) {
    for (const auto& block : blocks)
      ASSERT_THAT(harness.device->HostView(block, std::nullopt), IsOk());
  };
  const auto before = new_version(kKept - 1);
  read(before);
  const auto version = new_version(kKept);
  read(version);
  const int64_t copies = harness.accelerator->copies_to_host();
  read(version);
  EXPECT_EQ(harness.accelerator->copies_to_host(), copies);
}

TEST(HostCopiesTest, WhatIsKeptOfOtherSizesMakesNobodyPinAnew) {
  Harness harness({}, /*kept_host_bytes=*/16 * kBytes);
  ASSERT_THAT(harness.device->HostView(*harness.device->Allocate(8 * kBytes), std::nullopt),
              IsOk());
  std::shared_ptr<Block> version;
  const auto read_next_version = [&] {
    version = *harness.device->Allocate(kBytes);
    ASSERT_THAT(harness.device->HostView(version, std::nullopt), IsOk());
  };
  read_next_version();
  read_next_version();
  const int64_t pin_count = harness.accelerator->pin_count();
  for (int i = 0; i < 10; ++i) read_next_version();
  EXPECT_EQ(harness.accelerator->pin_count(), pin_count);
}

TEST(HostCopiesTest, ReadersOfMoreThanIsKeptPinNothingAnew) {
  constexpr int kKept = 16;
  constexpr size_t kHeld = 20;
  Harness harness({}, /*kept_host_bytes=*/kKept * kBytes);
  std::vector<std::shared_ptr<Block>> blocks;
  for (size_t i = 0; i < 2 * kHeld; ++i) blocks.push_back(*harness.device->Allocate(kBytes));
  std::deque<std::shared_ptr<const std::byte>> held;
  const auto read_all = [&] {
    for (const auto& block : blocks) {
      held.push_back(*harness.device->HostView(block, std::nullopt));
      if (held.size() > kHeld) held.pop_front();
    }
  };
  read_all();
  const int64_t pin_count = harness.accelerator->pin_count();
  read_all();
  EXPECT_EQ(harness.accelerator->pin_count(), pin_count);
  EXPECT_LE(harness.accelerator->pinned_bytes(), static_cast<int64_t>(kHeld + 2) * kBytes);
}

TEST(HostCopiesTest, ACastMovesHalfTheBytesOnceForAllReaders) {
  Harness harness({.max_delay_us = 100});
  const auto stream = *harness.device->NewStream();
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  ASSERT_THAT(Assign(*stream, *block, 1.5f), IsOk());
  ASSERT_THAT(stream->Synchronize(), IsOk());
  const int64_t before = harness.accelerator->bytes_to_host();
  for (int reader = 0; reader < 3; ++reader) {
    const auto view = *harness.device->HostView(block, Dtype::kBFloat16);
    std::vector<uint16_t> values(kElements);
    std::memcpy(values.data(), view.get(), kBytes / 2);
    EXPECT_THAT(values, Each(0x3fc0));
    EXPECT_EQ(harness.accelerator->bytes_to_host(), before + kBytes / 2);
  }
  EXPECT_THAT(ValuesOf(*harness.device->HostView(block, std::nullopt)), Each(1.5f));
}

}  // namespace
}  // namespace ema
