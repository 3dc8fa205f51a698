// SPDX-License-Identifier: Apache-2.0
//
// What a push costs a large group: messages between its servers, and writes to etcd.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ema/client.h"
#include "ema/shard.h"
#include "nlohmann/json.hpp"
#include "server/base/observer.h"
#include "server/group/messages.h"
#include "server/registry/etcd_registry.h"
#include "tests/group/group_fixture.h"
#include "tests/testutil/etcd_cluster.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

constexpr int kServers = 8;
constexpr int64_t kRanks = 256;
constexpr int64_t kTensors = 2 * kServers;
constexpr int64_t kElements = 48;  // Of each tensor, and of each rank.
constexpr absl::Duration kPatience = absl::Seconds(100);

// Counts the calls that servers have answered, by the method's name.
class CallCounter final : public ServerObserver {
 public:
  void OnRpcEnded(std::string_view rpc, const absl::Status&) override {
    absl::MutexLock lock(&mu_);
    ++counts_[std::string(rpc)];
  }
  std::map<std::string, int64_t> Counts() const {
    absl::MutexLock lock(&mu_);
    return counts_;
  }

 private:
  mutable absl::Mutex mu_;
  std::map<std::string, int64_t> counts_ ABSL_GUARDED_BY(mu_);
};

// A group with a real etcd, and a trainer of its model "m".
class GroupMessagesTest : public testing::Test {
 protected:
  void SetUp() override {
    for (int i = 0; i < kServers; ++i) {
      // On a busy machine etcd may be slow.
      EMA_ASSERT_OK_AND_ASSIGN(
          auto registry, EtcdRegistry::Create(
                             {.endpoints = etcd_->endpoints(), .call_timeout = absl::Seconds(20)}));
      registries_.push_back(std::move(registry));
      servers_.push_back(
          std::make_unique<GroupServer>(GroupServer::Options{.registry = registries_.back().get(),
                                                             .name = absl::StrCat("ema-", i),
                                                             .observer = &calls_}));
    }
    // The last server knows all members.
    EMA_ASSERT_OK_AND_ASSIGN(client_,
                             Client::Create(servers_.back()->address(), {.same_host_lane = false}));
    std::vector<TensorSpec> tensors;
    for (int64_t i = 0; i < kTensors; ++i) {
      tensors.push_back({.name = absl::StrCat("t", i), .shape = {kElements}});
    }
    EMA_ASSERT_OK_AND_ASSIGN(const Manifest manifest, Manifest::Create(std::move(tensors)));
    const std::vector<TrackConfig> tracks = {{.name = "raw", .schedule = *Schedule::Parse("copy")}};
    ASSERT_THAT(client_->CreateModel("m", manifest, tracks, {}, kPatience), IsOk());
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      EMA_ASSERT_OK_AND_ASSIGN(RankShare share, EvenShare(manifest, {}, {}, rank, kRanks));
      EMA_ASSERT_OK_AND_ASSIGN(auto run, client_->OpenRun("m",
                                                          {.launch_id = "life",
                                                           .rank = rank,
                                                           .world_size = kRanks,
                                                           .shards = std::move(share.shards)},
                                                          kPatience));
      runs_.push_back(std::move(run));
    }
  }

  // All ranks push the step, with `value` in each element.
  void Push(int64_t step, float value) {
    const std::vector<float> values(kElements, value);
    std::vector<std::unique_ptr<PendingPush>> pushes;
    for (const auto& run : runs_) {
      std::vector<std::span<const std::byte>> shards;
      for (const Shard& shard : run->layout().shards()) {
        shards.push_back(std::as_bytes(std::span(values).first(shard.element_count())));
      }
      EMA_ASSERT_OK_AND_ASSIGN(
          auto push, run->StartPush(step, TrainingTime::AtBatch(step), shards, kPatience));
      pushes.push_back(std::move(push));
    }
    for (const auto& push : pushes) {
      EMA_ASSERT_OK_AND_ASSIGN(const Version version, push->Wait());
      EXPECT_EQ(version.step, step);
    }
  }
  void ExpectPulled(float value) {
    std::vector<float> pulled(kTensors * kElements);
    const auto target = [&](const PullInfo&) -> absl::StatusOr<std::span<std::byte>> {
      return std::as_writable_bytes(std::span(pulled));
    };
    ASSERT_THAT(client_->Pull("m", "raw", {}, target, kPatience), IsOk());
    EXPECT_THAT(pulled, testing::Each(value));
  }
  // Grows by one with each write.
  int64_t EtcdRevision() const {
    const absl::StatusOr<std::string> text = etcd_->Etcdctl("get nothing --write-out=json");
    EXPECT_THAT(text, IsOk());
    return nlohmann::json::parse(*text)["header"]["revision"];
  }

  CallCounter calls_;
  const std::unique_ptr<EtcdCluster> etcd_ = *EtcdCluster::Start({});
  std::vector<std::unique_ptr<EtcdRegistry>> registries_;
  std::vector<std::unique_ptr<GroupServer>> servers_;
  std::unique_ptr<Client> client_;
  std::vector<std::unique_ptr<ema::Run>> runs_;
};

TEST_F(GroupMessagesTest, APushCostsOneCallOfEachOtherServerAndNoWriteToEtcd) {
  constexpr int64_t kPushes = 10;
  v1::Model described;
  ASSERT_TRUE(std::any_of(servers_.begin(), servers_.end(), [&](const auto& server) {
    return GroupTrainer::Get(server->address(), "m", &described).ok();
  }));
  ASSERT_EQ(described.partitions_size(), kServers);
  Push(1, 1);

  const int64_t revision = EtcdRevision();
  const absl::Time begin = absl::Now();
  std::map<std::string, int64_t> before = calls_.Counts();
  for (int64_t step = 2; step < 2 + kPushes; ++step) Push(step, static_cast<float>(step));
  std::map<std::string, int64_t> calls = calls_.Counts();
  const absl::Duration elapsed = absl::Now() - begin;
  for (auto& [rpc, count] : calls) count -= before[rpc];

  // A Vote and its reply are two messages.
  EXPECT_EQ(calls["Vote"], kPushes * (kServers - 1));
  EXPECT_EQ(calls["PublishState"], 0);
  // These are sent at an interval, whatever is pushed. The first one may have been sent before.
  EXPECT_LE(calls["Sync"], (kServers - 1) * (2 + elapsed / kSyncInterval));
  EXPECT_EQ(EtcdRevision(), revision);
  ExpectPulled(1 + kPushes);
}

}  // namespace
}  // namespace ema::group
