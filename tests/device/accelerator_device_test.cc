// SPDX-License-Identifier: Apache-2.0
//
// What is asynchronous about a device with memory of its own; what it computes is in
// tests/conformance.
#include "server/device/accelerator_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "ema/error_reason.h"
#include "tests/device/accelerator_harness.h"
#include "tests/testutil/device_bytes.h"
#include "tests/testutil/fake_accelerator.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

auto IsDeviceError() {
  return AllOf(StatusIs(absl::StatusCode::kInternal, HasSubstr("illegal memory access")),
               ReasonIs(ErrorReason::kDevice));
}

TEST(AcceleratorDeviceTest, ManyStreamsAtOnceEachInItsOrder) {
  Harness harness({.max_delay_us = 300});
  std::vector<std::jthread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      const auto stream = *harness.device->NewStream();
      const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
      for (int round = 0; round < 5; ++round) {
        const float value = static_cast<float>(100 * i + round);
        EXPECT_THAT(Assign(*stream, *block, -1), IsOk());
        EXPECT_THAT(stream->Zero(block->data(), kBytes), IsOk());
        EXPECT_THAT(Assign(*stream, *block, value), IsOk());
        const auto got = DeviceBytes(*harness.device, *stream, block->data(), kBytes);
        ASSERT_THAT(got, IsOk());
        EXPECT_THAT(ValuesOf(*got), Each(value));
      }
    });
  }
}

TEST(AcceleratorDeviceTest, ADroppedStreamWritesNothingMore) {
  Harness harness({.max_delay_us = 2'000});
  for (int round = 0; round < 10; ++round) {
    std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
    const std::byte* const address = block->data();
    {
      const auto stream = *harness.device->NewStream();
      ASSERT_THAT(Assign(*stream, *block, 1), IsOk());
    }
    // The next session gets the same memory.
    block = nullptr;
    block = *harness.device->Allocate(kBytes);
    ASSERT_EQ(block->data(), address);
    const auto stream = *harness.device->NewStream();
    ASSERT_THAT(Assign(*stream, *block, 2), IsOk());
    ASSERT_THAT(stream->Synchronize(), IsOk());
    EXPECT_THAT(ValuesOf(*harness.device->HostView(block, std::nullopt)), Each(2.0f));
  }
}

TEST(AcceleratorDeviceTest, WhatIsNotFiniteIsOfOneStreamAndOfWhatCameSince) {
  Harness harness({.max_delay_us = 100});
  const auto stream = *harness.device->NewStream();
  const auto other = *harness.device->NewStream();
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  const float infinity = std::numeric_limits<float>::infinity();
  ASSERT_THAT(Assign(*stream, *block, infinity, 7), IsOk());
  ASSERT_THAT(Assign(*stream, *block, 1, 6), IsOk());
  ASSERT_THAT(Assign(*stream, *block, infinity, 5), IsOk());
  ASSERT_THAT(Assign(*stream, *block, infinity, 7), IsOk());
  EXPECT_THAT(other->Synchronize(), IsOkAndHolds(IsEmpty()));
  EXPECT_THAT(stream->Synchronize(), IsOkAndHolds(ElementsAre(NonFiniteElement{5, kElements},
                                                              NonFiniteElement{7, kElements})));
  EXPECT_THAT(stream->Synchronize(), IsOkAndHolds(IsEmpty()));
}

TEST(AcceleratorDeviceTest, ManySmallFoldsAreOneLaunch) {
  Harness harness({}, /*kept_host_bytes=*/0, /*slab_bytes=*/1 << 20);
  const auto stream = *harness.device->NewStream();
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  ASSERT_THAT(Assign(*stream, *block, 1), IsOk());  // Makes the ring.
  ASSERT_THAT(stream->Synchronize(), IsOk());
  const int64_t before = harness.accelerator->work_count();
  const float source = 3;
  for (int64_t i = 0; i < 100; ++i) {
    const FoldTarget target{.kind = FoldKind::kAssign, .next = block->data() + 4 * i};
    ASSERT_THAT(stream->Fold({Dtype::kFloat32, reinterpret_cast<const std::byte*>(&source), 1,
                              std::span(&target, 1)}),
                IsOk());
  }
  EXPECT_EQ(harness.accelerator->work_count(), before) << "nothing is launched one by one";
  ASSERT_THAT(stream->Synchronize(), IsOk());
  EXPECT_LE(harness.accelerator->work_count(), before + 2);  // Copy, fold.
}

TEST(AcceleratorDeviceTest, ManySmallCopiesFromTheHostAreOneLaunch) {
  Harness harness({}, /*kept_host_bytes=*/0, /*slab_bytes=*/1 << 20);
  const auto stream = *harness.device->NewStream();
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  ASSERT_THAT(Assign(*stream, *block, 1), IsOk());  // Makes the ring.
  ASSERT_THAT(stream->Synchronize(), IsOk());
  const int64_t before = harness.accelerator->work_count();
  for (int64_t i = 0; i < 100; ++i) {
    const float source = 3;  // Gone when the copy is made.
    ASSERT_THAT(
        stream->CopyFromHost(block->data() + 4 * i, reinterpret_cast<const std::byte*>(&source), 4),
        IsOk());
  }
  ASSERT_THAT(stream->Synchronize(), IsOk());
  EXPECT_LE(harness.accelerator->work_count(), before + 2);
  const std::vector<float> values = ValuesOf(*harness.device->HostView(block, std::nullopt));
  EXPECT_THAT(std::vector(values.begin(), values.begin() + 100), Each(3.0f));
  EXPECT_EQ(values[100], 1.0f);
}

// The GPU has something to do while the rest still arrives.
TEST(AcceleratorDeviceTest, TheFirstLaunchesOfAPushAreSmall) {
  Harness harness({}, /*kept_host_bytes=*/0, /*slab_bytes=*/1 << 20);
  const auto stream = *harness.device->NewStream();
  const std::shared_ptr<Block> block = *harness.device->Allocate(16 * kBytes);
  for (int push = 0; push < 2; ++push) {
    SCOPED_TRACE(push);
    // Each is 40 KB, a push 640 KB: less than a slab.
    std::vector<int> first_launches;
    int64_t work = harness.accelerator->work_count();
    for (int i = 0; i < 16; ++i) {
      ASSERT_THAT(Assign(*stream, *block, 1), IsOk());
      if (harness.accelerator->work_count() > work) first_launches.push_back(i);
      work = harness.accelerator->work_count();
    }
    ASSERT_THAT(first_launches, testing::SizeIs(testing::Ge(3)));
    EXPECT_LE(first_launches[0], 1);
    EXPECT_GT(first_launches[2] - first_launches[1], first_launches[1] - first_launches[0]);
    ASSERT_THAT(stream->Synchronize(), IsOk());
  }
}

// Many streams only begin: one that has sent no weights yet, or that only copies on the device.
TEST(AcceleratorDeviceTest, AStreamTakesMemoryWhenItHasSomethingToMove) {
  Harness harness({});
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  const std::shared_ptr<Block> other = *harness.device->Allocate(kBytes);
  const int64_t device_bytes = harness.accelerator->device_bytes();
  const auto stream = *harness.device->NewStream();
  ASSERT_THAT(stream->Zero(block->data(), kBytes), IsOk());
  ASSERT_THAT(stream->Copy(other->data(), block->data(), kBytes), IsOk());
  ASSERT_THAT(stream->Synchronize(), IsOk());
  EXPECT_THAT(ValuesOf(*harness.device->HostView(other, std::nullopt)), Each(0.0f));
  EXPECT_EQ(harness.accelerator->device_bytes(), device_bytes);
  const int64_t pinned_bytes = harness.accelerator->pinned_bytes();
  ASSERT_THAT(Assign(*stream, *block, 1), IsOk());
  const Device::Overhead overhead = harness.device->overhead(kBytes);
  EXPECT_EQ(harness.accelerator->device_bytes(), device_bytes + overhead.bytes_per_stream);
  EXPECT_EQ(harness.accelerator->pinned_bytes(), pinned_bytes + overhead.host_bytes_per_stream);
}

TEST(AcceleratorDeviceTest, SumsOfManyRunsAreOneLaunch) {
  Harness harness({.max_delay_us = 100});
  const auto stream = *harness.device->NewStream();
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  ASSERT_THAT(Assign(*stream, *block, 2), IsOk());
  ASSERT_THAT(stream->Synchronize(), IsOk());
  const std::vector<SumRun> runs(100, {.average = block->data(), .element_count = 10});
  ASSERT_THAT(harness.device->SumSquares(runs), IsOk());  // Makes what it needs.
  const int64_t before = harness.accelerator->work_count();
  EMA_ASSERT_OK_AND_ASSIGN(const SquareSums sums, harness.device->SumSquares(runs));
  EXPECT_EQ(sums.average, 4000);
  EXPECT_EQ(harness.accelerator->work_count(), before + 4);  // Zeros, table, sums, result.
}

TEST(AcceleratorDeviceTest, ASumThatFailsBreaksTheDevice) {
  // Whichever piece of work it is.
  for (int64_t n = 1; n < 5; ++n) {
    SCOPED_TRACE(n);
    Harness harness({.max_delay_us = 50, .failing_work = n});
    const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
    const SumRun run = {.average = block->data(), .element_count = kElements};
    EXPECT_THAT(harness.device->SumSquares({&run, 1}), IsDeviceError());
    EXPECT_THAT(harness.device->health(), IsDeviceError());
  }
}

TEST(AcceleratorDeviceTest, AnErrorWhileMemoryIsTakenBreaksTheDevice) {
  for (const bool is_read : {false, true}) {
    Harness harness({});
    const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
    const auto stream = *harness.device->NewStream();
    harness.accelerator->Break();
    if (is_read) {
      EXPECT_THAT(harness.device->HostView(block, std::nullopt), IsDeviceError());
    } else {
      EXPECT_THAT(Assign(*stream, *block, 1), IsDeviceError());
    }
    EXPECT_THAT(harness.device->health(), IsDeviceError());
  }
}

TEST(AcceleratorDeviceTest, ManyReadersTakeNoMoreThanTheOverheadSays) {
  Harness harness({.max_delay_us = 300}, /*kept_host_bytes=*/0);
  constexpr int kReaders = 16;
  std::vector<std::shared_ptr<Block>> blocks;
  for (int i = 0; i < kReaders; ++i) blocks.push_back(*harness.device->Allocate(kBytes));
  const int64_t before = harness.accelerator->device_bytes();
  {
    std::vector<std::jthread> readers;
    for (int i = 0; i < kReaders; ++i) {
      readers.emplace_back([&, i] {
        EXPECT_THAT(harness.device->HostView(blocks[i], Dtype::kFloat16), IsOk());
        const SumRun run = {.average = blocks[i]->data(), .element_count = kElements};
        EXPECT_THAT(harness.device->SumSquares({&run, 1}), IsOk());
      });
    }
  }
  // Rings are kept: this is the most there was.
  const Device::Overhead overhead = harness.device->overhead(kBytes);
  EXPECT_LE(harness.accelerator->device_bytes() - before, overhead.shared_bytes);
  EXPECT_LE(harness.accelerator->pinned_bytes(),
            overhead.shared_host_bytes + kReaders * overhead.host_bytes_per_reader);
}

TEST(AcceleratorDeviceTest, AStreamThatOnlyClearsTakesNoRingFromOthers) {
  Harness harness({});
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  {
    const auto stream = *harness.device->NewStream();
    ASSERT_THAT(Assign(*stream, *block, 1), IsOk());
  }
  const auto clears = *harness.device->NewStream();
  ASSERT_THAT(clears->Zero(block->data(), kBytes), IsOk());
  ASSERT_THAT(clears->Synchronize(), IsOk());
  const auto folds = *harness.device->NewStream();
  ASSERT_THAT(Assign(*folds, *block, 2), IsOk());
  ASSERT_THAT(folds->Synchronize(), IsOk());
  EXPECT_EQ(harness.accelerator->pinned_bytes(),
            harness.device->overhead(kBytes).host_bytes_per_stream);
  EXPECT_THAT(ValuesOf(*harness.device->HostView(block, std::nullopt)), Each(2.0f));
}

TEST(AcceleratorDeviceTest, ACopyOutlivesTheDeviceWhateverElseIsAskedFor) {
  Harness harness({}, /*kept_host_bytes=*/kBytes);
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  const std::shared_ptr<Block> other = *harness.device->Allocate(kBytes);
  const auto stream = *harness.device->NewStream();
  ASSERT_THAT(Assign(*stream, *block, 1), IsOk());
  ASSERT_THAT(stream->Synchronize(), IsOk());
  ASSERT_THAT(harness.device->HostView(block, std::nullopt), IsOk());
  harness.accelerator->Break();
  EXPECT_THAT(Assign(*stream, *other, 1), IsDeviceError());
  // There is room for one copy.
  EXPECT_THAT(harness.device->HostView(other, std::nullopt), IsDeviceError());
  const auto view = harness.device->HostView(block, std::nullopt);
  ASSERT_THAT(view, IsOk());
  EXPECT_THAT(ValuesOf(*view), Each(1.0f));
}

TEST(AcceleratorDeviceTest, TrimLeavesWhatModelsThatStayMayUse) {
  Harness harness({});
  ASSERT_THAT(harness.device->Allocate(3 * kBytes), IsOk());
  std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  {
    const auto stream = *harness.device->NewStream();
    ASSERT_THAT(Assign(*stream, *block, 1), IsOk());
  }
  block = nullptr;
  const int64_t ring_bytes = harness.device->overhead(kBytes).bytes_per_stream;
  harness.device->Trim(2 * kBytes);
  EXPECT_EQ(harness.device->memory_use().kept_bytes, kBytes);
  EXPECT_EQ(harness.accelerator->device_bytes(), kBytes + ring_bytes);
  harness.device->Trim(0);
  EXPECT_EQ(harness.accelerator->device_bytes(), 0);
}

// It is for the device's memory: what other models' readers share stays.
TEST(AcceleratorDeviceTest, TrimLeavesTheCopiesOfBlocksThatAreThere) {
  Harness harness({});
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  std::shared_ptr<Block> other = *harness.device->Allocate(kBytes);
  ASSERT_THAT(harness.device->HostView(block, std::nullopt), IsOk());
  ASSERT_THAT(harness.device->HostView(other, std::nullopt), IsOk());
  other = nullptr;
  harness.device->Trim(0);
  EXPECT_TRUE(harness.device->HasHostView(block, std::nullopt));
  EXPECT_EQ(harness.accelerator->device_bytes(), kBytes);
  const Device::MemoryUse use = harness.device->memory_use();
  EXPECT_EQ(use.block_bytes, kBytes);
  EXPECT_EQ(use.kept_bytes, 0);
  EXPECT_EQ(use.host_copy_bytes, 2 * kBytes) << "unpinning waits for the whole device";
}

TEST(AcceleratorDeviceTest, TrimGivesAllMemoryBackThatNobodyHas) {
  Harness harness({});
  std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  {
    const auto stream = *harness.device->NewStream();
    ASSERT_THAT(Assign(*stream, *block, 1), IsOk());
    ASSERT_THAT(stream->Synchronize(), IsOk());
  }
  ASSERT_THAT(harness.device->HostView(block, std::nullopt), IsOk());
  block = nullptr;
  EXPECT_GT(harness.accelerator->device_bytes(), 0);
  EXPECT_GT(harness.accelerator->pinned_bytes(), 0);
  harness.device->Trim(0);
  EXPECT_EQ(harness.accelerator->device_bytes(), 0);
  EXPECT_EQ(harness.accelerator->pinned_bytes(), 0);
  EXPECT_EQ(harness.accelerator->trim_count(), 1) << "what the allocator keeps";
}

TEST(AcceleratorDeviceTest, WhatIsKeptFreeIsGivenUpForStreamsAndReaders) {
  // As many bytes as the blocks; a ring does not fit beside the pool.
  Harness harness({.memory_bytes = 1 << 20});
  const std::shared_ptr<Block> block = *harness.device->Allocate(kBytes);
  const SumRun run = {.average = block->data(), .element_count = 0};
  const auto fill_pool = [&] {
    harness.device->Trim(0);
    ASSERT_THAT(harness.device->Allocate((1 << 20) - kBytes), IsOk());
  };
  fill_pool();
  {
    const auto stream = *harness.device->NewStream();
    EXPECT_THAT(Assign(*stream, *block, 1), IsOk());
    EXPECT_THAT(stream->Synchronize(), IsOk());
  }
  fill_pool();
  EXPECT_THAT(harness.device->HostView(block, Dtype::kFloat16), IsOk());
  fill_pool();
  EXPECT_THAT(harness.device->SumSquares({&run, 1}), IsOk());
  EXPECT_THAT(harness.device->health(), IsOk());
}

TEST(AcceleratorDeviceTest, WithoutMemoryNothingIsBroken) {
  Harness harness({.memory_bytes = 1 << 20});
  const auto all = harness.device->Allocate(2 << 20);
  EXPECT_THAT(all, AllOf(StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no memory")),
                         ReasonIs(ErrorReason::kMemoryBudget)));
  EXPECT_THAT(harness.device->health(), IsOk());
  EXPECT_THAT(harness.device->Allocate(kBytes), IsOk());
}

TEST(AcceleratorDeviceTest, TheFirstErrorIsWhatEveryCallGivesFromThenOn) {
  // Whichever piece of work it is.
  for (int64_t n = 1; n < 40; ++n) {
    SCOPED_TRACE(n);
    Harness harness({.max_delay_us = 50, .failing_work = n});
    absl::Status status;
    std::shared_ptr<const std::byte> copied;
    std::shared_ptr<Block> block;
    {
      const auto stream = harness.device->NewStream();
      status = stream.status();
      if (status.ok()) {
        block = *harness.device->Allocate(kBytes);
        status = Assign(**stream, *block, 7);
        if (status.ok()) status = (*stream)->Synchronize().status();
      }
      if (status.ok()) {
        const auto view = harness.device->HostView(block, std::nullopt);
        status = view.status();
        if (view.ok()) copied = *view;
      }
      for (int i = 0; i < 100 && status.ok(); ++i) {
        status = Assign(**stream, *block, 8);
        if (status.ok()) status = (*stream)->Synchronize().status();
      }
    }
    EXPECT_THAT(status, IsDeviceError());
    EXPECT_EQ(harness.device->health(), status);
    EXPECT_EQ(harness.device->Allocate(kBytes).status(), status);
    EXPECT_EQ(harness.device->NewStream().status(), status);
    if (copied != nullptr) {
      // Readers of what is in host memory go on.
      EXPECT_THAT(harness.device->HostView(block, std::nullopt), IsOk());
      EXPECT_THAT(ValuesOf(copied), Each(7.0f));
    }
  }
}

}  // namespace
}  // namespace ema
