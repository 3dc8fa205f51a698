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
  Version record;
  bool may_omit_frozen = false;
};
struct Dropped {
  int64_t run_epoch = 0;
  int64_t step = 0;
  absl::Status why;
};

class RecordingGate final : public CommitGate {
 public:
  void OnPrepared(const Version& record, bool may_omit_frozen) override {
    prepared.push_back({record, may_omit_frozen});
  }
  void OnDropped(int64_t run_epoch, int64_t step, const absl::Status& why) override {
    dropped.push_back({run_epoch, step, why});
  }

  std::vector<Prepared> prepared;
  std::vector<Dropped> dropped;
};

class CommitGateTest : public testing::Test {
 protected:
  void SetUp() override {
    ModelStore::Options options = SmallBlocks();
    options.model.gate = &gate_;
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
  void Publish() { model_->PublishPrepared({.commit_time = kCommitTime}); }

  RecordingGate gate_;  // Outlives the store.
  std::optional<ModelStore> store_;
  std::shared_ptr<Model> model_;
  std::vector<TestRank> ranks_;
  std::shared_ptr<PushOutcome> outcome_;
  std::unique_ptr<RankPush> push_;
};

TEST_F(CommitGateTest, PublishesAPreparedStepAsDecided) {
  Prepare(1, 3);
  ASSERT_THAT(gate_.prepared, SizeIs(1));
  EXPECT_EQ(gate_.prepared[0].record.step, 1);
  EXPECT_EQ(gate_.prepared[0].record.number, 1);
  EXPECT_EQ(gate_.prepared[0].record.run_epoch, ranks_[0].run_epoch());
  EXPECT_EQ(NewestStep(), 0);
  EXPECT_EQ(outcome_->calls, 0);

  model_->PublishPrepared(
      {.commit_time = kCommitTime, .skipped_tensor_count = 2, .skipped_tensors = {"x", "y"}});
  EXPECT_EQ(outcome_->calls, 1);
  ASSERT_THAT(outcome_->result, IsOk());
  EXPECT_EQ(outcome_->result->record.commit_time, kCommitTime);
  EXPECT_EQ(outcome_->result->record.skipped_tensor_count, 2);
  EXPECT_THAT(outcome_->result->record.skipped_tensors, ElementsAre("x", "y"));
  EXPECT_EQ(model_->history().latest()->id(), outcome_->result->record.id());
  EMA_ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, ReadAll(*model_, "raw"));
  EXPECT_EQ(bytes, Weights(3));
  EXPECT_THAT(gate_.dropped, IsEmpty());
}

TEST_F(CommitGateTest, FreesADroppedStepBeforeItsRanksAreTold) {
  Prepare(1, 3);
  Publish();
  const int64_t block_bytes = model_->device().memory_use().block_bytes;
  Prepare(2, 4);
  model_->DropOpenStep(absl::AbortedError("the other partition refuses"));
  EXPECT_THAT(outcome_->result,
              StatusIs(absl::StatusCode::kAborted, HasSubstr("the other partition refuses")));
  EXPECT_EQ(NewestStep(), 1);
  ASSERT_THAT(gate_.dropped, SizeIs(1));
  EXPECT_EQ(gate_.dropped[0].step, 2);
  push_.reset();
  EXPECT_EQ(model_->device().memory_use().block_bytes, block_bytes);
  // The same step once more.
  Prepare(2, 5);
  Publish();
  EMA_ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, ReadAll(*model_, "raw"));
  EXPECT_EQ(bytes, Weights(5));
}

TEST_F(CommitGateTest, DropsAStepThatIsReceiving) {
  EMA_ASSERT_OK_AND_ASSIGN(push_, ranks_[0].Open(1, outcome_ = std::make_shared<PushOutcome>()));
  model_->DropOpenStep(absl::AbortedError("the round has ended"));
  EXPECT_THAT(outcome_->result, StatusIs(absl::StatusCode::kAborted, "the round has ended"));
  EXPECT_THAT(gate_.dropped, SizeIs(1));
  model_->DropOpenStep(absl::AbortedError("no step is open"));
  EXPECT_THAT(gate_.dropped, SizeIs(1));
}

TEST_F(CommitGateTest, IsToldOfARefusedStep) {
  // There is no value that a skipped tensor could keep.
  const std::vector<std::byte> bytes = Weights(NAN);
  EMA_ASSERT_OK_AND_ASSIGN(push_, ranks_[0].Open(1, std::make_shared<PushOutcome>()));
  const absl::Status added = TestRank::AddChunk(*push_, bytes, 0, kBytes);
  const absl::Status status = added.ok() ? push_->Commit(TestRank::EndOf(bytes, 1)) : added;
  EXPECT_THAT(status, ReasonIs(ErrorReason::kNonFinite));
  EXPECT_THAT(gate_.prepared, IsEmpty());
  ASSERT_THAT(gate_.dropped, SizeIs(1));
  EXPECT_EQ(gate_.dropped[0].run_epoch, ranks_[0].run_epoch());
  EXPECT_THAT(gate_.dropped[0].why, ReasonIs(ErrorReason::kNonFinite));
}

// Each of these ends a step that receives. A prepared one may have been published elsewhere.
TEST_F(CommitGateTest, OnlyTheDecisionEndsAPreparedStep) {
  Prepare(1, 3);
  model_->ExpireSession(SteadyNow() + std::chrono::hours(1), std::chrono::seconds(1));
  EMA_ASSERT_OK_AND_ASSIGN(const Model::PushState state,
                           model_->QueryPush(ranks_[1].run_epoch(), 1, 1,
                                             /*abandon_if_unfinished=*/true, "no memory"));
  EXPECT_EQ(state.state, Model::PushState::State::kOpen);
  TestRank later(model_, "another launch");
  EXPECT_THAT(later.Join(), ReasonIs(ErrorReason::kSessionBusy));
  EXPECT_THAT(ranks_[0].Open(2, std::make_shared<PushOutcome>()),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("step 1 is complete here and waits for the model's other "
                                 "partitions")));
  EXPECT_THAT(model_->RollBack({7, 1},
                               []() -> absl::StatusOr<std::shared_ptr<Snapshot>> {
                                 return absl::InternalError("it is not loaded");
                               }),
              ReasonIs(ErrorReason::kSessionBusy));
  // A rank that has lost the connection, and sends damaged bytes.
  EMA_ASSERT_OK_AND_ASSIGN(const auto again, ranks_[0].Open(1, std::make_shared<PushOutcome>()));
  const std::vector<std::byte> other = Weights(4);
  EXPECT_FALSE(TestRank::AddChunk(*again, other, 0, kBytes).ok());
  model_->Drain(absl::UnavailableError("the server stops"), SteadyNow());

  EXPECT_THAT(gate_.dropped, IsEmpty());
  Publish();
  EXPECT_EQ(NewestStep(), 1);
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
