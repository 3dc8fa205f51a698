// SPDX-License-Identifier: Apache-2.0
//
// The launch of the cast's kernel, for C++ that is not compiled by nvcc.
#ifndef EMA_SERVER_DEVICE_CAST_CUDA_H_
#define EMA_SERVER_DEVICE_CAST_CUDA_H_

#include <cuda_runtime_api.h>

#include "server/device/cast_run.h"

namespace ema {

// As LoadFold().
cudaError_t LoadCast();

// Queues `run`, whose addresses are the device's, on `stream`. As LaunchFold(); 0 elements are
// nothing.
cudaError_t LaunchCast(const CastRun& run, cudaStream_t stream);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_CAST_CUDA_H_
