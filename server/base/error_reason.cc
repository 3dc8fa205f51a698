// SPDX-License-Identifier: Apache-2.0
#include "ema/error_reason.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ema {
namespace {

constexpr std::string_view kReasonUrl = "ema.v1/reason";
constexpr std::string_view kRetryDelayUrl = "ema.v1/retry_delay_ns";

absl::string_view ToAbsl(std::string_view text) { return {text.data(), text.size()}; }

// Payloads are decimal text: they show up readable in absl::Status::ToString().
void SetNumber(absl::Status& status, std::string_view url, int64_t value) {
  status.SetPayload(ToAbsl(url), absl::Cord(absl::StrCat(value)));
}

std::optional<int64_t> GetNumber(const absl::Status& status, std::string_view url) {
  const absl::optional<absl::Cord> payload = status.GetPayload(ToAbsl(url));
  int64_t value = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &value)) {
    return std::nullopt;
  }
  return value;
}

}  // namespace

std::string_view ErrorReasonName(ErrorReason reason) {
  switch (reason) {
    case ErrorReason::kUnspecified:
      return "UNSPECIFIED";
    case ErrorReason::kBadRequest:
      return "BAD_REQUEST";
    case ErrorReason::kBadName:
      return "BAD_NAME";
    case ErrorReason::kBadManifest:
      return "BAD_MANIFEST";
    case ErrorReason::kBadSchedule:
      return "BAD_SCHEDULE";
    case ErrorReason::kBadLayout:
      return "BAD_LAYOUT";
    case ErrorReason::kLayoutOverlap:
      return "LAYOUT_OVERLAP";
    case ErrorReason::kLayoutHole:
      return "LAYOUT_HOLE";
    case ErrorReason::kBadChunk:
      return "BAD_CHUNK";
    case ErrorReason::kChunkOverlap:
      return "CHUNK_OVERLAP";
    case ErrorReason::kNonFinite:
      return "NON_FINITE";
    case ErrorReason::kBadTime:
      return "BAD_TIME";
    case ErrorReason::kNoCommit:
      return "NO_COMMIT";
    case ErrorReason::kCountMismatch:
      return "COUNT_MISMATCH";
    case ErrorReason::kModelNotFound:
      return "MODEL_NOT_FOUND";
    case ErrorReason::kTrackNotFound:
      return "TRACK_NOT_FOUND";
    case ErrorReason::kModelDiffers:
      return "MODEL_DIFFERS";
    case ErrorReason::kCheckpointNotFound:
      return "CHECKPOINT_NOT_FOUND";
    case ErrorReason::kLabelNotFound:
      return "LABEL_NOT_FOUND";
    case ErrorReason::kFileNotFound:
      return "FILE_NOT_FOUND";
    case ErrorReason::kNoVersion:
      return "NO_VERSION";
    case ErrorReason::kRunIncomplete:
      return "RUN_INCOMPLETE";
    case ErrorReason::kLayoutMismatch:
      return "LAYOUT_MISMATCH";
    case ErrorReason::kPushIncomplete:
      return "PUSH_INCOMPLETE";
    case ErrorReason::kNoDataDir:
      return "NO_DATA_DIR";
    case ErrorReason::kPlanMismatch:
      return "PLAN_MISMATCH";
    case ErrorReason::kPlanChanged:
      return "PLAN_CHANGED";
    case ErrorReason::kResumeMismatch:
      return "RESUME_MISMATCH";
    case ErrorReason::kCheckpointInUse:
      return "CHECKPOINT_IN_USE";
    case ErrorReason::kPartialCheckpoint:
      return "PARTIAL_CHECKPOINT";
    case ErrorReason::kStaleStep:
      return "STALE_STEP";
    case ErrorReason::kFenced:
      return "FENCED";
    case ErrorReason::kStepAbandoned:
      return "STEP_ABANDONED";
    case ErrorReason::kSessionExpired:
      return "SESSION_EXPIRED";
    case ErrorReason::kStalled:
      return "STALLED";
    case ErrorReason::kStepGivenUp:
      return "STEP_GIVEN_UP";
    case ErrorReason::kVersionNotKept:
      return "VERSION_NOT_KEPT";
    case ErrorReason::kVersionNotYet:
      return "VERSION_NOT_YET";
    case ErrorReason::kBadToken:
      return "BAD_TOKEN";
    case ErrorReason::kNotAllowed:
      return "NOT_ALLOWED";
    case ErrorReason::kMemoryBudget:
      return "MEMORY_BUDGET";
    case ErrorReason::kTooManyStreams:
      return "TOO_MANY_STREAMS";
    case ErrorReason::kTooManyPins:
      return "TOO_MANY_PINS";
    case ErrorReason::kDiskFull:
      return "DISK_FULL";
    case ErrorReason::kTooManyModels:
      return "TOO_MANY_MODELS";
    case ErrorReason::kTooManyCalls:
      return "TOO_MANY_CALLS";
    case ErrorReason::kTooManySessions:
      return "TOO_MANY_SESSIONS";
    case ErrorReason::kDraining:
      return "DRAINING";
    case ErrorReason::kRangeBusy:
      return "RANGE_BUSY";
    case ErrorReason::kStoreReadOnly:
      return "STORE_READ_ONLY";
    case ErrorReason::kSessionBusy:
      return "SESSION_BUSY";
    case ErrorReason::kDiskFailed:
      return "DISK_FAILED";
    case ErrorReason::kChunkCorrupt:
      return "CHUNK_CORRUPT";
    case ErrorReason::kDigestMismatch:
      return "DIGEST_MISMATCH";
    case ErrorReason::kCheckpointCorrupt:
      return "CHECKPOINT_CORRUPT";
    case ErrorReason::kDevice:
      return "DEVICE";
    case ErrorReason::kBug:
      return "BUG";
  }
  return "UNKNOWN_REASON";
}

absl::Status MakeError(absl::StatusCode code, ErrorReason reason, std::string_view message,
                       absl::Duration retry_delay) {
  absl::Status status(code, ToAbsl(message));
  SetNumber(status, kReasonUrl, static_cast<int>(reason));
  if (retry_delay > absl::ZeroDuration()) SetRetryDelay(status, retry_delay);
  return status;
}

absl::Status BadRequest(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadRequest, message);
}

absl::Status WithPlace(const absl::Status& status, std::string_view where) {
  absl::Status result(status.code(), absl::StrCat(ToAbsl(where), status.message()));
  status.ForEachPayload([&result](absl::string_view url, const absl::Cord& payload) {
    result.SetPayload(url, payload);
  });
  return result;
}

ErrorReason GetErrorReason(const absl::Status& status) {
  return static_cast<ErrorReason>(GetNumber(status, kReasonUrl).value_or(0));
}

void SetRetryDelay(absl::Status& status, absl::Duration delay) {
  SetNumber(status, kRetryDelayUrl, absl::ToInt64Nanoseconds(delay));
}

absl::Duration GetRetryDelay(const absl::Status& status) {
  return absl::Nanoseconds(GetNumber(status, kRetryDelayUrl).value_or(0));
}

}  // namespace ema
