// SPDX-License-Identifier: Apache-2.0
#include "server/device/device.h"

#include <charconv>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/device/accelerator_device.h"
#include "server/device/cuda_accelerator.h"
#include "server/device/host_memory_bytes.h"

namespace ema {

absl::Status CheckFold(const FoldOp& op, std::string_view device) {
  if (IsFloat(op.source_dtype)) return absl::OkStatus();
  for (const FoldTarget& target : op.targets) {
    if (target.kind == FoldKind::kCopy) continue;
    return MakeError(absl::StatusCode::kInternal, ErrorReason::kBug,
                     absl::StrCat("device \"", std::string(device),
                                  "\": elements that are not floats, of dtype ",
                                  static_cast<int>(op.source_dtype), ", can only be copied"));
  }
  return absl::OkStatus();
}

namespace {

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int index, int64_t kept_free_bytes) {
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<Accelerator> accelerator, MakeCudaAccelerator(index));
  // The second reader of a version finds all of it, if it is not larger.
  const int64_t kept_host_bytes = HostMemoryBytes() / 4;
  return MakeAcceleratorDevice(std::move(accelerator), {.kept_free_bytes = kept_free_bytes,
                                                        .kept_host_bytes = kept_host_bytes});
}

absl::StatusOr<std::unique_ptr<Device>> MakeAnyDevice(int64_t kept_free_bytes) {
  const absl::StatusOr<GpuList> list = ListCudaDevices();
  const int gpu_count = list.ok() ? static_cast<int>(list->gpus.size()) : 0;
  for (int i = 0; i < gpu_count; ++i) {
    absl::StatusOr<std::unique_ptr<Device>> device = MakeCudaDevice(i, kept_free_bytes);
    if (!absl::IsFailedPrecondition(device.status())) return device;
  }
  return MakeCpuDevice(kept_free_bytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> MakeDevice(std::string_view name, int64_t kept_free_bytes) {
  constexpr std::string_view kCuda = "cuda:";
  if (name == "auto") return MakeAnyDevice(kept_free_bytes);
  if (name == "cpu") return MakeCpuDevice(kept_free_bytes);
  int index = -1;
  if (name.starts_with(kCuda)) {
    const std::string_view digits = name.substr(kCuda.size());
    const char* const digits_end = digits.data() + digits.size();
    const auto [end, error] = std::from_chars(digits.data(), digits_end, index);
    if (error != std::errc() || end != digits_end) index = -1;
  }
  if (index < 0) {
    return BadRequest(
        absl::StrCat("device \"", std::string(name),
                     "\" is unknown; expected \"auto\", \"cpu\", or \"cuda:\" and the "
                     "index of a GPU"));
  }
  absl::StatusOr<std::unique_ptr<Device>> device = MakeCudaDevice(index, kept_free_bytes);
  if (absl::IsFailedPrecondition(device.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat("device \"", std::string(name), "\": ", device.status().message()));
  }
  return device;
}

std::string DescribeGpus() {
  const absl::StatusOr<GpuList> list = ListCudaDevices();
  return list.ok() ? Describe(*list) : std::string(list.status().message());
}

}  // namespace ema
