// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/stream_slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

constexpr char kPeer[] = "ipv4:10.0.0.1:4711";
constexpr absl::Duration kStallTimeout = absl::Seconds(1);

StreamSlots::Options SlotsOf(int64_t limit, absl::Duration stall_timeout = kStallTimeout) {
  return {.kind = "push",
          .method = "/ema.v1.EmaService/Push",
          .limit = limit,
          .stall_timeout = stall_timeout,
          .min_bytes_per_second = 1000};
}

void Sleep(absl::Duration duration) {
  std::this_thread::sleep_for(absl::ToChronoNanoseconds(duration));
}

class FakeCall final : public StreamCall {
 public:
  using StreamCall::CountBytes;
  using StreamCall::SetWaiting;
  void End(StreamEnd why) override {
    ++ended;
    end = why;
  }

  int ended = 0;
  StreamEnd end = StreamEnd::kRevoked;
};

TEST(StreamSlotsTest, BusyStreamsAreNotEvicted) {
  StreamSlots slots(SlotsOf(2));
  FakeCall busy;
  FakeCall waiting;
  FakeCall newcomer;
  ASSERT_THAT(slots.Enter(&busy, "", kPeer, std::nullopt), IsOk());
  ASSERT_THAT(slots.Enter(&waiting, "", kPeer, std::nullopt), IsOk());
  waiting.SetWaiting(true);  // Not for long.
  EXPECT_THAT(slots.Enter(&newcomer, "", kPeer, std::nullopt),
              AllOf(ReasonIs(ErrorReason::kTooManyStreams),
                    StatusIs(absl::StatusCode::kResourceExhausted,
                             testing::HasSubstr("2 push streams are open (limit 2"))));
  waiting.SetWaiting(false);
  Sleep(kStallTimeout / 5);
  EXPECT_THAT(slots.Enter(&newcomer, "", kPeer, std::nullopt),
              ReasonIs(ErrorReason::kTooManyStreams));
  EXPECT_EQ(busy.ended + waiting.ended, 0);
}

TEST(StreamSlotsTest, TheLongestStalledStreamIsEvictedOneAtATime) {
  // Long, so that the test asks again within a fortieth of it.
  const absl::Duration kLongTimeout = 5 * kStallTimeout;
  StreamSlots slots(SlotsOf(3, kLongTimeout));
  FakeCall busy;
  FakeCall longest;
  FakeCall later;
  FakeCall newcomer;
  for (FakeCall* const call : {&busy, &longest, &later}) {
    ASSERT_THAT(slots.Enter(call, "", kPeer, std::nullopt), IsOk());
  }
  longest.SetWaiting(true);
  Sleep(kLongTimeout / 10);
  later.SetWaiting(true);
  Sleep(kLongTimeout / 10);
  ASSERT_THAT(slots.Enter(&newcomer, "", kPeer, std::nullopt), IsOk());
  EXPECT_EQ(longest.ended, 1);
  EXPECT_EQ(later.ended, 0);
  slots.Leave(&longest);  // It has no slot any more.
  FakeCall another;
  EXPECT_THAT(slots.Enter(&another, "", kPeer, std::nullopt),
              ReasonIs(ErrorReason::kTooManyStreams));
  EXPECT_EQ(later.ended, 0);
  Sleep(kLongTimeout / 40);
  ASSERT_THAT(slots.Enter(&another, "", kPeer, std::nullopt), IsOk());
  EXPECT_EQ(later.ended, 1);
  FakeCall refused;
  EXPECT_THAT(slots.Enter(&refused, "", kPeer, std::nullopt),
              ReasonIs(ErrorReason::kTooManyStreams));
  slots.Leave(&busy);
  EXPECT_THAT(slots.Enter(&refused, "", kPeer, std::nullopt), IsOk());
}

// A caller is a token and an address, whatever its port.
struct Caller {
  std::string token;
  std::string address;
};

// Enters `call` of `caller`, from a port of its own.
absl::Status Enter(StreamSlots& slots, FakeCall& call, const Caller& caller) {
  static int port = 1024;
  return slots.Enter(&call, caller.token, absl::StrCat(caller.address, ":", ++port), "m");
}

int64_t CountEnded(const std::vector<FakeCall>& calls) {
  return std::count_if(calls.begin(), calls.end(), [](const FakeCall& call) { return call.ended; });
}

TEST(StreamSlotsTest, TheCallerWithTheMostSlotsGivesThemToOthers) {
  const Caller greedy = {"a", "ipv4:10.0.0.1"};
  for (const Caller& other : {Caller{"b", "ipv4:10.0.0.1"}, {"a", "ipv4:10.0.0.2"}}) {
    SCOPED_TRACE(other.token + other.address);
    StreamSlots slots(SlotsOf(5));
    std::vector<FakeCall> calls(5);
    for (FakeCall& call : calls) ASSERT_THAT(Enter(slots, call, greedy), IsOk());
    calls[3].SetWaiting(true);
    std::vector<FakeCall> others(3);
    ASSERT_THAT(Enter(slots, others[0], other), IsOk());
    EXPECT_EQ(calls[3].ended, 1) << "the one that waits";
    EXPECT_EQ(calls[3].end, StreamEnd::kOverFairShare);
    ASSERT_THAT(Enter(slots, others[1], other), IsOk());
    EXPECT_EQ(CountEnded(calls), 2) << "busy ones, too";
    // Now they have 3 and 2.
    EXPECT_THAT(Enter(slots, others[2], other), ReasonIs(ErrorReason::kTooManyStreams));
    EXPECT_THAT(Enter(slots, calls[3], greedy), ReasonIs(ErrorReason::kTooManyStreams));
    EXPECT_EQ(CountEnded(calls), 2);
    EXPECT_EQ(CountEnded(others), 0);
  }
}

TEST(StreamSlotsTest, CallersConvergeToEqualShares) {
  constexpr int kSlots = 6;
  StreamSlots slots(SlotsOf(kSlots));
  const std::vector<Caller> callers = {{"a", "x"}, {"b", "x"}, {"c", "x"}};
  // The first two callers have half of the slots each.
  std::vector<std::vector<FakeCall>> calls(callers.size());
  for (std::vector<FakeCall>& of_caller : calls) of_caller = std::vector<FakeCall>(kSlots);
  for (int i = 0; i < kSlots / 2; ++i) {
    for (const int caller : {0, 1}) {
      ASSERT_THAT(Enter(slots, calls[caller][i], callers[caller]), IsOk());
    }
  }
  ASSERT_THAT(Enter(slots, calls[2][0], callers[2]), IsOk());
  ASSERT_THAT(Enter(slots, calls[2][1], callers[2]), IsOk());
  EXPECT_EQ(CountEnded(calls[0]), 1);
  EXPECT_EQ(CountEnded(calls[1]), 1);
  // With two slots each, none of them gets another one.
  for (const int caller : {0, 1, 2}) {
    EXPECT_THAT(Enter(slots, calls[caller][kSlots - 1], callers[caller]),
                ReasonIs(ErrorReason::kTooManyStreams));
  }
  EXPECT_EQ(CountEnded(calls[0]) + CountEnded(calls[1]) + CountEnded(calls[2]), 2);
}

// The pulls of `caller`, one of each version.
void Pin(StreamSlots& slots, std::vector<FakeCall>& calls, const Caller& caller,
         std::vector<int64_t> versions) {
  for (size_t i = 0; i < versions.size(); ++i) {
    ASSERT_THAT(Enter(slots, calls[i], caller), IsOk());
    slots.SetPinnedVersion(&calls[i], {versions[i], 1});
  }
}

TEST(StreamSlotsTest, ACallerThatPinsTwoVersionsMoreGivesOneUp) {
  StreamSlots slots(SlotsOf(10));
  const Caller greedy = {"a", "x"};
  const Caller other = {"b", "x"};
  std::vector<FakeCall> pulls(3);
  std::vector<FakeCall> shared(1);
  std::vector<FakeCall> refused(2);
  Pin(slots, pulls, greedy, {5, 6, 7});
  Pin(slots, shared, other, {5});
  for (FakeCall& call : refused) ASSERT_THAT(Enter(slots, call, other), IsOk());

  EXPECT_EQ(slots.EndPullsAboveFairShare(&refused[0]), 1);
  EXPECT_EQ(pulls[1].ended, 1) << "version 6, as the other caller pins version 5, too";
  EXPECT_EQ(pulls[1].end, StreamEnd::kOverFairShare);
  EXPECT_EQ(CountEnded(pulls) + CountEnded(shared), 1);
  // Now they pin two and one.
  slots.Leave(&pulls[1]);
  EXPECT_EQ(slots.EndPullsAboveFairShare(&refused[1]), 0);
  EXPECT_EQ(slots.EndPullsAboveFairShare(&pulls[0]), 0);
  EXPECT_EQ(CountEnded(pulls) + CountEnded(shared), 1);
}

TEST(StreamSlotsTest, PinsOfAnotherModelAreNotCounted) {
  StreamSlots slots(SlotsOf(10));
  std::vector<FakeCall> pulls(2);
  Pin(slots, pulls, {"a", "x"}, {1, 2});
  FakeCall refused;
  ASSERT_THAT(Enter(slots, refused, {"b", "x"}), IsOk());
  slots.SetModel(&refused, "other");
  EXPECT_EQ(slots.EndPullsAboveFairShare(&refused), 0);
  EXPECT_EQ(CountEnded(pulls), 0);
}

TEST(StreamSlotsTest, Ipv6AddressesOfOnePrefixAreOneCaller) {
  StreamSlots slots(SlotsOf(4));
  std::vector<FakeCall> calls(4);
  int host = 0;
  for (FakeCall& call : calls) {
    const Caller neighbour = {"a", absl::StrCat("ipv6:%5B2001:db8:0:1:", ++host, "::7%5D")};
    ASSERT_THAT(Enter(slots, call, neighbour), IsOk());
  }
  FakeCall refused;
  EXPECT_THAT(Enter(slots, refused, {"a", "ipv6:%5B2001:db8:0:1::9%25eth0%5D"}),
              ReasonIs(ErrorReason::kTooManyStreams));
  EXPECT_EQ(CountEnded(calls), 0);
  FakeCall other;
  ASSERT_THAT(Enter(slots, other, {"a", "ipv6:%5B2001:db8:0:2::7%5D"}), IsOk());
  EXPECT_EQ(CountEnded(calls), 1);
}

TEST(StreamSlotsTest, ACallerGetsNoStalledSlotOfOneWithFewer) {
  StreamSlots slots(SlotsOf(4));
  FakeCall other;
  std::vector<FakeCall> calls(3);
  ASSERT_THAT(slots.Enter(&other, "other", kPeer, "m"), IsOk());
  other.SetWaiting(true);
  for (FakeCall& call : calls) ASSERT_THAT(slots.Enter(&call, "greedy", kPeer, "m"), IsOk());
  calls[1].SetWaiting(true);
  Sleep(kStallTimeout / 10);
  FakeCall newcomer;
  ASSERT_THAT(slots.Enter(&newcomer, "greedy", kPeer, "m"), IsOk());
  EXPECT_EQ(calls[1].ended, 1);
  EXPECT_EQ(calls[1].end, StreamEnd::kStalled);
  EXPECT_EQ(other.ended, 0) << "though it has waited longer";
}

TEST(StreamSlotsTest, StreamsThatStallForTheTimeoutAreEnded) {
  StreamSlots slots(SlotsOf(2));
  FakeCall stalled;
  FakeCall busy;
  ASSERT_THAT(slots.Enter(&stalled, "", kPeer, std::nullopt), IsOk());
  ASSERT_THAT(slots.Enter(&busy, "", kPeer, std::nullopt), IsOk());
  stalled.SetWaiting(true);
  slots.EndStalled(SteadyNow());
  EXPECT_EQ(stalled.ended, 0);
  slots.EndStalled(After(SteadyNow(), 2 * kStallTimeout));
  EXPECT_EQ(stalled.ended, 1);
  EXPECT_EQ(busy.ended, 0);
}

TEST(StreamSlotsTest, SlowPullsOfOneVersionAreEnded) {
  StreamSlots slots(SlotsOf(5));
  FakeCall fast;
  FakeCall slow;
  FakeCall slow_too;
  FakeCall newer;
  FakeCall of_another_model;
  for (FakeCall* const call : {&fast, &slow, &slow_too, &newer, &of_another_model}) {
    ASSERT_THAT(slots.Enter(call, "", kPeer, call == &of_another_model ? "n" : "m"), IsOk());
    slots.SetPinnedVersion(call, {call == &newer ? 8 : 7, 1});
  }
  const SteadyTime begin = SteadyNow();
  slots.EndStalled(begin);
  for (FakeCall* const call : {&slow, &slow_too, &newer, &of_another_model}) call->CountBytes(300);
  fast.CountBytes(500);
  // The first window is not over.
  slots.EndStalled(After(begin, kStallTimeout / 4));
  EXPECT_EQ(slots.EndSlowPulls("m", {7, 1}), 0);
  slots.EndStalled(After(begin, 2 * kStallTimeout / 5));
  EXPECT_EQ(slots.EndSlowPulls("m", {7, 1}), 2);
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

TEST(StreamSlotsTest, StreamsWhoseTokenIsNoLongerValidAreEnded) {
  StreamSlots slots(SlotsOf(3));
  const OneToken authenticator;
  FakeCall revoked;
  FakeCall known;
  FakeCall of_another_model;
  ASSERT_THAT(slots.Enter(&revoked, "revoked", kPeer, std::nullopt), IsOk());
  ASSERT_THAT(slots.Enter(&known, "known", kPeer, "mine"), IsOk());
  ASSERT_THAT(slots.Enter(&of_another_model, "known", kPeer, std::nullopt), IsOk());
  slots.EndRevoked(authenticator);
  EXPECT_EQ(revoked.ended, 1);
  EXPECT_EQ(known.ended + of_another_model.ended, 0);
  slots.SetModel(&of_another_model, "other");
  slots.EndRevoked(authenticator);
  EXPECT_EQ(of_another_model.ended, 1);
  EXPECT_EQ(known.ended, 0);
}

}  // namespace
}  // namespace ema
