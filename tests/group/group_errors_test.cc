// SPDX-License-Identifier: Apache-2.0
#include "server/group/group_errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ema/error_reason.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using ::testing::AllOf;

TEST(GroupErrorsTest, ARegistryThatRejectsThisServerIsUnavailable) {
  for (const absl::Status& status :
       {absl::UnavailableError("no answer"), absl::PermissionDeniedError("no answer"),
        absl::UnauthenticatedError("no answer")}) {
    EXPECT_THAT(RegistryError(status), AllOf(StatusIs(absl::StatusCode::kUnavailable, "no answer"),
                                             ReasonIs(ErrorReason::kRegistryUnavailable)));
  }
  const absl::Status damaged = absl::DataLossError("models/m: partitions is empty");
  EXPECT_EQ(RegistryError(damaged), damaged);
}

}  // namespace
}  // namespace ema::group
