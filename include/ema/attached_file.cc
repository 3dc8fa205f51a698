// SPDX-License-Identifier: Apache-2.0
#include "ema/attached_file.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"

namespace ema {

absl::Status ValidateAttachedName(std::string_view name) {
  EMA_RETURN_IF_ERROR(ValidateName("file", name));
  const std::string text(name);
  // Not only the names that a checkpoint uses: readers take every such file for weights.
  if (absl::EndsWithIgnoreCase(text, ".safetensors") ||
      absl::EndsWithIgnoreCase(text, ".safetensors.index.json")) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kBadName,
        absl::StrCat("file \"", text,
                     "\": this name is reserved for the weights that the server writes"));
  }
  return absl::OkStatus();
}

}  // namespace ema
