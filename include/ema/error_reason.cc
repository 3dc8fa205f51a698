// SPDX-License-Identifier: Apache-2.0
#include "ema/error_reason.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/base/printable.h"

namespace ema {
namespace {

constexpr std::string_view kReasonUrl = "ema.v1/reason";
constexpr std::string_view kRetryDelayUrl = "ema.v1/retry_delay_ns";
constexpr std::string_view kHomeUrl = "ema.v1/home";
constexpr std::string_view kRoundUrl = "ema.v1/round";
constexpr std::string_view kIncarnationUrl = "ema.v1/incarnation";

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
#define EMA_CASE(enumerator, number, name) \
  case ErrorReason::enumerator:            \
    return name;
    EMA_ERROR_REASONS(EMA_CASE)
#undef EMA_CASE
  }
  return "UNKNOWN_REASON";
}

absl::Status MakeError(absl::StatusCode code, ErrorReason reason, std::string_view message,
                       absl::Duration retry_delay) {
  absl::Status status(code, EscapeUnprintable(message));
  SetNumber(status, kReasonUrl, static_cast<int>(reason));
  if (retry_delay > absl::ZeroDuration()) SetRetryDelay(status, retry_delay);
  return status;
}

absl::Status BadRequest(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadRequest, message);
}

absl::Status WithPrefix(const absl::Status& status, std::string_view where) {
  absl::Status result(status.code(),
                      EscapeUnprintable(absl::StrCat(ToAbsl(where), status.message())));
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

void SetGroupHint(absl::Status& status, const GroupHint& hint) {
  if (!hint.home.empty()) status.SetPayload(ToAbsl(kHomeUrl), absl::Cord(hint.home));
  if (hint.round != 0) SetNumber(status, kRoundUrl, hint.round);
  if (hint.incarnation != 0) SetNumber(status, kIncarnationUrl, hint.incarnation);
}

GroupHint GetGroupHint(const absl::Status& status) {
  GroupHint hint;
  if (const absl::optional<absl::Cord> home = status.GetPayload(ToAbsl(kHomeUrl))) {
    hint.home = std::string(*home);
  }
  hint.round = GetNumber(status, kRoundUrl).value_or(0);
  hint.incarnation = GetNumber(status, kIncarnationUrl).value_or(0);
  return hint;
}

}  // namespace ema
