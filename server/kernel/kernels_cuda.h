// SPDX-License-Identifier: Apache-2.0
//
// The launches of the kernels, for C++ that is not compiled by nvcc.
#ifndef EMA_SERVER_KERNEL_KERNELS_CUDA_H_
#define EMA_SERVER_KERNEL_KERNELS_CUDA_H_

#include <cuda_runtime_api.h>

#include "server/kernel/cast_run.h"
#include "server/kernel/fold_table.h"
#include "server/kernel/sum_table.h"

namespace ema {

// The oldest compute capability that the kernels are compiled for, times ten: 80 is 8.0.
int OldestCapability();

// Brings the kernels to the thread's current device, which else happens at the first launch of
// each; an error of CUDA if there is no code for it.
cudaError_t LoadKernels();

// These queue on `stream` what `table` or `run` says, whose addresses are the device's, and return
// at once: what goes wrong while it runs shows at a later call, as is CUDA's way. A table without
// tiles, or a run without elements, is nothing.
cudaError_t LaunchFold(const FoldTable& table, cudaStream_t stream);
cudaError_t LaunchSum(const SumTable& table, cudaStream_t stream);
cudaError_t LaunchCast(const CastRun& run, cudaStream_t stream);

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_KERNELS_CUDA_H_
