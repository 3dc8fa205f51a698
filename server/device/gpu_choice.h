// SPDX-License-Identifier: Apache-2.0
//
// Which GPUs of a machine this build can use.
#ifndef EMA_SERVER_DEVICE_GPU_CHOICE_H_
#define EMA_SERVER_DEVICE_GPU_CHOICE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ema {

struct Gpu {
  std::string model;   // "NVIDIA H200".
  int capability = 0;  // Compute capability times ten: 90 is 9.0.
};

struct GpuList {
  std::vector<Gpu> gpus;  // By index.
  // The lowest capability that the build has code for. GPUs with a higher one can run its PTX.
  int oldest_capability = 0;
};

// FAILED_PRECONDITION: there is no GPU of that index, or the build has no code for it; the message
// names it and says what is needed.
absl::Status CheckGpu(const GpuList& list, int index);

// "2 GPUs", and why each unusable one cannot be used.
std::string Describe(const GpuList& list);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_GPU_CHOICE_H_
