// SPDX-License-Identifier: Apache-2.0
//
// A GPU of NVIDIA: device memory of LibTorch's caching allocator, streams of its pool. Events and
// pinned memory are CUDA's own: LibTorch's events end the process once the GPU has failed, and its
// pinned memory is in libtorch_cuda.so, which is gigabytes with what it needs. In every build; one
// that had no CUDA toolkit has no GPUs.
#ifndef EMA_SERVER_DEVICE_CUDA_ACCELERATOR_H_
#define EMA_SERVER_DEVICE_CUDA_ACCELERATOR_H_

#include <memory>

#include "absl/status/statusor.h"
#include "server/device/accelerator.h"
#include "server/device/gpu_choice.h"

namespace ema {

// The GPUs there are, 1 or more; CheckGpu() says which of them can be used. Takes no memory on
// them. FAILED_PRECONDITION: there is none; the message says why: the build, the driver, or the
// machine.
absl::StatusOr<GpuList> ListCudaDevices();

// The GPU of that index. Its memory is what is free on it now. Changes LibTorch for the whole
// process: how its allocator takes memory, and that its guards leave a thread on the GPU that it
// used last. FAILED_PRECONDITION: as ListCudaDevices() and CheckGpu(), or the driver finds no code
// for it. INTERNAL, DEVICE: it does not work.
//
// Known to end the process: memory is short, LibTorch gives back what it keeps to find some, and
// the GPU turns out to have failed just then.
//
// REQUIRES: libtorch_cuda.so is not used in this process.
absl::StatusOr<std::shared_ptr<Accelerator>> MakeCudaAccelerator(int index);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_CUDA_ACCELERATOR_H_
