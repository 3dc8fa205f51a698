// SPDX-License-Identifier: Apache-2.0
//
// Modules that train while the server is away, slow, or another's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <filesystem>
#include <thread>

#include "absl/time/clock.h"
#include "tests/client/torch_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST_F(TorchTest, TrainingGoesOnWithoutTheServerAndThenWithIt) {
  Trainer trainer;
  std::vector<int64_t> told;
  Attachment::Options options = WithEma();
  options.on_skip = [&](int64_t step, const absl::Status&) { told.push_back(step); };
  const auto ema = Attach(trainer.net, options);
  for (int i = 0; i < 6; ++i) trainer.Step(*ema);
  ASSERT_THAT(ema->WaitPushed(), IsOk());
  EXPECT_EQ(ema->version()->step, 6);

  const int port = server_->port();
  StopServer();
  for (int i = 0; i < 20; ++i) trainer.Step(*ema);
  EXPECT_EQ(ema->step(), 26);
  EXPECT_TRUE(ema->stats().is_disconnected);
  EXPECT_GT(ema->stats().skipped, 5);
  EXPECT_THAT(told, ElementsAre(8));
  EXPECT_THAT(ema->stats().last_error, Not(IsOk()));

  // One that has forgotten the model: its first version is what was pushed then.
  StartServer(port);
  const int64_t pushes_before = ema->stats().pushes;
  const absl::Time wait_end = absl::Now() + kPatience;
  while (ema->stats().pushes == pushes_before && absl::Now() < wait_end) {
    trainer.Step(*ema);
    ASSERT_THAT(ema->WaitPushed(), IsOk());
  }
  ASSERT_GT(ema->stats().pushes, pushes_before) << ema->stats().last_error;
  EXPECT_FALSE(ema->stats().is_disconnected);
  EXPECT_EQ(ema->stats().lost_versions, pushes_before);
  EXPECT_EQ(ema->version()->number, 1);
  EXPECT_EQ(ema->version()->step, ema->step());
  EXPECT_THAT(Differences(Pulled(), TensorsOf(trainer.net)), IsEmpty());
}

TEST_F(TorchTest, RanksMeetAgainAfterARestart) {
  Trainer trainers[2];
  CopyInto(trainers[1].net, trainers[0].net);
  const int port = server_->port();
  const absl::Time wait_end = absl::Now() + kPatience;
  std::atomic<int> met = 0;
  std::atomic<bool> restarted = false;
  std::atomic<bool> stop = false;
  // Ranks step together, as gradients that are summed make them.
  std::barrier stepped(2, [&]() noexcept {
    if (!restarted.exchange(true)) {
      StopServer();
      StartServer(port);
    }
    stop = met == 2 || absl::Now() > wait_end;
  });
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Attachment::Options options = WithEma();
      options.launch_id = "launch";
      options.rank = rank;
      options.world_size = 2;
      const auto ema = Attach(trainers[rank].net, options);
      trainers[rank].Step(*ema);
      EXPECT_THAT(ema->WaitPushed(), IsOk());
      EXPECT_EQ(ema->stats().pushes, 1);
      stepped.arrive_and_wait();
      bool has_met = false;
      while (!stop) {
        trainers[rank].Step(*ema);
        if (!has_met && ema->stats().pushes > 1) {
          has_met = true;
          ++met;
        }
        stepped.arrive_and_wait();
      }
      EXPECT_TRUE(has_met) << ema->stats().last_error;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo info, client_->GetModel("m"));
  EXPECT_GE(info.latest->number, 1);
}

TEST_F(TorchTest, ANewerRunTakesOver) {
  Trainer trainer;
  const auto older = Attach(trainer.net);
  trainer.Step(*older);
  ASSERT_THAT(older->WaitPushed(), IsOk());
  Trainer next;
  const auto newer = Attach(next.net);
  EXPECT_EQ(newer->step(), 1);
  trainer.Step(*older);
  ASSERT_THAT(older->WaitPushed(), IsOk());
  EXPECT_EQ(older->stats().pushes, 1);
  EXPECT_THAT(older->stats().last_error, ReasonIs(ErrorReason::kFenced));
  next.Step(*newer);
  ASSERT_THAT(newer->WaitPushed(), IsOk());
  EXPECT_EQ(newer->stats().pushes, 1) << newer->stats().last_error;
  EXPECT_EQ(newer->version()->step, 2);
}

TEST_F(TorchTest, AnAverageOfAnEarlierTrainingIsRefusedContinuedOrReplaced) {
  using Existing = StepPusher::Existing;
  Trainer trainer;
  const auto first = Attach(trainer.net);
  trainer.Step(*first);
  ASSERT_THAT(first->WaitPushed(), IsOk());
  trainer.Step(*first);
  ASSERT_THAT(first->WaitPushed(), IsOk());

  Attachment::Options options = WithEma();
  EXPECT_THAT(Attachment::Create(*client_, "m", trainer.net, options),
              AllOf(ReasonIs(ErrorReason::kResumeMismatch),
                    StatusIs(absl::StatusCode::kFailedPrecondition,
                             AllOf(HasSubstr("at step 2"), HasSubstr("kContinue"),
                                   HasSubstr("kNew"), HasSubstr("Options::resume")))));
  // Nobody has taken over. Pushes are due at steps 1, 2, 4, 6.
  for (int i = 0; i < 2; ++i) trainer.Step(*first);
  ASSERT_THAT(first->WaitPushed(), IsOk());
  EXPECT_EQ(first->stats().pushes, 3) << first->stats().last_error;

  options.existing = Existing::kContinue;
  const auto second = Attach(trainer.net, options);
  for (int i = 0; i < 2; ++i) trainer.Step(*second);
  EMA_ASSERT_OK_AND_ASSIGN(const std::optional<Version> continued, second->WaitPushed());
  EXPECT_EQ(continued->number, 4);
  EXPECT_EQ(continued->step, 6);

  options.existing = Existing::kNew;
  const auto third = Attach(trainer.net, options);
  trainer.Step(*third);
  EMA_ASSERT_OK_AND_ASSIGN(const std::optional<Version> fresh, third->WaitPushed());
  EXPECT_EQ(fresh->number, 1);
  EXPECT_EQ(fresh->step, 1);

  options.resume = {.step = 1};
  EXPECT_THAT(Attachment::Create(*client_, "m", trainer.net, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("existing and resume")));
}

TEST_F(TorchTest, ResumesWhereTheTrainerStands) {
  RestartWithDisk();
  Trainer trainer;
  Reference reference;
  std::optional<Version> at_6;
  {
    const auto ema = Attach(trainer.net);
    for (int64_t step = 1; step <= 6; ++step) {
      trainer.Step(*ema);
      reference.Step(step, trainer.net);
    }
    EMA_ASSERT_OK_AND_ASSIGN(at_6, ema->WaitPushed());
    ASSERT_THAT(client_->CreateCheckpoint("m"), IsOk());
    // What the checkpoint of the trainer does not have.
    Trainer strayed;
    for (int i = 0; i < 2; ++i) strayed.Step(*ema);
  }
  ASSERT_TRUE(at_6.has_value());
  Attachment::Options options = WithEma();
  options.resume = {.step = 6, .version = VersionId{at_6->number, at_6->incarnation}};
  const auto ema = Attach(trainer.net, options);
  EXPECT_EQ(ema->step(), 6);
  for (int64_t step = 7; step <= 10; ++step) {
    trainer.Step(*ema);
    reference.Step(step, trainer.net);
  }
  ema->Close();
  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());

  options.resume->version->version = 99;
  EXPECT_THAT(Attachment::Create(*client_, "m", trainer.net, options), Not(IsOk()));
  options.start_step = 6;
  EXPECT_THAT(Attachment::Create(*client_, "m", trainer.net, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("start_step 6 and resume")));
  // A model that is gone is not made anew.
  ASSERT_THAT(client_->DeleteModel("m"), IsOk());
  options.start_step.reset();
  EXPECT_THAT(Attachment::Create(*client_, "m", trainer.net, options),
              ReasonIs(ErrorReason::kModelNotFound));
  EXPECT_THAT(client_->GetModel("m"), ReasonIs(ErrorReason::kModelNotFound));
}

TEST_F(TorchTest, CorruptCheckpointsAreReportedUntilTheModelIsDeleted) {
  RestartWithDisk();
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  trainer.Step(*ema);
  ASSERT_THAT(ema->WaitPushed(), IsOk());
  const int port = server_->port();
  StopServer();  // It saves the model.
  for (const auto& entry : std::filesystem::recursive_directory_iterator(data_dir_)) {
    if (entry.path().filename() == "manifest.json") std::filesystem::resize_file(entry.path(), 10);
  }
  StartServer(port);
  const absl::Time wait_end = absl::Now() + kPatience;
  const auto is_refused = [&] {
    return GetErrorReason(ema->stats().last_error) == ErrorReason::kAllCheckpointsCorrupt;
  };
  while (!is_refused() && absl::Now() < wait_end) trainer.Step(*ema);
  EXPECT_TRUE(is_refused()) << ema->stats().last_error;
  Trainer next;
  EXPECT_THAT(Attachment::Create(*client_, "m", next.net, WithEma()),
              ReasonIs(ErrorReason::kAllCheckpointsCorrupt));
  ASSERT_THAT(client_->DeleteModel("m"), IsOk());
  while (ema->stats().pushes == 1 && absl::Now() < wait_end) trainer.Step(*ema);
  EXPECT_GT(ema->stats().pushes, 1) << ema->stats().last_error;
}

TEST_F(StalledTorchTest, AStepWaitsNoLongerThanMaxWaitAndGivesThePushUp) {
  Attachment::Options options = WithEma();
  options.max_wait = absl::Milliseconds(50);
  const auto ema = AttachBy(*far_client_, large_, options);
  proxy_->SetStalled(true);
  ema->Step(optimizer_);
  ema->Step(optimizer_);
  EXPECT_EQ(ema->stats().pushes, 0);
  EXPECT_GE(ema->stats().skipped, 1);
  EXPECT_THAT(ema->stats().last_error, Not(IsOk()));
  EXPECT_EQ(ema->step(), 2);
  proxy_->SetStalled(false);
  ema->Close();
}

}  // namespace
}  // namespace ema
