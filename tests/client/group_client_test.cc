// SPDX-License-Identifier: Apache-2.0
//
// Runs, pushes, pulls and watches of a model that is on a group of servers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "tests/client/fake_group.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr absl::Duration kPatience = absl::Seconds(30);

// Tensors "t0" to "t5" of 1000, 2000, ... floats.
Manifest TestManifest() {
  std::vector<TensorSpec> tensors;
  for (int64_t i = 0; i < 6; ++i) {
    tensors.push_back({.name = absl::StrCat("t", i), .shape = {1000 * (i + 1)}});
  }
  return *Manifest::Create(std::move(tensors));
}

class GroupClientTest : public testing::Test {
 protected:
  GroupClientTest() : group_(TestManifest(), {2, 1, 3}) {
    client_ = *Client::Create(group_.address(), {.chunk_bytes = 4096});
  }

  void Open(Client::RunOptions options = {}) {
    if (options.launch_id.empty()) options.launch_id = "life";
    EMA_ASSERT_OK_AND_ASSIGN(run_, client_->OpenRun("m", options));
    bytes_.resize(run_->layout().total_bytes());
    for (size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<char>(i * 31 + i / 7);
  }
  // Of the rank's shards, in bytes_.
  std::vector<std::span<const std::byte>> Shards() const {
    std::vector<std::span<const std::byte>> shards;
    const RankLayout& layout = run_->layout();
    for (int64_t i = 0; i < std::ssize(layout.shards()); ++i) {
      shards.push_back(std::as_bytes(std::span(bytes_.data() + layout.shard_start(i),
                                               layout.shard_start(i + 1) - layout.shard_start(i))));
    }
    return shards;
  }
  std::unique_ptr<PendingPush> Start(int64_t step) {
    auto push = run_->StartPush(step, TrainingTime::AtBatch(step), Shards(), kPatience);
    EXPECT_THAT(push, IsOk());
    return push.ok() ? *std::move(push) : nullptr;
  }
  absl::StatusOr<Version> Push(int64_t step) {
    return run_->Push(step, TrainingTime::AtBatch(step), Shards(), kPatience);
  }
  std::vector<int64_t> Rounds(size_t partition) {
    std::vector<int64_t> rounds;
    for (const FakeServer::SeenPush& push : group_.server(partition).pushes()) {
      rounds.push_back(push.header.round());
    }
    return rounds;
  }
  // The queries at a partition that abandon a step.
  std::vector<v1::QueryPushRequest> Abandons(size_t partition) {
    std::vector<v1::QueryPushRequest> queries = group_.server(partition).queries();
    std::erase_if(queries, [](const auto& query) { return !query.abandon_if_unfinished(); });
    return queries;
  }

  FakeGroup group_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<ema::Run> run_;
  std::string bytes_;
};

TEST_F(GroupClientTest, TheHomeOpensTheRunThatTheOthersJoin) {
  Open();
  ASSERT_THAT(group_.server(0).open_runs(), SizeIs(1));
  const v1::OpenRunRequest at_home = group_.server(0).open_runs()[0];
  EXPECT_EQ(at_home.run_epoch(), 0);
  EXPECT_EQ(at_home.layout().shards_size(), 2);
  for (const size_t partition : {1, 2}) {
    ASSERT_THAT(group_.server(partition).open_runs(), SizeIs(1));
    const v1::OpenRunRequest request = group_.server(partition).open_runs()[0];
    EXPECT_EQ(request.launch_id(), "life");
    EXPECT_EQ(request.run_epoch(), run_->run_epoch());
    EXPECT_EQ(request.incarnation(), FakeGroup::kIncarnation);
    EXPECT_NE(request.manifest_digest(), at_home.manifest_digest());
    EXPECT_EQ(request.layout().shards(0).tensor_index(), 0);
  }
  EXPECT_EQ(run_->manifest(), TestManifest());
  EXPECT_EQ(run_->layout().total_bytes(), 21'000 * 4);
  EXPECT_THAT(run_->WaitReady(kPatience), IsOk());
}

TEST_F(GroupClientTest, IsReadyWhenEveryServerIs) {
  group_.server(2).not_ready_count = 2;
  Open();
  EXPECT_THAT(run_->WaitReady(kPatience), IsOk());
  EXPECT_EQ(group_.server(2).open_run_count(), 3);
}

TEST_F(GroupClientTest, DoesNotWaitForRanksAtAServerThatWasReplaced) {
  group_.server(2).not_ready_count = 1;
  Open({.rejoins = false});
  group_.server(2).open_run_error = absl::UnavailableError("it does not run");
  group_.server(0).edit_model = [describe = group_.server(0).edit_model](v1::Model& model) {
    describe(model);
    model.set_incarnation(FakeGroup::kIncarnation + 1);
  };
  EXPECT_THAT(run_->WaitReady(kPatience), ReasonIs(ErrorReason::kFenced));
}

TEST_F(GroupClientTest, WaitsForAServerThatDoesNotRunYet) {
  std::atomic<int> calls = 0;
  group_.server(0).edit_model = [&, describe = group_.server(0).edit_model](v1::Model& model) {
    describe(model);
    if (++calls <= 2) model.mutable_partitions(2)->clear_address();
  };
  Open();
  EXPECT_EQ(calls, 3);
}

TEST_F(GroupClientTest, SendsEachServerItsTensors) {
  Open();
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(10));
  EXPECT_EQ(version.number, 1);
  EXPECT_EQ(version.incarnation, FakeGroup::kIncarnation);
  EXPECT_EQ(run_->latest()->number, 1);
  EXPECT_EQ(group_.server(0).StepBytes(10, 0), bytes_.substr(0, 3000 * 4));
  EXPECT_EQ(group_.server(1).StepBytes(10, 0), bytes_.substr(3000 * 4, 3000 * 4));
  EXPECT_EQ(group_.server(2).StepBytes(10, 0), bytes_.substr(6000 * 4));
  EXPECT_EQ(group_.server(1).pushes()[0].header.incarnation(), FakeGroup::kIncarnation);
  // The next round comes with the reply.
  EXPECT_THAT(Push(20), IsOk());
  for (const size_t partition : {0, 1, 2}) EXPECT_THAT(Rounds(partition), ElementsAre(1, 2));
}

TEST_F(GroupClientTest, AStepIsOnePushWithOneReleaseAndOneResult) {
  Open();
  group_.server(1).push_scripts = {{.hold_reply = true}};
  const auto push = Start(10);
  EXPECT_TRUE(push->WaitReleased(kPatience));
  // All bytes have left, so these changes are not sent.
  std::fill(bytes_.begin(), bytes_.end(), '\0');
  EXPECT_FALSE(push->done());
  group_.server(1).Release();
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, push->Wait());
  EXPECT_EQ(version.number, 1);
  EXPECT_TRUE(push->WaitDone(absl::ZeroDuration()));
  const PendingPush::Stats stats = push->stats();
  EXPECT_EQ(stats.total_bytes, 21'000 * 4);
  EXPECT_EQ(stats.sent_bytes, stats.total_bytes);
  EXPECT_EQ(stats.stream_count, 1);
}

TEST_F(GroupClientTest, TheShardsMayBeInAnyOrder) {
  const Manifest manifest = TestManifest();
  Open({.shards = std::vector<Shard>{WholeTensor(manifest, 5), WholeTensor(manifest, 2),
                                     WholeTensor(manifest, 0), WholeTensor(manifest, 3)}});
  ASSERT_THAT(Push(10), IsOk());
  const RankLayout& layout = run_->layout();
  const auto shard = [&](int64_t i) {
    return bytes_.substr(layout.shard_start(i), layout.shard_start(i + 1) - layout.shard_start(i));
  };
  EXPECT_EQ(group_.server(0).StepBytes(10, 0), shard(2));
  EXPECT_EQ(group_.server(1).StepBytes(10, 0), shard(1));
  EXPECT_EQ(group_.server(2).StepBytes(10, 0), shard(0) + shard(3));
}

TEST_F(GroupClientTest, ARankDoesNotPushToAServerForWhichItHasNoShards) {
  const Manifest manifest = TestManifest();
  std::vector<Shard> of_first;
  std::vector<Shard> of_second = {WholeTensor(manifest, 2)};
  for (const int64_t i : {0, 1, 3, 4, 5}) of_first.push_back(WholeTensor(manifest, i));
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto second,
      client_->OpenRun("m",
                       {.launch_id = "life", .rank = 1, .world_size = 2, .shards = of_second}));
  Open({.launch_id = "life", .rank = 0, .world_size = 2, .shards = of_first});
  const std::string of_second_bytes(3000 * 4, 'x');
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto pushed,
      second->StartPush(10, TrainingTime::AtBatch(10),
                        {std::as_bytes(std::span(of_second_bytes.data(), 3000 * 4))}, kPatience));
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(10));
  EMA_ASSERT_OK_AND_ASSIGN(const Version same, pushed->Wait());
  EXPECT_EQ(version.id(), same.id());
  EXPECT_THAT(group_.server(0).pushes(), SizeIs(1));
  EXPECT_THAT(group_.server(1).pushes(), SizeIs(1));
  EXPECT_THAT(group_.server(2).pushes(), SizeIs(1));
  EXPECT_EQ(group_.server(1).pushes()[0].header.rank(), 1);
  // It has no reply of the home.
  EXPECT_EQ(second->latest()->number, 1);
}

TEST_F(GroupClientTest, ABrokenPartSendsOnlyWhatIsMissing) {
  Open();
  group_.server(2).push_scripts = {{.break_after_chunks = 3}};
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(10));
  EXPECT_EQ(version.number, 1);
  EXPECT_THAT(group_.server(0).pushes(), SizeIs(1));
  ASSERT_THAT(group_.server(2).pushes(), SizeIs(2));
  EXPECT_EQ(group_.server(2).StepBytes(10, 0), bytes_.substr(6000 * 4));
  // 15 chunks; three have arrived before.
  EXPECT_THAT(group_.server(2).pushes()[1].chunks, SizeIs(12));
}

TEST_F(GroupClientTest, AStepOfARoundThatHasEndedIsSentInTheNewOne) {
  Open();
  group_.AbortRound();
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(10));
  EXPECT_EQ(version.number, 1);
  for (const size_t partition : {0, 1, 2}) {
    // A part that begins after another one was rejected knows the round already.
    EXPECT_THAT(Rounds(partition), AnyOf(ElementsAre(1, 2), ElementsAre(2)));
  }
}

TEST_F(GroupClientTest, AFailedPartAbandonsTheStepOnceAtTheHome) {
  Open();
  group_.server(1).push_scripts = {
      {.refuse = MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite,
                           "tensor \"t2\" has a NaN")}};
  const auto push = Start(10);
  const absl::Status status = push->Wait().status();
  EXPECT_THAT(status, ReasonIs(ErrorReason::kNonFinite));
  EXPECT_THAT(std::string(status.message()), HasSubstr("t2"));
  EXPECT_TRUE(push->WaitReleased(absl::ZeroDuration()));
  ASSERT_THAT(Abandons(0), SizeIs(1));
  EXPECT_EQ(Abandons(0)[0].round(), 1);
  EXPECT_THAT(Abandons(1), IsEmpty());
  EXPECT_THAT(Abandons(2), IsEmpty());
  // Its answer has the round of the next step.
  EXPECT_THAT(Push(20), IsOk());
  EXPECT_EQ(Rounds(2).back(), 2);
}

TEST_F(GroupClientTest, AStepThatOneServerHasEndedIsDroppedOnTheOthers) {
  Open();
  group_.server(0).push_scripts = {
      {.refuse = MakeError(absl::StatusCode::kAborted, ErrorReason::kStepSkipped,
                           "step 10: rank 1 has abandoned it")}};
  EXPECT_THAT(Push(10), ReasonIs(ErrorReason::kStepSkipped));
  ASSERT_THAT(Abandons(0), SizeIs(1));
  EXPECT_EQ(Abandons(0)[0].round(), 1);
  EXPECT_THAT(Push(20), IsOk());
  EXPECT_EQ(Rounds(0).back(), 2);
}

TEST_F(GroupClientTest, NoPartSendsAnyMoreWhenTheStepIsDropped) {
  Open();
  group_.server(1).push_scripts = {
      {.refuse = MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite, "a NaN")}};
  group_.server(2).push_scripts = {{.hold_chunks = true}};
  const auto have_ended = std::make_shared<std::atomic<bool>>(false);
  group_.server(0).on_abandon = [this, have_ended,
                                 abort_round = group_.server(0).on_abandon](int64_t step) {
    *have_ended = group_.server(2).AwaitNoPush();
    return abort_round(step);
  };
  EXPECT_THAT(Push(10), ReasonIs(ErrorReason::kNonFinite));
  EXPECT_TRUE(*have_ended);
  for (const size_t partition : {0, 1, 2}) {
    EXPECT_THAT(Rounds(partition), testing::Each(1)) << partition;
  }
}

// Other ranks may push the next step in a later round.
TEST_F(GroupClientTest, AFailedPushEndsTheRoundInWhichItBegan) {
  Open();
  absl::Status stale =
      MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleRound, "round 1 has ended");
  SetGroupHint(stale, {.round = 2, .incarnation = FakeGroup::kIncarnation});
  // When the other parts have begun in round 1.
  group_.server(2).check_push = [this, stale](const v1::PushHeader&) {
    EXPECT_TRUE(group_.server(0).AwaitPushes(1) && group_.server(1).AwaitPushes(1));
    return stale;
  };
  // Its query, the next thing after it has learned of round 2, has to be repeated later.
  group_.server(2).unary_errors = {MakeError(absl::StatusCode::kUnavailable,
                                             ErrorReason::kModelBusy, "busy", absl::Seconds(10))};
  group_.server(1).push_scripts = {{.break_after_chunks = 0,
                                    .break_status = MakeError(absl::StatusCode::kInvalidArgument,
                                                              ErrorReason::kNonFinite, "a NaN"),
                                    .hold_chunks = true}};
  const auto push = Start(10);
  while (group_.server(2).unary_count() < 1) std::this_thread::yield();
  group_.server(1).Release();
  EXPECT_THAT(push->Wait(), ReasonIs(ErrorReason::kNonFinite));
  ASSERT_THAT(Abandons(0), SizeIs(1));
  EXPECT_EQ(Abandons(0)[0].round(), 1);
}

TEST_F(GroupClientTest, TheHomesWordCountsForAllServers) {
  Open();
  group_.set_commits_abandoned_steps(true);
  group_.server(2).push_scripts = {
      {.refuse = MakeError(absl::StatusCode::kInternal, ErrorReason::kDevice, "the GPU is lost")}};
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(10));
  EXPECT_EQ(version.number, 1);
  EXPECT_EQ(run_->latest()->number, 1);
}

TEST_F(GroupClientTest, AStepThatIsBeingPublishedIsNotTakenForAbandoned) {
  Open();
  group_.set_commits_abandoned_steps(true);
  group_.server(2).push_scripts = {
      {.refuse = MakeError(absl::StatusCode::kInternal, ErrorReason::kDevice, "the GPU is lost")}};
  // The first call at the home was GetModel, the second is the one that abandons the step.
  ASSERT_EQ(group_.server(0).unary_count(), 1);
  group_.server(0).unary_errors = {
      absl::OkStatus(), MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                                  "committed as version 1", absl::Milliseconds(1))};
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(10));
  EXPECT_EQ(version.number, 1);
}

TEST_F(GroupClientTest, AnAbandonedPushEndsOnAllServers) {
  Open();
  group_.server(1).push_scripts = {{.hold_chunks = true}};
  const auto push = Start(10);
  ASSERT_TRUE(group_.server(1).AwaitPushes(1));
  push->Abandon();
  EXPECT_THAT(push->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
  EXPECT_THAT(Abandons(0), SizeIs(1));
  group_.server(1).Release();
  EMA_ASSERT_OK_AND_ASSIGN(const Version next, Push(20));
  EXPECT_EQ(next.number, 1);
}

TEST_F(GroupClientTest, ATrainerDoesNotWaitForAServerThatIsAway) {
  Open();
  group_.server(1).Stop();
  const auto push = Start(10);
  // True only when the push has timed out.
  EXPECT_FALSE(push->WaitReleased(absl::InfiniteDuration()));
  EXPECT_THAT(push->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
}

absl::Status Fenced() {
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced, "the incarnation has ended");
}

TEST_F(GroupClientTest, ATrainerDoesNotWaitForAServerThatIsAwayWhenThePushIsRepeated) {
  Open({.rejoins = true});
  group_.server(1).push_scripts = {{.refuse = Fenced()}, {.hold_reply = true}};
  const auto push = Start(10);
  ASSERT_TRUE(group_.server(1).AwaitPushes(2));
  group_.server(1).Stop();
  // True only when the push has timed out.
  EXPECT_FALSE(push->WaitDone(absl::InfiniteDuration()));
  push->Abandon();
}

// A second one would abort the step that the first one has begun.
TEST_F(GroupClientTest, ConcurrentRejoinsOfARankOpenTheRunOnce) {
  std::atomic<int> poll_count = 0;  // Of the thread that refreshes the plan.
  client_ =
      *Client::Create(group_.address(), {.chunk_bytes = 4096, .is_interrupted = [&poll_count] {
                                           ++poll_count;
                                           return false;
                                         }});
  Open({.rejoins = true});
  FakeServer& home = group_.server(0);
  std::atomic<bool> is_fenced = false;
  std::atomic<int> polls_when_fenced = INT_MAX;
  home.check_open_run = [&](const v1::OpenRunRequest&) {
    if (!is_fenced) return absl::OkStatus();
    polls_when_fenced = poll_count.load();
    return Fenced();
  };
  std::atomic<int> describe_count = 0;
  home.edit_model = [&, describe = home.edit_model](v1::Model& model) {
    describe(model);
    if (++describe_count > 1) return;
    is_fenced = true;
    // The push rejoins. It continues when the other call rejoins, too, or waits.
    while (describe_count == 1 && poll_count - 5 < polls_when_fenced) std::this_thread::yield();
    is_fenced = false;
  };
  group_.server(1).push_scripts = {{.refuse = Fenced()}};
  const auto push = Start(10);
  while (!is_fenced) std::this_thread::yield();
  EXPECT_THAT(run_->RefreshPlan(kPatience), IsOk());
  EXPECT_THAT(push->Wait(), IsOk());
  // The first call, the refreshed plan, and the rejoined run.
  EXPECT_EQ(home.open_run_count(), 3);
}

TEST_F(GroupClientTest, DifferentRecordsOfOneStepAreAnError) {
  Open();
  group_.set_diverging_partition(1);
  EXPECT_THAT(Push(10), StatusIs(absl::StatusCode::kInternal, HasSubstr("1000")));
}

TEST_F(GroupClientTest, MissingRangesAreThoseOfTheWholeLayout) {
  Open();
  group_.server(1).push_scripts = {{.hold_chunks = true}};
  const auto push = Start(10);
  ASSERT_TRUE(group_.server(1).AwaitPushes(1));
  ASSERT_TRUE(group_.server(0).AwaitPushes(1));
  ASSERT_TRUE(group_.server(2).AwaitPushes(1));
  // The others have everything soon.
  std::vector<PushProgress::Range> missing;
  do {
    EMA_ASSERT_OK_AND_ASSIGN(const PushProgress progress,
                             run_->QueryPush(10, /*abandon_if_unfinished=*/false));
    EXPECT_EQ(progress.state, PushProgress::State::kOpen);
    missing = progress.missing;
  } while (missing.size() > 1);
  ASSERT_THAT(missing, SizeIs(1));
  EXPECT_EQ(missing[0].offset, 3000 * 4);
  EXPECT_EQ(missing[0].length_bytes, 3000 * 4);
  group_.server(1).Release();
  EXPECT_THAT(push->Wait(), IsOk());
}

class GroupPullTest : public GroupClientTest {
 protected:
  absl::StatusOr<PullInfo> Pull(const Client::PullOptions& options = {}) {
    return client_->Pull(
        "m", "ema", options,
        [this](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
          ++target_count_;
          pulled_.assign(info.total_bytes, '?');
          return std::as_writable_bytes(std::span(pulled_.data(), pulled_.size()));
        },
        kPatience, [this](int64_t position) { progress_ = position; });
  }

  std::string pulled_;
  int target_count_ = 0;
  int64_t progress_ = 0;
};

TEST_F(GroupPullTest, PutsThePartitionsTogether) {
  EMA_ASSERT_OK_AND_ASSIGN(const PullInfo info, Pull());
  // The servers have 100, 110 and 120 bytes; each begins at a multiple of 64.
  EXPECT_EQ(info.total_bytes, 256 + 120);
  EXPECT_EQ(pulled_, std::string(100, 'a') + std::string(28, '\0') + std::string(110, 'b') +
                         std::string(18, '\0') + std::string(120, 'c'));
  ASSERT_THAT(info.tensors, SizeIs(3));
  EXPECT_EQ(info.tensors[0].spec.name, "t0");
  EXPECT_EQ(info.tensors[1].spec.name, "t2");
  EXPECT_EQ(info.tensors[1].offset, 128);
  EXPECT_EQ(info.tensors[2].offset, 256);
  EXPECT_EQ(info.received_bytes, 330);
  EXPECT_EQ(progress_, 330);
  EXPECT_EQ(target_count_, 1);
  EXPECT_EQ(info.version.number, 42);
  // The first call, which does not name the incarnation, is answered with NOT_HOME.
  ASSERT_THAT(group_.server(1).pulls(), SizeIs(1));
  EXPECT_EQ(group_.server(1).pulls()[0].version(), 42);
  EXPECT_EQ(group_.server(1).pulls()[0].incarnation(), FakeGroup::kIncarnation);
  EXPECT_EQ(group_.server(0).pulls().back().version(), 0);
  const size_t calls = group_.server(0).pulls().size();
  // Then the partitions are known.
  ASSERT_THAT(Pull(), IsOk());
  EXPECT_THAT(group_.server(0).pulls(), SizeIs(calls + 1));
}

TEST_F(GroupPullTest, ASelectionGoesToItsServersOnly) {
  ASSERT_THAT(Pull({.selection = {.tensors = {"t2"}}}), IsOk());
  EXPECT_EQ(pulled_, std::string(110, 'b'));
  EXPECT_THAT(group_.server(2).pulls(), IsEmpty());
  ASSERT_THAT(Pull({.selection = {.tensors = {"t2", "t4"}}}), IsOk());
  ASSERT_THAT(group_.server(2).pulls(), SizeIs(1));
  EXPECT_THAT(group_.server(2).pulls()[0].selection().tensors(), ElementsAre("t4"));
  EXPECT_THAT(group_.server(1).pulls().back().selection().tensors(), ElementsAre("t2"));
  EXPECT_THAT(Pull({.selection = {.tensors = {"t9"}}}), ReasonIs(ErrorReason::kBadRequest));
}

TEST_F(GroupPullTest, WaitsForAServerThatPublishesLater) {
  group_.set_not_yet_count(3);
  ASSERT_THAT(Pull(), IsOk());
  EXPECT_THAT(group_.server(1).pulls(), SizeIs(4));
}

TEST_F(GroupPullTest, ContinuesAPartThatBreaks) {
  group_.server(1).pull_chunk_bytes = 10;
  group_.server(1).pull_scripts = {{.break_after_chunks = 4}};
  ASSERT_THAT(Pull(), IsOk());
  EXPECT_EQ(pulled_.substr(128, 110), std::string(110, 'b'));
  ASSERT_THAT(group_.server(1).pulls(), SizeIs(2));
  EXPECT_EQ(group_.server(1).pulls()[1].offset(), 40);
}

TEST_F(GroupPullTest, BeginsAgainIfAServerHasFreedTheVersion) {
  group_.server(2).pull_scripts = {
      {.refuse = MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept, "freed")}};
  ASSERT_THAT(Pull(), IsOk());
  EXPECT_THAT(group_.server(2).pulls(), SizeIs(2));
  // Not if a certain version is wanted.
  group_.server(2).pull_scripts.resize(3, group_.server(2).pull_scripts[0]);
  EXPECT_THAT(Pull({.version = 42}), ReasonIs(ErrorReason::kVersionNotKept));
}

TEST_F(GroupPullTest, DoesNotMixVersions) {
  group_.set_diverging_partition(2);
  EXPECT_THAT(Pull(), StatusIs(absl::StatusCode::kInternal, HasSubstr("of step 9")));
  EXPECT_EQ(target_count_, 0);
}

TEST_F(GroupPullTest, AnErrorOfTheTargetEndsThePull) {
  const absl::StatusOr<PullInfo> info = client_->Pull(
      "m", "ema", {},
      [](const PullInfo&) -> absl::StatusOr<std::span<std::byte>> {
        return absl::ResourceExhaustedError("no room");
      },
      kPatience);
  EXPECT_THAT(info, StatusIs(absl::StatusCode::kResourceExhausted, "no room"));
}

TEST(GroupWatchTest, GoesToTheHome) {
  FakeServer member(TestManifest());
  FakeServer home(TestManifest());
  absl::Status not_home =
      MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotHome, "the home is there");
  SetGroupHint(not_home, {.home = home.address()});
  member.watch_scripts = {{.end = not_home}};
  v1::VersionRecord record;
  record.set_version(3);
  record.set_incarnation(1);
  home.watch_scripts = {{.versions = {record}, .hold = true}};
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(member.address()));
  EMA_ASSERT_OK_AND_ASSIGN(const auto watch, client->Watch("m", VersionId{2, 1}, kPatience));
  EMA_ASSERT_OK_AND_ASSIGN(const VersionWatch::Item item, watch->Next());
  EXPECT_EQ(item.version.number, 3);
  home.Release();
}

TEST(GroupPushTest, APushReachesMoreServersThanItSendsToAtOnce) {
  constexpr size_t kServers = 10;
  std::vector<TensorSpec> tensors;
  for (size_t i = 0; i < kServers; ++i) {
    tensors.push_back({.name = absl::StrCat("t", i), .shape = {1000}});
  }
  FakeGroup group(*Manifest::Create(std::move(tensors)), std::vector<int64_t>(kServers, 1));
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(group.address()));
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, client->OpenRun("m", {.launch_id = "life"}));
  std::vector<std::string> weights;
  std::vector<std::span<const std::byte>> shards;
  for (size_t i = 0; i < kServers; ++i) weights.emplace_back(4000, static_cast<char>(i));
  for (const std::string& tensor : weights) shards.push_back(std::as_bytes(std::span(tensor)));
  EXPECT_THAT(run->Push(1, TrainingTime::AtBatch(1), shards, kPatience), IsOk());
  for (size_t i = 0; i < kServers; ++i) EXPECT_EQ(group.server(i).StepBytes(1, 0), weights[i]);
}

}  // namespace
}  // namespace ema
