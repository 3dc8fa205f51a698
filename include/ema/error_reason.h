// SPDX-License-Identifier: Apache-2.0
//
// The machine-readable reason of an error, carried inside an absl::Status.
#ifndef EMA_ERROR_REASON_H_
#define EMA_ERROR_REASON_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ema {

// Every reason: its enumerator, number, and name in error.proto (ema.v1.ErrorReason) without the
// prefix. error.proto says what each reason means; tests/include/error_reason_test.cc checks that
// the two lists are equal.
#define EMA_ERROR_REASONS(X)                               \
  X(kUnspecified, 0, "UNSPECIFIED")                        \
  X(kBadRequest, 1, "BAD_REQUEST")                         \
  X(kBadName, 2, "BAD_NAME")                               \
  X(kBadManifest, 3, "BAD_MANIFEST")                       \
  X(kBadSchedule, 4, "BAD_SCHEDULE")                       \
  X(kBadLayout, 5, "BAD_LAYOUT")                           \
  X(kLayoutOverlap, 6, "LAYOUT_OVERLAP")                   \
  X(kLayoutHole, 7, "LAYOUT_HOLE")                         \
  X(kBadChunk, 8, "BAD_CHUNK")                             \
  X(kChunkOverlap, 9, "CHUNK_OVERLAP")                     \
  X(kNonFinite, 10, "NON_FINITE")                          \
  X(kBadTime, 11, "BAD_TIME")                              \
  X(kNoCommit, 12, "NO_COMMIT")                            \
  X(kCountMismatch, 13, "COUNT_MISMATCH")                  \
  X(kModelNotFound, 20, "MODEL_NOT_FOUND")                 \
  X(kTrackNotFound, 21, "TRACK_NOT_FOUND")                 \
  X(kModelDiffers, 22, "MODEL_DIFFERS")                    \
  X(kCheckpointNotFound, 23, "CHECKPOINT_NOT_FOUND")       \
  X(kLabelNotFound, 24, "LABEL_NOT_FOUND")                 \
  X(kFileNotFound, 25, "FILE_NOT_FOUND")                   \
  X(kAllCheckpointsCorrupt, 26, "ALL_CHECKPOINTS_CORRUPT") \
  X(kNoVersion, 30, "NO_VERSION")                          \
  X(kRunIncomplete, 31, "RUN_INCOMPLETE")                  \
  X(kLayoutMismatch, 32, "LAYOUT_MISMATCH")                \
  X(kPushIncomplete, 33, "PUSH_INCOMPLETE")                \
  X(kNoDataDir, 34, "NO_DATA_DIR")                         \
  X(kPlanMismatch, 35, "PLAN_MISMATCH")                    \
  X(kPlanChanged, 36, "PLAN_CHANGED")                      \
  X(kResumeMismatch, 37, "RESUME_MISMATCH")                \
  X(kCheckpointInUse, 38, "CHECKPOINT_IN_USE")             \
  X(kPartialCheckpoint, 39, "PARTIAL_CHECKPOINT")          \
  X(kStaleStep, 40, "STALE_STEP")                          \
  X(kFenced, 41, "FENCED")                                 \
  X(kStepAbandoned, 42, "STEP_ABANDONED")                  \
  X(kSessionExpired, 43, "SESSION_EXPIRED")                \
  X(kStalled, 44, "STALLED")                               \
  X(kStepSkipped, 45, "STEP_SKIPPED")                      \
  X(kStaleRound, 46, "STALE_ROUND")                        \
  X(kVersionNotKept, 50, "VERSION_NOT_KEPT")               \
  X(kVersionNotYet, 51, "VERSION_NOT_YET")                 \
  X(kBadToken, 55, "BAD_TOKEN")                            \
  X(kNotAllowed, 56, "NOT_ALLOWED")                        \
  X(kMemoryBudget, 60, "MEMORY_BUDGET")                    \
  X(kTooManyStreams, 61, "TOO_MANY_STREAMS")               \
  X(kTooManyPins, 62, "TOO_MANY_PINS")                     \
  X(kDiskFull, 63, "DISK_FULL")                            \
  X(kTooManyModels, 64, "TOO_MANY_MODELS")                 \
  X(kTooManyCalls, 65, "TOO_MANY_CALLS")                   \
  X(kTooManySessions, 66, "TOO_MANY_SESSIONS")             \
  X(kDraining, 70, "DRAINING")                             \
  X(kRangeBusy, 71, "RANGE_BUSY")                          \
  X(kStoreReadOnly, 72, "STORE_READ_ONLY")                 \
  X(kModelBusy, 73, "MODEL_BUSY")                          \
  X(kDiskFailed, 74, "DISK_FAILED")                        \
  X(kGroupDegraded, 75, "GROUP_DEGRADED")                  \
  X(kRegistryUnavailable, 76, "REGISTRY_UNAVAILABLE")      \
  X(kChunkCorrupt, 80, "CHUNK_CORRUPT")                    \
  X(kDigestMismatch, 81, "DIGEST_MISMATCH")                \
  X(kCheckpointCorrupt, 82, "CHECKPOINT_CORRUPT")          \
  X(kDevice, 90, "DEVICE")                                 \
  X(kBug, 91, "BUG")                                       \
  X(kNotHome, 100, "NOT_HOME")                             \
  X(kReadOnly, 101, "READ_ONLY")

enum class ErrorReason : int {
#define EMA_ENUMERATOR(enumerator, number, name) enumerator = number,
  EMA_ERROR_REASONS(EMA_ENUMERATOR)
#undef EMA_ENUMERATOR
};

// The reason's name in error.proto without its prefix, such as "STALE_STEP"; "UNKNOWN_REASON" for a
// number that this build does not know.
std::string_view ErrorReasonName(ErrorReason reason);

// A Status with `reason` and, if it is more than zero, `retry_delay`. Control characters in
// `message`, and bytes that are not UTF-8, are escaped as in C. REQUIRES: code is not OK.
absl::Status MakeError(absl::StatusCode code, ErrorReason reason, std::string_view message,
                       absl::Duration retry_delay = absl::ZeroDuration());
// INVALID_ARGUMENT, BAD_REQUEST.
absl::Status BadRequest(std::string_view message);
// `status` with `where` prepended to its message, escaped as by MakeError(); OK stays OK.
absl::Status WithPrefix(const absl::Status& status, std::string_view where);

// The reason attached to `status`; kUnspecified if there is none.
ErrorReason GetErrorReason(const absl::Status& status);

// The delay before a retry. GetRetryDelay() returns zero if none was set.
void SetRetryDelay(absl::Status& status, absl::Duration delay);
absl::Duration GetRetryDelay(const absl::Status& status);

// Additional details of an error about a model on a group of servers: see ErrorDetail in
// error.proto. Fields that are empty or 0 are not given.
struct GroupHint {
  std::string home;
  int64_t round = 0;
  int64_t incarnation = 0;
};
void SetGroupHint(absl::Status& status, const GroupHint& hint);
GroupHint GetGroupHint(const absl::Status& status);

}  // namespace ema

#endif  // EMA_ERROR_REASON_H_
