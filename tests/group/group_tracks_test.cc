// SPDX-License-Identifier: Apache-2.0
//
// Changes of the tracks of a model on a group of real servers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "server/core/checkpoints.h"
#include "tests/group/trained_group.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema::group {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TrackConfig Track(const std::string& name, const std::string& schedule) {
  return {.name = name, .schedule = *Schedule::Parse(schedule)};
}

std::vector<std::string> NamesOf(const std::vector<TrackConfig>& tracks) {
  std::vector<std::string> names;
  for (const TrackConfig& track : tracks) names.push_back(track.name);
  return names;
}

class GroupTracksTest : public testing::Test {
 protected:
  GroupTracksTest() : directory_(testing::TempDir() + "/ema_group_XXXXXX") {
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
  }
  ~GroupTracksTest() override { PosixFileSystem().RemoveTree(directory_).IgnoreError(); }

  static absl::StatusOr<ModelInfo> Update(TrainedGroup& group,
                                          const Client::ModelChanges& changes) {
    return group.client().UpdateModel("m", changes, kPatience);
  }
  static ModelInfo Describe(TrainedGroup& group) {
    const auto info = group.client().GetModel("m", kPatience);
    EXPECT_THAT(info, IsOk());
    return info.ok() ? *info : ModelInfo();
  }
  // The memory that the tracks of each partition have reserved.
  static std::vector<int64_t> ReservedBytes(TrainedGroup& group) {
    std::vector<int64_t> bytes;
    for (const auto& server : group.servers_) {
      const auto model = server->store().Get("m");
      bytes.push_back(model.ok() ? (*model)->tracks().reserved_bytes() : 0);
    }
    return bytes;
  }
  static GroupServer& ServerOf(TrainedGroup& group, int partition) {
    return group.ServerAt(group.Describe("m").partitions(partition).address());
  }

  std::string directory_;
};

TEST_F(GroupTracksTest, AChangeTakesEffectOnAllServersAtTheNextCommit) {
  std::optional<std::map<std::string, std::string>> expected;
  for (const int server_count : {1, 3}) {
    SCOPED_TRACE(server_count);
    TrainedGroup group(server_count, /*tensor_count=*/6);
    const auto run = group.Open();
    ASSERT_NE(run, nullptr);
    ASSERT_THAT(Push(*run, 1), IsOk());
    const TrackConfig before = Describe(group).tracks[0];
    TrackConfig faster = before;
    faster.schedule = *Schedule::Parse("half_life=1ba");
    EMA_ASSERT_OK_AND_ASSIGN(
        const ModelInfo pending,
        Update(group, {.put = {faster, Track("late", "smoothing=0.5")}, .remove = {"raw"}}));
    EXPECT_THAT(NamesOf(pending.tracks), ElementsAre("ema", "raw"));
    ASSERT_TRUE(pending.pending_tracks.has_value());
    EXPECT_THAT(NamesOf(*pending.pending_tracks), ElementsAre("ema", "late"));

    // The first commit still has the tracks as they were.
    EMA_ASSERT_OK_AND_ASSIGN(const Version second, Push(*run, 2));
    EXPECT_THAT(second.tracks, SizeIs(2));
    const ModelInfo changed = Describe(group);
    EXPECT_FALSE(changed.pending_tracks.has_value());
    EXPECT_THAT(NamesOf(changed.tracks), ElementsAre("ema", "late"));
    EXPECT_GT(changed.plan_revision, pending.plan_revision);
    for (int64_t step = 3; step <= 5; ++step) {
      EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*run, step));
      EXPECT_EQ(version.number, step);
    }
    std::map<std::string, std::string> found;
    for (const std::string track : {"ema", "late"}) {
      EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled pulled, group.Pull(track));
      ASSERT_THAT(pulled.tensors, SizeIs(6));
      for (const auto& [name, bytes] : pulled.tensors) found[track + "/" + name] = bytes;
    }
    EXPECT_THAT(group.Pull("raw"), ReasonIs(ErrorReason::kTrackNotFound));
    // As on one server.
    if (!expected.has_value()) expected = found;
    EXPECT_EQ(found, *expected);
  }
}

TEST_F(GroupTracksTest, WithoutARunAChangeTakesEffectAtOnce) {
  TrainedGroup group(3, /*tensor_count=*/6);
  TrainedGroup::Await([&] { return ServerOf(group, 0).store().Get("m").value()->round() > 0; });
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo changed,
                           Update(group, {.put = {Track("late", "copy")}}));
  EXPECT_FALSE(changed.pending_tracks.has_value());
  EXPECT_THAT(NamesOf(changed.tracks), ElementsAre("ema", "raw", "late"));
  // The servers of the other partitions learn it before they accept a push.
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const Version first, Push(*run, 1));
  EXPECT_THAT(first.tracks, SizeIs(3));
}

TEST_F(GroupTracksTest, PausedAndResumedTracksChangeAtOnce) {
  TrainedGroup group(3, /*tensor_count=*/6);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  ASSERT_THAT(Update(group, {.pause = {"ema", "raw"}}), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const Version second, Push(*run, 2));
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo resumed, Update(group, {.resume = {"ema", "raw"}}));
  EXPECT_FALSE(resumed.pending_tracks.has_value());
  EXPECT_FALSE(resumed.tracks[0].paused);
  // The trainer learns the new plan, or loses one step.
  absl::StatusOr<Version> next;
  for (int64_t step = 3; step < 6; ++step) {
    next = run->Push(step, TrainingTime::AtBatch(step), Weights(*run, step).shards(), kPatience);
    if (next.ok()) break;
  }
  ASSERT_THAT(next, IsOk());
  EXPECT_TRUE(next->tracks[0].updated);
  EXPECT_EQ(next->number, second.number + 1);
}

TEST_F(GroupTracksTest, ARefusalOfOneServerLeavesNothingOnAnyServer) {
  TrainedGroup group(3, /*tensor_count=*/6);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  const std::vector<int64_t> reserved = ReservedBytes(group);
  const ModelInfo before = Describe(group);
  // Only the server of the last tensor knows that the track takes another form.
  TrackConfig other_form = before.tracks[0];
  other_form.tensor_rules.push_back({.pattern = "t5", .action = TensorAction::kCopy});
  EXPECT_THAT(Update(group, {.put = {Track("late", "copy"), other_form}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cannot be changed")));
  TrainedGroup::Await([&] { return ReservedBytes(group) == reserved; });
  EXPECT_FALSE(Describe(group).pending_tracks.has_value());
  ASSERT_THAT(Push(*run, 2), IsOk());
  EXPECT_EQ(Describe(group).plan_revision, before.plan_revision);
  // The home refuses this one itself.
  EXPECT_THAT(Update(group, {.put = {Track("raw", "smoothing=0.5")}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cannot be changed")));

  // The next change is as good as the first one would have been.
  ASSERT_THAT(Update(group, {.put = {Track("late", "copy")}}), IsOk());
  for (int64_t step = 3; step <= 4; ++step) ASSERT_THAT(Push(*run, step), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled late, group.Pull("late"));
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled raw, group.Pull("raw"));
  EXPECT_EQ(late.tensors, raw.tensors);
}

// Servers whose connections can be cut.
class GroupTracksCutTest : public GroupFixture {
 protected:
  GroupTracksCutTest() {
    for (int i = 0; i < 3; ++i) {
      StartServer({.name = absl::StrCat("ema-", i), .advertise = [this](int port) {
                     proxies_.push_back(std::make_unique<TcpProxy>(port));
                     return proxies_.back()->address();
                   }});
    }
    AwaitMembers();
    model_ = Create();
  }
  TcpProxy& ProxyOf(int partition) {
    for (const std::unique_ptr<TcpProxy>& proxy : proxies_) {
      if (proxy->address() == model_.partitions(partition).address()) return *proxy;
    }
    ADD_FAILURE() << "partition " << partition << " has no proxy";
    return *proxies_[0];
  }
  GroupServer& ServerOf(int partition) {
    for (const std::unique_ptr<GroupServer>& server : servers_) {
      if (server->name() == model_.partitions(partition).member()) return *server;
    }
    ADD_FAILURE() << "partition " << partition << " has no server";
    return *servers_[0];
  }

  std::vector<std::unique_ptr<TcpProxy>> proxies_;
  v1::Model model_;
};

TEST_F(GroupTracksCutTest, ALostWithdrawalIsRepeated) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(model_.partitions(0).address()));
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo before, client->GetModel("m", kPatience));
  EMA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Model> accepting, ServerOf(1).store().Get("m"));
  const int64_t reserved_bytes = accepting->tracks().reserved_bytes();
  // Partition 2 refuses the change.
  TrackConfig other_form = before.tracks[0];
  other_form.tensor_rules.push_back({.pattern = "t5", .action = TensorAction::kCopy});
  ProxyOf(2).HoldReplies(true);
  std::future<absl::Status> update = std::async(std::launch::async, [&] {
    return client->UpdateModel("m", {.put = {Track("late", "copy"), other_form}}, absl::Seconds(10))
        .status();
  });
  Await([&] { return accepting->tracks().reserved_bytes() > reserved_bytes; });
  ProxyOf(1).SetStalled(true);
  ProxyOf(1).CutAll();
  ProxyOf(1).AwaitCut();
  ProxyOf(2).HoldReplies(false);
  EXPECT_FALSE(update.get().ok());
  ProxyOf(1).CutAll();
  ProxyOf(1).AwaitCut();
  EXPECT_GT(accepting->tracks().reserved_bytes(), reserved_bytes);
  ProxyOf(1).SetStalled(false);
  Await([&] { return accepting->tracks().reserved_bytes() == reserved_bytes; });
}

// A rollback that takes long.
class LongRestore final : public Checkpoints {
 public:
  absl::StatusOr<Version> Restore(Model&, const VersionId&, std::string_view) override {
    has_begun.Notify();
    may_end.WaitForNotification();
    return absl::OutOfRangeError("no such version");
  }

  absl::Notification has_begun;
  absl::Notification may_end;
};

TEST(GroupTracksCallTest, AChangeDoesNotWaitForARollback) {
  LongRestore checkpoints;
  MemoryRegistry registry;
  GroupServer server({.registry = &registry, .name = "ema-0", .checkpoints = &checkpoints});
  v1::CreateModelResponse created;
  ASSERT_TRUE(RetryBusy([&] {
                return GroupTrainer::Create(server.address(), GroupTrainer::CreateRequest("m"),
                                            &created);
              }).ok());
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(server.address()));
  const std::future<absl::Status> rollback = std::async(std::launch::async, [&] {
    return client->RestoreCheckpoint("m", VersionId{1, 1}, kPatience).status();
  });
  checkpoints.has_begun.WaitForNotification();
  EXPECT_THAT(client->UpdateModel("m", {.put = {Track("late", "copy")}}, absl::Seconds(10)),
              IsOk());
  checkpoints.may_end.Notify();
}

TEST_F(GroupTracksTest, ChangesInARowAreMadeInTheirOrder) {
  TrainedGroup group(3, /*tensor_count=*/6);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  ASSERT_THAT(Update(group, {.put = {Track("a", "copy"), Track("b", "copy")}}), IsOk());
  ASSERT_THAT(Update(group, {.put = {Track("c", "copy")}, .remove = {"a"}}), IsOk());
  ASSERT_THAT(Push(*run, 2), IsOk());
  ASSERT_THAT(Update(group, {.remove = {"b"}}), IsOk());
  ASSERT_THAT(Push(*run, 3), IsOk());
  ASSERT_THAT(Push(*run, 4), IsOk());
  EXPECT_THAT(NamesOf(Describe(group).tracks), ElementsAre("ema", "raw", "c"));
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled pulled, group.Pull("c"));
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled raw, group.Pull("raw"));
  EXPECT_EQ(pulled.tensors, raw.tensors);
}

TEST_F(GroupTracksTest, ATrainerThatStartsAgainFindsItsChangedModel) {
  TrainedGroup group(2, /*tensor_count=*/4);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  const ModelInfo created = Describe(group);
  ASSERT_THAT(Push(*run, 1), IsOk());
  ASSERT_THAT(Update(group, {.put = {Track("late", "copy")}}), IsOk());
  const auto create = [&](const std::vector<TrackConfig>& tracks) {
    return group.client().CreateModel("m", created.manifest, tracks, {}, kPatience).status();
  };
  std::vector<TrackConfig> changed = created.tracks;
  changed.push_back(Track("late", "copy"));
  EXPECT_THAT(create(created.tracks), IsOk());
  EXPECT_THAT(create(changed), IsOk());
  changed.push_back(Track("none", "copy"));
  EXPECT_THAT(create(changed), ReasonIs(ErrorReason::kModelDiffers));
}

TEST_F(GroupTracksTest, AfterACrashTheTracksAreThoseOfTheCheckpoint) {
  TrainedGroup group(3, /*tensor_count=*/6, directory_);
  {
    const auto run = group.Open();
    ASSERT_NE(run, nullptr);
    ASSERT_THAT(Push(*run, 1), IsOk());
    ASSERT_THAT(Update(group, {.put = {Track("late", "copy")}}), IsOk());
    // All servers save the tracks with the change, which none of them has applied yet.
    ASSERT_THAT(group.client().CreateCheckpoint("m", kPatience), IsOk());
    ASSERT_THAT(Push(*run, 2), IsOk());
    ASSERT_THAT(Update(group, {.remove = {"raw"}}), IsOk());
    ASSERT_THAT(Push(*run, 3), IsOk());
    EXPECT_THAT(NamesOf(Describe(group).tracks), ElementsAre("ema", "late"));
  }
  GroupServer& crashed = ServerOf(group, 1);
  crashed.Stop();
  group.Restart(crashed);
  TrainedGroup::Await([&] {
    const auto info = group.client().GetModel("m", kPatience);
    return info.ok() && info->latest.has_value() && info->latest->step == 1;
  });
  EXPECT_THAT(NamesOf(Describe(group).tracks), ElementsAre("ema", "raw", "late"));
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 4), IsOk());
  // Also a checkpoint after a change that is in force.
  ASSERT_THAT(Update(group, {.remove = {"late"}}), IsOk());
  ASSERT_THAT(Push(*run, 5), IsOk());
  ASSERT_THAT(group.client().CreateCheckpoint("m", kPatience), IsOk());
  EXPECT_THAT(NamesOf(Describe(group).tracks), ElementsAre("ema", "raw"));
}

}  // namespace
}  // namespace ema::group
