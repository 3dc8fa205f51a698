// SPDX-License-Identifier: Apache-2.0
#include "ema/error_reason.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "ema/v1/error.pb.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

TEST(ErrorReasonTest, NamesAndNumbersAreThoseOfTheProto) {
  const google::protobuf::EnumDescriptor* proto = v1::ErrorReason_descriptor();
  std::set<int> numbers;
  for (int i = 0; i < proto->value_count(); ++i) {
    const google::protobuf::EnumValueDescriptor* value = proto->value(i);
    numbers.insert(value->number());
    const std::string name(ErrorReasonName(static_cast<ErrorReason>(value->number())));
    EXPECT_EQ("ERROR_REASON_" + name, value->name());
  }
  for (int number = -1; number < 1000; ++number) {
    EXPECT_EQ(ErrorReasonName(static_cast<ErrorReason>(number)) != "UNKNOWN_REASON",
              numbers.count(number) == 1)
        << number;
  }
}

TEST(ErrorReasonTest, ReasonTravelsWithTheStatus) {
  absl::Status status =
      MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleStep, "step 41 is not after 41");
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kAborted, "step 41 is not after 41"));
  EXPECT_THAT(status, ReasonIs(ErrorReason::kStaleStep));
  EXPECT_EQ(GetRetryDelay(status), absl::ZeroDuration());

  SetRetryDelay(status, absl::Milliseconds(250));
  const absl::Status copy = status;
  EXPECT_EQ(GetRetryDelay(copy), absl::Milliseconds(250));
  EXPECT_EQ(GetErrorReason(copy), ErrorReason::kStaleStep);
  EXPECT_EQ(MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                      "step 41 is not after 41", absl::Milliseconds(250)),
            copy);
}

TEST(ErrorReasonTest, GroupHintTravelsWithTheStatus) {
  absl::Status status =
      MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleRound, "round 4 has ended");
  EXPECT_EQ(GetGroupHint(status).round, 0);
  EXPECT_EQ(GetGroupHint(status).home, "");

  SetGroupHint(status, {.home = "ema-0:50051", .round = 5, .incarnation = 7});
  const GroupHint hint = GetGroupHint(WithPrefix(status, "model \"m\": "));
  EXPECT_EQ(hint.home, "ema-0:50051");
  EXPECT_EQ(hint.round, 5);
  EXPECT_EQ(hint.incarnation, 7);
}

TEST(ErrorReasonTest, MessagesDoNotControlTerminals) {
  const absl::Status status =
      MakeError(absl::StatusCode::kNotFound, ErrorReason::kTrackNotFound,
                "\"caf\u00e9\x1b[31m\xc2\x9b\n\x7f\x80\xc3\": \xe2\x82\xac, \\ and 'quotes'");
  EXPECT_EQ(status.message(),
            "\"caf\u00e9\\x1b[31m\\xc2\\x9b\\n\\x7f\\x80\\xc3\": \xe2\x82\xac, \\ and 'quotes'");
  EXPECT_EQ(WithPrefix(status, "track \"\x1b\": ").message(),
            absl::StrCat("track \"\\x1b\": ", status.message()));
}

TEST(ErrorReasonTest, StatusWithoutPayloadHasNoReason) {
  EXPECT_EQ(GetErrorReason(absl::OkStatus()), ErrorReason::kUnspecified);
  EXPECT_EQ(GetErrorReason(absl::InternalError("x")), ErrorReason::kUnspecified);
  EXPECT_EQ(GetRetryDelay(absl::InternalError("x")), absl::ZeroDuration());
}

TEST(ErrorReasonTest, ForeignPayloadIsNoReason) {
  absl::Status status = absl::InternalError("x");
  status.SetPayload("ema.v1/reason", absl::Cord("not a number"));
  EXPECT_EQ(GetErrorReason(status), ErrorReason::kUnspecified);
}

}  // namespace
}  // namespace ema
