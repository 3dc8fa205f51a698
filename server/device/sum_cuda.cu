// SPDX-License-Identifier: Apache-2.0
#include "server/device/sum_cuda.h"

namespace ema {
namespace {

__global__ void __launch_bounds__(kSumThreads) SumKernel(SumTable table) {
  SumOfThread(table, blockIdx.x, static_cast<int>(threadIdx.x));
}

}  // namespace

cudaError_t LoadSum() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, SumKernel);
}

cudaError_t LaunchSum(const SumTable& table, cudaStream_t stream) {
  if (table.tile_count == 0) return cudaSuccess;
  SumKernel<<<static_cast<unsigned>(table.block_count), kSumThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

}  // namespace ema
