// SPDX-License-Identifier: Apache-2.0
//
// Models on a group of real servers: creation, commits on all servers or none, deletion.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "server/group/hosted_partition.h"
#include "tests/group/group_fixture.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema::group {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Pushed = GroupTrainer::Pushed;

class GroupCommitTest : public GroupFixture {
 protected:
  // The newest version number at each partition.
  static std::vector<int64_t> Newest(const GroupTrainer& trainer) {
    std::vector<int64_t> versions;
    for (size_t i = 0; i < trainer.partition_count(); ++i) {
      versions.push_back(trainer.Pull(i, "raw").record.version());
    }
    return versions;
  }
  static void ExpectFailed(const std::vector<Pushed>& pushed, v1::ErrorReason reason) {
    for (const Pushed& of : pushed) {
      EXPECT_EQ(of.result.detail.reason(), reason) << of.result.status.error_message();
    }
  }
  static grpc::Status Delete(const std::string& address) {
    v1::DeleteModelRequest request;
    request.set_model("m");
    request.set_confirm_model("m");
    grpc::ClientContext context;
    v1::Empty response;
    return GroupTrainer::StubOf(address)->DeleteModel(&context, request, &response);
  }
  static bool HasNothing(GroupServer& server) {
    return server.store().List().empty() && server.store().budget().reserved_bytes() == 0;
  }
};

TEST_F(GroupCommitTest, TheHomeDescribesTheModelAndOthersNameTheHome) {
  StartServers(3);
  const v1::Model model = Create();
  ASSERT_THAT(model.partitions(), SizeIs(3));
  EXPECT_EQ(model.manifest().tensors_size(), 6);
  EXPECT_GT(model.incarnation(), 0);
  int64_t next = 0;
  for (const v1::Partition& partition : model.partitions()) {
    EXPECT_EQ(partition.first_tensor(), next);
    next += partition.tensor_count();
  }
  EXPECT_EQ(next, 6);
  for (const auto& server : servers_) {
    v1::Model described;
    const GroupCall result =
        RetryBusy([&] { return GroupTrainer::Get(server->address(), "m", &described); });
    if (server->address() == model.partitions(0).address()) {
      EXPECT_TRUE(result.ok());
      continue;
    }
    EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_NOT_HOME);
    EXPECT_EQ(result.detail.home(), model.partitions(0).address());
  }
  // Creating it again finds it.
  v1::CreateModelResponse again;
  EXPECT_TRUE(
      GroupTrainer::Create(model.partitions(0).address(), GroupTrainer::CreateRequest("m"), &again)
          .ok());
  EXPECT_FALSE(again.created());
  v1::CreateModelRequest other = GroupTrainer::CreateRequest("m");
  (*other.mutable_tracks(0)->mutable_schedule())["half_life"] = "3ba";
  EXPECT_EQ(GroupTrainer::Create(model.partitions(0).address(), other, &again).detail.reason(),
            v1::ERROR_REASON_MODEL_DIFFERS);
}

TEST_F(GroupCommitTest, AStepIsPublishedOnAllServersAtOnceOrNotAtAll) {
  StartServers(3);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  ASSERT_EQ(trainer.partition_count(), 3);
  std::future<Pushed> home = trainer.Push(0, 1, 5);
  std::future<Pushed> first = trainer.Push(1, 1, 5);
  // They are complete, and wait for the last partition.
  for (const size_t i : {0, 1}) AwaitReceived(trainer, i, 1);
  EXPECT_THAT(Newest(trainer), testing::Each(0));
  std::vector<Pushed> pushed;
  pushed.push_back(trainer.Push(2, 1, 5).get());
  pushed.push_back(home.get());
  pushed.push_back(first.get());
  ExpectCommitted(pushed, 1, 1);
  for (size_t i = 0; i < 3; ++i) {
    const GroupTrainer::Pulled pulled = trainer.Pull(i, "raw", 1);
    ASSERT_TRUE(pulled.result.ok()) << pulled.result.status.error_message();
    EXPECT_EQ(pulled.record.SerializeAsString(),
              trainer.Pull(0, "raw", 1).record.SerializeAsString());
    float value = 0;
    std::memcpy(&value, pulled.data.data(), sizeof(value));
    EXPECT_EQ(value, 5);
  }
}

TEST_F(GroupCommitTest, APullThatKnowsOfNoPartitionsIsRejected) {
  StartServers(2);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  ExpectCommitted(trainer.PushAll(1, 5), 1, 1);
  v1::PullRequest request;
  request.set_model("m");
  request.set_track("raw");
  const auto stub = GroupTrainer::StubOf(trainer.described().partitions(0).address());
  // Also with the id of a version, which a client has from a push or from Watch.
  for (const int64_t incarnation : {int64_t{0}, trainer.described().incarnation()}) {
    request.set_version(incarnation == 0 ? 0 : 1);
    request.set_incarnation(incarnation);
    grpc::ClientContext context;
    v1::PullResponse response;
    const auto reader = stub->Pull(&context, request);
    EXPECT_FALSE(reader->Read(&response));
    const grpc::Status status = reader->Finish();
    EXPECT_EQ(ResultOf(status, context).detail.reason(), v1::ERROR_REASON_NOT_HOME);
  }
  // A version that other partitions may have published already.
  const GroupTrainer::Pulled next = trainer.Pull(1, "raw", 2);
  EXPECT_EQ(next.result.detail.reason(), v1::ERROR_REASON_VERSION_NOT_YET);
  EXPECT_GT(next.result.detail.retry_delay_ms(), 0);
}

TEST_F(GroupCommitTest, ValuesThatAreNotFiniteEndTheStepEverywhere) {
  StartServers(3);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  ExpectCommitted(trainer.PushAll(1, 5), 1, 1);
  const int64_t round = trainer.round();
  std::future<Pushed> home = trainer.Push(0, 2, 6);
  std::future<Pushed> first = trainer.Push(1, 2, 6);
  for (const size_t i : {0, 1}) AwaitReceived(trainer, i, 2);
  std::vector<Pushed> pushed;
  pushed.push_back(trainer.Push(2, 2, std::numeric_limits<float>::quiet_NaN()).get());
  pushed.push_back(home.get());
  pushed.push_back(first.get());
  ExpectFailed(pushed, v1::ERROR_REASON_NON_FINITE);
  const int64_t tensor = trainer.described().partitions(2).first_tensor();
  EXPECT_THAT(pushed[1].result.status.error_message(), HasSubstr(absl::StrCat("t", tensor)));
  EXPECT_EQ(pushed[1].result.detail.round(), round + 1);
  EXPECT_THAT(Newest(trainer), testing::Each(1));
  trainer.set_round(round + 1);
  ExpectCommitted(trainer.PushAll(2, 6), 2, 2);
}

TEST_F(GroupCommitTest, OfDifferentStepsInOneRoundOnlyTheLaterOneCanBePushedAgain) {
  StartServers(2);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  const int64_t round = trainer.round();
  std::future<Pushed> home = trainer.Push(0, 1, 5);
  AwaitReceived(trainer, 0, 1);
  ExpectFailed({trainer.Push(1, 2, 5).get()}, v1::ERROR_REASON_STALE_ROUND);
  ExpectFailed({home.get()}, v1::ERROR_REASON_STEP_ABANDONED);
  trainer.set_round(round + 1);
  ExpectCommitted(trainer.PushAll(2, 5), 2, 1);
}

TEST_F(GroupCommitTest, TheHomeAbandonsAStepForAllServers) {
  StartServers(3);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  const int64_t round = trainer.round();
  std::future<Pushed> first = trainer.Push(1, 1, 5);
  AwaitReceived(trainer, 1, 1);
  v1::QueryPushResponse response;
  const GroupCall refused = trainer.Query(1, 1, /*abandon=*/true, round, &response);
  EXPECT_EQ(refused.detail.reason(), v1::ERROR_REASON_NOT_HOME);
  EXPECT_EQ(refused.detail.home(), trainer.described().partitions(0).address());
  ASSERT_TRUE(trainer.Query(0, 1, /*abandon=*/true, round, &response).ok());
  EXPECT_EQ(response.state(), v1::QueryPushResponse::STATE_ABANDONED);
  EXPECT_EQ(response.round(), round + 1);
  EXPECT_EQ(first.get().result.detail.reason(), v1::ERROR_REASON_STEP_ABANDONED);
  // A second rank that abandons the same step does not end the next round.
  ASSERT_TRUE(trainer.Query(0, 1, /*abandon=*/true, round, &response).ok());
  EXPECT_EQ(response.state(), v1::QueryPushResponse::STATE_ABANDONED);
  EXPECT_EQ(response.round(), round + 1);
  // What was committed is not abandoned.
  trainer.set_round(round + 1);
  ExpectCommitted(trainer.PushAll(2, 5), 2, 1);
  ASSERT_TRUE(trainer.Query(0, 2, /*abandon=*/true, round + 1, &response).ok());
  EXPECT_EQ(response.state(), v1::QueryPushResponse::STATE_COMMITTED);
}

TEST_F(GroupCommitTest, ALateRankDoesNotPushALostStepAgain) {
  StartServers(2);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  const int64_t round = trainer.round();
  std::future<Pushed> first = trainer.Push(1, 1, 5);
  AwaitReceived(trainer, 1, 1);
  v1::QueryPushResponse response;
  ASSERT_TRUE(trainer.Query(0, 1, /*abandon=*/true, round, &response).ok());
  EXPECT_EQ(first.get().result.detail.reason(), v1::ERROR_REASON_STEP_ABANDONED);
  // In the next round it would wait for ranks that have already failed.
  const Pushed late = trainer.Push(1, 1, 5).get();
  EXPECT_EQ(late.result.detail.reason(), v1::ERROR_REASON_STEP_ABANDONED);
  EXPECT_EQ(late.result.detail.round(), round + 1);
  // Of another step, only the round is wrong.
  EXPECT_EQ(trainer.Push(1, 2, 5).get().result.detail.reason(), v1::ERROR_REASON_STALE_ROUND);
  trainer.set_round(round + 1);
  ExpectCommitted(trainer.PushAll(1, 5), 1, 1);
}

TEST_F(GroupCommitTest, ALateRankLearnsOfALostStepAtAServerThatHasNotSeenIt) {
  StartServers(3);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  const int64_t round = trainer.round();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const Pushed bad = trainer.Push(1, 1, kNan).get();
  EXPECT_EQ(bad.result.detail.reason(), v1::ERROR_REASON_NON_FINITE);
  for (const size_t i : {0, 2}) {
    const Pushed late = trainer.Push(i, 1, 5).get();
    EXPECT_EQ(late.result.detail.reason(), v1::ERROR_REASON_NON_FINITE);
  }
  trainer.set_round(round + 1);
  ExpectCommitted(trainer.PushAll(2, 5), 2, 1);
}

TEST_F(GroupCommitTest, ARankThatAbandonsAStepDoesNotEndTheRoundOfAnother) {
  StartServers(3);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  const int64_t round = trainer.round();
  std::future<Pushed> first = trainer.Push(1, 2, 5);
  AwaitReceived(trainer, 1, 2);
  v1::QueryPushResponse response;
  ASSERT_TRUE(trainer.Query(1, 2, /*abandon=*/false, /*round=*/0, &response).ok());
  EXPECT_EQ(response.round(), round);
  // The home has no step, and does not know in which round step 1 was pushed.
  ASSERT_TRUE(trainer.Query(0, 1, /*abandon=*/true, /*round=*/0, &response).ok());
  EXPECT_EQ(response.state(), v1::QueryPushResponse::STATE_UNKNOWN);
  std::vector<Pushed> pushed;
  std::future<Pushed> home = trainer.Push(0, 2, 5);
  pushed.push_back(trainer.Push(2, 2, 5).get());
  pushed.push_back(home.get());
  pushed.push_back(first.get());
  ExpectCommitted(pushed, 2, 1);
}

TEST_F(GroupCommitTest, APushOfAnEndedRoundIsRejectedWithThePresentOne) {
  StartServers(2);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  const int64_t round = trainer.round();
  ExpectCommitted(trainer.PushAll(1, 5), 1, 1);
  trainer.set_round(round);
  const std::vector<Pushed> pushed = trainer.PushAll(2, 5);
  ExpectFailed(pushed, v1::ERROR_REASON_STALE_ROUND);
  for (const Pushed& of : pushed) EXPECT_EQ(of.result.detail.round(), round + 1);
}

TEST_F(GroupCommitTest, ALaterRunFencesAnEarlierOneOnAllServers) {
  StartServers(3);
  GroupTrainer earlier("m", "launch-1");
  earlier.OpenRun(Create());
  // This step is prepared at a partition, and would wait for ever.
  std::future<Pushed> prepared = earlier.Push(0, 1, 5);
  AwaitReceived(earlier, 0, 1);
  GroupTrainer later("m", "launch-2");
  later.OpenRun(Describe("m"));
  EXPECT_EQ(prepared.get().result.detail.reason(), v1::ERROR_REASON_FENCED);
  EXPECT_GT(later.run_epoch(), earlier.run_epoch());
  ExpectFailed(earlier.PushAll(2, 5), v1::ERROR_REASON_FENCED);
  ExpectCommitted(later.PushAll(2, 5), 2, 1);
}

TEST_F(GroupCommitTest, AHomeThatStopsEndsItsRound) {
  StartServers(2);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  std::future<Pushed> prepared = trainer.Push(1, 1, 5);
  AwaitReceived(trainer, 1, 1);
  ServerAt(trainer.described().partitions(0).address()).Stop();
  EXPECT_EQ(prepared.get().result.detail.reason(), v1::ERROR_REASON_DRAINING);
  // It prepares no other step, for which nobody would decide.
  trainer.set_round(trainer.round() + 1);
  EXPECT_EQ(trainer.Push(1, 2, 5).get().result.detail.reason(), v1::ERROR_REASON_DRAINING);
}

TEST_F(GroupCommitTest, AHomeThatStopsAnswersHeldCallsOnItsOwnThread) {
  StartServers(1);
  const std::unique_ptr<Peers> peers = *Peers::Start({});
  constexpr int64_t kIncarnation = 1;
  const auto home = std::make_shared<HostedPartition>(HostedPartition::Options{
      .model = "m",
      .id = {.incarnation = kIncarnation, .partition = 0, .boot = "a"},
      .partitions = {{.member = "ema-0", .boot = "a"}, {.member = "ema-1", .boot = "b"}},
      .peers = peers.get(),
      .member = &servers_[0]->member()});
  const PartitionId other = {.incarnation = kIncarnation, .partition = 1, .boot = "b"};
  ASSERT_THAT(home->OnSync({.from = home->id()}), IsOk());
  ASSERT_THAT(home->OnSync({.from = other}), IsOk());
  absl::Notification release;
  peers->Post([&release] { release.WaitForNotification(); });
  absl::StatusOr<GroupState> answer = absl::UnknownError("no answer yet");
  home->OnVote({.from = other, .round = 1},
               [&answer](const absl::StatusOr<GroupState>& state) { answer = state; });
  EXPECT_THAT(answer, StatusIs(absl::StatusCode::kUnknown, "no answer yet"));
  home->ReleaseHeldCalls();
  EXPECT_THAT(answer, IsOk());
  if (answer.ok()) {
    EXPECT_EQ(answer->round, 2);
    EXPECT_TRUE(answer->rejects_pushes);
    EXPECT_THAT(answer->last_abort->why, ReasonIs(ErrorReason::kDraining));
  }
  home->ReleaseHeldCalls();
  EXPECT_EQ(home->round(), 2);
  release.Notify();
  peers->Stop();
}

TEST_F(GroupCommitTest, LostRepliesOfTheHomeDelayACommitOnly) {
  std::vector<std::unique_ptr<TcpProxy>> proxies;
  for (int i = 0; i < 3; ++i) {
    StartServer({.name = absl::StrCat("ema-", i), .advertise = [&proxies](int port) {
                   proxies.push_back(std::make_unique<TcpProxy>(port));
                   return proxies.back()->address();
                 }});
  }
  AwaitMembers();
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  std::vector<std::future<Pushed>> running;
  for (const size_t i : {1, 2}) running.push_back(trainer.Push(i, 1, 5));
  for (const size_t i : {1, 2}) AwaitReceived(trainer, i, 1);
  // Vote() of both is held now, or on its way. Their pushes go through the proxies, too, so
  // only the home's connections are cut.
  for (const std::unique_ptr<TcpProxy>& proxy : proxies) {
    if (proxy->address() != trainer.described().partitions(0).address()) continue;
    proxy->CutAll();
    proxy->AwaitCut();
  }
  running.push_back(trainer.Push(0, 1, 5));
  std::vector<Pushed> pushed;
  for (auto& of : running) pushed.push_back(of.get());
  ExpectCommitted(pushed, 1, 1);
}

TEST_F(GroupCommitTest, ModelsCommitIndependently) {
  StartServers(3);
  GroupTrainer one("one", "launch");
  GroupTrainer two("two", "launch");
  one.OpenRun(Create("one", 0));
  two.OpenRun(Create("two", 1));
  std::vector<std::future<Pushed>> waiting;
  for (const size_t i : {0, 1}) waiting.push_back(one.Push(i, 1, 5));
  for (int64_t step = 1; step <= 3; ++step) ExpectCommitted(two.PushAll(step, 5), step, step);
  waiting.push_back(one.Push(2, 1, 5));
  std::vector<Pushed> pushed;
  for (auto& of : waiting) pushed.push_back(of.get());
  ExpectCommitted(pushed, 1, 1);
}

TEST_F(GroupCommitTest, AModelThatOneServerRefusesLeavesNothing) {
  StartServer({.name = "ema-0"});
  StartServer({.name = "ema-1"});
  StartServer({.name = "ema-2", .memory_bytes = 1000, .reported_memory_bytes = 1 << 20});
  AwaitMembers();
  v1::CreateModelResponse response;
  const GroupCall result =
      GroupTrainer::Create(servers_[0]->address(), GroupTrainer::CreateRequest("m"), &response);
  EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_MEMORY_BUDGET);
  EXPECT_THAT(result.status.error_message(), HasSubstr("member \"ema-2\""));
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, servers_[0]->member().Read("m"));
  EXPECT_FALSE(stored.has_value());
  for (const auto& server : servers_) Await([&] { return HasNothing(*server); });
}

TEST_F(GroupCommitTest, CreationsAtTwoServersMakeOneModel) {
  StartServers(3);
  std::vector<std::future<bool>> created;
  for (size_t i = 0; i < 3; ++i) {
    created.push_back(std::async(std::launch::async, [this, i] {
      v1::CreateModelResponse response;
      const GroupCall result = RetryBusy([&] {
        return GroupTrainer::Create(servers_[i]->address(), GroupTrainer::CreateRequest("m"),
                                    &response);
      });
      EXPECT_TRUE(result.ok() || result.detail.reason() == v1::ERROR_REASON_NOT_HOME)
          << result.status.error_message();
      return result.ok() && response.created();
    }));
  }
  int count = 0;
  for (auto& of : created) count += of.get() ? 1 : 0;
  EXPECT_EQ(count, 1);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Describe("m"));
  ExpectCommitted(trainer.PushAll(1, 5), 1, 1);
}

TEST_F(GroupCommitTest, AveragesAreThoseOfOneServerBitForBit) {
  std::vector<std::string> averages;
  for (const int server_count : {1, 2, 3, 6}) {
    servers_.clear();
    StartServers(server_count);
    // The registry still has the models of the servers before.
    const std::string name = absl::StrCat("on-", server_count);
    GroupTrainer trainer(name, "launch");
    trainer.OpenRun(Create(name));
    for (int64_t step = 1; step <= 5; ++step) {
      ExpectCommitted(trainer.PushAll(step, 1 / static_cast<float>(step)), step, step);
    }
    std::string data;
    for (size_t i = 0; i < trainer.partition_count(); ++i) data += trainer.Pull(i, "ema").data;
    averages.push_back(data);
    EXPECT_EQ(averages.back(), averages.front()) << server_count << " servers";
  }
  EXPECT_THAT(averages.front(), testing::Not(IsEmpty()));
}

TEST_F(GroupCommitTest, ADeletedModelIsGoneOnAllServers) {
  StartServers(3);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  ExpectCommitted(trainer.PushAll(1, 5), 1, 1);
  EXPECT_TRUE(Delete(servers_[0]->address()).ok());
  for (const auto& server : servers_) Await([&] { return HasNothing(*server); });
  // A new model of that name has another incarnation.
  GroupTrainer again("m", "launch");
  again.OpenRun(Create());
  EXPECT_GT(again.described().incarnation(), trainer.described().incarnation());
  ExpectCommitted(again.PushAll(1, 5), 1, 1);
}

TEST_F(GroupCommitTest, WithoutAMemberItsModelsCannotBePushed) {
  StartServers(3);
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(Create());
  const v1::Partition lost = trainer.described().partitions(2);
  ServerAt(lost.address()).Stop();
  v1::OpenRunResponse response;
  GroupCall result;
  Await([&] {
    result = trainer.OpenRunAt(0, &response);
    return !result.ok();
  });
  EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_GROUP_DEGRADED);
  EXPECT_THAT(result.status.error_message(), HasSubstr(absl::StrCat("\"", lost.member(), "\"")));
  const std::string home = trainer.described().partitions(0).address();
  v1::Model model;
  ASSERT_TRUE(GroupTrainer::Get(home, "m", &model).ok());
  EXPECT_EQ(model.partitions(2).address(), "");
  EXPECT_TRUE(Delete(home).ok());
  Await([&] { return HasNothing(ServerAt(home)); });
}

}  // namespace
}  // namespace ema::group
