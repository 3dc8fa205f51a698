// SPDX-License-Identifier: Apache-2.0
//
// The launch of the fold's kernel, for C++ that is not compiled by nvcc.
#ifndef EMA_SERVER_DEVICE_FOLD_CUDA_H_
#define EMA_SERVER_DEVICE_FOLD_CUDA_H_

#include <cuda_runtime_api.h>

#include "server/device/fold_table.h"

namespace ema {

// Queues the folds of `table`, whose addresses are the device's, on `stream`. Returns at once: what
// goes wrong while it runs shows at a later call, as is CUDA's way. A table without tiles is
// nothing.
cudaError_t LaunchFold(const FoldTable& table, cudaStream_t stream);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_FOLD_CUDA_H_
