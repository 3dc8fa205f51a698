// SPDX-License-Identifier: Apache-2.0
#include "server/group/retried_work.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

namespace ema::group {
namespace {

TEST(RetriedWorkTest, AWakeUpDuringTheWorkRunsItAgain) {
  absl::Notification has_begun;
  absl::Notification may_end;
  absl::Notification has_run_twice;
  int count = 0;
  RetriedWork work([&] {
    if (++count == 1) {
      has_begun.Notify();
      may_end.WaitForNotification();
    } else if (count == 2) {
      has_run_twice.Notify();
    }
    return absl::OkStatus();
  });
  work.Wake();
  has_begun.WaitForNotification();
  work.Wake();
  may_end.Notify();
  has_run_twice.WaitForNotification();
  work.Stop();
  EXPECT_EQ(count, 2);
  work.Wake();  // Does nothing any more.
}

TEST(RetriedWorkTest, WorkIsRepeatedAfterAnErrorUntilItSucceeds) {
  absl::Notification has_succeeded;
  int count = 0;
  RetriedWork work([&] {
    if (++count == 1) return absl::UnavailableError("registry away");
    has_succeeded.Notify();
    return absl::OkStatus();
  });
  work.Wake();
  has_succeeded.WaitForNotification();
  work.Stop();
  EXPECT_EQ(count, 2);
}

}  // namespace
}  // namespace ema::group
