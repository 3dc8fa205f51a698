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

absl::StatusOr<std::unique_ptr<Device>> MakeDevice(std::string_view name, int64_t kept_free_bytes) {
  constexpr std::string_view kCuda = "cuda:";
  if (name == "auto") name = CountCudaDevices().ok() ? "cuda:0" : "cpu";
  if (name == "cpu") return MakeCpuDevice(kept_free_bytes);
  int index = -1;
  if (name.starts_with(kCuda)) {
    const std::string_view digits = name.substr(kCuda.size());
    const char* const digits_end = digits.data() + digits.size();
    const auto [end, error] = std::from_chars(digits.data(), digits_end, index);
    if (error != std::errc() || end != digits_end) index = -1;
  }
  if (index < 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadRequest,
                     absl::StrCat("device \"", std::string(name),
                                  "\" is unknown; expected \"auto\", \"cpu\", or \"cuda:\" and the "
                                  "index of a GPU"));
  }
  absl::StatusOr<std::shared_ptr<Accelerator>> accelerator = MakeCudaAccelerator(index);
  if (absl::IsFailedPrecondition(accelerator.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat("device \"", std::string(name), "\": ", accelerator.status().message()));
  }
  EMA_RETURN_IF_ERROR(accelerator.status());
  return MakeAcceleratorDevice(*std::move(accelerator), {.kept_free_bytes = kept_free_bytes});
}

std::string DescribeGpus() {
  const absl::StatusOr<int> count = CountCudaDevices();
  if (!count.ok()) return std::string(count.status().message());
  return absl::StrCat(*count, *count == 1 ? " GPU" : " GPUs");
}

}  // namespace ema
