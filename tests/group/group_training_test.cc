// SPDX-License-Identifier: Apache-2.0
//
// The client trains and reads a model on a group of real servers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/shard.h"
#include "ema/step_pusher.h"
#include "tests/group/trained_group.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(GroupTrainingTest, RanksReadersAndWatchersSeeOneModel) {
  TrainedGroup group(3, /*tensor_count=*/6);
  const auto first = group.Open(0, 2);
  const auto second = group.Open(1, 2);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const auto watch, group.client().Watch("m", std::nullopt, kPatience));
  for (int64_t step = 1; step <= 3; ++step) {
    const Weights weights(*second, step);
    EMA_ASSERT_OK_AND_ASSIGN(const auto pushed, second->StartPush(step, TrainingTime::AtBatch(step),
                                                                  weights.shards(), kPatience));
    EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*first, step));
    EMA_ASSERT_OK_AND_ASSIGN(const Version same, pushed->Wait());
    EXPECT_EQ(version.id(), same.id());
    EMA_ASSERT_OK_AND_ASSIGN(const VersionWatch::Item item, watch->Next());
    EXPECT_EQ(item.version.id(), version.id());
  }
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled whole, group.Pull("raw"));
  EXPECT_THAT(whole.tensors, SizeIs(6));
  // Of one partition, and of all.
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled one,
                           group.Pull("raw", {.selection = {.tensors = {"t0"}}}));
  EXPECT_THAT(one.tensors, SizeIs(1));
  EXPECT_EQ(one.tensors.at("t0"), whole.tensors.at("t0"));
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled two,
                           group.Pull("raw", {.selection = {.tensors = {"t0", "t5"}}}));
  EXPECT_THAT(two.tensors, SizeIs(2));
  EXPECT_EQ(two.tensors.at("t5"), whole.tensors.at("t5"));
  // Nothing newer.
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled none,
                           group.Pull("raw", {.if_newer_than = whole.info.version.id()}));
  EXPECT_TRUE(none.info.not_newer);
}

// Two ranks that push together. The frozen tensors are on the first and on the last server.
class FrozenGroup {
 public:
  FrozenGroup() {
    const bool frozen[] = {true, false, false, false, false, true};
    for (int64_t rank = 0; rank < 2; ++rank) runs_.push_back(group_.Open(rank, 2, frozen));
  }
  // Returns the bytes that both ranks have sent: less than 0 if the push failed. `frozen`: the
  // value of all elements of the frozen tensors.
  int64_t Push(int64_t step, float frozen = 0.5f, bool frozen_changed = false) {
    std::vector<Weights> weights;
    std::vector<std::unique_ptr<PendingPush>> pushes;
    for (const auto& run : runs_) {
      std::vector<float>& values = weights.emplace_back(*run, step).values();
      std::fill(values.begin() + run->layout().trained_bytes() / 4, values.end(), frozen);
      auto push = run->StartPush(step, TrainingTime::AtBatch(step), weights.back().shards(),
                                 kPatience, {.frozen_changed = frozen_changed});
      EXPECT_THAT(push, IsOk());
      if (push.ok()) pushes.push_back(*std::move(push));
    }
    int64_t bytes = 0;
    for (const std::unique_ptr<PendingPush>& push : pushes) {
      const absl::StatusOr<Version> version = push->Wait();
      EXPECT_THAT(version, IsOk());
      bytes += push->stats().sent_bytes;
    }
    return bytes;
  }
  int64_t all_bytes() const { return Sum(&RankLayout::total_bytes); }
  int64_t trained_bytes() const { return Sum(&RankLayout::trained_bytes); }
  TrainedGroup& group() { return group_; }

 private:
  int64_t Sum(int64_t (RankLayout::*bytes)() const) const {
    int64_t sum = 0;
    for (const auto& run : runs_) sum += (run->layout().*bytes)();
    return sum;
  }

  TrainedGroup group_{3, /*tensor_count=*/6};
  std::vector<std::unique_ptr<ema::Run>> runs_;
};

TEST(GroupTrainingTest, FrozenTensorsAreOmittedOnceAllServersHaveThem) {
  FrozenGroup ranks;
  ASSERT_LT(ranks.trained_bytes(), ranks.all_bytes());
  EXPECT_EQ(ranks.Push(1), ranks.all_bytes());
  EXPECT_EQ(ranks.Push(2), ranks.trained_bytes());
  EXPECT_EQ(ranks.Push(3), ranks.trained_bytes());
  // A new track has none of them.
  const TrackConfig late{.name = "late", .schedule = *Schedule::Parse("half_life=1ba")};
  ASSERT_THAT(ranks.group().client().UpdateModel("m", {.put = {late}}, kPatience), IsOk());
  EXPECT_EQ(ranks.Push(4), ranks.trained_bytes());
  EXPECT_EQ(ranks.Push(5), ranks.all_bytes());
  EXPECT_EQ(ranks.Push(6), ranks.trained_bytes());
  // Changed ones are pushed, and then always, as averages of them differ.
  EXPECT_EQ(ranks.Push(7, 0.75f, /*frozen_changed=*/true), ranks.all_bytes());
  EXPECT_EQ(ranks.Push(8, 0.75f), ranks.all_bytes());
  for (const char* const tensor : {"t0", "t5"}) {
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled raw,
                             ranks.group().Pull("raw", {.selection = {.tensors = {tensor}}}));
    const std::string& bytes = raw.tensors.at(tensor);
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    EXPECT_THAT(values, testing::Each(0.75f)) << tensor;
  }
}

TEST(GroupTrainingTest, ANanOnOneServerDropsTheStepOnAll) {
  TrainedGroup group(3, /*tensor_count=*/6);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  Weights bad(*run, 2);
  bad.values().back() = std::numeric_limits<float>::quiet_NaN();
  const absl::Status status =
      run->Push(2, TrainingTime::AtBatch(2), bad.shards(), kPatience).status();
  EXPECT_THAT(status, ReasonIs(ErrorReason::kNonFinite));
  EXPECT_THAT(std::string(status.message()), HasSubstr("t5"));
  EMA_ASSERT_OK_AND_ASSIGN(const Version next, Push(*run, 3));
  EXPECT_EQ(next.number, 2);
  EXPECT_EQ(next.step, 3);
}

constexpr int64_t kRanks = 3;

// The runs of kRanks ranks, each of which has a third of every tensor: every rank pushes to every
// server.
absl::StatusOr<std::vector<std::unique_ptr<ema::Run>>> OpenThirds(TrainedGroup& group) {
  EMA_ASSIGN_OR_RETURN(const ModelInfo info, group.client().GetModel("m"));
  std::vector<std::unique_ptr<ema::Run>> runs;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    std::vector<Shard> shards;
    for (int64_t i = 0; i < info.manifest.tensor_count(); ++i) {
      const int64_t size = info.manifest.tensor(i).shape[0];
      const int64_t begin = rank * size / kRanks;
      shards.push_back(
          {.tensor_index = i, .offsets = {begin}, .extents = {(rank + 1) * size / kRanks - begin}});
    }
    EMA_ASSIGN_OR_RETURN(
        auto run,
        group.client().OpenRun(
            "m", {.launch_id = "life", .rank = rank, .world_size = kRanks, .shards = shards},
            kPatience));
    runs.push_back(std::move(run));
  }
  return runs;
}

TEST(GroupTrainingTest, AStepThatFailsBeforeARankHasBegunItFailsInThatRankToo) {
  TrainedGroup group(3, /*tensor_count=*/6);
  EMA_ASSERT_OK_AND_ASSIGN(const auto runs, OpenThirds(group));
  Weights bad(*runs[1], 1);
  bad.values().front() = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(runs[1]->Push(1, TrainingTime::AtBatch(1), bad.shards(), kPatience),
              ReasonIs(ErrorReason::kNonFinite));
  // These ranks do not know yet that all ranks are there; when they ask, the round is over.
  for (const int64_t rank : {0, 2}) {
    const Weights weights(*runs[rank], 1);
    EXPECT_THAT(runs[rank]->Push(1, TrainingTime::AtBatch(1), weights.shards(), kPatience),
                ReasonIs(ErrorReason::kNonFinite));
  }
}

// The ranks that have not pushed the step before still learn that it has failed. That does not end
// the second attempt.
TEST(GroupTrainingTest, AFailedStepThatARankPushesAgainIsCommittedWhenTheOthersDoSoToo) {
  TrainedGroup group(3, /*tensor_count=*/6);
  EMA_ASSERT_OK_AND_ASSIGN(const auto runs, OpenThirds(group));
  Weights bad(*runs[1], 1);
  bad.values().front() = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(runs[1]->Push(1, TrainingTime::AtBatch(1), bad.shards(), kPatience),
              ReasonIs(ErrorReason::kNonFinite));
  std::vector<Weights> good;
  for (const auto& run : runs) good.emplace_back(*run, 1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto again, runs[1]->StartPush(1, TrainingTime::AtBatch(1),
                                                                good[1].shards(), kPatience));
  for (const int64_t rank : {0, 2}) {
    EXPECT_THAT(runs[rank]->Push(1, TrainingTime::AtBatch(1), good[rank].shards(), kPatience),
                ReasonIs(ErrorReason::kNonFinite));
  }
  EMA_ASSERT_OK_AND_ASSIGN(const auto first, runs[0]->StartPush(1, TrainingTime::AtBatch(1),
                                                                good[0].shards(), kPatience));
  EXPECT_THAT(runs[2]->Push(1, TrainingTime::AtBatch(1), good[2].shards(), kPatience), IsOk());
  EXPECT_THAT(first->Wait(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, again->Wait());
  EXPECT_EQ(version.number, 1);
  EXPECT_EQ(version.step, 1);
}

TEST(GroupTrainingTest, AStepAfterAFailedOneIsCommittedForAllRanks) {
  TrainedGroup group(3, /*tensor_count=*/6);
  EMA_ASSERT_OK_AND_ASSIGN(const auto runs, OpenThirds(group));
  for (int64_t step = 1; step <= 20; ++step) {
    SCOPED_TRACE(step);
    const bool is_bad = step % 2 == 1;
    std::vector<Weights> weights;
    std::vector<std::unique_ptr<PendingPush>> pushes;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      weights.emplace_back(*runs[rank], step);
      if (is_bad && rank == step % kRanks) {
        weights.back().values().front() = std::numeric_limits<float>::quiet_NaN();
      }
    }
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      EMA_ASSERT_OK_AND_ASSIGN(auto push, runs[rank]->StartPush(step, TrainingTime::AtBatch(step),
                                                                weights[rank].shards(), kPatience));
      pushes.push_back(std::move(push));
    }
    for (const std::unique_ptr<PendingPush>& push : pushes) {
      const absl::StatusOr<Version> version = push->Wait();
      if (is_bad) {
        // Not SESSION_EXPIRED: no rank waits for others that have failed.
        EXPECT_THAT(version, testing::AnyOf(ReasonIs(ErrorReason::kNonFinite),
                                            ReasonIs(ErrorReason::kStepAbandoned)));
      } else {
        ASSERT_THAT(version, IsOk());
        EXPECT_EQ(version->number, step / 2);
      }
    }
  }
}

// Only one rank lost the step before, for example because its weights were written.
TEST(GroupTrainingTest, AStepThatARankBeginsBeforeTheOthersEndTheLastOneIsCommitted) {
  TrainedGroup group(3, /*tensor_count=*/6);
  const auto first = group.Open(0, 2);
  const auto second = group.Open(1, 2);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  const Weights weights(*first, 1);
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto lost, first->StartPush(1, TrainingTime::AtBatch(1), weights.shards(), kPatience));
  const auto has_received = [](const std::unique_ptr<GroupServer>& server) {
    const auto session = (*server->store().Get("m"))->Describe().session;
    return session != nullptr && session->HasRankCommitted(0);
  };
  // It has no tensors of the third server.
  group.Await([&] { return std::ranges::count_if(group.servers_, has_received) == 2; });
  const Weights next(*second, 2);
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto early, second->StartPush(2, TrainingTime::AtBatch(2), next.shards(), kPatience));
  EXPECT_THAT(lost->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*first, 2));
  EMA_ASSERT_OK_AND_ASSIGN(const Version same, early->Wait());
  EXPECT_EQ(version.id(), same.id());
}

TEST(GroupTrainingTest, AStepThatTheHomeRejectsIsDroppedOnAllServers) {
  TrainedGroup group(3, /*tensor_count=*/6);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  // Only the home knows that, so the other servers accept the step.
  ASSERT_THAT(run->SkipStep(2, "no memory", kPatience), IsOk());
  const Weights skipped(*run, 2);
  EXPECT_THAT(run->Push(2, TrainingTime::AtBatch(2), skipped.shards(), kPatience),
              ReasonIs(ErrorReason::kStepSkipped));
  EMA_ASSERT_OK_AND_ASSIGN(const Version next, Push(*run, 3));
  EXPECT_EQ(next.number, 2);
  EXPECT_EQ(next.step, 3);
}

TEST(GroupTrainingTest, AStepThatAnotherRankPushesElsewhereCanBeSkipped) {
  TrainedGroup group(2, /*tensor_count=*/4);
  const v1::Model described = group.Describe("m");
  const int64_t at_home = described.partitions(0).tensor_count();
  std::vector<std::vector<Shard>> shards(2);  // Of rank 0 at the home; of rank 1 elsewhere.
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo info, group.client().GetModel("m"));
  for (int64_t i = 0; i < 4; ++i) {
    shards[i < at_home ? 0 : 1].push_back(WholeTensor(info.manifest, i));
  }
  std::vector<std::unique_ptr<ema::Run>> runs;
  for (int64_t rank = 0; rank < 2; ++rank) {
    EMA_ASSERT_OK_AND_ASSIGN(
        auto run,
        group.client().OpenRun(
            "m", {.launch_id = "life", .rank = rank, .world_size = 2, .shards = shards[rank]},
            kPatience));
    runs.push_back(std::move(run));
  }
  const Weights weights(*runs[1], 1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto pushed, runs[1]->StartPush(1, TrainingTime::AtBatch(1),
                                                                 weights.shards(), kPatience));
  EXPECT_TRUE(pushed->WaitReleased(kPatience));
  const auto is_open = [&] {
    const auto progress = runs[1]->QueryPush(1, /*abandon_if_unfinished=*/false, kPatience);
    return progress.ok() && progress->state == PushProgress::State::kOpen;
  };
  while (!is_open()) std::this_thread::yield();
  ASSERT_THAT(runs[0]->SkipStep(1, "no memory", kPatience), IsOk());
  EXPECT_THAT(pushed->Wait(), ReasonIs(ErrorReason::kStepSkipped));
  // Both know the next round.
  const Weights next(*runs[1], 2);
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto second, runs[1]->StartPush(2, TrainingTime::AtBatch(2), next.shards(), kPatience));
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*runs[0], 2));
  EXPECT_EQ(version.number, 1);
  EXPECT_THAT(second->Wait(), IsOk());
}

TEST(GroupTrainingTest, ACommittedStepIsNotReplacedByOneWithOtherBytes) {
  TrainedGroup group(3, /*tensor_count=*/6);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const Version first, Push(*run, 1));
  ASSERT_THAT(Push(*run, 2), IsOk());
  for (const int64_t step : {1, 2}) {
    const Weights other(*run, step + 10);
    EXPECT_THAT(run->Push(step, TrainingTime::AtBatch(2), other.shards(), kPatience),
                ReasonIs(ErrorReason::kStaleStep));
  }
  // The same bytes are that step.
  EMA_ASSERT_OK_AND_ASSIGN(const Version same, Push(*run, 2));
  EXPECT_EQ(same.number, first.number + 1);
}

TEST(GroupTrainingTest, AnAbandonedStepIsDroppedOnAllServers) {
  TrainedGroup group(3, /*tensor_count=*/6);
  const auto first = group.Open(0, 2);
  const auto second = group.Open(1, 2);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  {
    const Weights weights(*first, 1);
    EMA_ASSERT_OK_AND_ASSIGN(const auto pushed, first->StartPush(1, TrainingTime::AtBatch(1),
                                                                 weights.shards(), kPatience));
    EXPECT_TRUE(pushed->WaitReleased(kPatience));
    pushed->Abandon();
    EXPECT_THAT(pushed->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
  }
  // It learns that the round has ended.
  ASSERT_THAT(second->QueryPush(1, /*abandon_if_unfinished=*/false, kPatience), IsOk());
  const Weights weights(*second, 2);
  EMA_ASSERT_OK_AND_ASSIGN(const auto pushed, second->StartPush(2, TrainingTime::AtBatch(2),
                                                                weights.shards(), kPatience));
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(*first, 2));
  EXPECT_EQ(version.number, 1);
  EXPECT_EQ(version.step, 2);
  EXPECT_THAT(pushed->Wait(), IsOk());
}

TEST(GroupTrainingTest, ATrainersHookNeedsNoChange) {
  TrainedGroup group(3, /*tensor_count=*/6);
  const Manifest manifest = *Manifest::Create(
      {{.name = "a", .shape = {100}}, {.name = "b", .shape = {200}}, {.name = "c", .shape = {50}}});
  StepPusher::Options options;
  options.tracks = {{.name = "raw", .schedule = *Schedule::Parse("copy")}};
  options.launch_id = "life";
  EMA_ASSERT_OK_AND_ASSIGN(const auto pusher,
                           StepPusher::Create(group.client(), "hooked", manifest, {}, options));
  std::vector<std::vector<float>> weights = {std::vector<float>(100), std::vector<float>(200),
                                             std::vector<float>(50)};
  for (int step = 1; step <= 3; ++step) {
    pusher->WaitReleased();
    for (std::vector<float>& tensor : weights) {
      std::fill(tensor.begin(), tensor.end(), static_cast<float>(step));
    }
    pusher->AfterStep([&](const StepPusher::Piece& piece) {
      const std::span<const float> tensor(weights[piece.tensor_index]);
      return StepPusher::Weights{std::as_bytes(tensor.subspan(piece.first, piece.count)), nullptr};
    });
    EXPECT_THAT(pusher->WaitPushed(), IsOk());
  }
  EXPECT_EQ(pusher->stats().pushes, 3);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled pulled, group.Pull("raw", {}, "hooked"));
  EXPECT_EQ(pulled.info.version.step, 3);
  const auto bytes = [](const std::vector<float>& tensor) {
    return std::string(reinterpret_cast<const char*>(tensor.data()), tensor.size() * sizeof(float));
  };
  EXPECT_EQ(pulled.tensors.at("b"), bytes(weights[1]));
  EXPECT_EQ(pulled.tensors.at("c"), bytes(weights[2]));
}

TEST(GroupTrainingTest, AServerWhoseTensorsHaveNoElementsCommitsToo) {
  TrainedGroup group(2, /*tensor_count=*/4);
  const Manifest manifest =
      *Manifest::Create({{.name = "a", .shape = {100}}, {.name = "empty", .shape = {0, 3}}});
  StepPusher::Options options;
  options.tracks = {{.name = "raw", .schedule = *Schedule::Parse("copy")}};
  options.launch_id = "life";
  EMA_ASSERT_OK_AND_ASSIGN(const auto pusher,
                           StepPusher::Create(group.client(), "hooked", manifest, {}, options));
  EXPECT_EQ(group.Describe("hooked").partitions_size(), 2);
  const std::vector<float> weights(100, 1.5f);
  for (int step = 1; step <= 2; ++step) {
    pusher->AfterStep([&](const StepPusher::Piece& piece) {
      const std::span<const float> tensor(weights);
      return StepPusher::Weights{std::as_bytes(tensor.subspan(piece.first, piece.count)), nullptr};
    });
    EXPECT_THAT(pusher->WaitPushed(), IsOk());
  }
  EXPECT_EQ(pusher->stats().pushes, 2);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled pulled, group.Pull("raw", {}, "hooked"));
  EXPECT_EQ(pulled.info.version.step, 2);
  EXPECT_THAT(pulled.tensors, SizeIs(2));
}

}  // namespace
}  // namespace ema::group
