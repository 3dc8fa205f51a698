// SPDX-License-Identifier: Apache-2.0
#include "client/cli/exit_code.h"

#include "ema/error_reason.h"

namespace ema::cli {

int ExitCode(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kOutOfRange:  // A version that is not kept, or not there yet.
      return kExitNotFound;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return kExitRefused;
    case absl::StatusCode::kUnavailable: {
      // The server is reachable, but cannot write to its disk.
      const ErrorReason reason = GetErrorReason(status);
      const bool is_of_disk =
          reason == ErrorReason::kStoreReadOnly || reason == ErrorReason::kDiskFailed;
      return is_of_disk ? kExitRefused : kExitNoServer;
    }
    case absl::StatusCode::kDeadlineExceeded:
      return kExitNoServer;
    case absl::StatusCode::kCancelled:
      return kExitInterrupted;
    default:
      return kExitOther;
  }
}

int LocalExitCode(const absl::Status& status) {
  return absl::IsUnavailable(status) ? kExitOther : ExitCode(status);
}

}  // namespace ema::cli
