// SPDX-License-Identifier: Apache-2.0
//
// What every registry promises: etcd's, that of Kubernetes, and the one in memory that other tests
// use. EMA_TEST_KUBERNETES names a real API server: "URL CA_FILE TOKEN_FILE NAMESPACE". Its
// registry is then tested, too, apart from an outage.
#include "server/registry/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "server/registry/etcd_registry.h"
#include "server/registry/kubernetes_registry.h"
#include "tests/registry/watched_keys.h"
#include "tests/testutil/etcd_cluster.h"
#include "tests/testutil/fake_kubernetes.h"
#include "tests/testutil/memory_registry.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr absl::Duration kTtl = absl::Seconds(2);  // etcd's shortest one.

// One store, with a registry for each server.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::shared_ptr<Registry> NewRegistry() = 0;
  virtual void SetUnavailable(bool is_unavailable) = 0;
};

class MemoryBackend final : public Backend {
 public:
  std::shared_ptr<Registry> NewRegistry() override { return registry_; }
  void SetUnavailable(bool is_unavailable) override { registry_->SetUnavailable(is_unavailable); }

 private:
  const std::shared_ptr<MemoryRegistry> registry_ = std::make_shared<MemoryRegistry>();
};

class EtcdBackend final : public Backend {
 public:
  EtcdBackend() : cluster_(*EtcdCluster::Start({})) {}
  std::shared_ptr<Registry> NewRegistry() override {
    // On a busy machine etcd may be slow.
    return *EtcdRegistry::Create(
        {.endpoints = cluster_->endpoints(), .call_timeout = absl::Seconds(20)});
  }
  void SetUnavailable(bool is_unavailable) override {
    if (is_unavailable) {
      cluster_->Kill(0);
    } else {
      EXPECT_THAT(cluster_->Restart(0), IsOk());
    }
  }

 private:
  const std::unique_ptr<EtcdCluster> cluster_;
};

class KubernetesBackend final : public Backend {
 public:
  KubernetesBackend() : server_(*FakeKubernetes::Start({})) {}
  std::shared_ptr<Registry> NewRegistry() override {
    return *KubernetesRegistry::Create(
        {.api_url = server_->url(), .name_space = "ema", .call_timeout = absl::Seconds(20)});
  }
  void SetUnavailable(bool is_unavailable) override {
    if (is_unavailable) {
      server_->Kill();
    } else {
      EXPECT_THAT(server_->Restart(), IsOk());
    }
  }

 private:
  const std::unique_ptr<FakeKubernetes> server_;
};

constexpr const char* kRealKubernetes = "EMA_TEST_KUBERNETES";

class RealKubernetesBackend final : public Backend {
 public:
  RealKubernetesBackend() {
    // The tests expect an empty registry.
    const std::string command = absl::StrCat(
        "for kind in api/v1/namespaces/", Part(3),
        "/configmaps apis/coordination.k8s.io/v1/namespaces/", Part(3),
        "/leases; do curl --silent --fail --request DELETE --cacert ", Part(1),
        " --header \"Authorization: Bearer $(cat ", Part(2), ")\" ", Part(0),
        "/$kind?labelSelector=app.kubernetes.io%2Fmanaged-by%3Dema-server >/dev/null; done");
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  }
  std::shared_ptr<Registry> NewRegistry() override {
    return *KubernetesRegistry::Create({.api_url = Part(0),
                                        .name_space = Part(3),
                                        .token_file = Part(2),
                                        .ca_file = Part(1),
                                        .call_timeout = absl::Seconds(20)});
  }
  void SetUnavailable(bool /*is_unavailable*/) override {}

 private:
  std::string Part(int index) const { return parts_[index]; }

  const std::vector<std::string> parts_ = absl::StrSplit(std::getenv(kRealKubernetes), ' ');
};

class RegistryTest : public testing::TestWithParam<const char*> {
 protected:
  static std::unique_ptr<Backend> NewBackend() {
    const std::string name = GetParam();
    if (name == "Etcd") return std::make_unique<EtcdBackend>();
    if (name == "Kubernetes") return std::make_unique<KubernetesBackend>();
    if (name == "RealKubernetes") return std::make_unique<RealKubernetesBackend>();
    return std::make_unique<MemoryBackend>();
  }

  const std::unique_ptr<Backend> backend_ = NewBackend();
  const std::shared_ptr<Registry> registry_ = backend_->NewRegistry();
  const std::shared_ptr<Registry> other_ = backend_->NewRegistry();
};

TEST_P(RegistryTest, KeyIsCreatedChangedAndDeletedByItsRevision) {
  EXPECT_THAT(registry_->Read("/m/a"), IsOkAndHolds(RegistryEntry{.key = "/m/a"}));
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t first, registry_->CompareAndPut("/m/a", 0, "one"));
  EXPECT_GT(first, 0);
  EXPECT_THAT(other_->Read("/m/a"), IsOkAndHolds(RegistryEntry{"/m/a", "one", first}));

  EXPECT_THAT(other_->CompareAndPut("/m/a", 0, "two"),
              StatusIs(absl::StatusCode::kAborted,
                       HasSubstr(absl::StrCat("key \"/m/a\" has revision ", first,
                                              ", expected 0 (0: no such key)"))));
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t second, other_->CompareAndPut("/m/a", first, "two"));
  EXPECT_GT(second, first);
  EXPECT_THAT(registry_->CompareAndPut("/m/a", first, "three"),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("expected")));
  EXPECT_THAT(registry_->CompareAndDelete("/m/a", first),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("expected")));
  EXPECT_THAT(registry_->Read("/m/a"), IsOkAndHolds(RegistryEntry{"/m/a", "two", second}));

  EXPECT_THAT(registry_->CompareAndDelete("/m/a", second), IsOk());
  EXPECT_THAT(other_->Read("/m/a"), IsOkAndHolds(RegistryEntry{.key = "/m/a"}));
  EXPECT_THAT(other_->CompareAndPut("/m/a", second, "four"),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("has revision 0")));
}

TEST_P(RegistryTest, PrefixSelectsItsKeysInOrder) {
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t b, registry_->CompareAndPut("/m/b", 0, "B"));
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t a, registry_->CompareAndPut("/m/a", 0, ""));
  for (const char* const outside : {"/l/a", "/m", "/m0", "/n/a"}) {
    EXPECT_THAT(registry_->CompareAndPut(outside, 0, "x"), IsOk());
  }
  EXPECT_THAT(other_->ReadPrefix("/m/"), IsOkAndHolds(ElementsAre(RegistryEntry{"/m/a", "", a},
                                                                  RegistryEntry{"/m/b", "B", b})));
  EXPECT_THAT(other_->ReadPrefix("/k/"), IsOkAndHolds(IsEmpty()));
}

TEST_P(RegistryTest, RacingWritersLoseNoChange) {
  constexpr int kWriters = 8;
  constexpr int kChanges = 20;
  ASSERT_THAT(registry_->CompareAndPut("/m/count", 0, "0"), IsOk());
  std::vector<std::thread> writers;
  for (int i = 0; i < kWriters; ++i) {
    writers.emplace_back([registry = i % 2 == 0 ? registry_ : other_] {
      for (int made = 0; made < kChanges;) {
        EMA_ASSERT_OK_AND_ASSIGN(const RegistryEntry entry, registry->Read("/m/count"));
        int count = 0;
        ASSERT_TRUE(absl::SimpleAtoi(entry.value, &count));
        const absl::StatusOr<int64_t> put =
            registry->CompareAndPut(entry.key, entry.revision, absl::StrCat(count + 1));
        if (put.ok()) {
          ++made;
        } else {
          ASSERT_EQ(put.status().code(), absl::StatusCode::kAborted) << put.status();
        }
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(registry_->Read("/m/count")->value, absl::StrCat(kWriters * kChanges));
}

TEST_P(RegistryTest, WatchReportsAllKeysThenEachChange) {
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t a, registry_->CompareAndPut("/m/a", 0, "1"));
  WatchedKeys keys;
  auto watch = other_->Watch("/m/", keys.callback());
  const WatchedKeys::Values initial = {{"/m/a", "1"}};
  EXPECT_EQ(keys.Await(initial), initial);
  EXPECT_THAT(keys.changes(), IsEmpty());

  EMA_ASSERT_OK_AND_ASSIGN(const int64_t changed, registry_->CompareAndPut("/m/a", a, "2"));
  EXPECT_THAT(registry_->CompareAndPut("/n", 0, "outside"), IsOk());
  EXPECT_THAT(registry_->CompareAndPut("/m/b", 0, "3"), IsOk());
  EXPECT_THAT(registry_->CompareAndDelete("/m/a", changed), IsOk());
  const WatchedKeys::Values last = {{"/m/b", "3"}};
  EXPECT_EQ(keys.Await(last), last);
  EXPECT_THAT(keys.changes(), ElementsAre("/m/a=2", "/m/b=3", "/m/a deleted"));
  EXPECT_EQ(keys.AwaitCompleteCount(1), 1);

  watch.reset();
  EXPECT_THAT(registry_->CompareAndPut("/m/c", 0, "4"), IsOk());
  EXPECT_EQ(keys.changes().size(), 3);
}

TEST_P(RegistryTest, CallbackOfAWatchCanCallTheRegistry) {
  WatchedKeys keys;
  const auto report = keys.callback();
  const auto watch = registry_->Watch("/m/", [&](const RegistryUpdate& update) {
    registry_->CompareAndPut("/m/seen", 0, "x").status().IgnoreError();
    report(update);
  });
  const WatchedKeys::Values expected = {{"/m/seen", "x"}};
  EXPECT_EQ(keys.Await(expected), expected);
}

TEST_P(RegistryTest, MemberKeyOutlivesItsTtlAndGoesWithLeave) {
  constexpr absl::Duration ttl = absl::Seconds(6);  // A renewal may be late on a busy machine.
  EMA_ASSERT_OK_AND_ASSIGN(const auto member, registry_->Join("/s/a", "boot-1", ttl));
  EXPECT_THAT(other_->Join("/s/a", "boot-2", ttl),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("/s/a")));
  WatchedKeys keys;
  const auto watch = other_->Watch("/s/", keys.callback());
  EXPECT_EQ(keys.Await({}, absl::Seconds(9)), (WatchedKeys::Values{{"/s/a", "boot-1"}}));
  EXPECT_THAT(member->status(), IsOk());
  EXPECT_LT(Since(registry_->last_contact()), ttl);
  EXPECT_THAT(keys.changes(), IsEmpty());

  EXPECT_THAT(member->Leave(), IsOk());
  EXPECT_THAT(other_->Read("/s/a"), IsOkAndHolds(RegistryEntry{.key = "/s/a"}));
  EXPECT_THAT(other_->Join("/s/a", "boot-2", ttl), IsOk());
}

TEST_P(RegistryTest, KeyOfADroppedMemberExpires) {
  EMA_ASSERT_OK_AND_ASSIGN(auto member, registry_->Join("/s/a", "boot-1", kTtl));
  WatchedKeys keys;
  const auto watch = other_->Watch("/s/", keys.callback());
  const WatchedKeys::Values joined = {{"/s/a", "boot-1"}};
  EXPECT_EQ(keys.Await(joined), joined);
  member.reset();
  EXPECT_EQ(keys.Await({}), WatchedKeys::Values());
  EXPECT_THAT(keys.changes(), Contains("/s/a deleted"));
}

TEST_P(RegistryTest, OutageKeepsMembersAndEndsInAllKeys) {
  if (GetParam() == std::string("RealKubernetes")) GTEST_SKIP() << "cannot stop it";
  EMA_ASSERT_OK_AND_ASSIGN(const auto member, registry_->Join("/s/a", "boot-1", kTtl));
  WatchedKeys keys;
  const auto watch = registry_->Watch("/s/", keys.callback());
  EXPECT_EQ(keys.AwaitCompleteCount(1), 1);

  backend_->SetUnavailable(true);
  const SteadyTime away = SteadyNow();
  EXPECT_THAT(registry_->Read("/s/a"), StatusIs(absl::StatusCode::kUnavailable, testing::_));
  EXPECT_THAT(other_->CompareAndPut("/s/b", 0, "x"),
              StatusIs(absl::StatusCode::kUnavailable, testing::_));
  EXPECT_THAT(other_->Join("/s/b", "x", kTtl),
              StatusIs(absl::StatusCode::kUnavailable, testing::_));
  while (member->status().ok()) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_THAT(member->status(), StatusIs(absl::StatusCode::kUnavailable, testing::_));
  // Longer than the TTL.
  absl::SleepFor(2 * kTtl - Since(away));
  EXPECT_GE(Since(registry_->last_contact()), kTtl);
  EXPECT_THAT(registry_->health().endpoints, Not(IsEmpty()));
  EXPECT_THAT(registry_->health().error, StatusIs(absl::StatusCode::kUnavailable, testing::_));

  backend_->SetUnavailable(false);
  EXPECT_EQ(keys.AwaitCompleteCount(2), 2);
  while (!member->status().ok()) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(registry_->Read("/s/a")->value, "boot-1");
  EXPECT_THAT(registry_->health().error, IsOk());
  EXPECT_THAT(keys.changes(), IsEmpty());
}

std::vector<const char*> Backends() {
  std::vector<const char*> names = {"Memory", "Etcd", "Kubernetes"};
  if (std::getenv(kRealKubernetes) != nullptr) names.push_back("RealKubernetes");
  return names;
}

INSTANTIATE_TEST_SUITE_P(, RegistryTest, testing::ValuesIn(Backends()),
                         [](const auto& instance) { return instance.param; });

}  // namespace
}  // namespace ema
