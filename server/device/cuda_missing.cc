// SPDX-License-Identifier: Apache-2.0
//
// Instead of cuda_accelerator.cc, in a build without the CUDA toolkit.
#include "server/device/cuda_accelerator.h"

namespace ema {

absl::StatusOr<GpuList> ListCudaDevices() {
  return absl::FailedPreconditionError(
      "no GPU can be used: this server was built without the CUDA toolkit");
}

absl::StatusOr<std::shared_ptr<Accelerator>> MakeCudaAccelerator(int) {
  return ListCudaDevices().status();
}

std::string CudaVersion() { return "none"; }

}  // namespace ema
