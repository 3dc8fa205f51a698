// SPDX-License-Identifier: Apache-2.0
#include "server/device/device.h"

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"

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
  if (name == "auto" || name == "cpu") return MakeCpuDevice(kept_free_bytes);
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadRequest,
                   absl::StrCat("device \"", std::string(name),
                                "\" is unknown; this build has \"auto\" and \"cpu\""));
}

}  // namespace ema
