// SPDX-License-Identifier: Apache-2.0
#include "server/core/model.h"

#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "absl/synchronization/notification.h"
#include "tests/core/test_model.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kElements = 3000;  // Three blocks of 4 KiB.

class ModelTest : public testing::Test {
 protected:
  ModelTest() : store_(TestDevice(), SmallBlocks()) {
    ModelConfig config;
    config.name = "m";
    config.manifest =
        MakeManifest({{"a", Dtype::kFloat32, {10, 100}}, {"b", Dtype::kFloat32, {2000}}});
    config.tracks = {{"fast", MakeSchedule("10ba")},
                     {"slow", MakeSchedule("100ba", "10ba")},
                     {"raw", MakeSchedule("copy")}};
    model_ = store_.Create(std::move(config))->model;
  }

  static std::vector<float> Values(int64_t seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    std::normal_distribution<float> normal;
    std::vector<float> values(kElements);
    for (float& value : values) value = normal(random);
    return values;
  }

  std::vector<float> Read(const std::string& track, int64_t version = 0) {
    return FloatsOf(*ReadAll(*model_, track, version));
  }

  static float Weight(double elapsed, double half_life) {
    return static_cast<float>(-std::expm1(-std::log(2.0) * elapsed / half_life));
  }

  ModelStore store_;
  std::shared_ptr<Model> model_;
};

TEST_F(ModelTest, FirstPushInitializesEveryTrack) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  const std::vector<float> values = Values(1);
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult result, rank.Push(1, BytesOf(values)));
  EXPECT_EQ(result.record.number, 1);
  EXPECT_EQ(result.record.incarnation, 7);
  EXPECT_EQ(result.record.step, 1);
  EXPECT_FALSE(result.is_duplicate);
  for (const TrackVersion& track : result.record.tracks) {
    EXPECT_TRUE(track.updated);
    EXPECT_EQ(track.update_weight, 1.0f);
    EXPECT_EQ(track.update_count, 1);
  }
  for (const char* track : {"fast", "slow", "raw"}) EXPECT_EQ(Read(track), values) << track;
}

TEST_F(ModelTest, AveragesAgreeBitForBitWithTheDefinition) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  std::vector<float> fast;
  std::vector<float> slow;
  int64_t fast_step = 0;
  int64_t slow_step = 0;
  for (const int64_t step : {1, 2, 5, 9, 10, 11, 19, 20, 45}) {
    const std::vector<float> values = Values(step);
    EMA_ASSERT_OK_AND_ASSIGN(const PushResult result, rank.Push(step, BytesOf(values), 1000));
    const bool slow_due = slow.empty() || step / 10 > slow_step / 10;
    if (fast.empty()) {
      fast = slow = values;
    } else {
      const float fast_weight = Weight(static_cast<double>(step - fast_step), 10);
      const float slow_weight = Weight(static_cast<double>(step - slow_step), 100);
      for (int64_t i = 0; i < kElements; ++i) {
        fast[i] = std::fma(fast_weight, values[i] - fast[i], fast[i]);
        if (slow_due) slow[i] = std::fma(slow_weight, values[i] - slow[i], slow[i]);
      }
      EXPECT_EQ(result.record.tracks[0].update_weight, fast_weight);
    }
    fast_step = step;
    if (slow_due) slow_step = step;
    EXPECT_EQ(result.record.tracks[1].updated, slow_due) << step;
    EXPECT_EQ(Read("fast"), fast) << step;
    EXPECT_EQ(Read("slow"), slow) << step;
    EXPECT_EQ(Read("raw"), values) << step;
  }
}

TEST_F(ModelTest, ATrackThatIsNotDueSharesItsBlocks) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(1, BytesOf(Values(1))), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef first, model_->history().Pin(0));
  ASSERT_THAT(rank.Push(2, BytesOf(Values(2))), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef second, model_->history().Pin(0));
  EXPECT_EQ(first->tracks[1].blocks, second->tracks[1].blocks);
  EXPECT_NE(first->tracks[0].blocks, second->tracks[0].blocks);
}

TEST_F(ModelTest, NothingIsVisibleBeforeEveryRankHasCommitted) {
  TestRank first(model_, "launch", 0, 2, {WholeTensor(model_->manifest(), 0)}, false);
  TestRank second(model_, "launch", 1, 2, {WholeTensor(model_->manifest(), 1)}, false);
  ASSERT_THAT(first.Join(), IsOk());
  auto outcome = std::make_shared<PushOutcome>();
  EXPECT_THAT(first.Open(1, outcome),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("ranks 1 of 2")));
  ASSERT_THAT(second.Join(), IsOk());

  const std::vector<std::byte> a(1000 * 4);
  const std::vector<std::byte> b(2000 * 4);
  EMA_ASSERT_OK_AND_ASSIGN(auto push, first.Open(1, outcome));
  ASSERT_THAT(TestRank::AddChunk(*push, a, 0, 4000), IsOk());
  ASSERT_THAT(push->Commit(TestRank::EndOf(a, 1)), IsOk());
  EXPECT_EQ(outcome->calls, 0);
  EXPECT_THAT(model_->history().Pin(0), ReasonIs(ErrorReason::kNoVersion));
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult result, second.Push(1, b));
  EXPECT_EQ(outcome->calls, 1);
  EXPECT_EQ(outcome->result->record.number, result.record.number);
}

TEST_F(ModelTest, RefusedPushesLeaveTheAverageAsItWas) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(1, BytesOf(Values(1))), IsOk());
  const std::vector<float> before = Read("fast");
  const std::vector<std::byte> bytes = BytesOf(Values(2));
  const auto total = static_cast<int64_t>(bytes.size());
  auto outcome = std::make_shared<PushOutcome>();

  {  // A damaged chunk; sent again, it is right.
    EMA_ASSERT_OK_AND_ASSIGN(auto push, rank.Open(2, outcome));
    const std::span<const std::byte> piece(bytes);
    EXPECT_THAT(push->AddChunk({0, Crc32c(0, piece) ^ 1, total}, {piece}),
                ReasonIs(ErrorReason::kChunkCorrupt));
    EXPECT_THAT(TestRank::AddChunk(*push, bytes, 0, 400), IsOk());
    EXPECT_THAT(TestRank::AddChunk(*push, bytes, 200, 400), ReasonIs(ErrorReason::kChunkOverlap));
    EXPECT_THAT(TestRank::AddChunk(*push, bytes, 402, 400), ReasonIs(ErrorReason::kBadChunk));
    EXPECT_THAT(push->AddChunk({total - 4, 0, 8}, {piece.subspan(0, 8)}),
                ReasonIs(ErrorReason::kBadChunk));
    EXPECT_THAT(push->AddChunk({-4, 0, 8}, {piece.subspan(0, 8)}),
                ReasonIs(ErrorReason::kBadChunk));
    EXPECT_THAT(push->AddChunk({0, 0, 0}, {}), ReasonIs(ErrorReason::kBadChunk));
  }
  {  // A commit with holes, with wrong counts, with a wrong digest.
    EMA_ASSERT_OK_AND_ASSIGN(auto push, rank.Open(2, outcome));
    EXPECT_THAT(push->Commit({1, 400, 0}), ReasonIs(ErrorReason::kCountMismatch));
    const absl::Status hole = push->Commit({0, 0, 0});
    EXPECT_THAT(hole, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("tensor \"a\"")));
    ASSERT_THAT(TestRank::AddChunk(*push, bytes, 400, total - 400), IsOk());
    EXPECT_THAT(push->Commit({1, total - 400, 1}), ReasonIs(ErrorReason::kDigestMismatch));
  }
  EXPECT_EQ(Read("fast"), before);
  EXPECT_EQ(model_->history().latest()->number, 1);
  EXPECT_EQ(outcome->calls, 0);

  EMA_ASSERT_OK_AND_ASSIGN(auto push, rank.Open(2, outcome));
  EXPECT_THAT(push->Commit({0, 0, Crc32c(0, bytes)}), IsOk());
  EXPECT_EQ(outcome->result->record.number, 2);
}

TEST_F(ModelTest, NonFiniteValuesDropTheStepAndNameTensorElementAndRank) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(1, BytesOf(Values(1))), IsOk());
  const std::vector<float> before = Read("fast");
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    std::vector<float> values = Values(2);
    values[1000 + 77] = bad;
    const auto result = rank.Push(2, BytesOf(values));
    EXPECT_THAT(result, ReasonIs(ErrorReason::kNonFinite));
    EXPECT_THAT(
        result,
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr("tensor \"b\" holds NaN or infinity at element 77, pushed by rank 0")));
  }
  EXPECT_EQ(Read("fast"), before);
  EXPECT_THAT(rank.Push(2, BytesOf(Values(2))), IsOk());
}

TEST_F(ModelTest, StaleStepsAndTimesThatGoBackAreRefused) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(5, BytesOf(Values(1))), IsOk());
  EXPECT_THAT(rank.Push(4, BytesOf(Values(2))),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("step 4 is not after 5")));
  EXPECT_THAT(rank.Push(-1, BytesOf(Values(2))), ReasonIs(ErrorReason::kBadRequest));
  PushStart start = rank.Start(6);
  start.time = TrainingTime::AtBatch(4);
  EXPECT_THAT(model_->OpenPush(start, [](const auto&) {}), ReasonIs(ErrorReason::kBadTime));
  start.time = TrainingTime();
  start.time.Set(TimeUnit::kSample, 100);
  EXPECT_THAT(model_->OpenPush(start, [](const auto&) {}), ReasonIs(ErrorReason::kBadTime));
}

TEST_F(ModelTest, ACommittedStepPushedAgainIsADuplicateOnlyWithTheSameContent) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(1, BytesOf(Values(1))), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult again, rank.Push(1, BytesOf(Values(1)), 444));
  EXPECT_TRUE(again.is_duplicate);
  EXPECT_EQ(again.record.number, 1);
  EXPECT_THAT(rank.Push(1, BytesOf(Values(2))), ReasonIs(ErrorReason::kStaleStep));
  EXPECT_EQ(model_->history().latest()->number, 1);
  EXPECT_TRUE(model_->QueryPush(rank.run_epoch(), 1, 0, false)->rank_committed);
  TestRank later(model_, "later");
  ASSERT_THAT(later.Join(), IsOk());
  EXPECT_THAT(later.Push(1, BytesOf(Values(1))),
              AllOf(ReasonIs(ErrorReason::kStaleStep),
                    StatusIs(absl::StatusCode::kAborted,
                             HasSubstr("is committed already, as version 1 of an earlier run"))));
}

TEST_F(ModelTest, ANewLaunchFencesTheOldOne) {
  TestRank old_rank(model_, "old");
  TestRank new_rank(model_, "new");
  ASSERT_THAT(old_rank.Join(), IsOk());
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto push, old_rank.Open(1, outcome));
  ASSERT_THAT(new_rank.Join(), IsOk());
  EXPECT_THAT(outcome->result, ReasonIs(ErrorReason::kFenced));
  const std::vector<std::byte> bytes = BytesOf(Values(1));
  EXPECT_THAT(TestRank::AddChunk(*push, bytes, 0, 400), ReasonIs(ErrorReason::kFenced));
  EXPECT_THAT(old_rank.Push(2, bytes), ReasonIs(ErrorReason::kFenced));
  EXPECT_THAT(old_rank.Join(), ReasonIs(ErrorReason::kFenced));
  EXPECT_THAT(new_rank.Push(2, bytes), IsOk());
}

TEST_F(ModelTest, ARankThatBeginsALaterStepEndsTheOpenOne) {
  TestRank first(model_, "launch", 0, 2, {WholeTensor(model_->manifest(), 0)}, false);
  TestRank second(model_, "launch", 1, 2, {WholeTensor(model_->manifest(), 1)}, false);
  ASSERT_THAT(first.Join(), IsOk());
  ASSERT_THAT(second.Join(), IsOk());
  const std::vector<std::byte> a(1000 * 4);
  auto waiting = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto push, first.Open(1, waiting));
  ASSERT_THAT(TestRank::AddChunk(*push, a, 0, 4000), IsOk());
  ASSERT_THAT(push->Commit(TestRank::EndOf(a, 1)), IsOk());
  // Rank 0 has committed: for it the step is not over yet.
  EXPECT_THAT(first.Open(2, std::make_shared<PushOutcome>()), ReasonIs(ErrorReason::kModelBusy));
  EXPECT_EQ(waiting->calls, 0);
  EMA_ASSERT_OK_AND_ASSIGN(auto later, second.Open(2, std::make_shared<PushOutcome>()));
  EXPECT_THAT(waiting->result, ReasonIs(ErrorReason::kStepAbandoned));
  EXPECT_THAT(waiting->result, StatusIs(absl::StatusCode::kAborted, HasSubstr("rank 1")));
}

TEST_F(ModelTest, ARankThatCannotBeginALaterStepLeavesTheOpenOneAlone) {
  TestRank first(model_, "launch", 0, 2, {WholeTensor(model_->manifest(), 0)}, false);
  TestRank second(model_, "launch", 1, 2, {WholeTensor(model_->manifest(), 1)}, false);
  ASSERT_THAT(first.Join(), IsOk());
  ASSERT_THAT(second.Join(), IsOk());
  const std::vector<std::byte> a(1000 * 4);
  const std::vector<std::byte> b(model_->manifest().tensor(1).element_count() * 4);
  auto waiting = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto push, first.Open(1, waiting));
  ASSERT_THAT(TestRank::AddChunk(*push, a, 0, 4000), IsOk());
  ASSERT_THAT(push->Commit(TestRank::EndOf(a, 1)), IsOk());
  // Without the unit that the tracks count in.
  PushStart start = second.Start(2);
  start.time = TrainingTime();
  EXPECT_THAT(model_->OpenPush(start, [](const auto&) {}), ReasonIs(ErrorReason::kBadTime));
  model_->StopAcceptingWork(absl::UnavailableError("draining"));
  EXPECT_THAT(second.Open(2, std::make_shared<PushOutcome>()),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("draining")));
  EXPECT_EQ(waiting->calls, 0);
  EXPECT_THAT(second.Push(1, b), IsOk());
  EXPECT_EQ(waiting->result->record.number, 1);
}

TEST_F(ModelTest, RanksThatDisagreeOnTheTimeOfAStepAreTold) {
  TestRank first(model_, "launch", 0, 2, {WholeTensor(model_->manifest(), 0)}, false);
  TestRank second(model_, "launch", 1, 2, {WholeTensor(model_->manifest(), 1)}, false);
  ASSERT_THAT(first.Join(), IsOk());
  ASSERT_THAT(second.Join(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(auto push, first.Open(1, std::make_shared<PushOutcome>()));
  PushStart start = second.Start(1);
  start.time = TrainingTime::AtBatch(2);
  EXPECT_THAT(model_->OpenPush(start, [](const auto&) {}), ReasonIs(ErrorReason::kPlanMismatch));
}

TEST_F(ModelTest, QueryPushConfirmsOrAbandons) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  EXPECT_EQ(model_->QueryPush(rank.run_epoch(), 1, 0, false)->state,
            Model::PushState::State::kUnknown);
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto push, rank.Open(1, outcome));
  EXPECT_EQ(model_->QueryPush(rank.run_epoch(), 1, 0, true)->state,
            Model::PushState::State::kAbandoned);
  EXPECT_THAT(outcome->result, ReasonIs(ErrorReason::kStepAbandoned));
  ASSERT_THAT(rank.Push(1, BytesOf(Values(1))), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto committed, model_->QueryPush(rank.run_epoch(), 1, 0, true));
  EXPECT_EQ(committed.state, Model::PushState::State::kCommitted);
  EXPECT_EQ(committed.record->number, 1);
  EXPECT_EQ(committed.digest, Crc32c(0, BytesOf(Values(1))));
  ASSERT_THAT(rank.Push(2, BytesOf(Values(2))), IsOk());
  EXPECT_EQ(model_->QueryPush(rank.run_epoch(), 1, 0, false)->digest, std::nullopt);
  EXPECT_THAT(model_->QueryPush(rank.run_epoch() + 1, 1, 0, false), ReasonIs(ErrorReason::kFenced));
  EXPECT_THAT(model_->QueryPush(rank.run_epoch(), 1, 5, false), ReasonIs(ErrorReason::kBadRequest));
}

TEST_F(ModelTest, AStepThatARankHasSkippedIsWaitedForByNobody) {
  TestRank first(model_, "launch", 0, 2, {WholeTensor(model_->manifest(), 0)}, false);
  TestRank second(model_, "launch", 1, 2, {WholeTensor(model_->manifest(), 1)}, false);
  ASSERT_THAT(first.Join(), IsOk());
  ASSERT_THAT(second.Join(), IsOk());
  const auto wait_end = [&](int64_t step, bool abandon, std::string_view why) {
    return model_->QueryPush(second.run_epoch(), step, 1, abandon, why);
  };
  EXPECT_THAT(wait_end(1, false, "no memory"), ReasonIs(ErrorReason::kBadRequest));
  EXPECT_THAT(wait_end(1, true, std::string(1025, 'x')), ReasonIs(ErrorReason::kBadRequest));
  // While the other one pushes.
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto push, first.Open(1, outcome));
  EXPECT_EQ(wait_end(1, true, "no memory")->state, Model::PushState::State::kAbandoned);
  EXPECT_THAT(outcome->result, ReasonIs(ErrorReason::kStepSkipped));
  EXPECT_THAT(outcome->result, StatusIs(absl::StatusCode::kAborted,
                                        HasSubstr("step 1: rank 1 has abandoned it: no memory")));
  EXPECT_THAT(first.Open(1, outcome), ReasonIs(ErrorReason::kStepSkipped));
  // Before it does.
  EXPECT_EQ(wait_end(2, true, "no memory")->state, Model::PushState::State::kUnknown);
  EXPECT_THAT(first.Open(2, outcome), ReasonIs(ErrorReason::kStepSkipped));
  EXPECT_THAT(first.Open(3, std::make_shared<PushOutcome>()), IsOk());
  // The next run has its own.
  TestRank next(model_, "next");
  ASSERT_THAT(next.Join(), IsOk());
  EXPECT_THAT(next.Push(2, BytesOf(Values(1))), IsOk());
}

TEST_F(ModelTest, ASessionWithoutProgressExpiresAndNamesTheMissingRanks) {
  TestRank first(model_, "launch", 0, 2, {WholeTensor(model_->manifest(), 0)}, false);
  TestRank second(model_, "launch", 1, 2, {WholeTensor(model_->manifest(), 1)}, false);
  ASSERT_THAT(first.Join(), IsOk());
  ASSERT_THAT(second.Join(), IsOk());
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto push, first.Open(1, outcome));
  const std::vector<std::byte> a(1000 * 4);
  ASSERT_THAT(TestRank::AddChunk(*push, a, 0, 4000), IsOk());
  ASSERT_THAT(push->Commit(TestRank::EndOf(a, 1)), IsOk());
  const auto now = std::chrono::steady_clock::now();
  model_->ExpireSession(now, std::chrono::seconds(30));
  EXPECT_EQ(outcome->calls, 0);
  model_->ExpireSession(now + std::chrono::seconds(31), std::chrono::seconds(30));
  EXPECT_THAT(outcome->result, ReasonIs(ErrorReason::kSessionExpired));
  EXPECT_THAT(outcome->result, StatusIs(absl::StatusCode::kAborted, HasSubstr("missing ranks: 1")));
}

TEST_F(ModelTest, PinnedVersionsStayAndOthersGo) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(1, BytesOf(Values(1))), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(SnapshotRef pinned, model_->history().Pin(1));
  for (int64_t step = 2; step <= 6; ++step)
    ASSERT_THAT(rank.Push(step, BytesOf(Values(step))), IsOk());
  EXPECT_EQ(Read("raw", 1), Values(1));
  EXPECT_THAT(model_->history().Pin(2), ReasonIs(ErrorReason::kVersionNotKept));
  EXPECT_EQ(Read("raw", 5), Values(5));
  EXPECT_THAT(model_->history().Pin(7), ReasonIs(ErrorReason::kVersionNotYet));
  EXPECT_THAT(model_->history().Pin(6, 8), ReasonIs(ErrorReason::kVersionNotKept));
  EXPECT_THAT(model_->history().Pin(6, 7), IsOk());
  pinned.reset();
  for (int64_t step = 7; step <= 8; ++step)
    ASSERT_THAT(rank.Push(step, BytesOf(Values(step))), IsOk());
  EXPECT_THAT(model_->history().Pin(1), ReasonIs(ErrorReason::kVersionNotKept));
}

TEST_F(ModelTest, MoreDistinctPinsThanAllowedAreRefusedAndCommitsGoOn) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  std::vector<SnapshotRef> pins;
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_THAT(rank.Push(step, BytesOf(Values(step))), IsOk());
    pins.push_back(*model_->history().Pin(0));
  }
  ASSERT_THAT(rank.Push(3, BytesOf(Values(3))), IsOk());
  EXPECT_THAT(model_->history().Pin(0), ReasonIs(ErrorReason::kTooManyPins));
  EXPECT_THAT(model_->history().Pin(2), IsOk());  // Pinned already: counts once.
  ASSERT_THAT(rank.Push(4, BytesOf(Values(4))), IsOk());
  pins.clear();
  EXPECT_EQ(Read("raw"), Values(4));
}

TEST_F(ModelTest, APullWithoutAPinNamesTheVersionsThatReadersPinOldestFirst) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  std::vector<SnapshotRef> pins;
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_THAT(rank.Push(step, BytesOf(Values(step))), IsOk());
    pins.push_back(*model_->history().Pin(0));
  }
  ASSERT_THAT(rank.Push(3, BytesOf(Values(3))), IsOk());
  // A caller that is no pull ends none.
  EXPECT_THAT(model_->history().Pin(3), ReasonIs(ErrorReason::kTooManyPins));
  EXPECT_THAT(model_->history().TakeVersionsBlockingReaders(), IsEmpty());
  EXPECT_THAT(model_->readings().Open("raw", 3, 0, {}), ReasonIs(ErrorReason::kTooManyPins));
  EXPECT_THAT(model_->history().TakeVersionsBlockingReaders(),
              ElementsAre(pins[0]->record.id(), pins[1]->record.id()));
  EXPECT_THAT(model_->history().TakeVersionsBlockingReaders(), IsEmpty());
  // The shortage may be over when it is looked at.
  EXPECT_THAT(model_->readings().Open("raw", 3, 0, {}), ReasonIs(ErrorReason::kTooManyPins));
  pins.pop_back();
  EXPECT_THAT(model_->history().TakeVersionsBlockingReaders(), IsEmpty());
}

TEST_F(ModelTest, ASaveHasAVersionBesideThoseOfTheReaders) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  std::vector<SnapshotRef> pins;
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_THAT(rank.Push(step, BytesOf(Values(step))), IsOk());
    pins.push_back(*model_->history().Pin(0));
  }
  ASSERT_THAT(rank.Push(3, BytesOf(Values(3))), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(SnapshotRef saved, model_->history().PinForSave(0));
  EXPECT_EQ(saved->record.step, 3);
  ASSERT_THAT(rank.Push(4, BytesOf(Values(4))), IsOk());
  // One version, however many saves there are of it.
  EXPECT_THAT(model_->history().PinForSave(3), IsOk());
  EXPECT_THAT(model_->history().PinForSave(0), ReasonIs(ErrorReason::kTooManyPins));
  saved.reset();
  EXPECT_THAT(model_->history().PinForSave(0), IsOk());
  ASSERT_THAT(rank.Push(5, BytesOf(Values(5))), IsOk());
  EXPECT_EQ(pins[0]->record.step, 1);
}

TEST_F(ModelTest, TheNextStepGetsTheMemoryOfTheVersionThatGoes) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  const std::vector<std::byte> bytes = BytesOf(Values(1));
  std::unique_ptr<RankPush> push;
  EMA_ASSERT_OK_AND_ASSIGN(push, rank.Open(10, std::make_shared<PushOutcome>()));
  for (int64_t step = 10; step <= 100; step += 10) {
    // Another rank begins it as soon as it is told.
    absl::Notification begun;
    std::thread next;
    const auto begin_next = [&](const auto&) {
      next = std::thread([&] {
        ASSERT_THAT(rank.Open(step + 10, std::make_shared<PushOutcome>()), IsOk());
        begun.Notify();
      });
      begun.WaitForNotificationWithTimeout(absl::Milliseconds(20));
    };
    EMA_ASSERT_OK_AND_ASSIGN(push, model_->OpenPush(rank.Start(step), begin_next));
    ASSERT_THAT(TestRank::AddChunk(*push, bytes, 0, static_cast<int64_t>(bytes.size())), IsOk());
    ASSERT_THAT(push->Commit(TestRank::EndOf(bytes, 1)), IsOk());
    next.join();
    EXPECT_LE(TakenBytes(model_->device()), model_->tracks().reserved_bytes()) << "step " << step;
  }
}

TEST_F(ModelTest, TheNextStepGetsTheMemoryOfTheStepThatIsBeingFolded) {
  constexpr int64_t kCount = 1 << 18;
  constexpr int64_t kBytes = kCount * 4;
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto created,
      store_.Create({.name = "large",
                     .manifest = MakeManifest({{"w", Dtype::kFloat32, {kCount}}}),
                     .tracks = {{"ema", MakeSchedule("10ba")}}}));
  Model& model = *created.model;
  const std::vector<std::byte> bytes = BytesOf(std::vector<float>(kCount, 1.0f));
  // Byte by byte a fold takes long, and it can be repeated.
  std::vector<std::span<const std::byte>> pieces;
  for (const std::byte& byte : bytes) pieces.emplace_back(&byte, 1);
  const ChunkHeader damaged = {0, Crc32c(0, bytes) + 1, kBytes};
  std::vector<SnapshotRef> held;
  {
    TestRank rank(created.model, "first");
    ASSERT_THAT(rank.Join(), IsOk());
    for (int64_t step = 1; step <= 3; ++step) {
      ASSERT_THAT(rank.Push(step, bytes, kBytes), IsOk());
      if (step < 3) held.push_back(*model.history().Pin(0));
    }
  }
  for (int64_t round = 0; round < 10; ++round) {
    TestRank rank(created.model, absl::StrCat("round ", round));
    ASSERT_THAT(rank.Join(), IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(auto push, rank.Open(10, std::make_shared<PushOutcome>()));
    absl::Notification begun;
    std::jthread folding([&] {
      while (absl::IsDataLoss(push->AddChunk(damaged, pieces))) {
        if (!begun.HasBeenNotified()) begun.Notify();
      }
    });
    begun.WaitForNotification();
    // It drops the step, or another run has done so.
    TestRank next(created.model, absl::StrCat("next ", round));
    if (round % 2 == 0) {
      ASSERT_THAT(next.Join(), IsOk());
    }
    EMA_ASSERT_OK_AND_ASSIGN(
        const auto open, (round % 2 == 0 ? next : rank).Open(11, std::make_shared<PushOutcome>()));
    EXPECT_LE(TakenBytes(model.device()), model.tracks().reserved_bytes()) << "round " << round;
    folding.join();
  }
}

TEST_F(ModelTest, AStepThatIsGivenUpHasFreedItsMemoryBeforeAnybodyIsTold) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  int64_t used_bytes = -1;
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, model_->OpenPush(rank.Start(1), [&](const auto&) {
    used_bytes = model_->device().memory_use().block_bytes;
  }));
  EXPECT_GT(model_->device().memory_use().block_bytes, 0);
  ASSERT_THAT(model_->QueryPush(rank.run_epoch(), 1, 0, /*abandon_if_unfinished=*/true), IsOk());
  EXPECT_EQ(used_bytes, 0);
}

TEST_F(ModelTest, WhatWaitsLeavesAPinForReaders) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_THAT(rank.Push(step, BytesOf(Values(step))), IsOk());
  }
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef first, model_->history().PinLeavingOneFree(1, 7));
  EXPECT_THAT(model_->history().PinLeavingOneFree(1, 7), IsOk());
  EXPECT_THAT(model_->history().PinLeavingOneFree(2, 7), ReasonIs(ErrorReason::kTooManyPins));
  EXPECT_THAT(model_->history().PinLeavingOneFree(3, 7), ReasonIs(ErrorReason::kVersionNotYet));
  {
    // What readers hold they may let go of first.
    const SnapshotRef second = *model_->history().Pin(2);
    EXPECT_THAT(model_->history().PinLeavingOneFree(1, 7), ReasonIs(ErrorReason::kTooManyPins));
    EXPECT_THAT(model_->history().PinLeavingOneFree(2, 7), ReasonIs(ErrorReason::kTooManyPins));
    EXPECT_THAT(model_->history().Pin(1), IsOk());
  }
  ASSERT_THAT(rank.Push(3, BytesOf(Values(3))), IsOk());
  EXPECT_EQ(Read("raw"), Values(3));
}

TEST_F(ModelTest, AModelMadeAgainRepeatsNeitherVersionsNorRunEpochs) {
  TestRank old_rank(model_, "old");
  ASSERT_THAT(old_rank.Join(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult old_push, old_rank.Push(1, BytesOf(Values(1))));
  ModelConfig config = model_->config();
  ASSERT_TRUE(store_.Delete("m"));
  EMA_ASSERT_OK_AND_ASSIGN(const auto again, store_.Create(std::move(config)));
  TestRank new_rank(again.model, "new");
  ASSERT_THAT(new_rank.Join(), IsOk());
  EXPECT_GT(new_rank.run_epoch(), old_rank.run_epoch());
  // The old trainer wakes up: its run is not this model's.
  EXPECT_THAT(again.model->OpenPush(old_rank.Start(5000), [](const auto&) {}),
              ReasonIs(ErrorReason::kFenced));
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult new_push, new_rank.Push(1, BytesOf(Values(1))));
  EXPECT_EQ(new_push.record.number, old_push.record.number);
  EXPECT_GT(new_push.record.incarnation, old_push.record.incarnation);
}

TEST_F(ModelTest, ACrashThatLosesVersionsHidesNoneOfTheNext) {
  // A reader has seen version 2 of this life; the next one goes on from a save of version 1.
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(1, BytesOf(Values(1))), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef saved, model_->history().Pin(0));
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult seen, rank.Push(2, BytesOf(Values(2))));
  ModelConfig config = model_->config();
  config.name = "restored";
  EMA_ASSERT_OK_AND_ASSIGN(const auto restored, store_.Create(std::move(config)));
  restored.model->Restore(saved);
  TestRank next(restored.model, "next");
  ASSERT_THAT(next.Join(), IsOk());
  ASSERT_THAT(next.Push(2, BytesOf(Values(3))), IsOk());
  const auto records =
      restored.model->history().RecordsAfter(seen.record.number, seen.record.incarnation, 10);
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].record.number, 2);
  EXPECT_GT(records[0].record.incarnation, seen.record.incarnation);
  EXPECT_THAT(restored.model->history().Pin(3, seen.record.incarnation),
              ReasonIs(ErrorReason::kVersionNotKept));
}

TEST_F(ModelTest, ARestartForgetsNobodyWhoWasFenced) {
  TestRank first(model_, "first");
  ASSERT_THAT(first.Join(), IsOk());
  ASSERT_THAT(first.Push(1, BytesOf(Values(1))), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef of_first, model_->history().Pin(0));
  TestRank second(model_, "second");
  ASSERT_THAT(second.Join(), IsOk());
  ASSERT_THAT(second.Push(2, BytesOf(Values(2))), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef of_second, model_->history().Pin(0));

  const Launch fenced{"first", first.run_epoch()};
  const Launch newer{"second", second.run_epoch()};
  const Launch fresh{"third"};
  int64_t restarts = 0;
  const auto restart = [&](const SnapshotRef& saved) {
    ModelConfig config = model_->config();
    config.name = absl::StrCat("restored", ++restarts);
    const std::shared_ptr<Model> model = store_.Create(std::move(config))->model;
    model->Restore(saved);
    return model;
  };
  const auto join = [](const std::shared_ptr<Model>& model, const Launch& launch) {
    std::vector<Shard> shards;
    for (int64_t i = 0; i < model->manifest().tensor_count(); ++i) {
      shards.push_back(WholeTensor(model->manifest(), i));
    }
    return model->JoinRun(launch, 0, 1, *RankLayout::Create(model->manifest(), shards)).status();
  };
  const auto is_fenced = ReasonIs(ErrorReason::kFenced);

  std::shared_ptr<Model> model = restart(of_second);
  EXPECT_THAT(join(model, fenced), is_fenced);
  EXPECT_THAT(model->IsRunOpen(fenced), is_fenced);
  EXPECT_THAT(join(model, newer), IsOk());
  EXPECT_GT(model->Describe().run_epoch, newer.last_run_epoch);
  EXPECT_THAT(join(model, fenced), is_fenced);

  // A crash has lost what the second one pushed: whoever comes first, the newer one has the model.
  model = restart(of_first);
  EXPECT_THAT(join(model, newer), IsOk());
  EXPECT_THAT(join(model, fenced), is_fenced);
  model = restart(of_first);
  EXPECT_THAT(join(model, fenced), IsOk());
  EXPECT_THAT(join(model, newer), IsOk());
  EXPECT_THAT(join(model, fenced), is_fenced);

  // A launch that comes for the first time is the newest, also of those that come back later.
  model = restart(of_second);
  EXPECT_THAT(join(model, fresh), IsOk());
  EXPECT_THAT(join(model, newer), is_fenced);
  EXPECT_THAT(join(model, {"third", model->Describe().run_epoch}), IsOk());
  EXPECT_THAT(join(model, fresh), IsOk());

  constexpr int64_t kMost = int64_t{1} << 53;
  const auto is_refused =
      AllOf(ReasonIs(ErrorReason::kBadRequest),
            StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("last_run_epoch")));
  for (const int64_t last : {int64_t{-1}, kMost + 1}) {
    for (const char* const launch : {"third", "fourth"}) {
      EXPECT_THAT(join(model, {launch, last}), is_refused);
      EXPECT_THAT(model->IsRunOpen({launch, last}), is_refused);
    }
  }
  // Whoever was given one beyond comes back with that.
  EXPECT_THAT(join(model, {"fifth", kMost}), IsOk());
  EXPECT_EQ(model->Describe().run_epoch, kMost + 1);
  EXPECT_THAT(join(model, {"fifth", kMost + 1}), IsOk());
}

TEST_F(ModelTest, MoreImportedUpdatesThanCanBeCountedAreRefused) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  PushStart start = rank.Start(1);
  for (const int64_t count : {int64_t{-1}, (int64_t{1} << 53) + 1}) {
    start.imported_updates = count;
    EXPECT_THAT(model_->OpenPush(start, [](const auto&) {}),
                AllOf(ReasonIs(ErrorReason::kBadRequest),
                      StatusIs(absl::StatusCode::kInvalidArgument,
                               HasSubstr(absl::StrCat("imported_updates: ", count)))));
  }
  start.imported_updates = int64_t{1} << 53;
  EXPECT_THAT(model_->OpenPush(start, [](const auto&) {}), IsOk());
}

TEST_F(ModelTest, TheSaveAtTheEndNeedsNoPin) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  std::vector<SnapshotRef> held;
  for (int64_t step = 1; step <= model_->config().max_pinned_versions; ++step) {
    ASSERT_THAT(rank.Push(step, BytesOf(Values(1))), IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(held.emplace_back(), model_->history().Pin(0));
  }
  ASSERT_THAT(rank.Push(100, BytesOf(Values(4))), IsOk());
  ASSERT_THAT(model_->history().Pin(0), ReasonIs(ErrorReason::kTooManyPins));
  model_->Drain(absl::UnavailableError("draining"), SteadyNow());
  ASSERT_NE(model_->history().newest(), nullptr);
  EXPECT_EQ(model_->history().newest()->record.step, 100);
}

TEST_F(ModelTest, ReadersOutliveTheDeletedModel) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(1, BytesOf(Values(1))), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef pinned, model_->history().Pin(0));
  Device& device = model_->device();
  EXPECT_TRUE(store_.Delete("m"));
  EXPECT_THAT(model_->history().Pin(0), ReasonIs(ErrorReason::kModelNotFound));
  EXPECT_THAT(rank.Push(2, BytesOf(Values(2))), ReasonIs(ErrorReason::kModelNotFound));
  model_.reset();
  EMA_ASSERT_OK_AND_ASSIGN(const auto view,
                           device.HostView(pinned->tracks[2].blocks[0], std::nullopt));
  EXPECT_EQ(FloatsOf({view.get(), view.get() + 4}), std::vector<float>{Values(1)[0]});
}

TEST_F(ModelTest, WatchersAreCalledOncePerCommitAndRecordsTellWhat) {
  int calls = 0;
  const int64_t watcher = model_->watchers().Watch([&] { ++calls; });
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  for (int64_t step = 1; step <= 5; ++step)
    ASSERT_THAT(rank.Push(step, BytesOf(Values(step))), IsOk());
  EXPECT_EQ(calls, 5);
  model_->watchers().Unwatch(watcher);
  ASSERT_THAT(rank.Push(6, BytesOf(Values(6))), IsOk());
  EXPECT_EQ(calls, 5);
  std::vector<int64_t> versions;
  std::vector<int64_t> available;
  for (const auto& entry : model_->history().RecordsAfter(2, 0, 100)) {
    versions.push_back(entry.record.number);
    if (entry.available) available.push_back(entry.record.number);
  }
  EXPECT_THAT(versions, ElementsAre(3, 4, 5, 6));
  EXPECT_THAT(available, ElementsAre(3, 4, 5, 6));
}

TEST_F(ModelTest, QuietIsWhenNoPushArrives) {
  model_->AwaitNoPush(absl::Hours(1));  // Nor has any.
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  const std::vector<std::byte> bytes = BytesOf(Values(1));
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto push, rank.Open(1, outcome));
  model_->AwaitNoPush(absl::Milliseconds(1));
  EXPECT_EQ(outcome->calls, 0);
  {
    std::jthread waiting([&] { model_->AwaitNoPush(absl::Hours(1)); });
    ASSERT_THAT(TestRank::AddChunk(*push, bytes, 0, static_cast<int64_t>(bytes.size())), IsOk());
    ASSERT_THAT(push->Commit(TestRank::EndOf(bytes, 1)), IsOk());
  }
  EXPECT_EQ(model_->history().latest()->number, 1);
}

}  // namespace
}  // namespace ema
