// SPDX-License-Identifier: Apache-2.0
//
// The registry in etcd over longer times: elections, and idle streams.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/registry/etcd_registry.h"
#include "tests/registry/watched_keys.h"
#include "tests/testutil/etcd_cluster.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::IsEmpty;

constexpr absl::Duration kSlack = absl::Seconds(1);  // For busy machines.

// Three etcds, of which the registry asks the one first that fails, or another one.
struct FailoverCase {
  const char* name;
  int signal;  // Sent to the leader.
  bool is_leader_asked;
};
class EtcdFailoverTest : public testing::TestWithParam<FailoverCase> {};

TEST_P(EtcdFailoverTest, CallsWatchesAndMembersMoveOn) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto cluster, EtcdCluster::Start({.size = 3}));
  const int leader = cluster->leader();
  ASSERT_GE(leader, 0);
  const int first = GetParam().is_leader_asked ? leader : (leader + 1) % 3;
  const std::string endpoints = absl::StrCat(
      cluster->url(first), ",", cluster->url((first + 1) % 3), ",", cluster->url((first + 2) % 3));
  EMA_ASSERT_OK_AND_ASSIGN(const auto registry, EtcdRegistry::Create({.endpoints = endpoints}));
  WatchedKeys members;
  EMA_ASSERT_OK_AND_ASSIGN(const auto member, registry->Join("/s/a", "boot-1", absl::Seconds(6)));
  const auto member_watch = registry->Watch("/s/", members.callback());
  const WatchedKeys::Values joined = {{"/s/a", "boot-1"}};
  ASSERT_EQ(members.Await(joined), joined);
  WatchedKeys keys;
  const auto key_watch = registry->Watch("/m/", keys.callback());
  ASSERT_EQ(keys.AwaitCompleteCount(1), 1);

  cluster->Signal(leader, GetParam().signal);
  const SteadyTime failed = SteadyNow();
  absl::Duration longest;
  bool is_put = false;
  while (!is_put && Since(failed) < absl::Seconds(20)) {
    const SteadyTime start = SteadyNow();
    const absl::StatusOr<int64_t> put = registry->CompareAndPut("/m/a", 0, "x");
    // ABORTED: a call that said UNAVAILABLE has put it.
    is_put = put.ok() || absl::IsAborted(put.status());
    longest = std::max(longest, Since(start));
  }
  EXPECT_TRUE(is_put);
  EXPECT_LT(longest, EtcdOptions().call_timeout + kSlack);
  RecordProperty("failover_ms", absl::ToInt64Milliseconds(Since(failed)));
  const WatchedKeys::Values put = {{"/m/a", "x"}};
  EXPECT_EQ(keys.Await(put), put);
  EXPECT_LT(Since(failed), absl::Seconds(8));
  while (!member->status().ok() && Since(failed) < absl::Seconds(20)) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_THAT(member->status(), IsOk());
  EXPECT_EQ(members.Await(joined), joined);
  EXPECT_THAT(members.changes(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, EtcdFailoverTest,
                         testing::Values(FailoverCase{"KilledLeader", SIGKILL, true},
                                         FailoverCase{"KilledLeaderOfTheAskedOne", SIGKILL, false},
                                         FailoverCase{"StoppedLeader", SIGSTOP, true},
                                         FailoverCase{"StoppedLeaderOfTheAskedOne", SIGSTOP,
                                                      false}),
                         [](const auto& instance) { return std::string(instance.param.name); });

// An idle stream must not look dead, and etcd must not object to the pings.
TEST(EtcdWatchTest, IdleWatchIsNotInterrupted) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto cluster, EtcdCluster::Start({}));
  std::atomic<int> events = 0;
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto registry,
      EtcdRegistry::Create({.endpoints = cluster->endpoints(), .log = [&](const LogEvent& event) {
                              ++events;
                              ADD_FAILURE() << ToText(event);
                            }}));
  WatchedKeys keys;
  const auto watch = registry->Watch("/m/", keys.callback());
  ASSERT_EQ(keys.AwaitCompleteCount(1), 1);
  absl::SleepFor(absl::Seconds(20));  // More than three pings.
  EXPECT_THAT(registry->CompareAndPut("/m/a", 0, "1"), IsOk());
  const WatchedKeys::Values expected = {{"/m/a", "1"}};
  EXPECT_EQ(keys.Await(expected), expected);
  EXPECT_EQ(keys.AwaitCompleteCount(1), 1);
  EXPECT_EQ(events, 0);
}

// Such an etcd would be silent, although it is connected.
TEST(EtcdWatchTest, WatchAtAnEtcdWithoutALeaderIsInterrupted) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto cluster, EtcdCluster::Start({.size = 3}));
  absl::Notification interrupted;
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto registry,
      EtcdRegistry::Create({.endpoints = cluster->url(0), .log = [&](const LogEvent& event) {
                              if (event.name != "registry watch interrupted") return;
                              if (!interrupted.HasBeenNotified()) interrupted.Notify();
                            }}));
  WatchedKeys keys;
  const auto watch = registry->Watch("/m/", keys.callback());
  ASSERT_EQ(keys.AwaitCompleteCount(1), 1);
  cluster->Signal(1, SIGSTOP);
  cluster->Signal(2, SIGSTOP);
  EXPECT_TRUE(interrupted.WaitForNotificationWithTimeout(absl::Seconds(20)));
  cluster->Signal(1, SIGCONT);
  cluster->Signal(2, SIGCONT);
  EXPECT_EQ(keys.AwaitCompleteCount(2), 2);
}

}  // namespace
}  // namespace ema
