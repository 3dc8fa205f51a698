// SPDX-License-Identifier: Apache-2.0
//
// Errors that several classes of the group layer return.
#ifndef EMA_SERVER_GROUP_GROUP_ERRORS_H_
#define EMA_SERVER_GROUP_GROUP_ERRORS_H_

#include <string_view>

#include "absl/status/status.h"

namespace ema::group {

// UNAVAILABLE, MODEL_BUSY: the caller should try again soon. `what`: such as "is being created".
absl::Status ModelBusyError(std::string_view model, std::string_view what);
// NOT_FOUND, MODEL_NOT_FOUND. INVALID_ARGUMENT, BAD_NAME: no model can have that name.
absl::Status ModelNotFoundError(std::string_view model);
// ABORTED, FENCED.
absl::Status FencedError(std::string_view model, std::string_view why);
// UNAVAILABLE, GROUP_DEGRADED: this server is not a member now.
absl::Status NotMemberError();
// FAILED_PRECONDITION, NO_DATA_DIR.
absl::Status NoDataDirError();
// `status`, an error of the registry. UNAVAILABLE, REGISTRY_UNAVAILABLE: it has not answered, or it
// rejects this server's user.
absl::Status RegistryError(const absl::Status& status);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_GROUP_ERRORS_H_
