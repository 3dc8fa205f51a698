// SPDX-License-Identifier: Apache-2.0
//
// The launch of the sums' kernel, for C++ that is not compiled by nvcc.
#ifndef EMA_SERVER_DEVICE_SUM_CUDA_H_
#define EMA_SERVER_DEVICE_SUM_CUDA_H_

#include <cuda_runtime_api.h>

#include "server/device/sum_table.h"

namespace ema {

// As LoadFold().
cudaError_t LoadSum();

// Queues the sums of `table`, whose addresses are the device's, on `stream`. As LaunchFold(); a
// table without tiles is nothing.
cudaError_t LaunchSum(const SumTable& table, cudaStream_t stream);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_SUM_CUDA_H_
