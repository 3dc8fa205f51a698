// SPDX-License-Identifier: Apache-2.0
//
// A model that is one partition of a larger one: its complete steps wait for the gate's decision.
#include "server/core/commit_gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/core/test_model.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kBytes = 4000;
const absl::Time kCommitTime = absl::FromUnixSeconds(1'700'000'000);

struct Prepared {
  int64_t round = 0;
  Version record;
};
struct Dropped {
  int64_t round = 0;
  absl::Status why;
};

class RecordingGate final : public CommitGate {
 public:
  bool is_home() const override { return true; }
  int64_t round() const override { return present_round; }
  int64_t tracks_revision() const override { return tracks_in_force; }
  absl::Status CheckLaunch(const Launch&) override { return check_launch; }
  void OnRunOpened(int64_t run_epoch, std::string_view) override { opened_run = run_epoch; }
  absl::Status CheckPush(const PushStart&) override { return check_push; }
  absl::Status AbandonRound(int64_t round, int64_t /*step*/, const absl::Status& why) override {
    abandoned.push_back({round, why});
    return absl::OkStatus();
  }
  void OnPrepared(int64_t round, const Version& record) override {
    prepared.push_back({round, record});
  }
  void OnDropped(int64_t round, const absl::Status& why) override {
    dropped.push_back({round, why});
  }

  int64_t present_round = 1;
  int64_t tracks_in_force = 0;
  absl::Status check_launch;
  absl::Status check_push;
  int64_t opened_run = 0;
  std::vector<Prepared> prepared;
  std::vector<Dropped> abandoned;
  std::vector<Dropped> dropped;
};

class CommitGateTest : public testing::Test {
 protected:
  void SetUp() override {
    ModelStore::Options options = SmallBlocks();
    options.model.gate = gate_;
    store_.emplace(TestDevice(), options);
    const auto created =
        store_->Create({.name = "m",
                        .manifest = MakeManifest({{"a", Dtype::kFloat32, {kBytes / 4}}}),
                        .tracks = {{.name = "raw", .schedule = MakeSchedule("copy")}},
                        .non_finite = NonFinitePolicy::kSkipTensor});
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
    ranks_.emplace_back(model_, "launch", 0, 2);
    // It has nothing of this partition, and pushes nothing.
    ranks_.emplace_back(model_, "launch", 1, 2, std::vector<Shard>{}, /*whole=*/false);
    for (TestRank& rank : ranks_) ASSERT_THAT(rank.Join(), IsOk());
  }

  static std::vector<std::byte> Weights(float value) {
    return BytesOf(std::vector<float>(kBytes / 4, value));
  }
  // Commits a step by all ranks that push, and keeps the streams open.
  void Prepare(int64_t step, float value) {
    outcome_ = std::make_shared<PushOutcome>();
    const std::vector<std::byte> bytes = Weights(value);
    EMA_ASSERT_OK_AND_ASSIGN(push_, ranks_[0].Open(step, outcome_));
    ASSERT_THAT(TestRank::AddChunk(*push_, bytes, 0, kBytes), IsOk());
    ASSERT_THAT(push_->Commit(TestRank::EndOf(bytes, 1)), IsOk());
  }
  int64_t NewestStep() const {
    const std::optional<Version> latest = model_->history().latest();
    return latest.has_value() ? latest->step : 0;
  }
  bool Publish(int64_t round = 0) {
    return model_->PublishPrepared(round, {.commit_time = kCommitTime});
  }
  void Drop(const absl::Status& why) { model_->DropOpenStep(/*round=*/0, why); }

  const std::shared_ptr<RecordingGate> gate_ = std::make_shared<RecordingGate>();
  std::optional<ModelStore> store_;
  std::shared_ptr<Model> model_;
  std::vector<TestRank> ranks_;
  std::shared_ptr<PushOutcome> outcome_;
  std::unique_ptr<RankPush> push_;
};

TEST_F(CommitGateTest, PublishesAPreparedStepAsDecided) {
  Prepare(1, 3);
  ASSERT_THAT(gate_->prepared, SizeIs(1));
  EXPECT_EQ(gate_->prepared[0].record.step, 1);
  EXPECT_EQ(gate_->prepared[0].record.number, 1);
  EXPECT_EQ(gate_->prepared[0].record.run_epoch, ranks_[0].run_epoch());
  EXPECT_EQ(NewestStep(), 0);
  EXPECT_EQ(outcome_->calls, 0);

  EXPECT_FALSE(Publish(/*round=*/1)) << "the step is of round 0";
  model_->PublishPrepared(
      0, {.commit_time = kCommitTime, .skipped_tensor_count = 2, .skipped_tensors = {"x", "y"}});
  EXPECT_EQ(outcome_->calls, 1);
  ASSERT_THAT(outcome_->result, IsOk());
  EXPECT_EQ(outcome_->result->record.commit_time, kCommitTime);
  EXPECT_EQ(outcome_->result->record.skipped_tensor_count, 2);
  EXPECT_THAT(outcome_->result->record.skipped_tensors, ElementsAre("x", "y"));
  EXPECT_EQ(model_->history().latest()->id(), outcome_->result->record.id());
  EMA_ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, ReadAll(*model_, "raw"));
  EXPECT_EQ(bytes, Weights(3));
  EXPECT_THAT(gate_->dropped, IsEmpty());
}

TEST_F(CommitGateTest, AVersionThatAnotherPartitionHoldsIsEvictedLast) {
  for (int64_t step = 1; step <= 10; ++step) {
    Prepare(step, 3);
    model_->PublishPrepared(0, {.commit_time = kCommitTime, .home_pinned_versions = {1}});
  }
  EXPECT_THAT(model_->history().PinnedVersions(), IsEmpty());
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef held, model_->history().Pin(1));
  EXPECT_EQ(held->record.step, 1);
  EXPECT_THAT(model_->history().PinnedVersions(), ElementsAre(1));
  EXPECT_THAT(model_->history().Pin(2).status(), ReasonIs(ErrorReason::kVersionNotKept));
}

TEST_F(CommitGateTest, FreesADroppedStepBeforeItsRanksAreTold) {
  Prepare(1, 3);
  Publish();
  const int64_t block_bytes = model_->device().memory_use().block_bytes;
  Prepare(2, 4);
  Drop(absl::AbortedError("the other partition refuses"));
  EXPECT_THAT(outcome_->result,
              StatusIs(absl::StatusCode::kAborted, HasSubstr("the other partition refuses")));
  EXPECT_EQ(NewestStep(), 1);
  ASSERT_THAT(gate_->dropped, SizeIs(1));
  EXPECT_EQ(gate_->dropped[0].round, 0);
  push_.reset();
  EXPECT_EQ(model_->device().memory_use().block_bytes, block_bytes);
  // The same step once more.
  Prepare(2, 5);
  Publish();
  EMA_ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, ReadAll(*model_, "raw"));
  EXPECT_EQ(bytes, Weights(5));
}

TEST_F(CommitGateTest, ARestartedRankEndsTheRound) {
  ASSERT_THAT(ranks_[0].Join(), IsOk());  // Again, by the process that has the run open.
  EXPECT_THAT(gate_->abandoned, IsEmpty());
  TestRank restarted(model_, "launch", 0, 2);
  ASSERT_THAT(restarted.Join(), IsOk());
  ASSERT_THAT(gate_->abandoned, SizeIs(1));
  EXPECT_THAT(gate_->abandoned[0].why,
              StatusIs(absl::StatusCode::kAborted, "rank 0 has restarted"));
}

TEST_F(CommitGateTest, DropsAStepThatIsReceiving) {
  EMA_ASSERT_OK_AND_ASSIGN(push_, ranks_[0].Open(1, outcome_ = std::make_shared<PushOutcome>()));
  Drop(absl::AbortedError("the round has ended"));
  EXPECT_THAT(outcome_->result, StatusIs(absl::StatusCode::kAborted, "the round has ended"));
  EXPECT_THAT(gate_->dropped, SizeIs(1));
  Drop(absl::AbortedError("no step is open"));
  EXPECT_THAT(gate_->dropped, SizeIs(1));
}

TEST_F(CommitGateTest, IsToldOfARefusedStep) {
  // There is no value that a skipped tensor could keep.
  const std::vector<std::byte> bytes = Weights(NAN);
  EMA_ASSERT_OK_AND_ASSIGN(push_, ranks_[0].Open(1, std::make_shared<PushOutcome>()));
  const absl::Status added = TestRank::AddChunk(*push_, bytes, 0, kBytes);
  const absl::Status status = added.ok() ? push_->Commit(TestRank::EndOf(bytes, 1)) : added;
  EXPECT_THAT(status, ReasonIs(ErrorReason::kNonFinite));
  EXPECT_THAT(gate_->prepared, IsEmpty());
  ASSERT_THAT(gate_->dropped, SizeIs(1));
  EXPECT_EQ(gate_->dropped[0].round, 0);
  EXPECT_THAT(gate_->dropped[0].why, ReasonIs(ErrorReason::kNonFinite));
}

// Each of these ends a step that receives. A prepared one may have been published elsewhere.
TEST_F(CommitGateTest, OnlyTheDecisionEndsAPreparedStep) {
  Prepare(1, 3);
  model_->ExpireSession(SteadyNow() + std::chrono::hours(1), std::chrono::seconds(1));
  // The gate decides.
  EMA_ASSERT_OK_AND_ASSIGN(const Model::PushState state,
                           model_->QueryPush(ranks_[1].run_epoch(), 1, 1,
                                             /*abandon_if_unfinished=*/true, "no memory"));
  EXPECT_EQ(state.state, Model::PushState::State::kAbandoned);
  ASSERT_THAT(gate_->abandoned, SizeIs(1));
  EXPECT_THAT(gate_->abandoned[0].why, ReasonIs(ErrorReason::kStepSkipped));
  TestRank later(model_, "another launch");
  EXPECT_THAT(later.Join(), ReasonIs(ErrorReason::kModelBusy));
  ASSERT_THAT(gate_->abandoned, SizeIs(2));
  EXPECT_THAT(gate_->abandoned[1].why, ReasonIs(ErrorReason::kFenced));
  EXPECT_THAT(ranks_[0].Open(2, std::make_shared<PushOutcome>()),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("step 1 is complete here and waits for the model's other "
                                 "partitions")));
  EXPECT_THAT(model_->RollBack({7, 1},
                               []() -> absl::StatusOr<std::shared_ptr<Snapshot>> {
                                 return absl::InternalError("it is not loaded");
                               }),
              ReasonIs(ErrorReason::kModelBusy));
  // A rank that has lost the connection, and sends damaged bytes.
  EMA_ASSERT_OK_AND_ASSIGN(const auto again, ranks_[0].Open(1, std::make_shared<PushOutcome>()));
  const std::vector<std::byte> other = Weights(4);
  EXPECT_FALSE(TestRank::AddChunk(*again, other, 0, kBytes).ok());
  model_->Drain(absl::UnavailableError("the server stops"), SteadyNow());

  EXPECT_THAT(gate_->dropped, IsEmpty());
  Publish();
  EXPECT_EQ(NewestStep(), 1);
}

TEST_F(CommitGateTest, ARoundEndsOnlyForAStepThatIsKnownToBeInIt) {
  const auto abandon = [this](int64_t step, int64_t round) {
    const absl::StatusOr<Model::PushState> state = model_->QueryPush(
        ranks_[1].run_epoch(), step, 1, /*abandon_if_unfinished=*/true, {}, round);
    return state.ok() ? state->state : Model::PushState::State::kCommitted;
  };
  using State = Model::PushState::State;
  // No step is open here, but another one may be open in another partition.
  EXPECT_EQ(abandon(1, /*round=*/0), State::kUnknown);
  EXPECT_THAT(gate_->abandoned, IsEmpty());
  EXPECT_EQ(abandon(1, /*round=*/7), State::kAbandoned);
  ASSERT_THAT(gate_->abandoned, SizeIs(1));
  EXPECT_EQ(gate_->abandoned[0].round, 7);
  EMA_ASSERT_OK_AND_ASSIGN(push_, ranks_[0].Open(2, std::make_shared<PushOutcome>()));
  EXPECT_EQ(abandon(1, /*round=*/0), State::kUnknown);
  EXPECT_EQ(abandon(2, /*round=*/0), State::kAbandoned);
  EXPECT_THAT(gate_->abandoned, SizeIs(2));
  // A call that is late does not end the round of the step after it.
  PushStart next = ranks_[0].Start(3);
  next.round = 8;
  EMA_ASSERT_OK_AND_ASSIGN(push_, model_->OpenPush(next, [](const auto&) {}));
  EXPECT_EQ(abandon(2, /*round=*/8), State::kAbandoned);
  EXPECT_THAT(gate_->abandoned, SizeIs(2));
  EXPECT_EQ(abandon(3, /*round=*/8), State::kAbandoned);
  EXPECT_THAT(gate_->abandoned, SizeIs(3));
  // A run that is not open.
  EXPECT_THAT(
      model_->QueryPush(ranks_[1].run_epoch() + 1, 2, 1, /*abandon_if_unfinished=*/true, {}, 7),
      ReasonIs(ErrorReason::kFenced));
}

TEST_F(CommitGateTest, AStepOfALaterRoundReplacesOneThatReceives) {
  const auto open = [this](int64_t step, int64_t round) {
    PushStart start = ranks_[0].Start(step);
    start.round = round;
    outcome_ = std::make_shared<PushOutcome>();
    return model_->OpenPush(start, [outcome = outcome_](const absl::StatusOr<PushResult>& result) {
      ++outcome->calls;
      outcome->result = result;
    });
  };
  EMA_ASSERT_OK_AND_ASSIGN(const auto first, open(5, 1));
  const std::shared_ptr<PushOutcome> first_outcome = outcome_;
  // The same step, so only the round tells that its bytes are those of another push.
  EMA_ASSERT_OK_AND_ASSIGN(push_, open(5, 2));
  EXPECT_THAT(first_outcome->result, ReasonIs(ErrorReason::kStepAbandoned));
  ASSERT_THAT(gate_->dropped, SizeIs(1));
  EXPECT_EQ(gate_->dropped[0].round, 1);
  const std::vector<std::byte> bytes = Weights(3);
  ASSERT_THAT(TestRank::AddChunk(*push_, bytes, 0, kBytes), IsOk());
  ASSERT_THAT(push_->Commit(TestRank::EndOf(bytes, 1)), IsOk());
  ASSERT_THAT(gate_->prepared, SizeIs(1));
  EXPECT_EQ(gate_->prepared[0].round, 2);
  // A prepared step waits for the decision of its round.
  EXPECT_THAT(open(6, 3), ReasonIs(ErrorReason::kModelBusy));
  model_->DropOpenStep(/*round=*/1, absl::AbortedError("an earlier round"));
  EXPECT_TRUE(Publish(/*round=*/2));
  EXPECT_EQ(NewestStep(), 5);
}

TEST_F(CommitGateTest, ALaterStepInOneRoundEndsTheEarlierOneOnly) {
  EMA_ASSERT_OK_AND_ASSIGN(push_, ranks_[0].Open(1, std::make_shared<PushOutcome>()));
  EXPECT_THAT(ranks_[0].Open(2, std::make_shared<PushOutcome>()),
              ReasonIs(ErrorReason::kModelBusy));
  EXPECT_THAT(gate_->dropped, SizeIs(1));
}

TEST_F(CommitGateTest, TheGateAdmitsLaunchesAndPushes) {
  EXPECT_EQ(gate_->opened_run, ranks_[0].run_epoch());
  gate_->check_push =
      MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleRound, "round 3 has ended");
  EXPECT_THAT(ranks_[0].Open(1, std::make_shared<PushOutcome>()),
              ReasonIs(ErrorReason::kStaleRound));
  gate_->check_launch = MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced, "an old run");
  EXPECT_THAT(ranks_[0].Join(), ReasonIs(ErrorReason::kFenced));
}

TEST_F(CommitGateTest, ARunMayHaveTheEpochThatAnotherPartitionHasAssigned) {
  EMA_ASSERT_OK_AND_ASSIGN(
      RankLayout layout,
      RankLayout::Create(model_->manifest(), {WholeTensor(model_->manifest(), 0)}));
  const int64_t epoch = ranks_[0].run_epoch() + 5;
  const Launch launch{.id = "assigned", .run_epoch = epoch};
  EMA_ASSERT_OK_AND_ASSIGN(const Model::JoinResult joined, model_->JoinRun(launch, 0, 1, layout));
  EXPECT_EQ(joined.run_epoch, epoch);
  EXPECT_THAT(model_->JoinRun(launch, 0, 1, layout), IsOk());
  EXPECT_THAT(model_->JoinRun({.id = "late", .run_epoch = epoch - 1}, 0, 1, layout),
              ReasonIs(ErrorReason::kFenced));
  // The error names the newer incarnation, so that the rank opens the run there.
  gate_->check_launch = MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced, "has ended");
  SetGroupHint(gate_->check_launch, {.incarnation = 9});
  const absl::Status late =
      model_->JoinRun({.id = "late", .run_epoch = epoch - 1}, 0, 1, layout).status();
  EXPECT_EQ(GetGroupHint(late).incarnation, 9) << late;
}

TEST_F(CommitGateTest, TheEndOfTheModelEndsAPreparedStep) {
  Prepare(1, 3);
  model_->Close(absl::NotFoundError("deleted"));
  EXPECT_THAT(outcome_->result, StatusIs(absl::StatusCode::kNotFound, "deleted"));
  Publish();
  EXPECT_EQ(NewestStep(), 0);
}

}  // namespace
}  // namespace ema
