// SPDX-License-Identifier: Apache-2.0
#include "server/group/fan_out.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "server/base/steady_wait.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;

const std::vector<Partition> kPartitions = {{"ema-0", "b0", 0, 1}, {"ema-1", "b1", 1, 1}};

TEST(FanOutTest, ResponsesAreInTheOrderOfThePartitions) {
  FanOut<std::string> calls(kPartitions);
  std::thread late([end = calls.EndOf(0)] { end(std::string("first")); });
  calls.EndOf(1)(std::string("second"));
  EXPECT_THAT(calls.Wait(), IsOkAndHolds(ElementsAre("first", "second")));
  late.join();
}

TEST(FanOutTest, AnErrorNamesTheMember) {
  FanOut<std::string> calls(kPartitions);
  calls.EndOf(0)(std::string("first"));
  calls.EndOf(1)(
      MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDiskFailed, "no such file"));
  EXPECT_THAT(calls.Wait(),
              AllOf(StatusIs(absl::StatusCode::kUnavailable, "member \"ema-1\": no such file"),
                    ReasonIs(ErrorReason::kDiskFailed)));
}

TEST(FanOutTest, AMemberThatHangsIsNotWaitedForForever) {
  std::optional<FanOut<std::string>> calls(kPartitions);
  calls->EndOf(0)(std::string("first"));
  const auto end = calls->EndOf(1);
  EXPECT_THAT(calls->Wait(After(SteadyNow(), absl::Milliseconds(1))),
              AllOf(StatusIs(absl::StatusCode::kUnavailable,
                             "member \"ema-1\": it has not answered in time"),
                    ReasonIs(ErrorReason::kGroupDegraded)));
  calls.reset();
  end(std::string("too late"));
}

}  // namespace
}  // namespace ema::group
