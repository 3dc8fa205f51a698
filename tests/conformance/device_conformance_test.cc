// SPDX-License-Identifier: Apache-2.0
//
// What every device must do with blocks, copies and threads. Its folds: fold_conformance_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/device/cuda_accelerator.h"
#include "server/device/device.h"
#include "server/kernel/cast.h"
#include "tests/conformance/device_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::HasSubstr;

constexpr Dtype kAllDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat64,
                                Dtype::kInt8,    Dtype::kInt16,   Dtype::kInt32,    Dtype::kInt64,
                                Dtype::kUInt8,   Dtype::kBool};

class DeviceConformanceTest : public DeviceTest {};

INSTANTIATE_TEST_SUITE_P(All, DeviceConformanceTest, testing::ValuesIn(AllDevices()),
                         [](const auto& test) { return test.param.name; });

// ---- Copies of any dtype -----------------------------------------------------------------------

TEST_P(DeviceConformanceTest, EveryDtypeIsCopiedBitForBit) {
  Folder folder(*device_);
  for (const Dtype dtype : kAllDtypes) {
    const Bytes source = RandomElements(dtype, 40000, 20);
    for (const int64_t count : {0, 1, 7, 64, 1000, 2048, 16385, 40000}) {
      const std::vector<Target> targets = {{Kind::kCopy, 1, count % 5}, {Kind::kCopy, 1, 0}};
      const Folded folded = folder.Fold(dtype, source, count, {}, targets, 3);
      ASSERT_EQ(Misses(folded, dtype, source, count, {}, targets), "")
          << std::string(DtypeName(dtype));
      ASSERT_EQ(folded.non_finite, std::nullopt);
    }
  }
}

TEST_P(DeviceConformanceTest, AveragingWhatIsNotAFloatIsABug) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DeviceStream> stream, device_->NewStream());
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Block> block, device_->Allocate(64));
  const std::byte source[64] = {};
  for (const Kind kind : kAllKinds) {
    if (kind == Kind::kCopy) continue;
    const FoldTarget target = {kind, 0.5, block->data(), block->data()};
    const auto result = stream->Fold({Dtype::kInt64, source, 1, {&target, 1}});
    EXPECT_THAT(result, StatusIs(absl::StatusCode::kInternal, HasSubstr("only be copied")));
    EXPECT_THAT(result, ReasonIs(ErrorReason::kBug));
  }
  EXPECT_THAT(device_->health(), IsOk());
}

// ---- Blocks and memory -------------------------------------------------------------------------

TEST_P(DeviceConformanceTest, BlocksAreAlignedAndWritableToTheirLastByte) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DeviceStream> stream, device_->NewStream());
  std::vector<std::shared_ptr<Block>> blocks;
  for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, int64_t{4097},
                             2 * kMiB - 1, 2 * kMiB, 2 * kMiB + 1, 32 * kMiB}) {
    EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<Block> block, device_->Allocate(size));
    EXPECT_EQ(block->size_bytes(), size);
    EXPECT_NE(block->data(), nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block->data()) % 64, 0u) << size;
    EXPECT_THAT(stream->Zero(block->data(), size), IsOk());
    blocks.push_back(std::move(block));
  }
  EXPECT_THAT(stream->Synchronize(), IsOkAndHolds(testing::IsEmpty()));
}

TEST_P(DeviceConformanceTest, AFreedBlockIsUsedAgain) {
  EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<Block> block, device_->Allocate(4 * kMiB));
  const std::byte* data = block->data();
  block.reset();
  EMA_ASSERT_OK_AND_ASSIGN(block, device_->Allocate(4 * kMiB));
  EXPECT_EQ(block->data(), data);
}

TEST_P(DeviceConformanceTest, BlocksOutliveTheirDevice) {
  std::unique_ptr<Device> device = GetParam().make(kMiB);
  EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<Block> block, device->Allocate(3 * kMiB));
  EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<const std::byte> view,
                           device->HostView(block, std::nullopt));
  device->Trim(0);
  device.reset();
  block.reset();
  EXPECT_NE(view, nullptr);
}

TEST_P(DeviceConformanceTest, AnAbsurdSizeIsRefusedAndTheDeviceStaysHealthy) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Block> held, device_->Allocate(kMiB));
  for (const int64_t size : {device_->total_memory_bytes(), int64_t{1} << 50,
                             std::numeric_limits<int64_t>::max(), int64_t{-1}}) {
    const absl::StatusOr<std::shared_ptr<Block>> refused = device_->Allocate(size);
    EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no memory")));
    EXPECT_THAT(refused, ReasonIs(ErrorReason::kMemoryBudget));
    EXPECT_THAT(device_->health(), IsOk());
  }
  EXPECT_THAT(device_->Allocate(kMiB), IsOk());
  Folder folder(*device_);
  const Bytes source = RandomElements(Dtype::kFloat32, 100, 21);
  const std::vector<Target> targets = {{Kind::kAverage, 0.5f}};
  const Folded folded = folder.Fold(Dtype::kFloat32, source, 100, source, targets);
  EXPECT_EQ(Misses(folded, Dtype::kFloat32, source, 100, source, targets), "");
}

TEST_P(DeviceConformanceTest, TheHostViewHasTheBytesAndKeepsThem) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DeviceStream> stream, device_->NewStream());
  EMA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<Block> block, device_->Allocate(100000));
  const Bytes bytes = RandomElements(Dtype::kUInt8, 100000, 22);
  ASSERT_THAT(stream->CopyFromHost(block->data(), bytes.data(), 100000), IsOk());
  ASSERT_THAT(stream->Synchronize(), IsOkAndHolds(testing::IsEmpty()));
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const std::byte> view,
                           device_->HostView(block, std::nullopt));
  block.reset();
  // Would get the block's memory, were it free.
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Block> other, device_->Allocate(100000));
  ASSERT_THAT(stream->Zero(other->data(), 100000), IsOk());
  ASSERT_THAT(stream->Synchronize(), IsOkAndHolds(testing::IsEmpty()));
  EXPECT_EQ(std::memcmp(view.get(), bytes.data(), bytes.size()), 0);
}

TEST_P(DeviceConformanceTest, AViewInAnotherDtypeIsCastAsTheDefinitionSays) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DeviceStream> stream, device_->NewStream());
  for (const int64_t count : {0, 1, 3, 1001, 100'000}) {
    EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Block> block, device_->Allocate(4 * count));
    const Bytes values = RandomElements(Dtype::kFloat32, count, 24);
    ASSERT_THAT(stream->CopyFromHost(block->data(), values.data(), 4 * count), IsOk());
    ASSERT_THAT(stream->Synchronize(), IsOkAndHolds(testing::IsEmpty()));
    for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16}) {
      Bytes expected(2 * count);
      CastScalar(Dtype::kFloat32, values.data(), dtype, expected.data(), count);
      EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const std::byte> view,
                               device_->HostView(block, dtype));
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), view.get())) << count;
    }
    EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const std::byte> view,
                             device_->HostView(block, std::nullopt));
    EXPECT_TRUE(std::equal(values.begin(), values.end(), view.get()));
  }
}

TEST_P(DeviceConformanceTest, ZeroAndCopiesTouchTheirRangeOnly) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DeviceStream> stream, device_->NewStream());
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Block> block, device_->Allocate(1000));
  Bytes expected = RandomElements(Dtype::kUInt8, 1000, 23);
  ASSERT_THAT(stream->CopyFromHost(block->data(), expected.data(), 1000), IsOk());
  ASSERT_THAT(stream->Zero(block->data() + 13, 101), IsOk());
  ASSERT_THAT(stream->Zero(block->data() + 500, 0), IsOk());
  const Bytes patch(77, std::byte{7});
  ASSERT_THAT(stream->Synchronize(), IsOkAndHolds(testing::IsEmpty()));
  ASSERT_THAT(stream->CopyFromHost(block->data() + 333, patch.data(), 77), IsOk());
  ASSERT_THAT(stream->CopyFromHost(block->data() + 700, nullptr, 0), IsOk());
  ASSERT_THAT(stream->Copy(block->data() + 801, block->data() + 300, 99), IsOk());
  ASSERT_THAT(stream->Copy(block->data() + 950, block->data(), 0), IsOk());
  std::fill_n(expected.begin() + 13, 101, std::byte{0});
  std::fill_n(expected.begin() + 333, 77, std::byte{7});
  std::copy_n(expected.begin() + 300, 99, expected.begin() + 801);
  ASSERT_THAT(stream->Synchronize(), IsOkAndHolds(testing::IsEmpty()));
  EMA_ASSERT_OK_AND_ASSIGN(const auto got, device_->HostView(block, std::nullopt));
  EXPECT_EQ(Bytes(got.get(), got.get() + 1000), expected);
}

TEST_P(DeviceConformanceTest, TotalMemoryIsWhatAMachineHas) {
  EXPECT_GT(device_->total_memory_bytes(), 64 * kMiB);
  EXPECT_LT(device_->total_memory_bytes(), int64_t{1} << 50);
  EXPECT_FALSE(device_->name().empty());
}

// ---- Threads -----------------------------------------------------------------------------------

TEST_P(DeviceConformanceTest, ManyStreamsFoldDisjointRangesOfOneBlock) {
  constexpr int64_t kCount = 400'000;
  constexpr int kThreads = 4;
  constexpr int64_t kFloatBytes = sizeof(float);
  const Bytes source = RandomElements(Dtype::kFloat32, kCount, 24);
  const Bytes current = RandomElements(Dtype::kFloat32, kCount, 25);
  EMA_ASSERT_OK_AND_ASSIGN(const auto current_block, device_->Allocate(kCount * kFloatBytes));
  EMA_ASSERT_OK_AND_ASSIGN(const auto next_block, device_->Allocate(kCount * kFloatBytes));
  EMA_ASSERT_OK_AND_ASSIGN(const auto main_stream, device_->NewStream());
  ASSERT_THAT(
      main_stream->CopyFromHost(current_block->data(), current.data(), kCount * kFloatBytes),
      IsOk());
  ASSERT_THAT(main_stream->Synchronize(), IsOk());
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        const std::unique_ptr<DeviceStream> stream = device_->NewStream().value();
        // Pieces of odd sizes, dealt in turn: neighbours share cache lines.
        constexpr int64_t kPiece = 2501;
        for (int64_t begin = thread * kPiece; begin < kCount; begin += kThreads * kPiece) {
          const FoldTarget target = {Kind::kAverage, 0.01f,
                                     current_block->data() + begin * kFloatBytes,
                                     next_block->data() + begin * kFloatBytes};
          EXPECT_THAT(stream->Fold({Dtype::kFloat32,
                                    source.data() + begin * kFloatBytes,
                                    std::min(kPiece, kCount - begin),
                                    {&target, 1}}),
                      IsOkAndHolds(std::nullopt));
        }
        EXPECT_THAT(stream->Synchronize(), IsOkAndHolds(testing::IsEmpty()));
      });
    }
  }
  Folded folded;
  folded.next.emplace_back((kCount + kGuardElements) * kFloatBytes, kGuard);
  EMA_ASSERT_OK_AND_ASSIGN(const auto next, DeviceBytes(*device_, *main_stream, next_block->data(),
                                                        kCount * kFloatBytes));
  std::copy_n(next.get(), kCount * kFloatBytes, folded.next[0].data());
  EXPECT_EQ(Misses(folded, Dtype::kFloat32, source, kCount, current, {{Kind::kAverage, 0.01f}}),
            "");
}

TEST_P(DeviceConformanceTest, ManyThreadsAllocateAndFree) {
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      const std::unique_ptr<DeviceStream> stream = device_->NewStream().value();
      for (int round = 0; round < 200; ++round) {
        const absl::StatusOr<std::shared_ptr<Block>> block =
            device_->Allocate(kMiB << (round + thread) % 3);
        EXPECT_THAT(block, IsOk());
        if (!block.ok()) return;
        EXPECT_THAT(stream->Zero((*block)->data(), 4096), IsOk());
        EXPECT_THAT(stream->Synchronize(), IsOkAndHolds(testing::IsEmpty()));
        if (round % 50 == 0) device_->Trim(0);
      }
    });
  }
}

// ---- The choice of a device

TEST(MakeDeviceTest, AutoIsAGpuIfThereIsOne) {
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Device> device, MakeDevice("auto", 0));
  EXPECT_EQ(device->name(), FirstGpu().empty() ? "cpu" : FirstGpu());
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Device> cpu, MakeDevice("cpu", 0));
  EXPECT_EQ(cpu->name(), "cpu");
}

TEST(MakeDeviceTest, AnotherNameIsRefusedWithWhatIsExpected) {
  for (const char* name :
       {"", "CPU", "cuda", "cuda:", "cuda:-1", "cuda:1x", "cuda:99999999999", "tpu"}) {
    const absl::StatusOr<std::unique_ptr<Device>> refused = MakeDevice(name, 0);
    EXPECT_THAT(refused, StatusIs(absl::StatusCode::kInvalidArgument,
                                  HasSubstr("expected \"auto\", \"cpu\", or \"cuda:\"")));
    EXPECT_THAT(refused, ReasonIs(ErrorReason::kBadRequest));
  }
}

TEST(MakeDeviceTest, AGpuThatIsNotThereIsRefusedWithTheReason) {
  const char* const why = ListCudaDevices().ok() ? "there is no GPU of index 99" : "no GPU can be";
  EXPECT_THAT(MakeDevice("cuda:99", 0),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       testing::AllOf(HasSubstr("device \"cuda:99\""), HasSubstr(why))));
  EXPECT_THAT(DescribeGpus(), HasSubstr("GPU"));
}

TEST(GpuTest, IsThere) {
  if (FirstGpu().empty()) GTEST_SKIP() << DescribeGpus();
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Device> device, MakeDevice(FirstGpu(), 0));
  EXPECT_THAT(device->health(), IsOk());
}

}  // namespace
}  // namespace ema
