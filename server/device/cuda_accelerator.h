// SPDX-License-Identifier: Apache-2.0
//
// An NVIDIA GPU: device memory from LibTorch's caching allocator, streams from its pool. Events and
// pinned memory are CUDA's own: LibTorch's events end the process once the GPU has failed, and its
// pinned memory is in libtorch_cuda.so, which takes gigabytes with its dependencies. Declared in
// every build; one without a CUDA toolkit has no GPUs.
#ifndef EMA_SERVER_DEVICE_CUDA_ACCELERATOR_H_
#define EMA_SERVER_DEVICE_CUDA_ACCELERATOR_H_

#include <memory>

#include "absl/status/statusor.h"
#include "server/device/accelerator.h"
#include "server/device/gpu_choice.h"

namespace ema {

// The GPUs of the machine, at least one; CheckGpu() says which of them can be used. Takes no memory
// on them. FAILED_PRECONDITION: there is none; the message says why: the build, the driver, or the
// machine.
absl::StatusOr<GpuList> ListCudaDevices();

// The GPU of that index, with the memory that is free on it now. Changes LibTorch for the whole
// process: how its allocator takes memory, and that its guards leave a thread on the GPU that it
// used last. FAILED_PRECONDITION: as ListCudaDevices() and CheckGpu(), or the driver finds no code
// for it. INTERNAL, DEVICE: it does not work.
//
// It is known to end the process in one case: memory is short, so that LibTorch frees its cache,
// and the GPU has failed at that moment.
//
// REQUIRES: libtorch_cuda.so is not used in this process.
absl::StatusOr<std::shared_ptr<Accelerator>> MakeCudaAccelerator(int index);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_CUDA_ACCELERATOR_H_
