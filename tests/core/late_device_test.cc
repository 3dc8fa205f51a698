// SPDX-License-Identifier: Apache-2.0
//
// Sessions on a device that does its work later than it is asked to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "server/device/accelerator_device.h"
#include "tests/core/test_model.h"
#include "tests/testutil/fake_accelerator.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kElements = 20'000;

class LateDeviceTest : public testing::Test {
 protected:
  void Create(NonFinitePolicy non_finite = NonFinitePolicy::kReject) {
    const auto created =
        store_.Create({.name = "m",
                       .manifest = MakeManifest({{"a", Dtype::kFloat32, {kElements}},
                                                 {"b", Dtype::kFloat32, {kElements}}}),
                       .tracks = {{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")},
                                  {.name = "raw", .schedule = MakeSchedule("copy")}},
                       .non_finite = non_finite});
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
    rank_ = std::make_unique<TestRank>(model_, "launch");
    ASSERT_THAT(rank_->Join(), IsOk());
  }

  static std::vector<std::byte> Filled(float value) {
    return BytesOf(std::vector<float>(2 * kElements, value));
  }
  std::vector<float> Read(const std::string& track) { return FloatsOf(*ReadAll(*model_, track)); }

  // Slabs are filled several times by a chunk, so some of its work has begun, and some has not.
  ModelStore store_{
      MakeAcceleratorDevice(
          std::make_shared<FakeAccelerator>(FakeAccelerator::Options{.max_delay_us = 3'000}),
          {.kept_free_bytes = int64_t{64} << 20, .slab_bytes = 16 << 10}),
      SmallBlocks()};
  std::shared_ptr<Model> model_;
  std::unique_ptr<TestRank> rank_;
};

TEST_F(LateDeviceTest, AnAbandonedStepWritesNothingIntoTheNext) {
  Create();
  ASSERT_THAT(rank_->Push(1, Filled(1)), IsOk());
  for (int step = 2; step < 40; step += 2) {
    const std::vector<std::byte> wrong = Filled(-1000);
    auto outcome = std::make_shared<PushOutcome>();
    EMA_ASSERT_OK_AND_ASSIGN(auto push, rank_->Open(step, outcome));
    ASSERT_THAT(TestRank::AddChunk(*push, wrong, 0, static_cast<int64_t>(wrong.size())), IsOk());
    // It gets the memory of the step before, whose stream is still there.
    ASSERT_THAT(rank_->Push(step + 1, Filled(static_cast<float>(step))), IsOk());
    EXPECT_THAT(outcome->result, ReasonIs(ErrorReason::kStepAbandoned));
    EXPECT_THAT(Read("raw"), Each(static_cast<float>(step)));
  }
}

TEST_F(LateDeviceTest, WhatAFencedStreamHasFoldedIsInTheVersion) {
  Create();
  for (int step = 1; step < 20; ++step) {
    const std::vector<std::byte> bytes = Filled(static_cast<float>(step));
    const auto half = static_cast<int64_t>(bytes.size()) / 2;
    EMA_ASSERT_OK_AND_ASSIGN(auto older, rank_->Open(step, std::make_shared<PushOutcome>()));
    ASSERT_THAT(TestRank::AddChunk(*older, bytes, 0, half), IsOk());
    auto outcome = std::make_shared<PushOutcome>();
    EMA_ASSERT_OK_AND_ASSIGN(auto newer, rank_->Open(step, outcome));
    ASSERT_THAT(TestRank::AddChunk(*newer, bytes, half, half), IsOk());
    if (step % 2 == 0) older = nullptr;  // Or it goes later.
    ASSERT_THAT(newer->Commit({1, half, Crc32c(0, bytes)}), IsOk());
    ASSERT_THAT(outcome->result, IsOk());
    EXPECT_THAT(Read("raw"), Each(static_cast<float>(step)));
  }
}

TEST_F(LateDeviceTest, ADamagedChunkNeverReachesTheDevice) {
  Create();
  for (int step = 1; step < 10; ++step) {
    const std::vector<std::byte> bytes = Filled(static_cast<float>(step));
    const auto total = static_cast<int64_t>(bytes.size());
    // Its infinities would end the step, too.
    const std::vector<std::byte> wrong = Filled(std::numeric_limits<float>::infinity());
    EMA_ASSERT_OK_AND_ASSIGN(auto older, rank_->Open(step, std::make_shared<PushOutcome>()));
    // Less than a slab, so that nothing is launched by itself.
    const std::span<const std::byte> piece(wrong.data(), 1000);
    EXPECT_THAT(older->AddChunk(
                    {0, Crc32c(0, std::span<const std::byte>(bytes.data(), 1000)), 1000}, {piece}),
                ReasonIs(ErrorReason::kChunkCorrupt));
    auto outcome = std::make_shared<PushOutcome>();
    EMA_ASSERT_OK_AND_ASSIGN(auto newer, rank_->Open(step, outcome));
    ASSERT_THAT(TestRank::AddChunk(*newer, bytes, 0, total), IsOk());
    ASSERT_THAT(newer->Commit({1, total, Crc32c(0, bytes)}), IsOk());
    ASSERT_THAT(outcome->result, IsOk());
    EXPECT_THAT(Read("raw"), Each(static_cast<float>(step)));
  }
}

TEST_F(LateDeviceTest, WhatAFencedStreamHasSeenThatIsNotFiniteEndsTheStep) {
  Create();
  ASSERT_THAT(rank_->Push(1, Filled(1)), IsOk());
  std::vector<float> values(2 * kElements, 2);
  values[17] = std::numeric_limits<float>::infinity();
  const std::vector<std::byte> bytes = BytesOf(values);
  const auto half = static_cast<int64_t>(bytes.size()) / 2;
  EMA_ASSERT_OK_AND_ASSIGN(auto older, rank_->Open(2, std::make_shared<PushOutcome>()));
  ASSERT_THAT(TestRank::AddChunk(*older, bytes, 0, half), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(auto newer, rank_->Open(2, std::make_shared<PushOutcome>()));
  ASSERT_THAT(TestRank::AddChunk(*newer, bytes, half, half), IsOk());
  EXPECT_THAT(newer->Commit({1, half, Crc32c(0, bytes)}),
              AllOf(StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("tensor \"a\" holds NaN or infinity at element 17")),
                    ReasonIs(ErrorReason::kNonFinite)));
  EXPECT_EQ(model_->history().latest()->number, 1);
  EXPECT_THAT(Read("ema"), Each(1.0f));
}

TEST_F(LateDeviceTest, ATensorThatIsNotFiniteIsSkippedAndNamed) {
  Create(NonFinitePolicy::kSkipTensor);
  ASSERT_THAT(rank_->Push(1, Filled(1)), IsOk());
  std::vector<float> values(2 * kElements, 3);
  values[2 * kElements - 1] = std::numeric_limits<float>::quiet_NaN();
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult result, rank_->Push(2, BytesOf(values)));
  EXPECT_THAT(result.record.skipped_tensors, testing::ElementsAre("b"));
  std::vector<float> expected(2 * kElements, 2);
  std::fill(expected.begin() + kElements, expected.end(), 1.0f);
  EXPECT_EQ(Read("ema"), expected);
}

TEST(WaitingRanksTest, HoldNoMemoryByWhichWeightsCome) {
  constexpr int64_t kRanks = 20;
  const auto accelerator = std::make_shared<FakeAccelerator>(FakeAccelerator::Options{});
  ModelStore store(MakeAcceleratorDevice(accelerator, {.slab_bytes = 16 << 10}), SmallBlocks());
  const auto created =
      store.Create({.name = "m",
                    .manifest = MakeManifest({{"w", Dtype::kFloat32, {kRanks}}}),
                    .tracks = {{.name = "raw", .schedule = MakeSchedule("copy")}}});
  ASSERT_THAT(created, IsOk());
  std::vector<TestRank> ranks;
  for (int64_t i = 0; i < kRanks; ++i) {
    ranks.emplace_back(created->model, "launch", i, kRanks, std::vector<Shard>{{0, {i}, {1}}},
                       /*whole=*/false);
    ASSERT_THAT(ranks.back().Join(), IsOk());
  }
  const int64_t ring_bytes = store.device().overhead(0).host_bytes_per_stream;
  std::vector<std::unique_ptr<RankPush>> pushes;
  std::vector<float> expected;
  const auto outcome = std::make_shared<PushOutcome>();
  for (int64_t i = 0; i < kRanks; ++i) {
    expected.push_back(static_cast<float>(i));
    const std::vector<std::byte> bytes = BytesOf({expected.back()});
    EMA_ASSERT_OK_AND_ASSIGN(pushes.emplace_back(), ranks[i].Open(1, outcome));
    ASSERT_THAT(TestRank::AddChunk(*pushes.back(), bytes, 0, 4), IsOk());
    ASSERT_THAT(pushes.back()->Commit(TestRank::EndOf(bytes, 1)), IsOk());
    EXPECT_EQ(accelerator->pinned_bytes(), ring_bytes) << i;
  }
  ASSERT_THAT(outcome->result, IsOk());
  EXPECT_EQ(FloatsOf(*ReadAll(*created->model, "raw")), expected);
}

// Of which half is frozen, in a block with the others: behind them, or one by one between them.
TEST(ManyTensorsTest, AStepIsFewPiecesOfWork) {
  constexpr int64_t kTensors = 400;
  constexpr int64_t kLive = kTensors / 2;
  constexpr int64_t kSmall = 101;
  std::vector<TensorSpec> tensors;
  for (int64_t i = 0; i < kTensors; ++i) {
    tensors.push_back({absl::StrCat("t", 1000 + i), Dtype::kFloat32, {kSmall}});
  }
  for (const bool is_mixed : {false, true}) {
    SCOPED_TRACE(is_mixed);
    const auto is_live = [&](int64_t i) { return is_mixed ? i % 2 == 0 : i < kLive; };
    const auto accelerator = std::make_shared<FakeAccelerator>(FakeAccelerator::Options{});
    ModelStore::Options options = SmallBlocks();
    options.model.block_bytes = 1 << 20;
    ModelStore store(MakeAcceleratorDevice(accelerator, {}), options);
    const auto created =
        store.Create({.name = "m",
                      .manifest = MakeManifest(tensors),
                      .tracks = {{.name = "ema", .schedule = MakeSchedule("copy")}}});
    ASSERT_THAT(created, IsOk());
    std::vector<Shard> shards;
    std::vector<float> expected;
    for (const bool live : {true, false}) {
      for (int64_t i = 0; i < kTensors; ++i) {
        if (is_live(i) == live) shards.push_back(WholeTensor(created->model->manifest(), i));
      }
    }
    for (int64_t i = 0; i < kTensors; ++i) {
      expected.insert(expected.end(), kSmall, is_live(i) ? 2.0f : 1.0f);
    }
    TestRank rank(created->model, "launch", 0, 1, shards, /*whole=*/false);
    ASSERT_THAT(rank.Join(kTensors - kLive), IsOk());
    ASSERT_THAT(rank.Push(1, BytesOf(std::vector<float>(kTensors * kSmall, 1))), IsOk());
    rank.SetOmitsFrozen(true);
    const std::vector<std::byte> live = BytesOf(std::vector<float>(kLive * kSmall, 2));
    ASSERT_THAT(rank.Push(2, live), IsOk());
    const int64_t before = accelerator->work_count();
    ASSERT_THAT(rank.Push(3, live), IsOk());
    // What is frozen is copied; then a few slabs, which grow.
    EXPECT_LE(accelerator->work_count() - before, 10);
    EXPECT_EQ(FloatsOf(*ReadAll(*created->model, "ema")), expected);
  }
}

}  // namespace
}  // namespace ema
