// SPDX-License-Identifier: Apache-2.0
//
// Who gets a place for a data stream, and who loses it.
#include <thread>

#include "server/rpc/call.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStallTimeout(1000);
constexpr milliseconds kTenth = kStallTimeout / 10;

class FakeCall final : public StreamCall {
 public:
  using StreamCall::SetWaiting;
  void End(StreamEnd) override { ++ended; }

  int ended = 0;
};

TEST(StreamAdmissionTest, NobodyLosesAPlaceWhileItsPeerGetsOn) {
  StreamAdmission admission("push", 2, kStallTimeout);
  FakeCall busy;
  FakeCall waiting;
  FakeCall newcomer;
  ASSERT_THAT(admission.Enter(&busy), IsOk());
  ASSERT_THAT(admission.Enter(&waiting), IsOk());
  waiting.SetWaiting(true);  // Not for long.
  EXPECT_THAT(admission.Enter(&newcomer), ReasonIs(ErrorReason::kTooManyStreams));
  waiting.SetWaiting(false);
  std::this_thread::sleep_for(2 * kTenth);
  EXPECT_THAT(admission.Enter(&newcomer), ReasonIs(ErrorReason::kTooManyStreams));
  EXPECT_EQ(busy.ended + waiting.ended, 0);
}

TEST(StreamAdmissionTest, WhoHasWaitedLongestLosesItsPlace) {
  StreamAdmission admission("push", 3, kStallTimeout);
  FakeCall busy;
  FakeCall longest;
  FakeCall later;
  FakeCall newcomer;
  for (FakeCall* const call : {&busy, &longest, &later}) ASSERT_THAT(admission.Enter(call), IsOk());
  longest.SetWaiting(true);
  std::this_thread::sleep_for(kTenth);
  later.SetWaiting(true);
  std::this_thread::sleep_for(kTenth);
  ASSERT_THAT(admission.Enter(&newcomer), IsOk());
  EXPECT_EQ(longest.ended, 1);
  EXPECT_EQ(later.ended, 0);
  admission.Leave(&longest);  // It had no place any more.
  // One at a time: where all are slow, each must get time for a message.
  FakeCall another;
  EXPECT_THAT(admission.Enter(&another), ReasonIs(ErrorReason::kTooManyStreams));
  EXPECT_EQ(later.ended, 0);
  std::this_thread::sleep_for(kStallTimeout / 40);
  ASSERT_THAT(admission.Enter(&another), IsOk());
  EXPECT_EQ(later.ended, 1);
  FakeCall refused;
  EXPECT_THAT(admission.Enter(&refused), ReasonIs(ErrorReason::kTooManyStreams));
  admission.Leave(&busy);
  EXPECT_THAT(admission.Enter(&refused), IsOk());
}

TEST(StreamAdmissionTest, TheTimeoutEndsThoseThatStall) {
  StreamAdmission admission("pull", 2, kStallTimeout);
  FakeCall stalled;
  FakeCall busy;
  ASSERT_THAT(admission.Enter(&stalled), IsOk());
  ASSERT_THAT(admission.Enter(&busy), IsOk());
  stalled.SetWaiting(true);
  admission.CheckStalled(std::chrono::steady_clock::now());
  EXPECT_EQ(stalled.ended, 0);
  admission.CheckStalled(std::chrono::steady_clock::now() + 2 * kStallTimeout);
  EXPECT_EQ(stalled.ended, 1);
  EXPECT_EQ(busy.ended, 0);
}

}  // namespace
}  // namespace ema
