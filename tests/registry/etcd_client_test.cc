// SPDX-License-Identifier: Apache-2.0
//
// What the registry does when an etcd is slow, or refuses. A fake etcd does that on demand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/registry/etcd_registry.h"
#include "tests/registry/fake_etcd.h"
#include "tests/registry/watched_keys.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kTtl = absl::Seconds(3);

TEST(EtcdClientTest, OverloadedEtcdIsUnavailable) {
  FakeEtcd etcd({.range = [](grpc::ServerContext&, const etcdserverpb::RangeRequest&) {
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "etcdserver: too many requests");
  }});
  EMA_ASSERT_OK_AND_ASSIGN(const auto registry, EtcdRegistry::Create({.endpoints = etcd.url()}));
  EXPECT_THAT(registry->Read("/m/a"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("too many requests")));
}

// A rejected token says that the change was not made, so an equal value is another writer's.
TEST(EtcdClientTest, RejectedTokenIsNoLostAnswer) {
  std::atomic<int> attempts = 0;
  FakeEtcd etcd({.txn = [&](const etcdserverpb::TxnRequest&, etcdserverpb::TxnResponse& response) {
    if (++attempts == 1) {
      return grpc::Status(grpc::StatusCode::UNAUTHENTICATED, "etcdserver: invalid auth token");
    }
    etcdserverpb::KeyValue& found = *response.add_responses()->mutable_range()->add_kvs();
    found.set_key("/m/a");
    found.set_value("x");
    found.set_mod_revision(5);
    return grpc::Status::OK;
  }});
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto registry,
      EtcdRegistry::Create({.endpoints = etcd.url(), .user = "ema", .password = "secret"}));
  EXPECT_THAT(registry->CompareAndPut("/m/a", 0, "x"),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("has revision 5, expected 0")));
  EXPECT_EQ(attempts, 2);
}

TEST(EtcdClientTest, LeaveEndsInTimeAlthoughARenewalIsNotAnswered) {
  absl::Notification renewed;
  FakeEtcd* fake = nullptr;
  const auto hang = [&](grpc::ServerContext& context) {
    if (!renewed.HasBeenNotified()) renewed.Notify();
    fake->AwaitCancelled(context);
    return grpc::Status::OK;
  };
  FakeEtcd etcd({.renew = hang, .revoke = hang});
  fake = &etcd;
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto registry,
      EtcdRegistry::Create({.endpoints = etcd.url(), .call_timeout = absl::Seconds(5)}));
  EMA_ASSERT_OK_AND_ASSIGN(const auto member, registry->Join("/s/a", "boot-1", kTtl));
  renewed.WaitForNotification();
  const SteadyTime start = SteadyNow();
  EXPECT_THAT(member->Leave(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no answer")));
  // With a timeout for each of the two calls it would take 10 s.
  EXPECT_LT(Since(start), absl::Seconds(9));
}

// Each attempt makes etcd send all keys.
TEST(EtcdClientTest, RefusedWatchPausesLongerAndLonger) {
  FakeEtcd etcd({.watch = [] {
    return grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "etcdserver: permission denied");
  }});
  EMA_ASSERT_OK_AND_ASSIGN(const auto registry, EtcdRegistry::Create({.endpoints = etcd.url()}));
  absl::Mutex mu;
  std::vector<SteadyTime> reads;
  const auto watch = registry->Watch("/m/", [&](const RegistryUpdate&) {
    absl::MutexLock lock(&mu);
    reads.push_back(SteadyNow());
  });
  absl::MutexLock lock(&mu);
  const auto are_enough = [&] { return reads.size() == 4; };
  mu.Await(absl::Condition(&are_enough));
  // 0.4, 0.8 and 1.6 s.
  EXPECT_GT(absl::FromChrono(reads[3] - reads[0]), absl::Seconds(2));
}

class SlowEtcdTest : public testing::Test {
 protected:
  // Does not answer a read of "/slow", nor renewals once they are stopped.
  FakeEtcd::Answers Slow() {
    return {.range =
                [this](grpc::ServerContext& context, const etcdserverpb::RangeRequest& request) {
                  if (request.key() == "/slow") slow_.AwaitCancelled(context);
                  return grpc::Status::OK;
                },
            .renew =
                [this](grpc::ServerContext& context) {
                  if (are_renewals_stopped_) slow_.AwaitCancelled(context);
                  return grpc::Status::OK;
                }};
  }

  std::atomic<bool> are_renewals_stopped_ = false;
  FakeEtcd slow_{Slow()};
  FakeEtcd fast_;
};

TEST_F(SlowEtcdTest, SlowCallDoesNotInterruptAWatch) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto registry,
      EtcdRegistry::Create({.endpoints = absl::StrCat(slow_.url(), ",", fast_.url())}));
  WatchedKeys keys;
  const auto watch = registry->Watch("/m/", keys.callback());
  ASSERT_EQ(keys.AwaitCompleteCount(1), 1);
  slow_.Report("/m/a", "1");
  const WatchedKeys::Values first = {{"/m/a", "1"}};
  EXPECT_EQ(keys.Await(first), first);
  EXPECT_THAT(registry->Read("/slow"), IsOk());  // At the other etcd.
  slow_.Report("/m/b", "2");
  const WatchedKeys::Values both = {{"/m/a", "1"}, {"/m/b", "2"}};
  EXPECT_EQ(keys.Await(both), both);
  EXPECT_EQ(keys.AwaitCompleteCount(1), 1);
}

TEST_F(SlowEtcdTest, MissedRenewalMovesTheWatchThatACallHasLeftBehind) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto registry,
      EtcdRegistry::Create({.endpoints = absl::StrCat(slow_.url(), ",", fast_.url())}));
  EMA_ASSERT_OK_AND_ASSIGN(const auto member, registry->Join("/s/a", "boot-1", kTtl));
  WatchedKeys keys;
  const auto watch = registry->Watch("/m/", keys.callback());
  ASSERT_EQ(keys.AwaitCompleteCount(1), 1);
  slow_.Report("/m/a", "1");  // The watch is there.
  EXPECT_THAT(registry->Read("/slow"), IsOk());
  are_renewals_stopped_ = true;
  EXPECT_EQ(keys.AwaitCompleteCount(2), 2);
  fast_.Report("/m/b", "2");
  const WatchedKeys::Values moved = {{"/m/b", "2"}};
  EXPECT_EQ(keys.Await(moved), moved);
  EXPECT_THAT(member->Leave(), IsOk());
}

}  // namespace
}  // namespace ema
