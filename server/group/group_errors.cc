// SPDX-License-Identifier: Apache-2.0
#include "server/group/group_errors.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"

namespace ema::group {

absl::Status ModelBusyError(std::string_view model, std::string_view what) {
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                   absl::StrCat("model \"", std::string(model), "\" ", std::string(what)),
                   absl::Milliseconds(50));
}

absl::Status ModelNotFoundError(std::string_view model) {
  EMA_RETURN_IF_ERROR(ValidateName("model", model));
  return MakeError(absl::StatusCode::kNotFound, ErrorReason::kModelNotFound,
                   absl::StrCat("model \"", std::string(model), "\" does not exist"));
}

absl::Status FencedError(std::string_view model, std::string_view why) {
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                   absl::StrCat("model \"", std::string(model), "\": ", std::string(why)));
}

absl::Status NotMemberError() {
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                   "this server has not joined its group, or is leaving it", absl::Seconds(1));
}

absl::Status NoDataDirError() {
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoDataDir,
                   "the server was started without --data-dir");
}

absl::Status RegistryError(const absl::Status& status) {
  // The caller would think that its own token was rejected.
  const bool rejects_server = absl::IsPermissionDenied(status) || absl::IsUnauthenticated(status);
  if (!absl::IsUnavailable(status) && !rejects_server) return status;
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kRegistryUnavailable,
                   std::string(status.message()), absl::Seconds(1));
}

}  // namespace ema::group
