// SPDX-License-Identifier: Apache-2.0
//
// The machine-readable reason of an error, carried inside an absl::Status.
#ifndef EMA_ERROR_REASON_H_
#define EMA_ERROR_REASON_H_

#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ema {

// Mirrors ema.v1.ErrorReason (proto/ema/v1/error.proto), which says what each reason means, with
// the same numbers. tests/include/error_reason_test.cc checks that they are equal.
enum class ErrorReason : int {
  kUnspecified = 0,
  kBadRequest = 1,
  kBadName = 2,
  kBadManifest = 3,
  kBadSchedule = 4,
  kBadLayout = 5,
  kLayoutOverlap = 6,
  kLayoutHole = 7,
  kBadChunk = 8,
  kChunkOverlap = 9,
  kNonFinite = 10,
  kBadTime = 11,
  kNoCommit = 12,
  kCountMismatch = 13,
  kModelNotFound = 20,
  kTrackNotFound = 21,
  kModelDiffers = 22,
  kCheckpointNotFound = 23,
  kLabelNotFound = 24,
  kFileNotFound = 25,
  kAllCheckpointsCorrupt = 26,
  kNoVersion = 30,
  kRunIncomplete = 31,
  kLayoutMismatch = 32,
  kPushIncomplete = 33,
  kNoDataDir = 34,
  kPlanMismatch = 35,
  kPlanChanged = 36,
  kResumeMismatch = 37,
  kCheckpointInUse = 38,
  kPartialCheckpoint = 39,
  kStaleStep = 40,
  kFenced = 41,
  kStepAbandoned = 42,
  kSessionExpired = 43,
  kStalled = 44,
  kStepGivenUp = 45,
  kVersionNotKept = 50,
  kVersionNotYet = 51,
  kBadToken = 55,
  kNotAllowed = 56,
  kMemoryBudget = 60,
  kTooManyStreams = 61,
  kTooManyPins = 62,
  kDiskFull = 63,
  kTooManyModels = 64,
  kTooManyCalls = 65,
  kTooManySessions = 66,
  kDraining = 70,
  kRangeBusy = 71,
  kStoreReadOnly = 72,
  kSessionBusy = 73,
  kDiskFailed = 74,
  kChunkCorrupt = 80,
  kDigestMismatch = 81,
  kCheckpointCorrupt = 82,
  kDevice = 90,
  kBug = 91,
};

// The reason's name in error.proto without its prefix, such as "STALE_STEP"; "UNKNOWN_REASON" for a
// number that this build does not know.
std::string_view ErrorReasonName(ErrorReason reason);

// A Status with `reason` attached, and with `retry_delay`, if that is more than zero. REQUIRES:
// code is not OK.
absl::Status MakeError(absl::StatusCode code, ErrorReason reason, std::string_view message,
                       absl::Duration retry_delay = absl::ZeroDuration());
// INVALID_ARGUMENT, BAD_REQUEST.
absl::Status BadRequest(std::string_view message);
// `status` with `where` prepended to its message; OK stays OK.
absl::Status WithPlace(const absl::Status& status, std::string_view where);

// The reason attached to `status`; kUnspecified if there is none.
ErrorReason GetErrorReason(const absl::Status& status);

// The delay before a retry. GetRetryDelay() returns zero if none was set.
void SetRetryDelay(absl::Status& status, absl::Duration delay);
absl::Duration GetRetryDelay(const absl::Status& status);

}  // namespace ema

#endif  // EMA_ERROR_REASON_H_
