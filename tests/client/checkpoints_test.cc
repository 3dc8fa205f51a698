// SPDX-License-Identifier: Apache-2.0
//
// The calls about checkpoints and labels, pulls by label, and runs that resume.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "ema/client.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class CheckpointCallsTest : public testing::Test {
 protected:
  void SetUp() override {
    server_.checkpoint.set_name("c7");
    server_.checkpoint.set_state(v1::Checkpoint::STATE_COMPLETE);
    server_.checkpoint.set_incarnation(2);
    server_.checkpoint.set_version(7);
    server_.checkpoint.set_step(70);
    server_.checkpoint.set_total_bytes(4096);
    server_.checkpoint.set_commit_time_us(1'700'000'000'000'000);
    server_.checkpoint.add_tracks("ema");
    server_.checkpoint.add_labels("best");
    server_.label.set_name("best");
    server_.label.set_incarnation(2);
    server_.label.set_version(7);
    server_.label.set_step(70);
    server_.label.set_metric(0.5);
    server_.label.set_lower_is_better(true);
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_.address()));
  }

  FakeServer server_{*Manifest::Create({{.name = "w", .shape = {4}}})};
  std::unique_ptr<Client> client_;
};

const VersionId kSeven = {.version = 7, .incarnation = 2};
const absl::Status kBroken = absl::UnavailableError("the connection broke");

TEST_F(CheckpointCallsTest, CreateAsksForWhatItIsGiven) {
  EMA_ASSERT_OK_AND_ASSIGN(Client::CheckpointResult result, client_->CreateCheckpoint("m"));
  EXPECT_EQ(result.checkpoint, "c7");
  EXPECT_EQ(result.version.number, 7);
  EXPECT_EQ(result.total_bytes, 4096);
  EXPECT_EQ(result.state, CheckpointInfo::State::kComplete);

  server_.checkpoint.set_state(v1::Checkpoint::STATE_SAVING);
  EMA_ASSERT_OK_AND_ASSIGN(result, client_->CreateCheckpoint("m", {.version = 7,
                                                                   .incarnation = 2,
                                                                   .tracks = {"ema", "raw"},
                                                                   .async = true,
                                                                   .label = "stable"}));
  EXPECT_EQ(result.state, CheckpointInfo::State::kSaving);
  EXPECT_THAT(server_.checkpoint_calls(),
              ElementsAre("CreateCheckpoint model: \"m\"",
                          "CreateCheckpoint model: \"m\" version: 7 incarnation: 2 tracks: \"ema\" "
                          "tracks: \"raw\" async: true label: \"stable\""));
}

TEST_F(CheckpointCallsTest, GetAndListSayEverything) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointInfo one, client_->GetCheckpoint("m", "c7"));
  EXPECT_EQ(one.name, "c7");
  EXPECT_EQ(one.state, CheckpointInfo::State::kComplete);
  EXPECT_EQ(one.id, kSeven);
  EXPECT_EQ(one.step, 70);
  EXPECT_EQ(one.commit_time, absl::FromUnixSeconds(1'700'000'000));
  EXPECT_THAT(one.tracks, ElementsAre("ema"));
  EXPECT_FALSE(one.is_partial);
  EXPECT_EQ(one.total_bytes, 4096);
  EXPECT_THAT(one.labels, ElementsAre("best"));

  server_.checkpoint.set_state(v1::Checkpoint::STATE_CORRUPT);
  server_.checkpoint.set_is_partial(true);
  server_.checkpoint.set_problem("a byte is wrong");
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointList list, client_->ListCheckpoints("m"));
  ASSERT_THAT(list.checkpoints, SizeIs(1));
  EXPECT_EQ(list.checkpoints[0].state, CheckpointInfo::State::kCorrupt);
  EXPECT_TRUE(list.checkpoints[0].is_partial);
  EXPECT_EQ(list.checkpoints[0].problem, "a byte is wrong");
  ASSERT_THAT(list.labels, SizeIs(1));
  EXPECT_EQ(list.labels[0].name, "best");
  EXPECT_EQ(list.labels[0].id, kSeven);
  EXPECT_EQ(list.labels[0].step, 70);
  EXPECT_EQ(list.labels[0].metric, 0.5);
  EXPECT_TRUE(list.labels[0].lower_is_better);

  server_.label.clear_metric();
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointList by_hand, client_->ListCheckpoints("m"));
  EXPECT_EQ(by_hand.labels[0].metric, std::nullopt);
}

TEST_F(CheckpointCallsTest, AStateThatNobodyKnowsIsMalformed) {
  server_.checkpoint.set_state(v1::Checkpoint::STATE_UNSPECIFIED);
  EXPECT_THAT(client_->GetCheckpoint("m", "c7"),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("checkpoint state 0")));
}

TEST_F(CheckpointCallsTest, LabelsAreSetMovedAndRemoved) {
  EMA_ASSERT_OK_AND_ASSIGN(const CheckpointLabel label, client_->SetLabel("m", "best", kSeven));
  EXPECT_EQ(label.id, kSeven);
  ASSERT_THAT(client_->SetLabel("m", "best"), IsOk());
  ASSERT_THAT(client_->RemoveLabel("m", "best"), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(
      const MetricResult scored,
      client_->ReportMetric("m", {.id = kSeven, .value = 0.5, .lower_is_better = true}));
  EXPECT_TRUE(scored.moved);
  EXPECT_EQ(scored.label.metric, 0.5);
  EXPECT_THAT(server_.checkpoint_calls(),
              ElementsAre("SetLabel model: \"m\" label: \"best\" version: 7 incarnation: 2",
                          "SetLabel model: \"m\" label: \"best\"",
                          "SetLabel model: \"m\" label: \"best\" remove: true",
                          "ReportMetric model: \"m\" version: 7 incarnation: 2 value: 0.5 "
                          "lower_is_better: true"));
}

TEST_F(CheckpointCallsTest, RestoreGoesByVersionOrLabelAndSaysWhatItIsFrom) {
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, client_->RestoreCheckpoint("m", kSeven));
  EXPECT_EQ(version.number, 8);
  EXPECT_EQ(version.restored_from, kSeven);
  ASSERT_THAT(client_->RestoreCheckpoint("m", "best"), IsOk());
  EXPECT_THAT(server_.checkpoint_calls(),
              ElementsAre("RestoreCheckpoint model: \"m\" version: 7 incarnation: 2",
                          "RestoreCheckpoint model: \"m\" label: \"best\""));
}

TEST_F(CheckpointCallsTest, ALabelThatIsNotThereIsRemoved) {
  server_.unary_errors = {
      MakeError(absl::StatusCode::kNotFound, ErrorReason::kLabelNotFound, "no label"),
      MakeError(absl::StatusCode::kNotFound, ErrorReason::kModelNotFound, "no model")};
  EXPECT_THAT(client_->RemoveLabel("m", "best"), IsOk());
  EXPECT_THAT(client_->RemoveLabel("m", "best"), ReasonIs(ErrorReason::kModelNotFound));
}

// What changes nothing twice is tried again when nobody knows whether it was done.
TEST_F(CheckpointCallsTest, AllButRestoreAreRetried) {
  const std::vector<std::function<absl::Status()>> calls = {
      [&] { return client_->CreateCheckpoint("m").status(); },
      [&] { return client_->GetCheckpoint("m", "c7").status(); },
      [&] { return client_->ListCheckpoints("m").status(); },
      [&] { return client_->DeleteCheckpoint("m", "c7"); },
      [&] { return client_->SetLabel("m", "best").status(); },
      [&] { return client_->RemoveLabel("m", "best"); },
      [&] { return client_->ReportMetric("m", {.id = kSeven, .value = 1}).status(); }};
  // All of them before the first call: its thread in the server may still be reading them.
  for (size_t i = 0; i < calls.size(); ++i) {
    server_.unary_errors.insert(server_.unary_errors.end(), {kBroken, absl::OkStatus()});
  }
  server_.unary_errors.push_back(kBroken);
  for (size_t i = 0; i < calls.size(); ++i) EXPECT_THAT(calls[i](), IsOk()) << i;
  EXPECT_THAT(client_->RestoreCheckpoint("m", "best"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("broke")));
  EXPECT_THAT(server_.checkpoint_calls(), SizeIs(2 * calls.size() + 1));
}

TEST_F(CheckpointCallsTest, APullByLabelStaysWithTheVersionThatItBeganWith) {
  server_.pulled_bytes.assign(5000, 'x');
  server_.pull_scripts = {{.break_after_chunks = 2}};
  std::vector<std::byte> memory(5000);
  ASSERT_THAT(client_->Pull(
                  "m", "ema", {.label = "best"},
                  [&](const PullInfo&) { return std::span<std::byte>(memory); }, absl::Seconds(20)),
              IsOk());
  const std::vector<v1::PullRequest> pulls = server_.pulls();
  ASSERT_THAT(pulls, SizeIs(2));
  EXPECT_EQ(pulls[0].label(), "best");
  EXPECT_EQ(pulls[0].version(), 0);
  EXPECT_EQ(pulls[1].label(), "");
  EXPECT_EQ(pulls[1].version(), 42);
  EXPECT_EQ(pulls[1].incarnation(), 3);
}

TEST_F(CheckpointCallsTest, APullByLabelBeginsAnewWhenItsVersionHasGone) {
  server_.pulled_bytes.assign(5000, 'x');
  server_.pull_scripts = {
      {.break_after_chunks = 2},
      {.refuse = MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept, "gone")}};
  std::vector<std::byte> memory(5000);
  ASSERT_THAT(client_->Pull(
                  "m", "ema", {.label = "best"},
                  [&](const PullInfo&) { return std::span<std::byte>(memory); }, absl::Seconds(20)),
              IsOk());
  const std::vector<v1::PullRequest> pulls = server_.pulls();
  ASSERT_THAT(pulls, SizeIs(3));
  EXPECT_EQ(pulls[2].label(), "best");
  EXPECT_EQ(pulls[2].version(), 0);
  EXPECT_EQ(pulls[2].offset(), 0);
}

TEST_F(CheckpointCallsTest, ARunResumesUntilAllHaveJoinedAndNeverAgain) {
  server_.not_ready_count = 2;
  TrainingTime time;
  time.Set(TimeUnit::kBatch, 72);
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ema::Run> run,
                           client_->OpenRun("m", {.resume = ResumePoint{72, kSeven, time}}));
  ASSERT_THAT(run->WaitReady(), IsOk());
  const std::array<float, 4> weights = {1, 2, 3, 4};
  ASSERT_THAT(run->Push(80, time, {std::as_bytes(std::span(weights))}, absl::Seconds(20)), IsOk());
  // As a restarted server, which knows of no runs.
  server_.ForgetRuns();
  ASSERT_THAT(run->Push(90, time, {std::as_bytes(std::span(weights))}, absl::Seconds(20)), IsOk());
  const std::vector<v1::OpenRunRequest> joins = server_.open_runs();
  ASSERT_THAT(joins, SizeIs(4));
  for (size_t i = 0; i < 3; ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(joins[i].resume().step(), 72);
    EXPECT_EQ(joins[i].resume().version().version(), 7);
    EXPECT_EQ(joins[i].resume().version().incarnation(), 2);
    EXPECT_EQ(joins[i].resume().time().batch(), 72);
  }
  EXPECT_FALSE(joins[3].has_resume());
}

TEST_F(CheckpointCallsTest, AResumeByStepAloneLeavesTheRestToTheServer) {
  ASSERT_THAT(client_->OpenRun("m", {.resume = ResumePoint{.step = 72}}), IsOk());
  ASSERT_THAT(client_->OpenRun("m", {}), IsOk());
  const std::vector<v1::OpenRunRequest> joins = server_.open_runs();
  ASSERT_THAT(joins, SizeIs(2));
  EXPECT_EQ(joins[0].resume().ShortDebugString(), "step: 72");
  EXPECT_FALSE(joins[1].has_resume());
}

}  // namespace
}  // namespace ema
