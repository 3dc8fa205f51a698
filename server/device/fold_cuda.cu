// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>

#include "server/device/fold_cuda.h"

namespace ema {
namespace {

// So many are always there to be had.
constexpr int64_t kMaxBlocks = int64_t{1} << 30;

__global__ void __launch_bounds__(kFoldThreads) FoldKernel(FoldTable table) {
  for (int64_t tile = blockIdx.x; tile < table.tile_count; tile += gridDim.x) {
    FoldOfThread(table, tile, static_cast<int>(threadIdx.x));
  }
}

}  // namespace

int OldestCapability() {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};  // 800, 900 and so on.
  return *std::min_element(std::begin(kArchitectures), std::end(kArchitectures)) / 10;
}

cudaError_t LoadFold() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, FoldKernel);
}

cudaError_t LaunchFold(const FoldTable& table, cudaStream_t stream) {
  if (table.tile_count == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>(std::min(table.tile_count, kMaxBlocks));
  FoldKernel<<<blocks, kFoldThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

}  // namespace ema
