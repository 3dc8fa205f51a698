// SPDX-License-Identifier: Apache-2.0
//
// What the fake CUDA runtime takes, and that it ends a process which does what a GPU does not take.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "server/kernel/cast_run.h"
#include "server/kernel/fold_table.h"
#include "server/kernel/sum_table.h"

// What nvcc's code calls.
extern "C" {
void __cudaRegisterFunction(void**, const char* host_function, char*, const char* device_name, int,
                            uint3*, uint3*, dim3*, dim3*, int*);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream);
}

namespace {

// The test's program, or the child of a death test, is not to go on.
void Need(cudaError_t error) {
  if (error != cudaSuccess) std::_Exit(99);
}

constexpr int kElements = 8;
constexpr size_t kPieceBytes = 64 << 10;

struct Launch {
  dim3 grid = {1};
  unsigned halves = 2;  // Of the threads that the kernel is written for.
  unsigned block_y = 1;
  unsigned block_z = 1;
  size_t shared_bytes = 0;
};

// A stream of a GPU, and what each kernel needs for a few elements, in its memory. Made anew in
// each child: a thread that does a stream's work is not there.
class Work {
 public:
  explicit Work(int device = 0) {
    Need(cudaSetDevice(1 - device));
    Need(cudaMalloc(reinterpret_cast<void**>(&of_other), kPieceBytes));
    Need(cudaEventCreateWithFlags(&event_of_other, cudaEventDisableTiming));
    Need(cudaStreamCreateWithPriority(&stream_of_other, cudaStreamNonBlocking, 0));
    Need(cudaSetDevice(device));
    Need(cudaMalloc(reinterpret_cast<void**>(&own), kPieceBytes));
    Need(cudaHostAlloc(reinterpret_cast<void**>(&pinned), kPieceBytes, cudaHostAllocMapped));
    Need(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0));
    std::memset(pinned, 0, kPieceBytes);
    Need(cudaMemsetAsync(own, 0, kPieceBytes, stream));
    const auto next = [&] { return own + 64 * ++pieces_; };
    tile.source = next();
    tile.end = kElements;
    tile.target_count = 1;
    target.kind = ema::FoldKind::kAverage;
    target.next = next();
    target.current = next();
    table.tile_count = 1;
    table.non_finite = reinterpret_cast<uint32_t*>(next());
    run.average = next();
    run.raw = next();
    run.element_count = kElements;
    run.raw_format = ema::SourceFormat::kFloat32;
    sums.run_count = sums.tile_count = sums.block_count = 1;
    cast.from = next();
    cast.to = next();
    cast.element_count = kElements;
    table.tiles = tile_ = reinterpret_cast<ema::FoldTile*>(next());
    table.targets = target_ = reinterpret_cast<ema::DeviceFoldTarget*>(next());
    sums.runs = run_ = reinterpret_cast<ema::DeviceSumRun*>(next());
    sums.sums = reinterpret_cast<ema::SquareSums*>(next());
  }

  template <typename Argument>
  void Do(const char* kernel, unsigned threads, Argument argument, const Launch& launch) {
    __cudaRegisterFunction(nullptr, kernel, nullptr, kernel, 0, nullptr, nullptr, nullptr, nullptr,
                           nullptr);
    void* arguments[] = {&argument};
    const dim3 block = {threads * launch.halves / 2, launch.block_y, launch.block_z};
    Need(__cudaLaunchKernel(reinterpret_cast<cudaKernel_t>(const_cast<char*>(kernel)), launch.grid,
                            block, arguments, launch.shared_bytes, stream));
    Wait();
  }
  // What the tables are to have goes to memory of the GPU.
  void PutItems() {
    Put(tile, tile_);
    Put(target, target_);
    Put(run, run_);
  }
  void Wait() const { Need(cudaStreamSynchronize(stream)); }

  cudaStream_t stream = nullptr;
  std::byte* own = nullptr;
  std::byte* pinned = nullptr;
  std::byte* of_other = nullptr;  // The GPU that is not the stream's.
  cudaEvent_t event_of_other = nullptr;
  cudaStream_t stream_of_other = nullptr;
  std::array<std::byte, kPieceBytes> pageable = {};

  ema::FoldTile tile;
  ema::DeviceFoldTarget target;
  ema::FoldTable table;
  ema::DeviceSumRun run;
  ema::SumTable sums;
  ema::CastRun cast;

 private:
  template <typename T>
  void Put(const T& item, T* at) {
    std::byte* const from = pinned + kPieceBytes / 2 + 64 * puts_++;
    std::memcpy(from, &item, sizeof(item));
    Need(cudaMemcpyAsync(at, from, sizeof(item), cudaMemcpyHostToDevice, stream));
  }

  int64_t pieces_ = 0;
  int64_t puts_ = 0;
  ema::FoldTile* tile_ = nullptr;
  ema::DeviceFoldTarget* target_ = nullptr;
  ema::DeviceSumRun* run_ = nullptr;
};

void Fold(Work& work, const Launch& launch = {}) {
  work.Do("FoldKernel", ema::kFoldThreads, work.table, launch);
}
void Sum(Work& work, const Launch& launch = {}) {
  work.Do("SumKernel", ema::kSumThreads, work.sums, launch);
}
void Cast(Work& work, const Launch& launch = {}) {
  work.Do("CastKernel", ema::kCastThreads, work.cast, launch);
}

TEST(FakeCudartTest, AGpuUsesItsOwnMemory) {
  for (const int device : {0, 1}) {
    Work work(device);
    float values[kElements] = {1, 2, 3, 4, 5, 6, 7, 8};
    std::memcpy(work.pinned, values, sizeof(values));
    auto* const source = const_cast<std::byte*>(work.tile.source);
    Need(cudaMemcpyAsync(source, work.pinned, sizeof(values), cudaMemcpyHostToDevice, work.stream));
    work.run.average = work.target.next;
    work.run.raw = source;
    work.cast = {ema::SourceFormat::kBFloat16, work.target.next, work.cast.to, kElements};
    work.PutItems();
    Fold(work);
    Sum(work);
    Cast(work);
    Need(cudaMemcpyAsync(work.pinned, work.cast.to, 16, cudaMemcpyDeviceToHost, work.stream));
    Need(cudaMemcpyAsync(work.pinned + 16, work.sums.sums + 7, 16, cudaMemcpyDeviceToHost,
                         work.stream));
    work.Wait();
    uint16_t last = 0;
    ema::SquareSums sums;
    std::memcpy(&last, work.pinned + 14, sizeof(last));
    std::memcpy(&sums, work.pinned + 16, sizeof(sums));
    EXPECT_EQ(last, 0x4100);  // 8
    EXPECT_EQ(sums.average, 64);
    EXPECT_EQ(sums.difference, 0);
  }
}

TEST(FakeCudartTest, NotesMayBePinned) {
  Work work;
  work.target.update_weight = 0.5;
  work.table.non_finite = reinterpret_cast<uint32_t*>(work.pinned + 4);
  work.PutItems();
  auto* const source = const_cast<std::byte*>(work.tile.source);
  Need(cudaMemsetAsync(source, 0xff, 4, work.stream));
  Need(cudaMemsetAsync(source + 4, 0x3f, 4, work.stream));
  Fold(work);
  EXPECT_EQ(*work.table.non_finite, 1u);
}

TEST(FakeCudartTest, AStreamWaitsForAnEventOfAnotherGpu) {
  const Work work;
  Need(cudaSetDevice(1));
  Need(cudaEventRecord(work.event_of_other, work.stream_of_other));
  Need(cudaSetDevice(0));
  Need(cudaStreamWaitEvent(work.stream, work.event_of_other, 0));
  work.Wait();
  Need(cudaEventSynchronize(work.event_of_other));
  EXPECT_EQ(cudaEventQuery(work.event_of_other), cudaSuccess);
}

// Something that a kernel is told the place of.
struct Place {
  const char* name;
  const char* error;
  void (*put)(Work& work, std::byte* at);
  void (*use)(Work& work, const Launch& launch);
  bool may_be_pinned = false;
};

const Place kPlaces[] = {
    {"Tiles", "a table's tiles",
     [](Work& work, std::byte* at) { work.table.tiles = reinterpret_cast<ema::FoldTile*>(at); },
     Fold},
    {"Targets", "a table's targets",
     [](Work& work, std::byte* at) {
       work.table.targets = reinterpret_cast<ema::DeviceFoldTarget*>(at);
     },
     Fold},
    {"Source", "a tile's source", [](Work& work, std::byte* at) { work.tile.source = at; }, Fold},
    {"Next", "a target's next", [](Work& work, std::byte* at) { work.target.next = at; }, Fold},
    {"Current", "a target's current", [](Work& work, std::byte* at) { work.target.current = at; },
     Fold},
    {"NonFinite", "a note of what is not finite",
     [](Work& work, std::byte* at) { work.table.non_finite = reinterpret_cast<uint32_t*>(at); },
     Fold, /*may_be_pinned=*/true},
    {"Runs", "the runs of sums",
     [](Work& work, std::byte* at) { work.sums.runs = reinterpret_cast<ema::DeviceSumRun*>(at); },
     Sum},
    {"Sums", "the places of sums",
     [](Work& work, std::byte* at) { work.sums.sums = reinterpret_cast<ema::SquareSums*>(at); },
     Sum},
    {"Average", "an average that is summed",
     [](Work& work, std::byte* at) { work.run.average = at; }, Sum},
    {"Raw", "raw values of a sum", [](Work& work, std::byte* at) { work.run.raw = at; }, Sum},
    {"From", "what is cast", [](Work& work, std::byte* at) { work.cast.from = at; }, Cast},
    {"To", "where a cast goes", [](Work& work, std::byte* at) { work.cast.to = at; }, Cast},
};

class FakeCudartDeathTest : public testing::TestWithParam<Place> {
 protected:
  // `memory` gives the place.
  template <typename Memory>
  static void UseWith(const Memory& memory) {
    Work work;
    GetParam().put(work, memory(work));
    work.PutItems();
    GetParam().use(work, {});
  }
};

TEST_P(FakeCudartDeathTest, AKernelUsesMemoryOfItsGpuOnly) {
  const std::string error = std::string("not its GPU's: ") + GetParam().error;
  EXPECT_DEATH(UseWith([](Work& work) { return work.pageable.data(); }), error);
  EXPECT_DEATH(UseWith([](Work& work) { return work.of_other; }), error);
  EXPECT_DEATH(UseWith([](Work& work) { return work.own + kPieceBytes - 2; }), error);
  if (!GetParam().may_be_pinned) {
    EXPECT_DEATH(UseWith([](Work& work) { return work.pinned; }), error);
  }
}

INSTANTIATE_TEST_SUITE_P(Places, FakeCudartDeathTest, testing::ValuesIn(kPlaces),
                         [](const auto& of) { return of.param.name; });

TEST(FakeCudartLaunchDeathTest, OfABlockAsItsKernelIsWrittenFor) {
  const Launch wrong[] = {
      {.grid = {0}},  {.grid = {0x80000000}}, {.grid = {1, 2}}, {.grid = {1, 1, 2}},
      {.halves = 0},  {.halves = 1},          {.halves = 4},    {.block_y = 2},
      {.block_z = 2}, {.shared_bytes = 4},
  };
  for (const auto kernel : {Fold, Sum, Cast}) {
    for (const Launch& launch : wrong) {
      const auto use = [&] {
        Work work;
        work.PutItems();
        kernel(work, launch);
      };
      EXPECT_DEATH(use(), "a launch that no GPU takes, .*: (Fold|Sum|Cast)Kernel");
    }
  }
  EXPECT_DEATH(Work().Do("OtherKernel", 1, 0, {}), "a kernel that is not ours: OtherKernel");
}

TEST(FakeCudartCopyDeathTest, ACopyIsOfTheMemoryThatItSays) {
  const auto copy = [](auto to, auto from, cudaMemcpyKind kind) {
    Work work;
    Need(cudaMemcpyAsync(to(work), from(work), 64, kind, work.stream));
  };
  const auto own = [](Work& work) { return work.own; };
  const auto of_other = [](Work& work) { return work.of_other; };
  const auto pinned = [](Work& work) { return work.pinned; };
  const auto pageable = [](Work& work) { return work.pageable.data(); };
  EXPECT_DEATH(copy(own, pageable, cudaMemcpyHostToDevice), "a copy of other memory");
  EXPECT_DEATH(copy(own, of_other, cudaMemcpyDeviceToDevice), "a copy of other memory");
  EXPECT_DEATH(copy(own, own, cudaMemcpyHostToDevice), "a copy of other memory");
  EXPECT_DEATH(copy(of_other, pinned, cudaMemcpyHostToDevice), "a copy to other memory");
  EXPECT_DEATH(copy(pageable, own, cudaMemcpyDeviceToHost), "a copy to other memory");
  EXPECT_DEATH(copy(pinned, own, cudaMemcpyDeviceToDevice), "a copy to other memory");
  const auto set_of_other = [] {
    const Work work;
    Need(cudaMemsetAsync(work.of_other, 0, 1, work.stream));
  };
  EXPECT_DEATH(set_of_other(), "other memory is set");
}

TEST(FakeCudartStreamDeathTest, WorkIsOfOneGpu) {
  const auto record = [](auto event_of, auto stream_of) {
    const Work work;
    Need(cudaEventRecord(event_of(work), stream_of(work)));
  };
  const auto own_event = [](const Work&) {
    cudaEvent_t event = nullptr;
    Need(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  };
  const auto event_of_other = [](const Work& work) { return work.event_of_other; };
  const auto stream = [](const Work& work) { return work.stream; };
  const auto stream_of_other = [](const Work& work) { return work.stream_of_other; };
  EXPECT_DEATH(record(event_of_other, stream), "an event of another device");
  EXPECT_DEATH(record(own_event, stream_of_other), "a stream of another device");
}

TEST(FakeCudartHostDeathTest, HostCodeHasNoMemoryOfAGpu) {
  const auto own = [] { return static_cast<volatile std::byte*>(Work().own); };
  EXPECT_DEATH(static_cast<void>(*own()), "");
  EXPECT_DEATH(*own() = std::byte{1}, "");
}

}  // namespace
