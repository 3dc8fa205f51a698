// SPDX-License-Identifier: Apache-2.0
#include "server/group/participant.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using Answer = Participant::HeaderAnswer;
using Kind = Participant::Action::Kind;
using Phase = Participant::Phase;

constexpr int64_t kIncarnation = 7;
constexpr int64_t kBaseVersion = 40;
constexpr int64_t kEpoch = 3;

GroupState StateOf(int64_t round) {
  return {.incarnation = kIncarnation, .round = round, .run_epoch = kEpoch};
}

GroupState Committed(int64_t round, int64_t version, int64_t next_round) {
  GroupState state = StateOf(next_round);
  state.last_commit = GroupCommit{.round = round, .version = version};
  return state;
}

// A partition in round 1.
class ParticipantTest : public testing::Test {
 protected:
  ParticipantTest() { participant_.OnState(StateOf(1)); }

  static Participant::Header HeaderOf(int64_t round, int64_t step = 100) {
    return {.incarnation = kIncarnation, .round = round, .run_epoch = kEpoch, .step = step};
  }
  void Receive(int64_t round) {
    ASSERT_EQ(participant_.OnHeader(HeaderOf(round)), Answer::kAccept);
  }
  void Prepare(int64_t round) {
    Receive(round);
    ASSERT_TRUE(participant_.EndReceiving(round, PreparedStep{.step = 100, .run_epoch = kEpoch}));
  }

  Participant participant_{{.incarnation = kIncarnation, .partition = 1, .boot = "b"},
                           kBaseVersion};
};

TEST_F(ParticipantTest, MessagesOfAnotherIncarnationChangeNothing) {
  Prepare(1);
  Participant::Header header = HeaderOf(1);
  header.incarnation = kIncarnation - 1;
  EXPECT_EQ(participant_.OnHeader(header), Answer::kFenced);
  header.incarnation = kIncarnation + 1;
  EXPECT_EQ(participant_.OnHeader(header), Answer::kReadRegistry);

  GroupState state = Committed(1, kBaseVersion + 1, 2);
  state.incarnation = kIncarnation - 1;
  EXPECT_EQ(participant_.OnState(state).kind, Kind::kNothing);
  state.incarnation = kIncarnation + 1;
  EXPECT_EQ(participant_.OnState(state).kind, Kind::kReadRegistry);
  EXPECT_EQ(participant_.phase(), Phase::kPrepared);
}

TEST_F(ParticipantTest, NoPushUntilAllPartitionsHaveJoined) {
  Participant joining({.incarnation = kIncarnation, .partition = 1, .boot = "b"}, kBaseVersion);
  EXPECT_EQ(joining.OnHeader(HeaderOf(0)), Answer::kSync);
  EXPECT_EQ(joining.OnHeader(HeaderOf(1)), Answer::kSync);
}

TEST_F(ParticipantTest, AcceptsOnlyPushesOfItsRound) {
  participant_.OnState(StateOf(5));
  EXPECT_EQ(participant_.OnHeader(HeaderOf(4)), Answer::kStaleRound);
  EXPECT_EQ(participant_.OnHeader(HeaderOf(6)), Answer::kSync);
  EXPECT_EQ(participant_.phase(), Phase::kNone);
  EXPECT_EQ(participant_.OnHeader(HeaderOf(5)), Answer::kAccept);
  EXPECT_EQ(participant_.phase(), Phase::kReceiving);
  EXPECT_EQ(participant_.OnHeader(HeaderOf(5)), Answer::kAccept);
}

TEST_F(ParticipantTest, AcceptsOnlyPushesOfTheOpenRun) {
  Participant::Header header = HeaderOf(1);
  header.run_epoch = kEpoch - 1;
  EXPECT_EQ(participant_.OnHeader(header), Answer::kFenced);
  header.run_epoch = kEpoch + 1;
  EXPECT_EQ(participant_.OnHeader(header), Answer::kSync);
}

TEST_F(ParticipantTest, AcceptsNoPushInARoundThatRejectsPushes) {
  GroupState state = StateOf(2);
  state.rejects_pushes = true;
  participant_.OnState(state);
  EXPECT_EQ(participant_.OnHeader(HeaderOf(2)), Answer::kPushesRejected);
  participant_.OnState(StateOf(3));
  EXPECT_EQ(participant_.OnHeader(HeaderOf(3)), Answer::kAccept);
}

TEST_F(ParticipantTest, PreparedStepCannotBeRefused) {
  Prepare(1);
  EXPECT_FALSE(participant_.EndReceiving(1, absl::AbortedError("expired")));
  EXPECT_EQ(participant_.phase(), Phase::kPrepared);
  ASSERT_NE(participant_.to_send(), nullptr);
  EXPECT_THAT(participant_.to_send()->step, IsOk());
}

TEST_F(ParticipantTest, PreparedSessionTakesItsRanksAgainAndNoOtherStep) {
  Prepare(1);
  EXPECT_EQ(participant_.OnHeader(HeaderOf(1, 100)), Answer::kAccept);
  EXPECT_EQ(participant_.OnHeader(HeaderOf(1, 101)), Answer::kSync);
  EXPECT_EQ(participant_.phase(), Phase::kPrepared);
}

TEST_F(ParticipantTest, PreparedStepIsPublishedByTheCommitOfItsRound) {
  Prepare(1);
  EXPECT_EQ(participant_.OnState(StateOf(1)).kind, Kind::kNothing);
  EXPECT_EQ(participant_.OnState(Committed(1, kBaseVersion + 1, 2)).kind, Kind::kPublish);
  EXPECT_EQ(participant_.version(), kBaseVersion + 1);
  EXPECT_EQ(participant_.round(), 2);
  EXPECT_EQ(participant_.phase(), Phase::kNone);
  EXPECT_EQ(participant_.to_send(), nullptr);
  EXPECT_EQ(participant_.OnState(Committed(1, kBaseVersion + 1, 2)).kind, Kind::kNothing);
}

// The state of the next round was lost, and that round has been aborted meanwhile.
TEST_F(ParticipantTest, CommitIsPublishedRoundsLater) {
  Prepare(1);
  EXPECT_EQ(participant_.OnState(Committed(1, kBaseVersion + 1, 4)).kind, Kind::kPublish);
  EXPECT_EQ(participant_.round(), 4);
}

TEST_F(ParticipantTest, StepIsDroppedByTheAbortOfItsRound) {
  for (const int64_t round : {1, 2}) {
    if (round == 1) {
      Receive(round);
    } else {
      Prepare(round);
    }
    GroupState state = StateOf(round + 1);
    state.last_abort = GroupAbort{round, absl::DataLossError("NaN")};
    const Participant::Action action = participant_.OnState(state);
    EXPECT_EQ(action.kind, Kind::kDrop);
    EXPECT_THAT(action.why, StatusIs(absl::StatusCode::kDataLoss, "NaN"));
    EXPECT_EQ(participant_.phase(), Phase::kNone);
  }
  Prepare(3);
  EXPECT_THAT(participant_.OnState(StateOf(5)).why, ReasonIs(ErrorReason::kStepAbandoned));
}

TEST_F(ParticipantTest, AStepIsPushedAgainIfItsRoundWasAbortedForAnEarlierOne) {
  Receive(1);  // Step 100.
  GroupState state = StateOf(2);
  state.last_abort = GroupAbort{1, absl::AbortedError("step 99: abandoned")};
  state.failed_step = FailedStep{99, state.last_abort->why};
  const Participant::Action action = participant_.OnState(state);
  EXPECT_EQ(action.kind, Kind::kDrop);
  EXPECT_THAT(action.why, ReasonIs(ErrorReason::kStaleRound));
}

TEST_F(ParticipantTest, RefusalIsSentUntilTheRoundEnds) {
  Receive(1);
  ASSERT_TRUE(participant_.EndReceiving(1, absl::DataLossError("NaN")));
  EXPECT_EQ(participant_.phase(), Phase::kRefused);
  EXPECT_THAT(participant_.to_send()->step, StatusIs(absl::StatusCode::kDataLoss, "NaN"));
  EXPECT_EQ(participant_.to_send()->refused_step, 100);
  EXPECT_EQ(participant_.OnHeader(HeaderOf(1)), Answer::kSync);
  EXPECT_EQ(participant_.OnState(StateOf(2)).kind, Kind::kNothing);  // It has been dropped already.
  EXPECT_EQ(participant_.to_send(), nullptr);
}

TEST_F(ParticipantTest, SessionOfAnEarlierRoundCannotPrepare) {
  Receive(1);
  participant_.OnState(StateOf(2));
  EXPECT_FALSE(participant_.EndReceiving(1, PreparedStep{}));
  Receive(2);
  EXPECT_FALSE(participant_.EndReceiving(1, PreparedStep{}));
  EXPECT_EQ(participant_.phase(), Phase::kReceiving);
}

TEST_F(ParticipantTest, LateStatesOfEarlierRoundsChangeNothing) {
  participant_.OnState(StateOf(3));
  Prepare(3);
  EXPECT_EQ(participant_.OnState(StateOf(2)).kind, Kind::kNothing);
  EXPECT_EQ(participant_.phase(), Phase::kPrepared);
}

TEST_F(ParticipantTest, MissedVersionIsReported) {
  EXPECT_EQ(participant_.OnState(Committed(1, kBaseVersion + 1, 2)).kind, Kind::kDiverged);
  Prepare(1);
  EXPECT_EQ(participant_.OnState(Committed(1, kBaseVersion + 2, 2)).kind, Kind::kDiverged);
  EXPECT_EQ(participant_.phase(), Phase::kPrepared);
}

}  // namespace
}  // namespace ema::group
