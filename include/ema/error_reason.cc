// SPDX-License-Identifier: Apache-2.0
#include "ema/error_reason.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
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

// Every reason: tests/include/error_reason_test.cc looks up each of the proto's.
struct NamedReason {
  ErrorReason reason;
  std::string_view name;
};

constexpr NamedReason kReasons[] = {
    {ErrorReason::kUnspecified, "UNSPECIFIED"},
    {ErrorReason::kBadRequest, "BAD_REQUEST"},
    {ErrorReason::kBadName, "BAD_NAME"},
    {ErrorReason::kBadManifest, "BAD_MANIFEST"},
    {ErrorReason::kBadSchedule, "BAD_SCHEDULE"},
    {ErrorReason::kBadLayout, "BAD_LAYOUT"},
    {ErrorReason::kLayoutOverlap, "LAYOUT_OVERLAP"},
    {ErrorReason::kLayoutHole, "LAYOUT_HOLE"},
    {ErrorReason::kBadChunk, "BAD_CHUNK"},
    {ErrorReason::kChunkOverlap, "CHUNK_OVERLAP"},
    {ErrorReason::kNonFinite, "NON_FINITE"},
    {ErrorReason::kBadTime, "BAD_TIME"},
    {ErrorReason::kNoCommit, "NO_COMMIT"},
    {ErrorReason::kCountMismatch, "COUNT_MISMATCH"},
    {ErrorReason::kModelNotFound, "MODEL_NOT_FOUND"},
    {ErrorReason::kTrackNotFound, "TRACK_NOT_FOUND"},
    {ErrorReason::kModelDiffers, "MODEL_DIFFERS"},
    {ErrorReason::kCheckpointNotFound, "CHECKPOINT_NOT_FOUND"},
    {ErrorReason::kLabelNotFound, "LABEL_NOT_FOUND"},
    {ErrorReason::kFileNotFound, "FILE_NOT_FOUND"},
    {ErrorReason::kAllCheckpointsCorrupt, "ALL_CHECKPOINTS_CORRUPT"},
    {ErrorReason::kNoVersion, "NO_VERSION"},
    {ErrorReason::kRunIncomplete, "RUN_INCOMPLETE"},
    {ErrorReason::kLayoutMismatch, "LAYOUT_MISMATCH"},
    {ErrorReason::kPushIncomplete, "PUSH_INCOMPLETE"},
    {ErrorReason::kNoDataDir, "NO_DATA_DIR"},
    {ErrorReason::kPlanMismatch, "PLAN_MISMATCH"},
    {ErrorReason::kPlanChanged, "PLAN_CHANGED"},
    {ErrorReason::kResumeMismatch, "RESUME_MISMATCH"},
    {ErrorReason::kCheckpointInUse, "CHECKPOINT_IN_USE"},
    {ErrorReason::kPartialCheckpoint, "PARTIAL_CHECKPOINT"},
    {ErrorReason::kStaleStep, "STALE_STEP"},
    {ErrorReason::kFenced, "FENCED"},
    {ErrorReason::kStepAbandoned, "STEP_ABANDONED"},
    {ErrorReason::kSessionExpired, "SESSION_EXPIRED"},
    {ErrorReason::kStalled, "STALLED"},
    {ErrorReason::kStepGivenUp, "STEP_GIVEN_UP"},
    {ErrorReason::kVersionNotKept, "VERSION_NOT_KEPT"},
    {ErrorReason::kVersionNotYet, "VERSION_NOT_YET"},
    {ErrorReason::kBadToken, "BAD_TOKEN"},
    {ErrorReason::kNotAllowed, "NOT_ALLOWED"},
    {ErrorReason::kMemoryBudget, "MEMORY_BUDGET"},
    {ErrorReason::kTooManyStreams, "TOO_MANY_STREAMS"},
    {ErrorReason::kTooManyPins, "TOO_MANY_PINS"},
    {ErrorReason::kDiskFull, "DISK_FULL"},
    {ErrorReason::kTooManyModels, "TOO_MANY_MODELS"},
    {ErrorReason::kTooManyCalls, "TOO_MANY_CALLS"},
    {ErrorReason::kTooManySessions, "TOO_MANY_SESSIONS"},
    {ErrorReason::kDraining, "DRAINING"},
    {ErrorReason::kRangeBusy, "RANGE_BUSY"},
    {ErrorReason::kStoreReadOnly, "STORE_READ_ONLY"},
    {ErrorReason::kSessionBusy, "SESSION_BUSY"},
    {ErrorReason::kDiskFailed, "DISK_FAILED"},
    {ErrorReason::kChunkCorrupt, "CHUNK_CORRUPT"},
    {ErrorReason::kDigestMismatch, "DIGEST_MISMATCH"},
    {ErrorReason::kCheckpointCorrupt, "CHECKPOINT_CORRUPT"},
    {ErrorReason::kDevice, "DEVICE"},
    {ErrorReason::kBug, "BUG"},
};

}  // namespace

std::string_view ErrorReasonName(ErrorReason reason) {
  const auto* const it =
      std::find_if(std::begin(kReasons), std::end(kReasons),
                   [reason](const NamedReason& r) { return r.reason == reason; });
  return it != std::end(kReasons) ? it->name : "UNKNOWN_REASON";
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
