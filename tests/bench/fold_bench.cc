// SPDX-License-Identifier: Apache-2.0
//
// How fast pushed weights are folded: 400 MB of float32 in the pieces in which they arrive, out of
// place, in one thread, beside memcpy of the same bytes and a plain loop. Figures are pushed bytes
// per second, whatever the number of targets; moved_bytes_per_second counts all that the memory
// must move. The memory is the limit: for each pushed byte, memcpy of the whole moves two, a fold
// into one target three (also in place), into a float64 one five, a plain loop four. So compare
// with memcpy in the same run, not with another machine.
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
#include "server/kernel/fold.h"

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

// Folds `element_count` elements in ops of `elements_per_op`.
void FoldAll(benchmark::State& state, const std::byte* source, bool is_source_cached,
             int64_t element_count, int64_t elements_per_op,
             const std::vector<FoldTarget>& first_targets, int moved_per_pushed) {
  std::vector<FoldTarget> targets = first_targets;
  for (auto _ : state) {
    for (int64_t begin = 0; begin < element_count; begin += elements_per_op) {
      const int64_t offset = begin * kElementBytes;
      for (size_t i = 0; i < targets.size(); ++i) {
        const FoldTarget& first = first_targets[i];
        const int64_t stored = begin * first.StoredBytes(kElementBytes);
        targets[i].current = first.current + stored;
        targets[i].next = first.next + stored;
      }
      benchmark::DoNotOptimize(
          FoldOnCpu({Dtype::kFloat32, is_source_cached ? source : source + offset,
                     std::min(elements_per_op, element_count - begin), targets}));
    }
  }
  const int64_t pushed_bytes = state.iterations() * element_count * kElementBytes;
  state.SetBytesProcessed(pushed_bytes);
  state.counters["moved_bytes_per_second"] =
      benchmark::Counter(static_cast<double>(pushed_bytes * moved_per_pushed),
                         benchmark::Counter::kIsRate, benchmark::Counter::kIs1024);
}

// Arguments: KiB per op, number of targets, byte offset of the source, and 1 if the source of all
// ops is the same, which then is in a cache like bytes just received.
void BM_Fold(benchmark::State& state) {
  const int target_count = static_cast<int>(state.range(1));
  const bool is_source_cached = state.range(3) != 0;
  std::vector<FoldTarget> targets(target_count);
  for (int i = 0; i < target_count; ++i) {
    targets[i] = {FoldTarget::Kind::kAverage, kUpdateWeight, Arrays::Get().current(i),
                  Arrays::Get().next(i)};
  }
  FoldAll(state, Arrays::Get().source() + state.range(2), is_source_cached,
          ElementCount(target_count), state.range(0) * 1024 / kElementBytes, targets,
          2 * target_count + (is_source_cached ? 0 : 1));
}

// Over the old average. Argument: KiB per op.
void BM_FoldInPlace(benchmark::State& state) {
  Arrays& arrays = Arrays::Get();
  const FoldTarget target = {FoldTarget::Kind::kAverage, kUpdateWeight, arrays.current(0),
                             arrays.current(0)};
  FoldAll(state, arrays.source(), false, kElementCount, state.range(0) * 1024 / kElementBytes,
          {target}, 3);
}

// Arguments: KiB per op, and 1 to write over the old average. Half as many elements, as these
// averages are twice as large.
void BM_FoldFloat64(benchmark::State& state) {
  const bool in_place = state.range(1) != 0;
  Arrays& arrays = Arrays::Get();
  const FoldTarget target = {FoldTarget::Kind::kAverageFloat64, kUpdateWeight, arrays.current(0),
                             in_place ? arrays.current(0) : arrays.next(0)};
  FoldAll(state, arrays.source(), false, kElementCount / 2, state.range(0) * 1024 / kElementBytes,
          {target}, 5);
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
BENCHMARK(BM_FoldInPlace)->ArgName("KiB")->Arg(64)->Arg(1 << 20)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_FoldFloat64)
    ->ArgNames({"KiB", "in_place"})
    ->Args({64, 0})
    ->Args({64, 1})
    ->Unit(benchmark::kMillisecond);
BENCHMARK(BM_PlainLoop)->Unit(benchmark::kMillisecond);
// In pieces, and as a whole: then glibc, too, stores past the caches.
BENCHMARK(BM_Memcpy)->ArgName("KiB")->Arg(64)->Arg(1 << 20)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ema

BENCHMARK_MAIN();
