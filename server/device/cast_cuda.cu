// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "server/device/cast_cuda.h"
#include "server/device/cast_element.h"

namespace ema {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kVector = 4;  // Elements that a thread casts at once.
constexpr int64_t kMaxBlocks = int64_t{1} << 30;

__global__ void __launch_bounds__(kThreads)
    CastKernel(SourceFormat format, const float* from, uint16_t* to, int64_t element_count) {
  const int64_t step = int64_t{gridDim.x} * kThreads * kVector;
  int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  for (; i + kVector <= element_count; i += step) {
    const float4 values = *reinterpret_cast<const float4*>(from + i);
    *reinterpret_cast<ushort4*>(to + i) =
        make_ushort4(NarrowBits(format, values.x), NarrowBits(format, values.y),
                     NarrowBits(format, values.z), NarrowBits(format, values.w));
  }
  // One thread has the last few.
  for (; i < element_count && i + kVector > element_count; ++i) {
    to[i] = NarrowBits(format, from[i]);
  }
}

}  // namespace

cudaError_t LoadCast() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, CastKernel);
}

cudaError_t LaunchCast(SourceFormat format, const std::byte* from, std::byte* to,
                       int64_t element_count, cudaStream_t stream) {
  if (element_count == 0) return cudaSuccess;
  constexpr int64_t kPerBlock = kThreads * kVector;
  const int64_t blocks = std::min((element_count + kPerBlock - 1) / kPerBlock, kMaxBlocks);
  CastKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      format, reinterpret_cast<const float*>(from), reinterpret_cast<uint16_t*>(to), element_count);
  return cudaGetLastError();
}

}  // namespace ema
