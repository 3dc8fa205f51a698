// SPDX-License-Identifier: Apache-2.0
//
// Launches of the kernels, for C++ that nvcc does not compile.
#ifndef EMA_SERVER_KERNEL_KERNELS_CUDA_H_
#define EMA_SERVER_KERNEL_KERNELS_CUDA_H_

#include <cuda_runtime_api.h>

#include "server/kernel/cast_run.h"
#include "server/kernel/fold_table.h"
#include "server/kernel/sum_table.h"

namespace ema {

// The oldest compute capability that the kernels are compiled for, times ten: 80 is 8.0.
int OldestCapability();

// Loads the kernels to the thread's current device, which would otherwise happen at the first
// launch of each. Fails if there is no code for it.
cudaError_t LoadKernels();

// These queue the work of `table` or `run`, whose addresses are the device's, on `stream` and
// return at once. Like other CUDA calls they do not report failures of the work itself, which a
// later call reports. A table without tiles, or a run without elements, does nothing.
cudaError_t LaunchFold(const FoldTable& table, cudaStream_t stream);
cudaError_t LaunchSum(const SumTable& table, cudaStream_t stream);
cudaError_t LaunchCast(const CastRun& run, cudaStream_t stream);

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_KERNELS_CUDA_H_
