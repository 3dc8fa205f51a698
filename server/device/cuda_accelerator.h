// SPDX-License-Identifier: Apache-2.0
//
// A GPU of NVIDIA, by way of LibTorch: device memory of its caching allocator, streams of its pool,
// events. In every build; one that had no CUDA toolkit has no GPUs.
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

// The GPU of that index. Its memory is what is free on it now. FAILED_PRECONDITION: as
// ListCudaDevices() and CheckGpu(), or the driver finds no code for it. INTERNAL, DEVICE: it does
// not work.
absl::StatusOr<std::shared_ptr<Accelerator>> MakeCudaAccelerator(int index);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_CUDA_ACCELERATOR_H_
