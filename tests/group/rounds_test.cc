// SPDX-License-Identifier: Apache-2.0
#include "server/group/rounds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "absl/strings/str_cat.h"
#include "ema/version.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using Answer = Rounds::Answer;
using std::chrono::minutes;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int64_t kIncarnation = 7;
constexpr int64_t kBaseVersion = 40;
constexpr int64_t kEpoch = 3;
constexpr int64_t kPartitions = 3;

// The rounds of a model with three partitions, in round 2, with an open run.
class RoundsTest : public testing::Test {
 protected:
  RoundsTest() {
    for (int64_t p = 0; p < kPartitions; ++p) rounds_.OnSync({.from = IdOf(p)}, now_);
    rounds_.OpenRun(kEpoch, "launch");
  }

  static PartitionId IdOf(int64_t partition) {
    return {kIncarnation, partition, absl::StrCat("boot-", partition)};
  }
  static Rounds::Options OptionsOf() {
    Rounds::Options options{.incarnation = kIncarnation, .base_version = kBaseVersion};
    for (int64_t p = 0; p < kPartitions; ++p) {
      options.members.push_back({absl::StrCat("ema-", p), IdOf(p).boot});
    }
    return options;
  }
  static PreparedStep StepOf(int64_t step) {
    return {.step = step, .run_epoch = kEpoch, .plan_digest = 5};
  }
  int64_t round() const { return rounds_.state().round; }
  // Sends a Vote of the current round.
  Rounds::Result Vote(int64_t partition, absl::StatusOr<PreparedStep> step = StepOf(100)) {
    return rounds_.OnVote({IdOf(partition), round(), std::move(step)}, now_, kCommitTime);
  }
  void ExpectAbort(const Rounds::Result& result, int64_t round, ErrorReason reason,
                   const std::string& message) {
    EXPECT_TRUE(result.round_ended);
    EXPECT_EQ(result.answer, Answer::kState);
    ExpectAbort(round, reason, message);
  }
  void ExpectAbort(int64_t round, ErrorReason reason, const std::string& message) {
    ASSERT_TRUE(rounds_.state().last_abort.has_value());
    EXPECT_EQ(rounds_.state().last_abort->round, round);
    EXPECT_EQ(rounds_.state().round, round + 1);
    EXPECT_THAT(rounds_.state().last_abort->why, ReasonIs(reason));
    EXPECT_THAT(rounds_.state().last_abort->why.message(), HasSubstr(message));
    EXPECT_FALSE(rounds_.state().last_commit.has_value());
  }

  const absl::Time kCommitTime = absl::FromUnixSeconds(1000);
  SteadyTime now_{std::chrono::hours(1)};
  Rounds rounds_{OptionsOf(), now_};
};

TEST(RoundsLoadingTest, APartitionThatIsLoadingHasNotJoined) {
  const SteadyTime now{std::chrono::hours(1)};
  Rounds rounds({.incarnation = kIncarnation, .members = {{"ema-0", "b0"}, {"ema-1", "b1"}}}, now);
  rounds.OnSync({.from = {kIncarnation, 0, "b0"}}, now);
  const PartitionId second{kIncarnation, 1, "b1"};
  EXPECT_EQ(rounds.CheckJoined().message(), "partition 1 on member \"ema-1\" has not joined");
  EXPECT_FALSE(rounds.OnSync({.from = second, .loading = "is loading"}, now).round_ended);
  EXPECT_THAT(rounds.CheckJoined(), ReasonIs(ErrorReason::kGroupDegraded));
  EXPECT_EQ(rounds.CheckJoined().message(), "partition 1 on member \"ema-1\" is loading");
  EXPECT_EQ(rounds.state().round, 0);
  const auto problem = rounds.FindProblem(now + seconds(3));
  ASSERT_TRUE(problem.has_value());
  EXPECT_EQ(problem->text, "partition 1 on member \"ema-1\" is loading");
  EXPECT_EQ(problem->age, absl::Seconds(3));
  EXPECT_TRUE(rounds.OnSync({.from = second}, now).round_ended);
  EXPECT_THAT(rounds.CheckJoined(), IsOk());
  EXPECT_EQ(rounds.state().round, 1);
}

TEST_F(RoundsTest, ASilentPartitionIsAProblem) {
  now_ += seconds(4);
  EXPECT_FALSE(rounds_.FindProblem(now_).has_value());
  for (const int64_t p : {0, 2}) rounds_.OnSync({.from = IdOf(p)}, now_);
  now_ += seconds(3);
  const auto problem = rounds_.FindProblem(now_);
  ASSERT_TRUE(problem.has_value());
  EXPECT_EQ(problem->text, "partition 1 on member \"ema-1\" has sent nothing for 7s");
  EXPECT_EQ(problem->age, absl::Seconds(7));
  rounds_.OnSync({.from = IdOf(1)}, now_);
  EXPECT_FALSE(rounds_.FindProblem(now_).has_value());
}

TEST_F(RoundsTest, ARegistryThatIsUnavailableForTooLongIsAProblem) {
  now_ += minutes(11);
  for (int64_t p = 0; p < kPartitions; ++p) rounds_.OnSync({.from = IdOf(p)}, now_);
  const auto problem = rounds_.FindProblem(now_);
  ASSERT_TRUE(problem.has_value());
  EXPECT_THAT(problem->text, HasSubstr("has not reached the registry for 11m"));
  EXPECT_EQ(problem->age, absl::Minutes(1));
  rounds_.NoteRegistryReached(now_);
  EXPECT_FALSE(rounds_.FindProblem(now_).has_value());
}

TEST_F(RoundsTest, TheSlowestPartitionIsTheOneWithTheFewestBytes) {
  EXPECT_FALSE(rounds_.FindSlowest().has_value());
  rounds_.OnSync({.from = IdOf(0), .round = round(), .received_bytes = 30}, now_);
  rounds_.OnSync({.from = IdOf(1), .round = round(), .received_bytes = 20, .missing_ranks = {3, 5}},
                 now_);
  Vote(2);
  auto slowest = rounds_.FindSlowest();
  ASSERT_TRUE(slowest.has_value());
  EXPECT_EQ(slowest->partition, 1);
  EXPECT_EQ(slowest->activity, "has received 20 bytes and waits for ranks 3, 5");
  Vote(1);
  slowest = rounds_.FindSlowest();
  ASSERT_TRUE(slowest.has_value());
  EXPECT_EQ(slowest->partition, 0);
  EXPECT_EQ(slowest->activity, "has received 30 bytes");
  Vote(0);
  EXPECT_FALSE(rounds_.FindSlowest().has_value());
}

TEST_F(RoundsTest, FirstRoundBeginsWhenAllPartitionsHaveJoined) {
  Rounds rounds(OptionsOf(), now_);
  EXPECT_FALSE(rounds.OnSync({.from = IdOf(0)}, now_).round_ended);
  EXPECT_FALSE(rounds.OnSync({.from = IdOf(2)}, now_).round_ended);
  EXPECT_FALSE(rounds.OnSync({.from = IdOf(2)}, now_).round_ended);
  EXPECT_FALSE(rounds.Abort(0, /*step=*/0, absl::AbortedError("abandoned")));
  EXPECT_EQ(rounds.state().round, 0);
  EXPECT_TRUE(rounds.OnSync({.from = IdOf(1)}, now_).round_ended);
  EXPECT_EQ(rounds.state().round, 1);
}

TEST_F(RoundsTest, MessagesOfAnotherIncarnationOrBootAreFenced) {
  for (const int64_t incarnation : {kIncarnation - 1, kIncarnation + 1}) {
    EXPECT_EQ(rounds_.OnSync({.from = {incarnation, 1, IdOf(1).boot}}, now_).answer,
              Answer::kFenced);
  }
  EXPECT_EQ(rounds_.OnSync({.from = {kIncarnation, 1, "other"}}, now_).answer, Answer::kFenced);
  for (const int64_t partition : {int64_t{-1}, kPartitions}) {
    EXPECT_EQ(rounds_.OnSync({.from = {kIncarnation, partition, "boot-1"}}, now_).answer,
              Answer::kFenced);
  }
  EXPECT_EQ(
      rounds_.OnVote({{kIncarnation, 1, "other"}, round(), StepOf(100)}, now_, kCommitTime).answer,
      Answer::kFenced);
  EXPECT_EQ(rounds_.OnSync({.from = IdOf(1)}, now_).answer, Answer::kState);
}

TEST_F(RoundsTest, CommitsWhenAllPartitionsHavePrepared) {
  const int64_t ended = round();
  EXPECT_EQ(Vote(0).answer, Answer::kHold);
  EXPECT_EQ(Vote(2).answer, Answer::kHold);
  EXPECT_EQ(Vote(2).answer, Answer::kHold);
  const Rounds::Result result = Vote(1);
  EXPECT_EQ(result.answer, Answer::kState);
  EXPECT_TRUE(result.round_ended);

  const GroupState& state = rounds_.state();
  EXPECT_EQ(state.round, ended + 1);
  ASSERT_TRUE(state.last_commit.has_value());
  EXPECT_EQ(state.last_commit->round, ended);
  EXPECT_EQ(state.last_commit->version, kBaseVersion + 1);
  EXPECT_EQ(state.last_commit->step.step, 100);
  EXPECT_EQ(state.last_commit->commit_time, kCommitTime);

  // A repeated Vote of the round is answered at once.
  EXPECT_EQ(rounds_.OnVote({IdOf(2), ended, StepOf(100)}, now_, kCommitTime).answer,
            Answer::kState);
  for (int64_t p = 0; p < kPartitions; ++p) Vote(p, StepOf(101));
  EXPECT_EQ(rounds_.state().last_commit->version, kBaseVersion + 2);
}

TEST_F(RoundsTest, CommitMergesWhatPartitionsHaveSkipped) {
  PreparedStep step = StepOf(100);
  step.skipped_tensor_count = 20;
  for (int i = 0; i < 10; ++i) step.skipped_tensors.push_back(absl::StrCat("b", i));
  Vote(2, step);
  step.skipped_tensor_count = 10;
  for (std::string& name : step.skipped_tensors) name[0] = 'a';
  Vote(1, step);
  Vote(0);
  const PreparedStep& all = rounds_.state().last_commit->step;
  EXPECT_EQ(all.skipped_tensor_count, 30);
  EXPECT_THAT(all.skipped_tensors, SizeIs(Version::kMaxNamedTensors));
  EXPECT_EQ(all.skipped_tensors.front(), "a0");
  EXPECT_EQ(all.skipped_tensors.back(), "b5");
}

TEST_F(RoundsTest, RefusalAborts) {
  Vote(0);
  const absl::Status why =
      MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite, "tensor \"w\": NaN");
  ExpectAbort(Vote(2, why), 2, ErrorReason::kNonFinite, "partition 2 (ema-2): tensor \"w\": NaN");
}

TEST_F(RoundsTest, DifferentStepsAbort) {
  Vote(0);
  ExpectAbort(Vote(1, StepOf(101)), 2, ErrorReason::kStepAbandoned,
              "partition 1 (ema-1) has step 101, but partition 0 (ema-0) has step 100");
  // All ranks of partition 1 have left step 100, so that step 101 may be committed in the next
  // round.
  EXPECT_EQ(rounds_.state().failed_step->step, 100);
  EXPECT_EQ(rounds_.state().FindLoss(101, 2), nullptr);
}

TEST_F(RoundsTest, DifferentPlansAbort) {
  Vote(0);
  PreparedStep step = StepOf(100);
  step.plan_digest = 6;
  ExpectAbort(Vote(1, step), 2, ErrorReason::kPlanMismatch,
              "step 100: the plan of partition 1 (ema-1) differs from that of partition 0");
}

TEST_F(RoundsTest, NewRunFencesTheStepsOfTheOldOne) {
  Vote(0);
  Vote(1);
  EXPECT_TRUE(rounds_.OpenRun(kEpoch + 1, "next"));
  ExpectAbort(2, ErrorReason::kFenced, "run epoch 4 has replaced epoch 3");
  EXPECT_EQ(rounds_.state().run_epoch, kEpoch + 1);
  EXPECT_EQ(rounds_.state().launch_id, "next");
  ExpectAbort(Vote(0), 3, ErrorReason::kFenced, "step 100 is of run epoch 3, but epoch 4");
}

// The answer of Abort() is the only one about an abandoned step, for all partitions.
TEST_F(RoundsTest, AbandonedStepIsAbortedUnlessItsRoundHasEnded) {
  Vote(0);
  Vote(1);
  const absl::Status why =
      MakeError(absl::StatusCode::kAborted, ErrorReason::kStepAbandoned, "abandoned by rank 4");
  EXPECT_TRUE(rounds_.Abort(2, /*step=*/0, why));
  ExpectAbort(2, ErrorReason::kStepAbandoned, "rank 4");
  EXPECT_EQ(rounds_.OnVote({IdOf(2), 2, StepOf(100)}, now_, kCommitTime).answer, Answer::kState);

  for (int64_t p = 0; p < kPartitions; ++p) Vote(p);
  EXPECT_EQ(rounds_.state().last_commit->round, 3);
  EXPECT_FALSE(rounds_.Abort(3, /*step=*/0, why));
  EXPECT_EQ(round(), 4);
}

TEST_F(RoundsTest, StateNamesTheHighestFailedStepOfTheOpenRun) {
  const auto failed_step_after = [&](const absl::Status& why) {
    EXPECT_TRUE(rounds_.Abort(round(), /*step=*/0, why));
    const std::optional<FailedStep>& failed = rounds_.state().failed_step;
    return failed.has_value() ? failed->step : 0;
  };
  const absl::Status abandoned = absl::AbortedError("abandoned");
  EXPECT_EQ(failed_step_after(abandoned), 0);
  rounds_.NotePush(100);
  EXPECT_EQ(failed_step_after(abandoned), 100);
  rounds_.OnSync({.from = IdOf(1), .round = round(), .step = 101}, now_);
  EXPECT_EQ(failed_step_after(abandoned), 101);
  Vote(0, StepOf(102));
  rounds_.OnSync({.from = IdOf(1), .round = round(), .step = 101}, now_);
  EXPECT_EQ(failed_step_after(abandoned), 102);
  // A late one of an earlier step, and one that trainers push again.
  rounds_.NotePush(101);
  EXPECT_EQ(failed_step_after(absl::DataLossError("late")), 102);
  rounds_.NotePush(103);
  EXPECT_EQ(failed_step_after(absl::UnavailableError("rejected")), 102);
  EXPECT_EQ(rounds_.state().failed_step->why, abandoned);
  rounds_.OnVote({IdOf(2), round(), absl::DataLossError("NaN"), /*refused_step=*/103}, now_,
                 kCommitTime);
  EXPECT_EQ(rounds_.state().failed_step->step, 103);
  // A partition refuses its step, and another one has begun the next step.
  rounds_.NotePush(105);
  rounds_.OnVote({IdOf(2), round(), absl::DataLossError("NaN again"), /*refused_step=*/104}, now_,
                 kCommitTime);
  EXPECT_EQ(rounds_.state().failed_step->step, 104);
  EXPECT_EQ(rounds_.state().FindLoss(105, round() - 1), nullptr);
  EXPECT_EQ(*rounds_.state().FindLoss(104, round() - 1), rounds_.state().failed_step->why);
  // An abort that is not of one step ends the steps that the home has not heard of, too.
  EXPECT_TRUE(rounds_.Abort(round(), /*step=*/0, absl::AbortedError("rank 0 has restarted")));
  ASSERT_NE(rounds_.state().FindLoss(105, round() - 1), nullptr);
  EXPECT_EQ(rounds_.state().FindLoss(105, round() - 1)->message(), "rank 0 has restarted");
  EXPECT_EQ(rounds_.state().FindLoss(105, round() - 2), nullptr);
  rounds_.NotePush(106);
  EXPECT_TRUE(rounds_.OpenRun(/*run_epoch=*/99, "next"));
  EXPECT_FALSE(rounds_.state().failed_step.has_value());
}

TEST_F(RoundsTest, ALaterStepOfAnAbandonedRoundCanBePushedAgain) {
  rounds_.NotePush(101);
  const absl::Status why = absl::AbortedError("rank 4 has abandoned step 100");
  EXPECT_TRUE(rounds_.Abort(round(), /*step=*/100, why));
  ASSERT_NE(rounds_.state().FindLoss(100, round() - 1), nullptr);
  EXPECT_EQ(*rounds_.state().FindLoss(100, round() - 1), why);
  EXPECT_EQ(rounds_.state().FindLoss(101, round() - 1), nullptr);
}

TEST_F(RoundsTest, RoundWithoutProgressExpires) {
  now_ += seconds(100);
  EXPECT_FALSE(rounds_.Expire(now_));  // Nothing has arrived.
  Vote(0);
  now_ += seconds(29);
  Vote(0);  // This is no progress.
  EXPECT_FALSE(rounds_.Expire(now_));
  rounds_.OnSync({.from = IdOf(1), .round = 2, .received_bytes = 10, .missing_ranks = {4, 5}},
                 now_);
  now_ += seconds(29);
  rounds_.OnSync({.from = IdOf(1), .round = 2, .received_bytes = 10, .missing_ranks = {5}}, now_);
  EXPECT_FALSE(rounds_.Expire(now_));
  now_ += seconds(1);
  EXPECT_TRUE(rounds_.Expire(now_));
  ExpectAbort(2, ErrorReason::kSessionExpired,
              "no push progress for 30s (limit 30s, --session-timeout); incomplete: partition 1 "
              "(ema-1) without ranks 5; partition 2 (ema-2)");
  now_ += seconds(100);
  EXPECT_FALSE(rounds_.Expire(now_));
}

TEST_F(RoundsTest, PushesAreRejectedUntilTheTimeIsOver) {
  const auto stops = [](const std::string& member) {
    return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDraining, member + " stops");
  };
  Vote(0);
  EXPECT_TRUE(rounds_.RejectPushes(stops("ema-1"), now_ + minutes(2)));
  ExpectAbort(2, ErrorReason::kDraining, "ema-1 stops");
  EXPECT_TRUE(rounds_.state().rejects_pushes);
  // A second server stops, then a third.
  EXPECT_FALSE(rounds_.RejectPushes(stops("ema-2"), now_ + minutes(3)));
  EXPECT_FALSE(rounds_.RejectPushes(stops("ema-0"), now_ + minutes(1)));
  now_ += minutes(2);
  EXPECT_FALSE(rounds_.Expire(now_));
  EXPECT_TRUE(rounds_.state().rejects_pushes);
  EXPECT_EQ(round(), 3);
  now_ += minutes(1);
  EXPECT_TRUE(rounds_.Expire(now_));
  EXPECT_FALSE(rounds_.state().rejects_pushes);
  EXPECT_EQ(round(), 4);
}

TEST_F(RoundsTest, PushesAreAcceptedWhenAllRejectionsHaveEnded) {
  const absl::Status why = absl::UnavailableError("moves");
  const SteadyTime never = SteadyTime::max();
  rounds_.RejectPushes(why, never);
  EXPECT_TRUE(rounds_.AcceptPushes(never));
  EXPECT_FALSE(rounds_.state().rejects_pushes);
  EXPECT_FALSE(rounds_.AcceptPushes(never));
  // A server stops meanwhile: before the move begins, or after.
  for (const bool stops_first : {true, false}) {
    SCOPED_TRACE(stops_first);
    if (stops_first) rounds_.RejectPushes(why, now_ + minutes(20));
    rounds_.RejectPushes(why, never);
    if (!stops_first) rounds_.RejectPushes(why, now_ + minutes(20));
    EXPECT_FALSE(rounds_.AcceptPushes(never));
    EXPECT_TRUE(rounds_.state().rejects_pushes);
    now_ += minutes(20);
    EXPECT_TRUE(rounds_.Expire(now_));
    EXPECT_FALSE(rounds_.state().rejects_pushes);
  }
  // The move lasts longer than the stop of a server.
  rounds_.RejectPushes(why, never);
  rounds_.RejectPushes(why, now_ + minutes(20));
  now_ += minutes(20);
  EXPECT_FALSE(rounds_.Expire(now_));
  EXPECT_TRUE(rounds_.state().rejects_pushes);
  EXPECT_TRUE(rounds_.AcceptPushes(never));
}

TEST_F(RoundsTest, SettingsComeIntoForceWithACommitOrARun) {
  EXPECT_FALSE(rounds_.SetTracksRevision(1, false));
  EXPECT_TRUE(rounds_.Abort(round(), /*step=*/0, absl::AbortedError("abandoned")));
  EXPECT_EQ(rounds_.state().tracks_revision, 0);
  for (int64_t p = 0; p < kPartitions; ++p) Vote(p);
  EXPECT_EQ(rounds_.state().tracks_revision, 1);
  EXPECT_TRUE(rounds_.SetTracksRevision(2, true));
  EXPECT_EQ(rounds_.state().tracks_revision, 2);
  EXPECT_FALSE(rounds_.SetTracksRevision(3, false));
  EXPECT_TRUE(rounds_.OpenRun(/*run_epoch=*/99, "next"));
  EXPECT_EQ(rounds_.state().tracks_revision, 3);
}

TEST_F(RoundsTest, NothingIsCommittedLongAfterTheRegistryHasAnswered) {
  now_ += minutes(10);
  for (int64_t p = 0; p < kPartitions; ++p) Vote(p);
  EXPECT_EQ(rounds_.state().last_commit->round, 2);
  now_ += seconds(1);
  for (int64_t p = 0; p < kPartitions; ++p) Vote(p);
  EXPECT_EQ(rounds_.state().last_commit->round, 2);
  EXPECT_THAT(rounds_.state().last_abort->why,
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("has not reached the registry for 10m1s (limit 10m, "
                                 "--max-registry-outage)")));
  rounds_.NoteRegistryReached(now_);
  for (int64_t p = 0; p < kPartitions; ++p) Vote(p);
  EXPECT_EQ(rounds_.state().last_commit->round, 4);
}

TEST_F(RoundsTest, StateHasWhatPartitionsKeepForReadersAndSaves) {
  rounds_.SetHomePinnedVersions({41, 43});
  EXPECT_THAT(rounds_.state().home_pinned_versions, ElementsAre(41, 43));
  EXPECT_EQ(round(), 2);
}

}  // namespace
}  // namespace ema::group
