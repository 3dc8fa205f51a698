// SPDX-License-Identifier: Apache-2.0
#include "server/device/gpu_choice.h"

#include <cstddef>

#include "absl/strings/str_cat.h"

namespace ema {
namespace {

std::string Dotted(int capability) { return absl::StrCat(capability / 10, ".", capability % 10); }

}  // namespace

absl::Status CheckGpu(const GpuList& list, int index) {
  if (index < 0 || static_cast<size_t>(index) >= list.gpus.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no GPU of index ", index, "; there are ", list.gpus.size()));
  }
  const Gpu& gpu = list.gpus[static_cast<size_t>(index)];
  if (gpu.capability >= list.oldest_capability) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "GPU ", index, ", ", gpu.model, ", has compute capability ", Dotted(gpu.capability),
      "; this server has code for ", Dotted(list.oldest_capability), " and later"));
}

std::string Describe(const GpuList& list) {
  std::string text = absl::StrCat(list.gpus.size(), list.gpus.size() == 1 ? " GPU" : " GPUs");
  for (size_t i = 0; i < list.gpus.size(); ++i) {
    const absl::Status status = CheckGpu(list, static_cast<int>(i));
    if (!status.ok()) absl::StrAppend(&text, "; ", std::string(status.message()));
  }
  return text;
}

}  // namespace ema
