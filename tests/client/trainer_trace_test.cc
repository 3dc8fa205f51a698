// SPDX-License-Identifier: Apache-2.0
//
// The calls that a trainer makes, one after the other, of a server that follows a script.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/step_pusher.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr absl::Duration kPatience = absl::Seconds(30);

Manifest TestManifest() { return *Manifest::Create({{.name = "w", .shape = {1000}}}); }

absl::Status Fenced() {
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced, "the server was restarted");
}

class TrainerTraceTest : public testing::Test {
 protected:
  TrainerTraceTest() {
    v1::PushPlan plan;
    plan.set_revision(1);
    v1::Track* const track = plan.add_tracks()->mutable_track();
    track->set_name("ema");
    (*track->mutable_schedule())["copy"] = "true";
    server_.plan = plan;
  }

  void Attach(StepPusher::OnError on_error) {
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_.address()));
    StepPusher::Options options;
    options.tracks = {{.name = "ema", .schedule = *Schedule::Parse("copy")}};
    options.launch_id = "life";
    options.on_error = on_error;
    options.on_warning = [this](const std::string& text) {
      absl::MutexLock lock(&mu_);
      warnings_.push_back(text);
    };
    EMA_ASSERT_OK_AND_ASSIGN(pusher_,
                             StepPusher::Create(*client_, "m", TestManifest(), {}, options));
  }

  void Step() {
    pusher_->WaitReleased();
    pusher_->AfterStep([this](const StepPusher::Piece&) {
      return StepPusher::Weights{std::as_bytes(std::span(weights_)), nullptr};
    });
    (void)pusher_->WaitPushed();
  }

  // Until the run has been rejoined.
  void AwaitRejoined() {
    const absl::Time wait_end = absl::Now() + kPatience;
    while (pusher_->stats().is_disconnected && absl::Now() < wait_end) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    EXPECT_FALSE(pusher_->stats().is_disconnected) << pusher_->stats().last_error;
  }

  std::vector<int64_t> PushedSteps() const {
    std::vector<int64_t> steps;
    for (const FakeServer::SeenPush& push : server_.pushes()) steps.push_back(push.header.step());
    return steps;
  }
  std::vector<int64_t> AskedSteps() const {
    std::vector<int64_t> steps;
    for (const v1::QueryPushRequest& query : server_.queries()) steps.push_back(query.step());
    return steps;
  }
  std::vector<std::string> warnings() {
    absl::MutexLock lock(&mu_);
    return warnings_;
  }

  FakeServer server_{TestManifest()};
  std::unique_ptr<Client> client_;
  std::vector<float> weights_ = std::vector<float>(1000);
  absl::Mutex mu_;
  std::vector<std::string> warnings_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<StepPusher> pusher_;
};

TEST_F(TrainerTraceTest, RestartedServerIsRejoinedAndAskedForTheLostStep) {
  server_.push_scripts = {{}, {.refuse = Fenced()}};
  Attach(StepPusher::OnError::kSkip);
  Step();
  Step();
  AwaitRejoined();
  Step();
  EXPECT_THAT(PushedSteps(), ElementsAre(1, 2, 3));
  EXPECT_THAT(AskedSteps(), ElementsAre(2));
  const std::vector<v1::OpenRunRequest> opened = server_.open_runs();
  ASSERT_THAT(opened, SizeIs(2));
  EXPECT_EQ(opened[1].launch_id(), "life");
  EXPECT_EQ(opened[0].last_run_epoch(), 0);
  EXPECT_GT(opened[1].last_run_epoch(), 0);
  EXPECT_EQ(pusher_->stats().pushes, 2);
  EXPECT_EQ(pusher_->stats().skipped, 1);
  EXPECT_THAT(warnings(), ElementsAre(HasSubstr("pushing again, 1 steps were lost")));
}

TEST_F(TrainerTraceTest, WaitPushesTheSameStepAgain) {
  server_.push_scripts = {{}, {.refuse = Fenced()}};
  Attach(StepPusher::OnError::kWait);
  for (int step = 1; step <= 3; ++step) Step();
  EXPECT_THAT(PushedSteps(), ElementsAre(1, 2, 2, 3));
  EXPECT_THAT(AskedSteps(), ElementsAre(2));
  EXPECT_EQ(pusher_->stats().pushes, 3);
  EXPECT_EQ(pusher_->stats().skipped, 0);
  EXPECT_THAT(warnings(), ElementsAre(HasSubstr("push of step 2 waits for the server"),
                                      HasSubstr("pushing again, 0 steps were lost")));
}

TEST_F(TrainerTraceTest, RunThatANewerOneFencedIsNotRejoined) {
  server_.push_scripts = {{}, {.refuse = Fenced()}};
  Attach(StepPusher::OnError::kSkip);
  Step();
  server_.fenced = true;
  Step();
  const absl::Time wait_end = absl::Now() + kPatience;
  while (warnings().empty() && absl::Now() < wait_end) absl::SleepFor(absl::Milliseconds(5));
  for (int i = 0; i < 3; ++i) Step();
  EXPECT_THAT(PushedSteps(), ElementsAre(1, 2));
  EXPECT_EQ(server_.open_run_count(), 2);
  EXPECT_EQ(pusher_->stats().skipped, 4);
  EXPECT_THAT(warnings(), ElementsAre(HasSubstr("has taken over; this one no longer pushes.")));
}

TEST_F(TrainerTraceTest, LateRankIsWaitedForInTheRejoinedRun) {
  server_.push_scripts = {{}, {.refuse = Fenced()}};
  Attach(StepPusher::OnError::kSkip);
  Step();
  // The first two calls after the restart find the run incomplete.
  server_.not_ready_count = 3;
  Step();
  AwaitRejoined();
  EXPECT_EQ(server_.open_run_count(), 4);
  Step();
  EXPECT_THAT(PushedSteps(), ElementsAre(1, 2, 3));
}

TEST_F(TrainerTraceTest, ErrorThatNeedsAPersonIsWarnedOfOnce) {
  server_.push_scripts = {{}, {.refuse = Fenced()}};
  Attach(StepPusher::OnError::kSkip);
  Step();
  server_.open_run_error = absl::PermissionDeniedError("the token may not push");
  Step();
  const absl::Time wait_end = absl::Now() + kPatience;
  while (server_.open_run_count() < 4 && absl::Now() < wait_end) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_THAT(warnings(), ElementsAre(AllOf(HasSubstr("until this is fixed"),
                                            HasSubstr("the token may not push"))));
  // Training ends without waiting for the next try.
  pusher_ = nullptr;
}

TEST_F(TrainerTraceTest, TrainerAsksForThePlanWhileEveryTrackIsPaused) {
  server_.plan->mutable_tracks(0)->mutable_track()->set_paused(true);
  Attach(StepPusher::OnError::kSkip);
  for (int i = 0; i < 3; ++i) Step();
  EXPECT_THAT(PushedSteps(), IsEmpty());
  EXPECT_EQ(server_.open_run_count(), 4);
  EXPECT_EQ(pusher_->stats().skipped, 0);
}

}  // namespace
}  // namespace ema
