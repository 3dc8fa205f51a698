// SPDX-License-Identifier: Apache-2.0
//
// GoogleMock matchers for absl::Status and absl::StatusOr.
#ifndef EMA_TESTS_TESTUTIL_STATUS_MATCHERS_H_
#define EMA_TESTS_TESTUTIL_STATUS_MATCHERS_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {

inline const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& statusor) {
  return statusor.status();
}

MATCHER(IsOk, negation ? "is not OK" : "is OK") {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).ok();
}

MATCHER_P(IsOkAndHolds, matcher, "is OK and holds a value that matches") {
  if (!arg.ok()) {
    *result_listener << arg.status().ToString();
    return false;
  }
  return testing::ExplainMatchResult(matcher, *arg, result_listener);
}

MATCHER_P2(StatusIs, code, message_matcher, "has the code and a message that matches") {
  const absl::Status& status = StatusOf(arg);
  *result_listener << status.ToString();
  return status.code() == code &&
         testing::ExplainMatchResult(message_matcher, std::string(status.message()),
                                     result_listener);
}

MATCHER_P(ReasonIs, reason, "has the ErrorReason") {
  const absl::Status& status = StatusOf(arg);
  *result_listener << status.ToString() << " with reason "
                   << ErrorReasonName(GetErrorReason(status));
  return GetErrorReason(status) == reason;
}

}  // namespace ema

// Sets `lhs` to the value of `expr`, an absl::StatusOr, or fails the test.
#define EMA_ASSERT_OK_AND_ASSIGN(lhs, expr) \
  EMA_ASSERT_OK_AND_ASSIGN_INNER(EMA_MACRO_CONCAT(ema_statusor_, __LINE__), lhs, expr)
#define EMA_ASSERT_OK_AND_ASSIGN_INNER(statusor, lhs, expr) \
  auto statusor = (expr);                                   \
  ASSERT_THAT(statusor, ::ema::IsOk());                     \
  lhs = *std::move(statusor)

#endif  // EMA_TESTS_TESTUTIL_STATUS_MATCHERS_H_
