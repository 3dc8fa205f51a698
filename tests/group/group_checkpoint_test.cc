// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of a model on a group of real servers that share a directory, and what is left after
// crashes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/step_pusher.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/format/checkpoint_name.h"
#include "tests/checkpoint/test_checkpoints.h"
#include "tests/group/trained_group.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// The timeout of calls that are to fail. The client retries them until then, and returns the error
// of an attempt that was answered.
constexpr absl::Duration kTimeout = absl::Seconds(5);

class GroupCheckpointTest : public testing::Test {
 protected:
  GroupCheckpointTest() : directory_(testing::TempDir() + "/ema_group_XXXXXX") {
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
  }
  ~GroupCheckpointTest() override { PosixFileSystem().RemoveTree(directory_).IgnoreError(); }

  // The server of a partition; 0: the home.
  static GroupServer& ServerOf(TrainedGroup& group, int partition) {
    return group.ServerAt(group.Describe("m").partitions(partition).address());
  }
  static void Crash(TrainedGroup& group, int partition) {
    GroupServer& server = ServerOf(group, partition);
    server.Stop();
    group.Restart(server);
  }
  // The names of the model's folders, temporary ones included.
  std::vector<std::string> Folders() const {
    std::vector<std::string> names;
    const std::string path = directory_ + "/models/m/checkpoints";
    if (!std::filesystem::exists(path)) return names;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.is_directory()) names.push_back(entry.path().filename());
    }
    return names;
  }

  std::string Latest() const {
    return PosixFileSystem()
        .ReadSmallFile(directory_ + "/models/m/checkpoints/LATEST", 1024)
        .value_or("");
  }
  // Pushes `step` and saves it.
  static Client::CheckpointResult PushAndSave(TrainedGroup& group, ema::Run& run, int64_t step) {
    EXPECT_THAT(Push(run, step), IsOk());
    const auto saved = group.client().CreateCheckpoint("m", kPatience);
    EXPECT_THAT(saved, IsOk());
    return *saved;
  }
  // `in_same_incarnation`: the model has not returned to a checkpoint since the backup.
  void TestOldRegistry(bool in_same_incarnation);
  static void EraseRecord(TrainedGroup& group) {
    Member& member = group.servers_[0]->member();
    EMA_ASSERT_OK_AND_ASSIGN(const auto stored, member.Read("m"));
    ASSERT_THAT(member.Erase("m", stored->revision), IsOk());
    for (const auto& server : group.servers_) {
      TrainedGroup::Await([&] { return server->store().List().empty(); });
      TrainedGroup::Await([&] { return !server->member().model("m").has_value(); });
    }
  }
  static GroupCall CreateAgain(GroupServer& server) {
    v1::CreateModelResponse response;
    return RetryBusy([&] {
      return GroupTrainer::Create(server.address(), GroupTrainer::CreateRequest("m"), &response);
    });
  }

  std::string directory_;
};

TEST_F(GroupCheckpointTest, AfterACrashOfAnyServerTheModelReturnsToItsCheckpoint) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  int64_t step = 0;
  int64_t incarnation = 0;
  for (const int crashed : {2, 0, 1}) {
    SCOPED_TRACE(crashed);
    const auto run = group.Open();
    ASSERT_NE(run, nullptr);
    ASSERT_THAT(Push(*run, ++step), IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(const auto saved, group.client().CreateCheckpoint("m", kPatience));
    EXPECT_EQ(saved.version.step, step);
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled expected, group.Pull("ema"));
    ASSERT_THAT(Push(*run, step + 1), IsOk());

    Crash(group, crashed);
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group.Pull("ema"));
    EXPECT_EQ(found.info.version.id(), saved.version.id());
    EXPECT_EQ(found.info.version.commit_time, expected.info.version.commit_time);
    EXPECT_EQ(found.tensors, expected.tensors);
    const int64_t next = group.Describe("m").incarnation();
    EXPECT_GT(next, incarnation);
    incarnation = next;
  }
  // The next version is of the last incarnation.
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*run, ++step));
  EXPECT_EQ(version.id(), (VersionId{step, incarnation}));
}

TEST_F(GroupCheckpointTest, AveragesContinueAsWithoutTheCrash) {
  std::map<std::string, std::string> expected;
  {
    TrainedGroup undisturbed(1, /*tensor_count=*/6);
    const auto run = undisturbed.Open();
    ASSERT_NE(run, nullptr);
    for (int64_t step = 1; step <= 4; ++step) ASSERT_THAT(Push(*run, step), IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled pulled, undisturbed.Pull("ema"));
    expected = pulled.tensors;
  }
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  auto run = group.Open();
  ASSERT_NE(run, nullptr);
  for (int64_t step = 1; step <= 2; ++step) ASSERT_THAT(Push(*run, step), IsOk());
  ASSERT_THAT(group.client().CreateCheckpoint("m", kPatience), IsOk());
  ASSERT_THAT(Push(*run, 3), IsOk());
  for (const auto& server : group.servers_) server->Stop();
  for (size_t i = 0; i < group.servers_.size(); ++i) group.Restart(*group.servers_[i]);
  run = group.Open();
  ASSERT_NE(run, nullptr);
  for (int64_t step = 3; step <= 4; ++step) ASSERT_THAT(Push(*run, step), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled pulled, group.Pull("ema"));
  EXPECT_EQ(pulled.tensors, expected);
}

TEST_F(GroupCheckpointTest, ACheckpointIsListedReadLabelledAndDeletedAsOnOneServer) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto first, group.client().CreateCheckpoint("m", kPatience));
  EXPECT_THAT(group.client().SetLabel("m", "good", first.version.id(), kPatience), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled expected, group.Pull("ema"));
  for (int64_t step = 2; step <= 9; ++step) ASSERT_THAT(Push(*run, step), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto second, group.client().CreateCheckpoint("m", kPatience));
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointList list,
                           group.client().ListCheckpoints("m", kPatience));
  ASSERT_THAT(list.checkpoints, SizeIs(2));
  EXPECT_EQ(list.checkpoints[0].name, second.checkpoint);
  EXPECT_GT(list.checkpoints[0].total_bytes, 0);
  // It is no longer in memory.
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled labelled,
                           group.Pull("ema", {.label = "good"}));
  EXPECT_EQ(labelled.info.version.id(), first.version.id());
  EXPECT_EQ(labelled.tensors, expected.tensors);

  EXPECT_THAT(group.client().DeleteCheckpoint("m", first.checkpoint, kPatience),
              ReasonIs(ErrorReason::kCheckpointInUse));
  EXPECT_THAT(group.client().RemoveLabel("m", "good", kPatience), IsOk());
  EXPECT_THAT(group.client().DeleteCheckpoint("m", first.checkpoint, kPatience), IsOk());
  EXPECT_THAT(Folders(), testing::ElementsAre(second.checkpoint));
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, group.servers_[0]->member().Read("m"));
  ASSERT_THAT(stored->record.checkpoints, SizeIs(1));
  EXPECT_EQ(stored->record.checkpoints[0].id, second.version.id());
}

TEST_F(GroupCheckpointTest, NothingIsCommittedAfterTheSaveOfAServerThatStops) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  GroupTrainer trainer("m", "life");
  trainer.OpenRun(group.Describe("m"));
  ExpectCommitted(trainer.PushAll(1, 5), 1, 1);
  ASSERT_THAT(group.client().CreateCheckpoint("m", kPatience), IsOk());
  // The home has not received this step yet.
  std::vector<std::future<GroupTrainer::Pushed>> prepared;
  for (const size_t i : {1, 2}) prepared.push_back(trainer.Push(i, 2, 6));
  for (const size_t i : {1, 2}) TrainedGroup::AwaitReceived(trainer, i, 2);
  ServerOf(group, 2).models().SaveAtHomes(kPatience);
  std::future<GroupTrainer::Pushed> home = trainer.Push(0, 2, 6);
  for (auto& pushed : prepared) {
    EXPECT_EQ(pushed.get().result.detail.reason(), v1::ERROR_REASON_DRAINING);
  }
  EXPECT_FALSE(home.get().result.ok());
  trainer.set_round(trainer.round() + 1);
  EXPECT_EQ(trainer.Push(0, 2, 6).get().result.detail.reason(), v1::ERROR_REASON_DRAINING);
  // When the server is back, the model continues.
  Crash(group, 2);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*run, 2));
  EXPECT_EQ(version.number, 2);
}

TEST_F(GroupCheckpointTest, AModelWithoutACheckpointIsGoneAfterACrash) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  Crash(group, 1);
  TrainedGroup::Await([&] {
    return GetErrorReason(group.client().GetModel("m", kPatience).status()) ==
           ErrorReason::kModelNotFound;
  });
  for (const auto& server : group.servers_) {
    TrainedGroup::Await([&] { return server->store().List().empty(); });
  }
}

TEST_F(GroupCheckpointTest, ASaveWithoutAServerLeavesNothing) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  GroupServer& lost = ServerOf(group, 2);
  const std::string home = group.Describe("m").partitions(0).address();
  lost.Stop();
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(home));
  const absl::Status status = client->CreateCheckpoint("m", kTimeout).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("\"", lost.name(), "\"")));
  // The server may not have ended the client's last attempt.
  TrainedGroup::Await([&] { return Folders().empty(); });
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, group.ServerAt(home).member().Read("m"));
  EXPECT_THAT(stored->record.checkpoints, IsEmpty());
}

TEST_F(GroupCheckpointTest, ASaveThatTheRegistryDoesNotRecordIsNoCheckpoint) {
  TrainedGroup group(2, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  const auto saved = PushAndSave(group, *run, 1);
  ASSERT_THAT(Push(*run, 2), IsOk());
  group.registry_.SetUnavailable(true);
  EXPECT_THAT(group.client().CreateCheckpoint("m", kTimeout).status(),
              ReasonIs(ErrorReason::kRegistryUnavailable));
  // The server may not have ended the client's last attempt.
  TrainedGroup::Await([&] { return Folders().size() == 2; });
  EXPECT_THAT(Latest(), HasSubstr(saved.checkpoint));
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointList list,
                           group.client().ListCheckpoints("m", kPatience));
  ASSERT_THAT(list.checkpoints, SizeIs(2));
  EXPECT_NE(list.checkpoints[0].state, CheckpointInfo::State::kComplete);
  EXPECT_EQ(list.checkpoints[1].name, saved.checkpoint);

  for (const auto& server : group.servers_) server->Stop();
  group.registry_.SetUnavailable(false);
  for (size_t i = 0; i < group.servers_.size(); ++i) group.Restart(*group.servers_[i]);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group.Pull("ema"));
  EXPECT_EQ(found.info.version.id(), saved.version.id());
}

TEST_F(GroupCheckpointTest, AServerThatDoesNotAnswerIsNamedBySaves) {
  TrainedGroup group(2, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  const std::string home = group.Describe("m").partitions(0).address();
  // Its key is still in the registry.
  GroupServer& lost = ServerOf(group, 1);
  lost.StopListening();
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(home));
  EXPECT_THAT(client->CreateCheckpoint("m", kTimeout).status(),
              testing::AllOf(StatusIs(absl::StatusCode::kUnavailable,
                                      HasSubstr(absl::StrCat("\"", lost.name(), "\""))),
                             ReasonIs(ErrorReason::kGroupDegraded)));
}

TEST_F(GroupCheckpointTest, AVersionThatWaitsForItsSaveIsKeptOnAllServers) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  GroupServer& home = ServerOf(group, 0);
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Model> model, home.store().Get("m"));
  // As a save does that is in the home's queue.
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef waiting, model->history().PinForSave(0));
  for (int64_t step = 2; step <= 20; ++step) ASSERT_THAT(Push(*run, step), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved,
                           home.checkpoints().Save(*model, {.id = waiting->record.id()}));
  EXPECT_EQ(saved.record.step, 1);
}

TEST_F(GroupCheckpointTest, ACrashDuringASaveLeavesWholeCheckpointsOnly) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  std::map<int64_t, std::map<std::string, std::string>> expected;  // By step.
  auto run = group.Open();
  ASSERT_NE(run, nullptr);
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_THAT(Push(*run, step), IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled pulled, group.Pull("ema"));
    expected[step] = pulled.tensors;
    if (step == 1) {
      ASSERT_THAT(group.client().CreateCheckpoint("m", kPatience), IsOk());
    }
  }
  for (const int crashed : {1, 0}) {
    SCOPED_TRACE(crashed);
    GroupServer& server = ServerOf(group, crashed);
    const std::string home = group.Describe("m").partitions(0).address();
    EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(home));
    const auto saving = std::async(std::launch::async, [&client] {
      return client->CreateCheckpoint("m", /*timeout=*/absl::Seconds(1)).status();
    });
    server.Stop();
    group.Restart(server);
    saving.wait();
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group.Pull("ema"));
    EXPECT_EQ(found.tensors, expected.at(found.info.version.step));
    EMA_ASSERT_OK_AND_ASSIGN(const auto stored, group.servers_[0]->member().Read("m"));
    EXPECT_EQ(stored->record.base, found.info.version.id());
  }
  // The next save removes what is left.
  run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 3), IsOk());
  ASSERT_THAT(group.client().CreateCheckpoint("m", kPatience), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, group.servers_[0]->member().Read("m"));
  EXPECT_EQ(Folders().size(), stored->record.checkpoints.size());
}

TEST_F(GroupCheckpointTest, ADeletedModelsCheckpointsAreSetAside) {
  TrainedGroup group(2, /*tensor_count=*/6, directory_);
  auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  ASSERT_THAT(group.client().CreateCheckpoint("m", kPatience), IsOk());
  ASSERT_THAT(group.client().DeleteModel("m", /*purge=*/false, kPatience), IsOk());
  EXPECT_THAT(Folders(), IsEmpty());
  group.Create("m", 0, /*tensor_count=*/6);
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointList none,
                           group.client().ListCheckpoints("m", kPatience));
  EXPECT_THAT(none.checkpoints, IsEmpty());
  run = group.Open();
  ASSERT_NE(run, nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*run, 1));
  EXPECT_EQ(version.number, 1);
  EXPECT_THAT(group.client().CreateCheckpoint("m", kPatience), IsOk());
  EXPECT_THAT(Folders(), SizeIs(1));
}

TEST_F(GroupCheckpointTest, ARestoreReturnsAllServersToTheVersionAndFencesTheRun) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto first, group.client().CreateCheckpoint("m", kPatience));
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled expected, group.Pull("ema"));
  for (int64_t step = 2; step <= 3; ++step) ASSERT_THAT(Push(*run, step), IsOk());
  ASSERT_THAT(group.client().CreateCheckpoint("m", kPatience), IsOk());

  EMA_ASSERT_OK_AND_ASSIGN(const Version restored,
                           group.client().RestoreCheckpoint("m", first.version.id(), kPatience));
  EXPECT_EQ(restored.id(), first.version.id());
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group.Pull("ema"));
  EXPECT_EQ(found.info.version.id(), first.version.id());
  EXPECT_EQ(found.tensors, expected.tensors);
  // The trainer that had the run open reports its epoch.
  Client::RunOptions options{.launch_id = "life", .last_run_epoch = run->run_epoch()};
  EXPECT_THAT(group.client().OpenRun("m", options, kPatience), ReasonIs(ErrorReason::kFenced));

  options = {.launch_id = "next life"};
  EMA_ASSERT_OK_AND_ASSIGN(const auto next, group.client().OpenRun("m", options, kPatience));
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*next, 2));
  EXPECT_EQ(version.number, 2);
  // After a crash the model returns to that version again, not to the newer one.
  Crash(group, 1);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled after, group.Pull("ema"));
  EXPECT_EQ(after.info.version.id(), first.version.id());
}

TEST_F(GroupCheckpointTest, ARepeatedRestoreBeginsNoOtherIncarnation) {
  TrainedGroup group(2, /*tensor_count=*/6, directory_);
  auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved, group.client().CreateCheckpoint("m", kPatience));
  ASSERT_THAT(Push(*run, 2), IsOk());
  const auto restore = [&] {
    EXPECT_THAT(group.client().RestoreCheckpoint("m", saved.version.id(), kPatience), IsOk());
    return group.Describe("m").incarnation();
  };
  group.registry_.LoseNextReply();
  const int64_t incarnation = restore();
  EXPECT_EQ(restore(), incarnation);
  // Something has been committed since.
  EMA_ASSERT_OK_AND_ASSIGN(run, group.client().OpenRun("m", {.launch_id = "next life"}, kPatience));
  ASSERT_THAT(Push(*run, 2), IsOk());
  EXPECT_GT(restore(), incarnation);
}

TEST_F(GroupCheckpointTest, ARestoreDoesNotWaitForAServerThatCannotLoad) {
  TrainedGroup group(2, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved, group.client().CreateCheckpoint("m", kPatience));
  ASSERT_THAT(Push(*run, 2), IsOk());
  const v1::Model model = group.Describe("m");
  ServerOf(group, 1).models().Stop();
  EMA_ASSERT_OK_AND_ASSIGN(const auto home, Client::Create(model.partitions(0).address()));
  EXPECT_THAT(home->RestoreCheckpoint("m", saved.version.id(), kPatience), IsOk());
  EXPECT_THAT(home->GetModel("m", kTimeout).status(), ReasonIs(ErrorReason::kGroupDegraded));
}

TEST_F(GroupCheckpointTest, AResumingTrainerReturnsTheModelToItsStep) {
  TrainedGroup group(2, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved, group.client().CreateCheckpoint("m", kPatience));
  ASSERT_THAT(Push(*run, 2), IsOk());
  Client::RunOptions options{.launch_id = "next life", .resume = ResumePoint{.step = 1}};
  EMA_ASSERT_OK_AND_ASSIGN(const auto resumed, group.client().OpenRun("m", options, kPatience));
  ASSERT_TRUE(resumed->latest().has_value());
  EXPECT_EQ(resumed->latest()->id(), saved.version.id());
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*resumed, 2));
  EXPECT_EQ(version.number, 2);
  // It is there already.
  options = {.launch_id = "third life", .resume = ResumePoint{.step = 2}};
  const int64_t incarnation = group.Describe("m").incarnation();
  ASSERT_THAT(group.client().OpenRun("m", options, kPatience), IsOk());
  EXPECT_EQ(group.Describe("m").incarnation(), incarnation);
}

TEST_F(GroupCheckpointTest, DiscardedVersionsAreFoundByTheirIdOnly) {
  TrainedGroup group(2, /*tensor_count=*/6, directory_);
  auto run = group.Open();
  ASSERT_NE(run, nullptr);
  const auto first = PushAndSave(group, *run, 1);
  ASSERT_THAT(Push(*run, 2), IsOk());
  const auto discarded = PushAndSave(group, *run, 3);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled lost, group.Pull("ema"));
  EXPECT_THAT(group.client().SetLabel("m", "lost", discarded.version.id(), kPatience), IsOk());
  EXPECT_THAT(Latest(), HasSubstr(discarded.checkpoint));
  ASSERT_THAT(group.client().RestoreCheckpoint("m", first.version.id(), kPatience), IsOk());
  TrainedGroup::Await([&] { return absl::StrContains(Latest(), first.checkpoint); });

  Client::RunOptions options{.launch_id = "next life"};
  EMA_ASSERT_OK_AND_ASSIGN(const auto next, group.client().OpenRun("m", options, kPatience));
  ASSERT_THAT(Push(*next, 2), IsOk());
  ASSERT_THAT(Push(*next, 4), IsOk());
  const auto newest = PushAndSave(group, *next, 5);
  // Now only the disk knows what there was.
  Crash(group, 1);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group.Pull("ema"));
  EXPECT_EQ(found.info.version.id(), newest.version.id());
  EXPECT_THAT(group.Pull("ema", {.step = 3}).status(), ReasonIs(ErrorReason::kVersionNotKept));
  EXPECT_THAT(group.Pull("ema", {.version = 3}).status(), ReasonIs(ErrorReason::kVersionNotKept));
  options = {.launch_id = "third life", .resume = ResumePoint{.step = 3}};
  EXPECT_THAT(group.client().OpenRun("m", options, kPatience),
              ReasonIs(ErrorReason::kResumeMismatch));
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled labelled,
                           group.Pull("ema", {.label = "lost"}));
  EXPECT_EQ(labelled.info.version.id(), discarded.version.id());
  EXPECT_EQ(labelled.tensors, lost.tensors);

  // The rollback was a mistake.
  ASSERT_THAT(group.client().RestoreCheckpoint("m", discarded.version.id(), kPatience), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled again, group.Pull("ema", {.step = 3}));
  EXPECT_EQ(again.tensors, lost.tensors);
  EXPECT_THAT(group.Pull("ema", {.step = 1}), IsOk());
}

TEST_F(GroupCheckpointTest, ACheckpointThatTheRegistryDoesNotHaveIsSetAside) {
  TrainedGroup group(2, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  const auto saved = PushAndSave(group, *run, 1);
  // As a home leaves it that crashes between the rename and the change of the record.
  const std::string orphan = CheckpointName({saved.version.incarnation, 9, 9});
  const std::string folder = directory_ + "/models/m/checkpoints/";
  std::filesystem::copy(folder + saved.checkpoint, folder + orphan,
                        std::filesystem::copy_options::recursive);
  {
    GroupServer& home = ServerOf(group, 0);
    EMA_ASSERT_OK_AND_ASSIGN(const auto model, home.store().Get("m"));
    CheckpointManager& checkpoints = home.checkpoints();
    checkpoints.store().FolderOf("m").Refresh();
    EMA_ASSERT_OK_AND_ASSIGN(const auto on_disk, checkpoints.OnDisk(*model, true));
    EXPECT_THAT(on_disk, SizeIs(1));
    EXPECT_THAT(checkpoints.OpenVersion(*model, {9, saved.version.incarnation}, "ema").status(),
                ReasonIs(ErrorReason::kVersionNotKept));
  }
  Crash(group, 0);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group.Pull("ema"));
  EXPECT_EQ(found.info.version.id(), saved.version.id());
  EXPECT_THAT(Folders(), testing::UnorderedElementsAre(saved.checkpoint, ".abandoned-" + orphan));
}

TEST_F(GroupCheckpointTest, ACorruptBaseIsSetAsideAndTheOlderCheckpointLoaded) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  const auto older = PushAndSave(group, *run, 1);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled expected, group.Pull("ema"));
  const auto base = PushAndSave(group, *run, 2);
  for (const auto& server : group.servers_) server->Stop();
  const std::string tracks = directory_ + "/models/m/checkpoints/" + base.checkpoint + "/tracks/";
  for (const auto& entry : std::filesystem::directory_iterator(tracks + "ema")) {
    if (entry.path().extension() != ".safetensors") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('\x5a');
  }
  for (size_t i = 0; i < group.servers_.size(); ++i) group.Restart(*group.servers_[i]);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group.Pull("ema"));
  EXPECT_EQ(found.info.version.id(), older.version.id());
  EXPECT_EQ(found.tensors, expected.tensors);
  EXPECT_THAT(Folders(),
              testing::UnorderedElementsAre(older.checkpoint, ".corrupt-" + base.checkpoint));
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, group.servers_[0]->member().Read("m"));
  ASSERT_THAT(stored->record.checkpoints, SizeIs(1));
}

TEST_F(GroupCheckpointTest, AModelThatTheRegistryHasLostIsNotCreatedAnewButRecovered) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  auto run = group.Open();
  ASSERT_NE(run, nullptr);
  const auto first = PushAndSave(group, *run, 1);
  const auto newest = PushAndSave(group, *run, 2);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled expected, group.Pull("ema"));
  EXPECT_THAT(group.client().RecoverModel("m", kPatience).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("nothing to recover")));

  EraseRecord(group);
  const GroupCall refused = CreateAgain(*group.servers_[1]);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(refused.status.error_message(),
              testing::AllOf(HasSubstr("/models/m/checkpoints"), HasSubstr(newest.checkpoint),
                             HasSubstr("`emactl group recover m`")));
  EMA_ASSERT_OK_AND_ASSIGN(const Client::RecoveredModel recovered,
                           group.client().RecoverModel("m", kPatience));
  EXPECT_EQ(recovered.base, newest.version.id());
  EXPECT_EQ(recovered.step, 2);
  EXPECT_EQ(recovered.checkpoint_count, 2);
  EXPECT_THAT(recovered.members, SizeIs(3));
  // The home learns of the record by its watch of the registry.
  TrainedGroup::Await([&] { return group.Pull("ema").ok(); });
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group.Pull("ema"));
  EXPECT_EQ(found.info.version.id(), newest.version.id());
  EXPECT_EQ(found.tensors, expected.tensors);
  EXPECT_THAT(group.Pull("ema", {.step = 1}), IsOk());
  EXPECT_EQ(group.Describe("m").incarnation(), recovered.incarnation);
  run = group.Open();
  ASSERT_NE(run, nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*run, 3));
  EXPECT_EQ(version.number, 3);

  // The other way out.
  EraseRecord(group);
  EXPECT_THAT(group.client().DeleteModel("m", /*purge=*/false, kPatience), IsOk());
  EXPECT_THAT(Folders(), IsEmpty());
  const GroupCall created = CreateAgain(*group.servers_[0]);
  EXPECT_TRUE(created.ok() || created.detail.reason() == v1::ERROR_REASON_NOT_HOME)
      << created.status.error_message();
}

void GroupCheckpointTest::TestOldRegistry(bool in_same_incarnation) {
  TrainedGroup group(2, /*tensor_count=*/6, directory_);
  auto run = group.Open();
  ASSERT_NE(run, nullptr);
  PushAndSave(group, *run, 1);
  Member& member = group.servers_[0]->member();
  EMA_ASSERT_OK_AND_ASSIGN(const auto backup, member.Read("m"));
  if (!in_same_incarnation) {
    ASSERT_THAT(Push(*run, 2), IsOk());
    ASSERT_THAT(group.client().RestoreCheckpoint("m", backup->record.checkpoints[0].id, kPatience),
                IsOk());
    Client::RunOptions options{.launch_id = "next life"};
    EMA_ASSERT_OK_AND_ASSIGN(run, group.client().OpenRun("m", options, kPatience));
  }
  const auto newest = PushAndSave(group, *run, 2);
  const std::vector<std::string> folders = Folders();

  GroupServer& home = ServerOf(group, 0);
  home.Stop();
  Member& other =
      (group.servers_[0].get() == &home ? group.servers_[1] : group.servers_[0])->member();
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, other.Read("m"));
  ASSERT_THAT(other.Write("m", backup->record, stored->revision), IsOk());
  const std::string name = home.name();
  group.Restart(home);
  const auto restarted = std::find_if(group.servers_.begin(), group.servers_.end(),
                                      [&](const auto& server) { return server->name() == name; });
  // It does not begin an incarnation with the old checkpoint.
  v1::Model model;
  TrainedGroup::Await([&] {
    const GroupCall result = GroupTrainer::Get((*restarted)->address(), "m", &model);
    return result.status.error_message().find("emactl group recover") != std::string::npos;
  });
  EXPECT_EQ(Folders(), folders);
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create((*restarted)->address()));
  ASSERT_THAT(client->RecoverModel("m", kPatience), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group.Pull("ema"));
  EXPECT_EQ(found.info.version.id(), newest.version.id());
}

TEST_F(GroupCheckpointTest, ARegistryOfAnEarlierIncarnationLosesNoCheckpoint) {
  TestOldRegistry(/*in_same_incarnation=*/false);
}

TEST_F(GroupCheckpointTest, AnOldRegistryOfTheSameIncarnationLosesNoCheckpoint) {
  TestOldRegistry(/*in_same_incarnation=*/true);
}

TEST_F(GroupCheckpointTest, ATrainerContinuesByItselfAfterACrash) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  const Manifest manifest = *Manifest::Create(
      {{.name = "a", .shape = {100}}, {.name = "b", .shape = {200}}, {.name = "c", .shape = {50}}});
  StepPusher::Options options;
  options.tracks = {{.name = "raw", .schedule = *Schedule::Parse("copy")}};
  options.launch_id = "life";
  EMA_ASSERT_OK_AND_ASSIGN(const auto pusher,
                           StepPusher::Create(group.client(), "hooked", manifest, {}, options));
  std::vector<std::vector<float>> weights = {std::vector<float>(100), std::vector<float>(200),
                                             std::vector<float>(50)};
  const auto push = [&](int64_t step) {
    pusher->WaitReleased();
    for (std::vector<float>& tensor : weights) {
      std::fill(tensor.begin(), tensor.end(), static_cast<float>(step));
    }
    pusher->AfterStep([&](const StepPusher::Piece& piece) {
      const std::span<const float> tensor(weights[piece.tensor_index]);
      return StepPusher::Weights{std::as_bytes(tensor.subspan(piece.first, piece.count)), nullptr};
    });
    return pusher->WaitPushed();
  };
  int64_t step = 0;
  while (step < 2) ASSERT_THAT(push(++step), IsOk());
  ASSERT_THAT(group.client().CreateCheckpoint("hooked", kPatience), IsOk());
  ASSERT_THAT(push(++step), IsOk());

  GroupServer& lost = group.ServerAt(group.Describe("hooked").partitions(1).address());
  lost.Stop();
  group.Restart(lost);
  // Steps are skipped until it has joined the run again.
  const int64_t before = pusher->stats().pushes;
  const auto deadline = After(SteadyNow(), kPatience);
  while (pusher->stats().pushes == before && SteadyNow() < deadline) push(++step).IgnoreError();
  EXPECT_EQ(pusher->stats().pushes, before + 1);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled pulled, group.Pull("raw", {}, "hooked"));
  EXPECT_EQ(pulled.info.version.number, 3);
  EXPECT_EQ(pulled.info.version.step, step);
  EXPECT_EQ(pulled.info.version.incarnation, group.Describe("hooked").incarnation());
  float value = 0;
  std::memcpy(&value, pulled.tensors.at("c").data(), sizeof(value));
  EXPECT_EQ(value, static_cast<float>(step));
}

TEST_F(GroupCheckpointTest, APushJoinsTheRunAgainAfterACrash) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  const auto first = group.Open(0, 2);
  const auto second = group.Open(1, 2);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  const auto push_both = [&](int64_t step) {
    const Weights weights(*second, step);
    auto pushed = second->StartPush(step, TrainingTime::AtBatch(step), weights.shards(), kPatience);
    EXPECT_THAT(pushed, IsOk());
    const absl::StatusOr<Version> version = Push(*first, step);
    EXPECT_THAT((*pushed)->Wait(), IsOk());
    return version;
  };
  ASSERT_THAT(push_both(1), IsOk());
  ASSERT_THAT(group.client().CreateCheckpoint("m", kPatience), IsOk());
  int64_t step = 2;
  ASSERT_THAT(push_both(step), IsOk());
  for (const int crashed : {1, 0}) {
    SCOPED_TRACE(crashed);
    Crash(group, crashed);
    EMA_ASSERT_OK_AND_ASSIGN(const Version version, push_both(++step));
    EXPECT_EQ(version.number, 2);
    EXPECT_EQ(version.incarnation, group.Describe("m").incarnation());
    EXPECT_EQ(first->latest()->id(), version.id());
  }
}

TEST_F(GroupCheckpointTest, APushWhoseWeightsAreReleasedIsLostInACrashAndTheRunContinues) {
  TrainedGroup group(2, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  PushAndSave(group, *run, 1);
  Crash(group, 1);
  const Weights weights(*run, 2);
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto pushed, run->StartPush(2, TrainingTime::AtBatch(2), weights.shards(), kPatience));
  pushed->WaitReleased(kPatience);
  EXPECT_THAT(pushed->Wait(), testing::AllOf(StatusIs(absl::StatusCode::kAborted, testing::_),
                                             ReasonIs(ErrorReason::kStepAbandoned)));
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*run, 3));
  EXPECT_EQ(version.number, 2);
}

TEST_F(GroupCheckpointTest, ARunThatANewerOneFencesDoesNotJoinAgain) {
  TrainedGroup group(2, /*tensor_count=*/6, directory_);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  PushAndSave(group, *run, 1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto newer,
                           group.client().OpenRun("m", {.launch_id = "next life"}, kPatience));
  for (const bool has_crashed : {false, true}) {
    SCOPED_TRACE(has_crashed);
    if (has_crashed) Crash(group, 1);
    const Weights weights(*run, 2);
    EXPECT_THAT(run->Push(2, TrainingTime::AtBatch(2), weights.shards(), kPatience),
                ReasonIs(ErrorReason::kFenced));
  }
}

TEST_F(GroupCheckpointTest, OneServerLoadsTheGroupsFolder) {
  std::map<std::string, std::string> expected;
  {
    TrainedGroup group(3, /*tensor_count=*/6, directory_);
    const auto run = group.Open();
    ASSERT_NE(run, nullptr);
    for (int64_t step = 1; step <= 3; ++step) ASSERT_THAT(Push(*run, step), IsOk());
    ASSERT_THAT(group.client().CreateCheckpoint("m", kPatience), IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled pulled, group.Pull("ema"));
    expected = pulled.tensors;
  }
  // Another directory: this one belongs to the group.
  const std::string copy = directory_ + "-copy";
  std::filesystem::create_directory(copy);
  std::filesystem::copy(directory_ + "/models", copy + "/models",
                        std::filesystem::copy_options::recursive);
  ModelStore::Options options;
  options.memory_bytes = int64_t{1} << 28;
  ModelStore models(NewTestDevice(int64_t{16} << 20), options);
  EMA_ASSERT_OK_AND_ASSIGN(const auto store,
                           CheckpointStore::Open(PosixFileSystem(), {.data_dir = copy}));
  EMA_ASSERT_OK_AND_ASSIGN(const LoadReport report, store->LoadAll(models));
  ASSERT_THAT(report.loaded, SizeIs(1));
  EXPECT_THAT(report.corrupt, IsEmpty());
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Model> model, models.Get("m"));
  const SnapshotRef newest = model->history().newest();
  EXPECT_EQ(newest->record.step, 3);
  const std::vector<std::vector<std::byte>> tensors = TensorsOf(*model, *newest, /*t=*/0);
  ASSERT_THAT(tensors, SizeIs(6));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string& bytes = expected.at(absl::StrCat("t", i));
    ASSERT_THAT(tensors[i], SizeIs(bytes.size()));
    EXPECT_EQ(std::memcmp(tensors[i].data(), bytes.data(), bytes.size()), 0);
  }
  PosixFileSystem().RemoveTree(copy).IgnoreError();
}

}  // namespace
}  // namespace ema::group
