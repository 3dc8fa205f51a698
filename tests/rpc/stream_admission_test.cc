// SPDX-License-Identifier: Apache-2.0
//
// Who gets a place for a data stream, and who loses it.
#include <thread>

#include "server/rpc/rpc_context.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStallTimeout(1000);
constexpr milliseconds kTenth = kStallTimeout / 10;

class FakeCall final : public StreamCall {
 public:
  using StreamCall::CountBytes;
  using StreamCall::SetCaller;
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
  // Long: what is refused within a fortieth of it must be asked for as soon as that.
  constexpr milliseconds kLongTimeout = 5 * kStallTimeout;
  StreamAdmission admission("push", 3, kLongTimeout);
  FakeCall busy;
  FakeCall longest;
  FakeCall later;
  FakeCall newcomer;
  for (FakeCall* const call : {&busy, &longest, &later}) ASSERT_THAT(admission.Enter(call), IsOk());
  longest.SetWaiting(true);
  std::this_thread::sleep_for(kLongTimeout / 10);
  later.SetWaiting(true);
  std::this_thread::sleep_for(kLongTimeout / 10);
  ASSERT_THAT(admission.Enter(&newcomer), IsOk());
  EXPECT_EQ(longest.ended, 1);
  EXPECT_EQ(later.ended, 0);
  admission.Leave(&longest);  // It had no place any more.
  // One at a time: where all are slow, each must get time for a message.
  FakeCall another;
  EXPECT_THAT(admission.Enter(&another), ReasonIs(ErrorReason::kTooManyStreams));
  EXPECT_EQ(later.ended, 0);
  std::this_thread::sleep_for(kLongTimeout / 40);
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

TEST(StreamAdmissionTest, NewcomersMayAlwaysEnterWhereThatIsSo) {
  StreamAdmission admission("probe", 2, kStallTimeout, absl::ZeroDuration(),
                            StreamAdmission::Newcomers::kAlwaysEnter);
  FakeCall first;
  FakeCall second;
  FakeCall third;
  FakeCall fourth;
  for (FakeCall* const call : {&first, &second, &third, &fourth}) {
    call->SetWaiting(true);
    ASSERT_THAT(admission.Enter(call), IsOk());
  }
  EXPECT_EQ(first.ended, 1);
  EXPECT_EQ(second.ended, 1);
  EXPECT_EQ(third.ended, 0);
}

TEST(StreamAdmissionTest, EndsTheSlowPullsOfAVersion) {
  constexpr int64_t kMinBytesPerSecond = 1000;
  StreamAdmission admission("pull", 5, kStallTimeout, absl::ZeroDuration(),
                            StreamAdmission::Newcomers::kMayWait, kMinBytesPerSecond);
  FakeCall fast;
  FakeCall slow;
  FakeCall slow_too;
  FakeCall newer;
  FakeCall of_another_model;
  for (FakeCall* const call : {&fast, &slow, &slow_too, &newer, &of_another_model}) {
    call->SetCaller("Pull", "", call == &of_another_model ? "n" : "m");
    ASSERT_THAT(admission.Enter(call), IsOk());
    admission.SetPinned(call, {call == &newer ? 8 : 7, 1});
  }
  const SteadyTime begin = SteadyNow();
  admission.CheckStalled(begin);
  for (FakeCall* const call : {&slow, &slow_too, &newer, &of_another_model}) call->CountBytes(300);
  fast.CountBytes(500);
  // Before the window is over nothing is known.
  admission.CheckStalled(begin + kStallTimeout / 4);
  EXPECT_EQ(admission.EndSlowPulls("m", {7, 1}), 0);
  admission.CheckStalled(begin + 2 * kStallTimeout / 5);
  EXPECT_EQ(admission.EndSlowPulls("m", {7, 1}), 2);
  EXPECT_EQ(slow.ended, 1);
  EXPECT_EQ(slow_too.ended, 1);
  EXPECT_EQ(fast.ended + newer.ended + of_another_model.ended, 0);
}

// Knows the token "known", for one model.
class OneToken final : public Authenticator {
 public:
  absl::StatusOr<Access> Authenticate(std::string_view authorization) const override {
    if (authorization == "known") return Access{.role = Role::kTrainer, .models = {"mine"}};
    return MakeError(absl::StatusCode::kUnauthenticated, ErrorReason::kBadToken, "unknown");
  }
  bool Refresh() override { return false; }
};

TEST(StreamAdmissionTest, WhoseTokenHasBeenTakenAwayGetsNoPlace) {
  StreamAdmission admission("push", 1, kStallTimeout);
  const OneToken authenticator;
  FakeCall revoked;
  revoked.SetCaller("/ema.v1.EmaService/Push", "revoked", std::nullopt);
  EXPECT_THAT(admission.Enter(&revoked, &authenticator), ReasonIs(ErrorReason::kBadToken));
  EXPECT_EQ(admission.open_count(), 0);
  FakeCall known;
  known.SetCaller("/ema.v1.EmaService/Push", "known", std::nullopt);
  EXPECT_THAT(admission.Enter(&known, &authenticator), IsOk());
  EXPECT_THAT(admission.SetModel(&known, "mine", &authenticator), IsOk());
  admission.EndRevoked(authenticator);
  EXPECT_EQ(known.ended, 0);
  EXPECT_THAT(admission.SetModel(&known, "other", &authenticator),
              ReasonIs(ErrorReason::kBadToken));
  admission.EndRevoked(authenticator);
  EXPECT_EQ(known.ended, 1);
}

}  // namespace
}  // namespace ema
