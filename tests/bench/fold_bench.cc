// SPDX-License-Identifier: Apache-2.0
//
// How fast pushed weights are folded: 400 MB of float32 in the pieces in which they arrive, out of
// place, in one thread, beside memcpy of the same bytes and a plain loop. Figures are pushed bytes
// per second, whatever the number of targets. The memory is the limit: for each pushed byte, memcpy
// of the whole moves two, a fold into one target three, a plain loop four. So compare with memcpy
// in the same run, not with another machine.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/device/device.h"
#include "server/device/ema_kernel.h"

namespace ema {
namespace {

constexpr int64_t kElementCount = 100'000'000;
constexpr int64_t kElementBytes = sizeof(float);
constexpr int kMaxTargets = 4;
constexpr float kUpdateWeight = 1e-4f;

// With several targets a part of the elements is folded, as many bytes in all.
constexpr int64_t ElementCount(int target_count) { return kElementCount / target_count; }

// Blocks of the CPU device, allocated at first use and kept.
class Arrays {
 public:
  static Arrays& Get() {
    static Arrays arrays;
    return arrays;
  }

  std::byte* source() { return At(0, kElementCount + 1); }  // One more, for odd addresses.
  std::byte* current(int target) { return At(1 + 2 * target, ElementCount(target + 1)); }
  std::byte* next(int target) { return At(2 + 2 * target, ElementCount(target + 1)); }

 private:
  std::byte* At(int index, int64_t element_count) {
    std::shared_ptr<Block>& block = blocks_[index];
    if (block == nullptr) {
      absl::StatusOr<std::shared_ptr<Block>> allocated =
          device_->Allocate(element_count * kElementBytes);
      if (!allocated.ok()) {
        std::fprintf(stderr, "%s\n", allocated.status().ToString().c_str());
        std::exit(1);
      }
      block = *std::move(allocated);
      float* values = reinterpret_cast<float*>(block->data());
      for (int64_t i = 0; i < element_count; ++i) {
        values[i] = static_cast<float>(i % 1000 + index);
      }
    }
    return block->data();
  }

  const std::unique_ptr<Device> device_ = MakeCpuDevice(0);
  std::shared_ptr<Block> blocks_[1 + 2 * kMaxTargets];
};

// Arguments: KiB per op, number of targets, byte offset of the source, and 1 if the source of all
// ops is the same, which then is in a cache like bytes just received.
void BM_Fold(benchmark::State& state) {
  const int64_t elements_per_op = state.range(0) * 1024 / kElementBytes;
  const int target_count = static_cast<int>(state.range(1));
  const std::byte* source = Arrays::Get().source() + state.range(2);
  const bool is_source_cached = state.range(3) != 0;
  std::vector<FoldTarget> first_targets(target_count);
  for (int i = 0; i < target_count; ++i) {
    first_targets[i] = {FoldTarget::Kind::kAverage, kUpdateWeight, Arrays::Get().current(i),
                        Arrays::Get().next(i)};
  }
  std::vector<FoldTarget> targets = first_targets;
  const int64_t element_count = ElementCount(target_count);
  for (auto _ : state) {
    for (int64_t begin = 0; begin < element_count; begin += elements_per_op) {
      const int64_t offset = begin * kElementBytes;
      for (int i = 0; i < target_count; ++i) {
        targets[i].current = first_targets[i].current + offset;
        targets[i].next = first_targets[i].next + offset;
      }
      benchmark::DoNotOptimize(
          FoldOnCpu({Dtype::kFloat32, is_source_cached ? source : source + offset,
                     std::min(elements_per_op, element_count - begin), targets}));
    }
  }
  state.SetBytesProcessed(state.iterations() * element_count * kElementBytes);
}

// What the compiler makes of the formula.
void BM_PlainLoop(benchmark::State& state) {
  const float* source = reinterpret_cast<const float*>(Arrays::Get().source());
  const float* current = reinterpret_cast<const float*>(Arrays::Get().current(0));
  float* next = reinterpret_cast<float*>(Arrays::Get().next(0));
  for (auto _ : state) {
    for (int64_t i = 0; i < kElementCount; ++i) {
      next[i] = current[i] + kUpdateWeight * (source[i] - current[i]);
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kElementCount * kElementBytes);
}

void BM_Memcpy(benchmark::State& state) {
  const int64_t total_bytes = kElementCount * kElementBytes;
  const int64_t bytes_per_op = state.range(0) * 1024;
  const std::byte* source = Arrays::Get().source();
  std::byte* next = Arrays::Get().next(0);
  for (auto _ : state) {
    for (int64_t begin = 0; begin < total_bytes; begin += bytes_per_op) {
      std::memcpy(next + begin, source + begin, std::min(bytes_per_op, total_bytes - begin));
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * total_bytes);
}

BENCHMARK(BM_Fold)
    ->ArgNames({"KiB", "targets", "offset", "cached"})
    ->Args({64, 1, 0, 0})
    ->Args({64, 1, 1, 0})
    ->Args({64, 1, 1, 1})
    ->Args({64, 4, 0, 0})
    ->Args({64, 4, 0, 1})
    ->Args({8, 1, 0, 0})
    ->Unit(benchmark::kMillisecond);
BENCHMARK(BM_PlainLoop)->Unit(benchmark::kMillisecond);
// In pieces, and as a whole: then glibc, too, stores past the caches.
BENCHMARK(BM_Memcpy)->ArgName("KiB")->Arg(64)->Arg(1 << 20)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ema

BENCHMARK_MAIN();
