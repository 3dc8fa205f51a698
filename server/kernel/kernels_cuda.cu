// SPDX-License-Identifier: Apache-2.0
//
// The formulas are in fold_element.h, sum_element.h and cast_element.h; what one thread does with
// them, and why so, in fold_table.h, sum_table.h and cast_run.h, which tests walk on the CPU.
#include <algorithm>
#include <iterator>

#include "server/kernel/kernels_cuda.h"

namespace ema {
namespace {

// So many are always there to be had.
constexpr int64_t kMaxBlocks = int64_t{1} << 30;

// A block does one tile, or each gridDim-th; a thread its lanes of them.
__global__ void __launch_bounds__(kFoldThreads) FoldKernel(FoldTable table) {
  for (int64_t tile = blockIdx.x; tile < table.tile_count; tile += gridDim.x) {
    FoldOfThread(table, tile, static_cast<int>(threadIdx.x));
  }
}

// A thread adds the same elements in every launch, at a place of its own.
__global__ void __launch_bounds__(kSumThreads) SumKernel(SumTable table) {
  SumOfThread(table, blockIdx.x, static_cast<int>(threadIdx.x));
}

// A thread casts every n-th vector of kCastVector elements, where n is the grid's thread count.
__global__ void __launch_bounds__(kCastThreads) CastKernel(CastRun run) {
  CastOfThread(run, int64_t{blockIdx.x} * kCastThreads + threadIdx.x,
               int64_t{gridDim.x} * kCastThreads);
}

}  // namespace

int OldestCapability() {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};  // 800, 900 and so on.
  return *std::min_element(std::begin(kArchitectures), std::end(kArchitectures)) / 10;
}

cudaError_t LoadKernels() {
  const void* const kernels[] = {reinterpret_cast<const void*>(FoldKernel),
                                 reinterpret_cast<const void*>(SumKernel),
                                 reinterpret_cast<const void*>(CastKernel)};
  for (const void* const kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchFold(const FoldTable& table, cudaStream_t stream) {
  if (table.tile_count == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>(std::min(table.tile_count, kMaxBlocks));
  FoldKernel<<<blocks, kFoldThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

cudaError_t LaunchSum(const SumTable& table, cudaStream_t stream) {
  if (table.tile_count == 0) return cudaSuccess;
  SumKernel<<<static_cast<unsigned>(table.block_count), kSumThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

cudaError_t LaunchCast(const CastRun& run, cudaStream_t stream) {
  if (run.element_count == 0) return cudaSuccess;
  constexpr int64_t kPerBlock = kCastThreads * kCastVector;
  const int64_t blocks = std::min((run.element_count + kPerBlock - 1) / kPerBlock, kMaxBlocks);
  CastKernel<<<static_cast<unsigned>(blocks), kCastThreads, 0, stream>>>(run);
  return cudaGetLastError();
}

}  // namespace ema
