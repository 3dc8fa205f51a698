// SPDX-License-Identifier: Apache-2.0
//
// The launch of the fold's kernel, for C++ that is not compiled by nvcc.
#ifndef EMA_SERVER_DEVICE_FOLD_CUDA_H_
#define EMA_SERVER_DEVICE_FOLD_CUDA_H_

#include <cuda_runtime_api.h>

#include "server/device/fold_table.h"

namespace ema {

// The oldest compute capability that the kernels are compiled for, times ten: 80 is 8.0.
int OldestCapability();

// Brings the kernel to the thread's current device, which else happens at the first launch; an
// error of CUDA if there is no code for it.
cudaError_t LoadFold();

// Queues the folds of `table`, whose addresses are the device's, on `stream`. Returns at once: what
// goes wrong while it runs shows at a later call, as is CUDA's way. A table without tiles is
// nothing.
cudaError_t LaunchFold(const FoldTable& table, cudaStream_t stream);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_FOLD_CUDA_H_
