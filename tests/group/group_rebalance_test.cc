// SPDX-License-Identifier: Apache-2.0
//
// The tensors of a model move to other servers of a group of real servers, while it is trained.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "server/base/log_event.h"
#include "server/format/file_system.h"
#include "server/group/partition_config.h"
#include "server/rpc/convert_core.h"
#include "tests/group/trained_group.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

constexpr int kTensors = 12;

// Counts the events of all servers, by name.
class EventCounter {
 public:
  LogSink sink() {
    return [this](const LogEvent& event) {
      absl::MutexLock lock(&mu_);
      texts_[event.name].push_back(ToText(event));
    };
  }
  std::vector<std::string> Find(const std::string& name) {
    absl::MutexLock lock(&mu_);
    return texts_[name];
  }

 private:
  absl::Mutex mu_;
  std::map<std::string, std::vector<std::string>> texts_ ABSL_GUARDED_BY(mu_);
};

class GroupRebalanceTest : public testing::Test {
 protected:
  GroupRebalanceTest() : directory_(testing::TempDir() + "/ema_group_XXXXXX") {
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
    group_.emplace(3, kTensors, directory_);
  }
  ~GroupRebalanceTest() override {
    group_.reset();
    PosixFileSystem().RemoveTree(directory_).IgnoreError();
  }

  void AddServer() {
    const std::string name = absl::StrCat("ema-", group_->servers_.size());
    group_->StartServer({.name = name, .data_dir = directory_});
    group_->AwaitMembers();
  }
  absl::StatusOr<Client::RebalancedModel> Rebalance(const std::vector<std::string>& without = {}) {
    return group_->client().RebalanceModel("m", without, kPatience);
  }
  std::map<std::string, std::string> Averages() {
    absl::StatusOr<TrainedGroup::Pulled> pulled;
    // A server that has lost its part learns of it by its watch of the registry.
    TrainedGroup::Await([&] {
      pulled = group_->Pull("ema");
      return pulled.ok();
    });
    return pulled.ok() ? pulled->tensors : std::map<std::string, std::string>();
  }
  GroupServer& ServerOf(int partition) {
    return group_->ServerAt(group_->Describe("m").partitions(partition).address());
  }

  // The memory that model "m" needs on all servers.
  static int64_t ModelBytes() {
    const auto bytes = TensorBytes(*ema::FromProto(GroupTrainer::CreateRequest("m", kTensors)));
    return std::accumulate(bytes->begin(), bytes->end(), int64_t{0});
  }

  std::string directory_;
  EventCounter events_;  // Of the servers that log to its sink.
  std::optional<TrainedGroup> group_;
};

TEST_F(GroupRebalanceTest, ARunContinuesOnMoreAndOnFewerServersWithoutALostVersion) {
  std::map<std::string, std::string> expected;
  {
    TrainedGroup undisturbed(1, kTensors);
    const auto run = undisturbed.Open();
    ASSERT_NE(run, nullptr);
    for (int64_t step = 1; step <= 6; ++step) ASSERT_THAT(Push(*run, step), IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled pulled, undisturbed.Pull("ema"));
    expected = pulled.tensors;
  }
  const auto run = group_->Open();
  ASSERT_NE(run, nullptr);
  for (int64_t step = 1; step <= 2; ++step) ASSERT_THAT(Push(*run, step), IsOk());
  // From now on the client knows where the tensors are.
  const std::map<std::string, std::string> second = Averages();
  ASSERT_THAT(second, SizeIs(kTensors));
  AddServer();
  AddServer();
  EMA_ASSERT_OK_AND_ASSIGN(const Client::RebalancedModel five, Rebalance());
  EXPECT_EQ(Averages(), second);
  EXPECT_TRUE(five.has_changed);
  EXPECT_EQ(five.step, 2);
  EXPECT_THAT(five.members, UnorderedElementsAre("ema-0", "ema-1", "ema-2", "ema-3", "ema-4"));
  for (int64_t step = 3; step <= 4; ++step) {
    EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*run, step));
    EXPECT_EQ(version.id(), (VersionId{step, five.incarnation}));
  }
  EMA_ASSERT_OK_AND_ASSIGN(const Client::RebalancedModel two,
                           Rebalance({"ema-0", "ema-2", "ema-4"}));
  EXPECT_EQ(two.step, 4);
  EXPECT_THAT(Averages(), SizeIs(kTensors));
  EXPECT_THAT(two.members, UnorderedElementsAre("ema-1", "ema-3"));
  for (int64_t step = 5; step <= 6; ++step) {
    EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*run, step));
    EXPECT_EQ(version.number, step);
  }
  EXPECT_EQ(Averages(), expected);
  EXPECT_THAT(group_->Describe("m").partitions(), SizeIs(2));
}

TEST_F(GroupRebalanceTest, NothingChangesWhereTheTensorsAreSpreadEvenly) {
  const auto run = group_->Open();
  ASSERT_NE(run, nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const Version first, Push(*run, 1));
  EMA_ASSERT_OK_AND_ASSIGN(const Client::RebalancedModel same, Rebalance());
  EXPECT_FALSE(same.has_changed);
  EXPECT_EQ(same.incarnation, first.incarnation);
  EMA_ASSERT_OK_AND_ASSIGN(const Version second, Push(*run, 2));
  EXPECT_EQ(second.incarnation, first.incarnation);
}

TEST_F(GroupRebalanceTest, ALostServerIsReplaced) {
  const auto run = group_->Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  const std::map<std::string, std::string> expected = Averages();
  ASSERT_THAT(Push(*run, 2), IsOk());

  std::vector<GroupServer*> stopped;
  for (const int lost : {1, 0}) {
    SCOPED_TRACE(lost);
    GroupServer& server = ServerOf(lost);
    // The client calls it first.
    if (&server == group_->servers_.back().get()) continue;
    const std::string name = server.name();
    server.Stop();
    stopped.push_back(&server);
    TrainedGroup::Await(
        [&] { return !group_->servers_.back()->member().members().contains(name); });
    // It may come back by itself.
    EXPECT_THAT(Rebalance(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                      HasSubstr(absl::StrCat("\"", name, "\" does not run"))));
    EMA_ASSERT_OK_AND_ASSIGN(const Client::RebalancedModel moved, Rebalance({name}));
    EXPECT_EQ(moved.step, 1);
    EXPECT_THAT(moved.members, Not(testing::Contains(name)));
    EXPECT_EQ(Averages(), expected);
  }
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*run, 3));
  EXPECT_EQ(version.number, 2);
  // Servers that are back have nothing of the model, and can be used again.
  for (GroupServer* const server : stopped) group_->Restart(*server);
  group_->AwaitMembers();
  EMA_ASSERT_OK_AND_ASSIGN(const Client::RebalancedModel spread, Rebalance());
  EXPECT_EQ(spread.step, 3);
  EXPECT_THAT(spread.members, SizeIs(3));
}

TEST_F(GroupRebalanceTest, APushThatWaitsForAReplacedServerContinuesOnTheOthers) {
  {
    const auto run = group_->Open();
    ASSERT_NE(run, nullptr);
    ASSERT_THAT(Push(*run, 1), IsOk());
    ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  }
  GroupServer* const asked = group_->servers_.back().get();
  GroupServer& lost = &ServerOf(0) != asked ? ServerOf(0) : ServerOf(1);
  // The run is not ready, because the second rank has not joined it.
  const auto first = group_->Open(0, 2, {}, "next");
  ASSERT_NE(first, nullptr);
  lost.Stop();
  TrainedGroup::Await([&] { return !asked->member().members().contains(lost.name()); });
  const Weights weights(*first, 2);
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, first->StartPush(2, TrainingTime::AtBatch(2),
                                                             weights.shards(), 10 * kPatience));
  ASSERT_THAT(Rebalance({lost.name()}), IsOk());
  const auto second = group_->Open(1, 2, {}, "next");
  ASSERT_NE(second, nullptr);
  // Long before the push of the first rank times out.
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*second, 2));
  EMA_ASSERT_OK_AND_ASSIGN(const Version same, push->Wait());
  EXPECT_EQ(version.id(), same.id());
}

TEST_F(GroupRebalanceTest, AServerThatIsMissingForTooLongIsReplacedOnce) {
  group_.reset();
  // Until then each server is to see that it is missing.
  group_.emplace(3, kTensors, directory_,
                 TrainedGroup::Servers{.replace_after = absl::Seconds(3), .log = events_.sink()});
  const auto run = group_->Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  const std::map<std::string, std::string> expected = Averages();
  ASSERT_THAT(Push(*run, 2), IsOk());
  GroupServer* const asked = group_->servers_.back().get();
  GroupServer& lost = &ServerOf(0) != asked ? ServerOf(0) : ServerOf(1);
  lost.Stop();
  const auto members = [&] {
    std::vector<std::string> names;
    const ModelRecord record = *asked->member().model("m");
    for (const Partition& partition : record.partitions) {
      names.push_back(partition.member);
    }
    return names;
  };
  TrainedGroup::Await([&] { return members().size() == 2; });
  EXPECT_THAT(members(), Not(testing::Contains(lost.name())));
  EXPECT_EQ(Averages(), expected);
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*run, 3));
  EXPECT_EQ(version.number, 2);
  EMA_ASSERT_OK_AND_ASSIGN(const GroupInfo info, group_->client().GetGroup(kPatience));
  EXPECT_THAT(info.last_incident,
              HasSubstr(absl::StrCat("member \"", lost.name(), "\" was replaced")));
  // It is an ordinary server again, without a part of the model.
  group_->Restart(lost);
  group_->AwaitMembers();
  EXPECT_THAT(members(), SizeIs(2));
  EXPECT_THAT(Push(*run, 4), IsOk());
  group_.reset();
  EXPECT_THAT(events_.Find("model moves to other servers"), SizeIs(1));
  EXPECT_THAT(events_.Find("lost members replaced"), SizeIs(1));
}

TEST_F(GroupRebalanceTest, AnOldRecordIsNotUsedToReplaceAServer) {
  group_.reset();
  group_.emplace(3, kTensors, directory_,
                 TrainedGroup::Servers{.replace_after = absl::Seconds(3), .log = events_.sink()});
  const auto run = group_->Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  Member& member = group_->servers_.back()->member();
  EMA_ASSERT_OK_AND_ASSIGN(const auto backup, member.Read("m"));
  ASSERT_THAT(Push(*run, 2), IsOk());
  ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  group_->servers_.front()->Stop();
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, member.Read("m"));
  ASSERT_THAT(member.Write("m", backup->record, stored->revision), IsOk());
  TrainedGroup::Await([&] { return !events_.Find("lost members cannot be replaced").empty(); });
  EXPECT_THAT(events_.Find("lost members cannot be replaced").front(),
              HasSubstr("use emactl group recover"));
  EXPECT_EQ(member.model("m")->incarnation, backup->record.incarnation);
}

TEST_F(GroupRebalanceTest, AServerIsReplacedWhenTheOthersHaveTheMemory) {
  group_.reset();
  // Enough for a third of the model, not for a half.
  group_.emplace(3, kTensors, directory_,
                 TrainedGroup::Servers{.reported_memory_bytes = ModelBytes() * 2 / 5,
                                       .replace_after = absl::Seconds(1),
                                       .log = events_.sink()});
  const auto run = group_->Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  GroupServer& lost = *group_->servers_[0];
  lost.Stop();
  const std::string problem = "lost members cannot be replaced";
  TrainedGroup::Await([&] { return events_.Find(problem).size() == 2; });
  for (const std::string& warning : events_.Find(problem)) {
    EXPECT_THAT(warning, HasSubstr("too many; "));
    EXPECT_THAT(warning, HasSubstr("ema-0"));
  }
  group_->StartServer({.name = "ema-3", .data_dir = directory_});
  TrainedGroup::Await([&] { return !events_.Find("lost members replaced").empty(); });
  EXPECT_THAT(Push(*run, 2), IsOk());
  EXPECT_THAT(events_.Find(problem), SizeIs(2));  // One of each server.
}

TEST_F(GroupRebalanceTest, AMoveIsRejectedIfAnotherModelHasTheMemory) {
  group_.reset();
  // Enough for a third of each model, not for a half of one and a third of the other.
  group_.emplace(3, kTensors, directory_,
                 TrainedGroup::Servers{.reported_memory_bytes = ModelBytes() * 4 / 5});
  group_->Create("other", 0, kTensors);
  const auto run = group_->Open();
  ASSERT_NE(run, nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const Version first, Push(*run, 1));
  EXPECT_THAT(Rebalance({"ema-0"}), ReasonIs(ErrorReason::kMemoryBudget));
  EMA_ASSERT_OK_AND_ASSIGN(const Version second, Push(*run, 2));
  EXPECT_EQ(second.incarnation, first.incarnation);

  ASSERT_THAT(group_->client().DeleteModel("other", /*purge=*/false, kPatience), IsOk());
  TrainedGroup::Await([&] { return Rebalance({"ema-0"}).ok(); });
  EXPECT_THAT(group_->Describe("m").partitions(), SizeIs(2));
}

TEST_F(GroupRebalanceTest, AServerThatCannotLoadItsTensorsIsLeftOutAgain) {
  const auto run = group_->Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  const std::map<std::string, std::string> expected = Averages();
  // It reports more memory than it has.
  group_->StartServer({.name = "ema-3",
                       .memory_bytes = 1000,
                       .reported_memory_bytes = int64_t{1} << 28,
                       .data_dir = directory_});
  group_->AwaitMembers();
  EMA_ASSERT_OK_AND_ASSIGN(const Client::RebalancedModel stuck, Rebalance());
  EXPECT_THAT(stuck.members, testing::Contains("ema-3"));
  absl::StatusOr<Client::RebalancedModel> moved;
  TrainedGroup::Await([&] {
    moved = Rebalance({"ema-3"});  // Its home may still be loading its own tensors.
    return moved.ok();
  });
  ASSERT_THAT(moved, IsOk());
  EXPECT_THAT(moved->members, UnorderedElementsAre("ema-0", "ema-1", "ema-2"));
  EXPECT_EQ(moved->step, 1);
  EXPECT_EQ(Averages(), expected);
  EXPECT_THAT(Push(*run, 2), IsOk());
}

TEST_F(GroupRebalanceTest, AChangeOfTracksThatIsNotSavedIsNotLost) {
  const auto run = group_->Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  const TrackConfig late{.name = "late", .schedule = *Schedule::Parse("copy")};
  const int64_t memory_bytes = TotalMemoryBytes(ServerOf(0).member().model("m")->partitions);
  EXPECT_EQ(memory_bytes, ModelBytes());
  ASSERT_THAT(group_->client().UpdateModel("m", {.put = {late}}, kPatience), IsOk());
  EXPECT_GT(TotalMemoryBytes(ServerOf(0).member().model("m")->partitions), memory_bytes);
  EXPECT_THAT(Rebalance({"ema-1"}),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("tracks or attached")));
  ASSERT_THAT(Push(*run, 2), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const Client::RebalancedModel moved, Rebalance({"ema-1"}));
  EXPECT_EQ(moved.step, 2);
  TrainedGroup::Await([&] { return group_->Pull("ema").ok(); });
  EMA_ASSERT_OK_AND_ASSIGN(const Version third, Push(*run, 3));
  EXPECT_THAT(third.tracks, SizeIs(3));
}

TEST_F(GroupRebalanceTest, AfterAnErrorTheModelIsTrainedWhereItIs) {
  const auto run = group_->Open();
  ASSERT_NE(run, nullptr);
  // Pushes were rejected by then.
  EXPECT_THAT(Rebalance({"ema-1"}), ReasonIs(ErrorReason::kNoVersion));
  EMA_ASSERT_OK_AND_ASSIGN(const Version first, Push(*run, 1));
  EXPECT_THAT(Rebalance({"ema-9"}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("without: \"ema-9\" given")));
  EXPECT_THAT(
      Rebalance({"ema-0", "ema-1", "ema-2"}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("names all 3 servers that run")));
  EXPECT_THAT(group_->client().RebalanceModel("other", {}, kPatience),
              ReasonIs(ErrorReason::kModelNotFound));
  EMA_ASSERT_OK_AND_ASSIGN(const Version second, Push(*run, 2));
  EXPECT_EQ(second.incarnation, first.incarnation);
}

}  // namespace
}  // namespace ema::group
