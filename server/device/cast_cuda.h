// SPDX-License-Identifier: Apache-2.0
//
// The launch of the cast's kernel, for C++ that is not compiled by nvcc.
#ifndef EMA_SERVER_DEVICE_CAST_CUDA_H_
#define EMA_SERVER_DEVICE_CAST_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "server/device/fold_element.h"

namespace ema {

// As LoadFold().
cudaError_t LoadCast();

// Queues to[i] = NarrowBits(format, from[i]) for float32s in device memory. `from` is aligned to 16
// bytes, `to` to 8; they do not overlap. As LaunchFold(); 0 elements are nothing.
cudaError_t LaunchCast(SourceFormat format, const std::byte* from, std::byte* to,
                       int64_t element_count, cudaStream_t stream);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_CAST_CUDA_H_
