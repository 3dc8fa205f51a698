// SPDX-License-Identifier: Apache-2.0
//
// What fills in the rows of the benchmark on a GPU. A row holds what it needs, from when it is
// filled in until it is destroyed.
#ifndef EMA_TESTS_BENCH_ROWS_GPU_H_
#define EMA_TESTS_BENCH_ROWS_GPU_H_

#include <cstdint>
#include <memory>
#include <string>

#include "server/device/accelerator.h"
#include "server/device/accelerator_device.h"
#include "tests/bench/bench.h"
#include "tests/bench/row.h"

namespace ema::bench {

// What all of them share.
struct GpuBench {
  BenchOptions options;
  std::shared_ptr<Accelerator> accelerator;
  std::string server_device = "cuda:0";
  // What a GPU does in a millisecond is done so often before it is waited for, which takes tens of
  // microseconds.
  int repeats = 20;
  // Of gpu_receive: others than those of a server. Streams 0: as many as one here has threads.
  int streams = 0;
  int64_t slab_bytes = AcceleratorOptions().slab_bytes;

  int64_t parameters() const { return options.megabytes * 250'000; }
  // Of the rows about small ones; 1e5 at 1 GB.
  int64_t small_tensors() const { return options.megabytes * 100; }
  static constexpr int64_t kSmallTensorElements = 1000;
};

// rows_gpu_kernel.cc: weights that are on the GPU already.
void FoldBesideCopy(const GpuBench& bench, Row& row);
void FourTracksBesideCopy(const GpuBench& bench, Row& row);
void FourTracksAtOnce(const GpuBench& bench, Row& row);
void FourTracksBesideForeach(const GpuBench& bench, Row& row);
void FourTracksBesideLoop(const GpuBench& bench, Row& row);
void SmallTensorsInOneTable(const GpuBench& bench, Row& row);

// rows_gpu_stream.cc: weights that arrive in host memory.
void ReceiveBesideCopy(const GpuBench& bench, Row& row);
void SmallTensorsArriving(const GpuBench& bench, Row& row);

// rows_gpu_model.cc: models on the GPU.
void PushBesideCpu(const GpuBench& bench, Row& row);
void PushThroughMemoryBesideCpu(const GpuBench& bench, Row& row);
void SecondReader(const GpuBench& bench, Row& row);
void PullAsBfloat16(const GpuBench& bench, Row& row);

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_ROWS_GPU_H_
