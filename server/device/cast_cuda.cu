// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "server/device/cast_cuda.h"

namespace ema {
namespace {

constexpr int64_t kMaxBlocks = int64_t{1} << 30;

__global__ void __launch_bounds__(kCastThreads) CastKernel(CastRun run) {
  CastOfThread(run, int64_t{blockIdx.x} * kCastThreads + threadIdx.x,
               int64_t{gridDim.x} * kCastThreads);
}

}  // namespace

cudaError_t LoadCast() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, CastKernel);
}

cudaError_t LaunchCast(const CastRun& run, cudaStream_t stream) {
  if (run.element_count == 0) return cudaSuccess;
  constexpr int64_t kPerBlock = kCastThreads * kCastVector;
  const int64_t blocks = std::min((run.element_count + kPerBlock - 1) / kPerBlock, kMaxBlocks);
  CastKernel<<<static_cast<unsigned>(blocks), kCastThreads, 0, stream>>>(run);
  return cudaGetLastError();
}

}  // namespace ema
