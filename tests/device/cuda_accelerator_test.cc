// SPDX-License-Identifier: Apache-2.0
//
// The server's code for CUDA and LibTorch's half for it, over a CUDA runtime that has no GPU: all
// that does not depend on what a GPU computes. That is in tests/conformance, which runs over the
// same runtime, too.
#include "server/device/cuda_accelerator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/device/accelerator.h"
#include "server/device/accelerator_device.h"
#include "server/kernel/fold_table.h"
#include "tests/testutil/fake_cudart.h"
#include "tests/testutil/fake_nvml.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kElements = 10'000;
constexpr int64_t kBytes = kElements * 4;

absl::StatusOr<std::unique_ptr<Device>> NewDevice(int index = 0) {
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<Accelerator> accelerator, MakeCudaAccelerator(index));
  return MakeAcceleratorDevice(std::move(accelerator),
                               {.slab_bytes = 16 << 10, .kept_host_bytes = 1 << 20});
}

absl::Status Assign(DeviceStream& stream, Block& block, float value) {
  const std::vector<float> source(kElements, value);
  const FoldTarget target{.kind = FoldKind::kAssign, .next = block.data()};
  return stream
      .Fold({.source = reinterpret_cast<const std::byte*>(source.data()),
             .element_count = kElements,
             .targets = {&target, 1}})
      .status();
}

// All that a server does with a device.
absl::Status UseAll(Device& device) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Block> block, device.Allocate(kBytes));
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Block> copy, device.Allocate(kBytes));
  {
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream, device.NewStream());
    std::vector<float> values(kElements);
    EMA_RETURN_IF_ERROR(stream->Zero(block->data(), kBytes));
    EMA_RETURN_IF_ERROR(Assign(*stream, *block, 3));
    EMA_RETURN_IF_ERROR(stream->Copy(copy->data(), block->data(), kBytes));
    EMA_RETURN_IF_ERROR(stream->Synchronize().status());
    EMA_ASSIGN_OR_RETURN(const auto bytes, device.HostView(copy, std::nullopt));
    std::memcpy(values.data(), bytes.get(), kBytes);
    EXPECT_THAT(values, Each(3.0f));
    EMA_RETURN_IF_ERROR(stream->CopyFromHost(
        copy->data(), reinterpret_cast<const std::byte*>(values.data()), kBytes));
  }
  EMA_RETURN_IF_ERROR(device.HostView(block, std::nullopt).status());
  EMA_RETURN_IF_ERROR(device.HostView(block, Dtype::kBFloat16).status());
  const SumRun run = {.average = block->data(), .element_count = kElements};
  EMA_ASSIGN_OR_RETURN(const SquareSums sums, device.SumSquares({&run, 1}));
  EXPECT_EQ(sums.average, 9 * kElements);
  return absl::OkStatus();
}

absl::Status Live() {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, NewDevice());
  const absl::Status status = UseAll(*device);
  if (!status.ok()) device->Trim(0);  // As when models are deleted.
  if (!status.ok() && !absl::IsResourceExhausted(status)) {
    EXPECT_EQ(device->health(), status);
  }
  return status;
}

absl::Status LiveAndTrim() {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, NewDevice());
  EMA_RETURN_IF_ERROR(UseAll(*device));
  device->Trim(0);
  return absl::OkStatus();
}

class CudaAcceleratorTest : public testing::Test {
 protected:
  CudaAcceleratorTest() { EXPECT_THAT(Live(), IsOk()) << "LibTorch makes things for good"; }
};

TEST_F(CudaAcceleratorTest, WhatItTakesItGivesBack) {
  const int64_t events = ema_fake_cudart_events();
  ASSERT_THAT(LiveAndTrim(), IsOk());
  EXPECT_EQ(ema_fake_cudart_events(), events);
  EXPECT_EQ(ema_fake_cudart_pinned_bytes(), 0);
  EXPECT_EQ(ema_fake_cudart_device_bytes(), 0);
}

TEST_F(CudaAcceleratorTest, AThreadUsesSeveralGpusInTurn) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Device> first, NewDevice(0));
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Device> second, NewDevice(1));
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(UseAll(*second), IsOk());
    EXPECT_THAT(UseAll(*first), IsOk());
  }
}

TEST_F(CudaAcceleratorTest, APushWaitsForItsOwnWorkOnly) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Device> device, NewDevice());
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Block> block, device->Allocate(kBytes));
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DeviceStream> stream, device->NewStream());
  ASSERT_THAT(Assign(*stream, *block, 1), IsOk());
  const int64_t synchronizations = ema_fake_cudart_synchronizations();
  const int64_t launches = ema_fake_cudart_launches();
  const int64_t device_bytes = ema_fake_cudart_device_bytes();
  const int64_t pinned_bytes = ema_fake_cudart_pinned_bytes();
  for (int i = 0; i < 20; ++i) ASSERT_THAT(Assign(*stream, *block, 2), IsOk());
  ASSERT_THAT(stream->Synchronize(), IsOk());
  EXPECT_GE(ema_fake_cudart_launches(), launches + 20);
  EXPECT_EQ(ema_fake_cudart_synchronizations(), synchronizations);
  EXPECT_EQ(ema_fake_cudart_device_bytes(), device_bytes);
  EXPECT_EQ(ema_fake_cudart_pinned_bytes(), pinned_bytes);
}

TEST_F(CudaAcceleratorTest, WithoutMemoryNothingIsBroken) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Device> device, NewDevice());
  // Whether one may see who has it, or not.
  for (const bool nvml_refuses : {false, true}) {
    ema_fake_nvml_refuse(nvml_refuses);
    ema_fake_cudart_set_memory(int64_t{64} << 20);  // Others have filled the GPU.
    EXPECT_THAT(device->Allocate(int64_t{128} << 20),
                StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no memory for")));
    EXPECT_THAT(UseAll(*device), IsOk());
    EXPECT_THAT(device->health(), IsOk());
    ema_fake_cudart_set_memory(int64_t{8} << 30);
    EXPECT_THAT(device->Allocate(int64_t{128} << 20), IsOk());
    device->Trim(0);
  }
}

TEST_F(CudaAcceleratorTest, WhateverFindsNoMemoryNothingIsBroken) {
  const int64_t before = ema_fake_cudart_memory_calls();
  ASSERT_THAT(Live(), IsOk());
  const int64_t calls = ema_fake_cudart_memory_calls() - before;
  ASSERT_GT(calls, 5);
  int refused = 0;
  for (int64_t n = 1; n <= calls; ++n) {
    SCOPED_TRACE(n);
    ema_fake_cudart_refuse(n);
    const absl::Status status = Live();
    // LibTorch tries again when it has freed what it keeps.
    if (!status.ok()) {
      ++refused;
      EXPECT_THAT(status,
                  StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no memory for")));
      EXPECT_THAT(status, ReasonIs(ErrorReason::kMemoryBudget));
    }
    ASSERT_THAT(Live(), IsOk());
  }
  EXPECT_GT(refused, calls / 2);
}

// What becomes of a process whose GPU breaks at the `n`-th call.
enum Fate { kTold, kNobodyToTell, kTooFewCalls, kWrong };
Fate FateOfBroken(int64_t n) {
  // LibTorch's allocator ends the process if the device breaks just when it gives memory back: it
  // has none then.
  if (!LiveAndTrim().ok()) return kWrong;
  ema_fake_cudart_break(n);
  const absl::Status status = Live();
  if (!ema_fake_cudart_is_broken()) return kTooFewCalls;
  if (status.ok()) return kNobodyToTell;
  const bool is_told = absl::StrContains(std::string(status.message()), "an illegal memory access");
  if (!is_told || testing::Test::HasFailure())
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return is_told && !testing::Test::HasFailure() ? kTold : kWrong;
}

// Of its own process each, as there is no way back. This comes first, when there are no threads.
TEST(CudaAcceleratorDeathTest, AtAnyCallAFailureIsToldAndEndsNothing) {
  int told = 0;
  int not_told = 0;
  for (int64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) _exit(FateOfBroken(n));
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    ASSERT_NE(WEXITSTATUS(status), kWrong);
    if (WEXITSTATUS(status) == kTooFewCalls) break;
    ++(WEXITSTATUS(status) == kTold ? told : not_told);
  }
  EXPECT_GT(told, 100);
  // What comes last frees memory.
  EXPECT_LT(not_told, told / 4);
}

// In a process of its own, as LibTorch keeps it for good.
TEST(CudaAcceleratorDeathTest, MemoryThatCannotBeMappedIsTakenAsAWhole) {
  const auto live = [] {
    ema_fake_cudart_refuse_mapped(true);
    EXPECT_THAT(LiveAndTrim(), IsOk());
    // LibTorch keeps the page that it has tried to map.
    EXPECT_LE(ema_fake_cudart_device_bytes(), 2 << 20);
    std::_Exit(testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(live(), testing::ExitedWithCode(0), "");
}

TEST(CudaAcceleratorDeathTest, AGpuWithoutMemoryIsNotServedWith) {
  const auto make = [] {
    ema_fake_cudart_set_memory(0);
    EXPECT_THAT(NewDevice(), StatusIs(absl::StatusCode::kInternal, HasSubstr("out of memory")));
    std::_Exit(testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(make(), testing::ExitedWithCode(0), "");
}

// Of the runtime itself: it ends a process that does what a GPU does not take.
TEST(CudaAcceleratorDeathTest, AGpuUsesItsOwnMemoryOnly) {
  const auto fold = [](const FoldTable& table) {
    const std::shared_ptr<Accelerator> gpu = *MakeCudaAccelerator(0);
    const std::unique_ptr<Accelerator::Queue> queue = *gpu->NewQueue();
    EXPECT_THAT(queue->Fold(table), IsOk());
    EXPECT_THAT(queue->Mark(0), IsOk());
    EXPECT_THAT(queue->Wait(0), IsOk());
  };
  const FoldTile tile;
  EXPECT_DEATH(fold({.tiles = &tile, .tile_count = 1}), "not its GPU's: a table's tiles");
  const auto copy_to_another = [] {
    const std::shared_ptr<Accelerator> first = *MakeCudaAccelerator(0);
    const std::shared_ptr<Accelerator> second = *MakeCudaAccelerator(1);
    const auto from = *first->AllocateDevice(kBytes);
    const auto to = *second->AllocateDevice(kBytes);
    EXPECT_THAT((*first->NewQueue())->CopyOnDevice(to->data(), from->data(), kBytes), IsOk());
  };
  EXPECT_DEATH(copy_to_another(), "a copy to other memory");
  const auto write_on_host = [] {
    const std::shared_ptr<Accelerator> gpu = *MakeCudaAccelerator(0);
    const auto memory = *gpu->AllocateDevice(kBytes);
    *memory->data() = std::byte{1};
  };
  EXPECT_DEATH(write_on_host(), "");
}

}  // namespace
}  // namespace ema
