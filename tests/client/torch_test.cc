// SPDX-License-Identifier: Apache-2.0
//
// Modules that train: what is pushed and averaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/client/torch_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(TorchTest, AveragesAreThoseOfTheDefinition) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  Reference reference;
  for (int64_t step = 1; step <= 40; ++step) {
    trainer.Step(*ema);
    EXPECT_EQ(ema->step(), step);
    reference.Step(step, trainer.net);
  }
  ema->Close();
  EXPECT_EQ(ema->stats().pushes, 21);
  EXPECT_EQ(ema->stats().skipped, 0);
  EXPECT_THAT(ema->stats().last_error, IsOk());
  ASSERT_TRUE(ema->version().has_value());
  EXPECT_EQ(ema->version()->step, 40);

  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());
  EXPECT_FALSE(torch::equal(reference.average().at("encoder.weight"), trainer.net.encoder->weight));
}

TEST_F(TorchTest, TheServerKnowsBuffersTiedAndFrozenTensors) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo info, client_->GetModel("m"));
  EXPECT_EQ(info.manifest.tensor_count(), 9);
  const TensorSpec& tied = info.manifest.tensor(*info.manifest.Find("hidden.weight"));
  EXPECT_THAT(tied.aliases, ElementsAre("again.weight"));
  EXPECT_FALSE(tied.is_buffer);
  EXPECT_TRUE(info.manifest.tensor(*info.manifest.Find("norm.running_mean")).is_buffer);
  EXPECT_EQ(info.manifest.tensor(*info.manifest.Find("norm.num_batches_tracked")).dtype,
            Dtype::kInt64);

  Reference reference;
  for (int64_t step = 1; step <= 20; ++step) {
    trainer.Step(*ema);
    reference.Step(step, trainer.net);
  }
  EXPECT_THAT(ema->WaitPushed(), IsOk());
  // Eleven pushes, and the frozen layer in one of them.
  EXPECT_LT(ema->stats().sent_bytes, 2 * kFrozenBytes);

  ema->WaitReleased();
  {
    const torch::NoGradGuard no_grad;
    trainer.net.frozen->weight.mul_(-3);
  }
  for (int64_t step = 21; step <= 24; ++step) {
    trainer.Step(*ema);
    reference.Step(step, trainer.net);
  }
  ema->Close();
  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());
}

TEST_F(TorchTest, FrozenTensorsArePushedAgainAfterACountedWrite) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  const auto train_and_send = [&](int64_t steps) {
    const int64_t before = ema->stats().sent_bytes;
    for (int64_t step = 0; step < steps; ++step) trainer.Step(*ema);
    EXPECT_THAT(ema->WaitPushed(), IsOk());
    return ema->stats().sent_bytes - before;
  };
  EXPECT_GT(train_and_send(2), kFrozenBytes);
  ema->WaitReleased();
  {
    const torch::NoGradGuard no_grad;
    trainer.net.frozen->weight.mul_(1);
  }
  EXPECT_GT(train_and_send(2), kFrozenBytes);
  ema->WaitReleased();
  trainer.net.frozen->weight.data_ptr<float>()[7] += 1;
  EXPECT_LT(train_and_send(4), kFrozenBytes);
  // Other memory.
  ema->WaitReleased();
  trainer.net.frozen->weight.set_data(trainer.net.frozen->weight.detach().clone());
  EXPECT_GT(train_and_send(2), kFrozenBytes);
  EXPECT_EQ(ema->stats().skipped, 0) << ema->stats().last_error;
}

TEST_F(TorchTest, RanksSendEvenShares) {
  Trainer trainers[2];
  CopyInto(trainers[1].net, trainers[0].net);
  StepPusher::Stats stats[2];
  Reference reference;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Attachment::Options options = WithEma();
      options.launch_id = "launch";
      options.rank = rank;
      options.world_size = 2;
      const auto ema = Attach(trainers[rank].net, options);
      ASSERT_NE(ema, nullptr);
      for (int64_t step = 1; step <= 20; ++step) {
        trainers[rank].Backward();
        // Those of rank 0 count.
        if (rank == 1) trainers[rank].net.norm->running_mean.fill_(100);
        ema->Step(trainers[rank].optimizer);
        if (rank == 0) reference.Step(step, trainers[rank].net);
      }
      ema->Close();
      EXPECT_EQ(ema->step(), 20);
      stats[rank] = ema->stats();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const StepPusher::Stats& of_rank : stats) {
    EXPECT_EQ(of_rank.pushes, 11) << of_rank.last_error;
    EXPECT_EQ(of_rank.skipped, 0);
  }
  // At each push within an element, and one of what is not frozen.
  EXPECT_LE(std::abs(stats[0].sent_bytes - stats[1].sent_bytes), 11 * 16);
  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());
}

TEST_F(TorchTest, RunsThatLackALaunchAreRefused) {
  Net net;
  Attachment::Options options = WithEma();
  options.world_size = 2;
  EXPECT_THAT(Attachment::Create(*client_, "m", net, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("launch_id is empty")));
  EXPECT_THAT(client_->GetModel("m"), ReasonIs(ErrorReason::kModelNotFound));
}

TEST_F(TorchTest, AClosureRunsInsideTheStep) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  Reference reference;
  for (int64_t step = 1; step <= 10; ++step) {
    const torch::Tensor loss = ema->Step(trainer.optimizer, [&] {
      trainer.Backward();
      return torch::tensor(static_cast<double>(step));
    });
    EXPECT_EQ(loss.item<double>(), static_cast<double>(step));
    reference.Step(step, trainer.net);
  }
  ema->Close();
  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());
}

TEST_F(TorchTest, LoopsOfAnotherKindCountTheirSteps) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  Reference reference;
  for (int64_t step = 1; step <= 10; ++step) {
    trainer.Backward();
    ema->WaitReleased();
    trainer.optimizer.step();
    ema->AfterStep();
    reference.Step(step, trainer.net);
  }
  ema->Close();
  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());
}

TEST_F(TorchTest, AModuleThatChangesIsNotPushedAndTheStepCounted) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  trainer.Step(*ema);
  ASSERT_THAT(ema->WaitPushed(), IsOk());
  trainer.net.register_buffer("late", torch::zeros({2}));
  trainer.Step(*ema);
  EXPECT_EQ(ema->stats().skipped, 1);
  EXPECT_THAT(ema->stats().last_error, StatusIs(absl::StatusCode::kInvalidArgument,
                                                HasSubstr("changed since it was attached")));
}

TEST_F(TorchTest, TheExampleRuns) {
  const std::string command = absl::StrCat(EMA_CPP_TRAIN_BINARY, " ", address_, " mlp");
  FILE* const output = popen(command.c_str(), "r");
  ASSERT_NE(output, nullptr);
  int version = 0;
  int step = 0;
  double trained = 0;
  double averaged = 0;
  EXPECT_EQ(fscanf(output, "version %d, step %d trained: %lf averaged: %lf", &version, &step,
                   &trained, &averaged),
            4);
  EXPECT_EQ(pclose(output), 0);
  EXPECT_EQ(step, 300);
  EXPECT_LT(averaged, trained);
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo info, client_->GetModel("mlp"));
  EXPECT_EQ(info.latest->number, version);
}

TEST_F(StalledTorchTest, WhatTheOptimizerDoesNotHoldIsCopied) {
  const auto ema = AttachBy(*far_client_, large_, WithEma());
  proxy_->SetStalled(true);
  ema->Step(optimizer_);
  const std::map<std::string, torch::Tensor> pushed = CopyOf(large_);
  {
    const torch::NoGradGuard no_grad;
    large_.others->weight.fill_(7);
  }
  proxy_->SetStalled(false);
  ema->Close();
  EXPECT_EQ(ema->stats().pushes, 1) << ema->stats().last_error;
  Large average;
  ASSERT_THAT(PullInto(*client_, "m", average), IsOk());
  EXPECT_THAT(Differences(TensorsOf(average), pushed), IsEmpty());
}

TEST_F(StalledTorchTest, WhatIsFrozenIsReadInPlaceAndWaitedFor) {
  large_.others->weight.set_requires_grad(false);
  Attachment::Options options = WithEma();
  options.max_wait = absl::Milliseconds(100);
  const auto ema = AttachBy(*far_client_, large_, options);
  proxy_->SetStalled(true);
  ema->Step(optimizer_);
  // So Step() has given up what it could not wait for.
  EXPECT_EQ(ema->stats().skipped, 1);
  proxy_->SetStalled(false);
}

TEST_F(StalledTorchTest, CopiesThatWouldBeTooLargeAreNotMade) {
  large_.register_buffer("small", torch::zeros({1 << 20}));
  large_.register_buffer("larger", torch::zeros({16 << 20}));
  Attachment::Options options = WithEma();
  options.max_wait = absl::Milliseconds(100);
  const auto ema = AttachBy(*far_client_, large_, options);
  proxy_->SetStalled(true);
  ema->Step(optimizer_);
  EXPECT_EQ(ema->stats().skipped, 1);
  proxy_->SetStalled(false);
}

}  // namespace
}  // namespace ema
