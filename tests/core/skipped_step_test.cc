// SPDX-License-Identifier: Apache-2.0
//
// Steps that a rank says it will never push: no other waits for it, whenever it says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "server/device/accelerator_device.h"
#include "tests/core/test_model.h"
#include "tests/testutil/fake_accelerator.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTensorBytes = 4000;

// Calls a function, once, before it gives memory for weights.
class CallingAccelerator final : public FakeAccelerator {
 public:
  CallingAccelerator() : FakeAccelerator({}) {}

  void CallAtNextAllocation(std::function<void()> function) { function_ = std::move(function); }
  bool has_called() const { return function_ == nullptr; }
  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocateDevice(int64_t size_bytes) override {
    // Streams have memory, too, of other sizes.
    if (size_bytes >= kTensorBytes && size_bytes <= 2 * kTensorBytes) {
      if (const auto function = std::exchange(function_, nullptr)) function();
    }
    return FakeAccelerator::AllocateDevice(size_bytes);
  }

 private:
  std::function<void()> function_;
};

class SkippedStepTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto created = store_.Create(
        {.name = "m",
         .manifest = MakeManifest({{"a", Dtype::kFloat32, {1000}}, {"b", Dtype::kFloat32, {1000}}}),
         .tracks = {{.name = "raw", .schedule = MakeSchedule("copy")}}});
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
    for (int64_t rank = 0; rank < 2; ++rank) {
      ranks_.emplace_back(model_, "launch", rank, 2,
                          std::vector<Shard>{WholeTensor(model_->manifest(), rank)}, false);
      ASSERT_THAT(ranks_[rank].Join(), IsOk());
    }
  }
  void SkipStep(int64_t step, int64_t rank = 1) {
    EXPECT_THAT(model_->QueryPush(ranks_[rank].run_epoch(), step, rank,
                                  /*abandon_if_unfinished=*/true, "no memory"),
                IsOk());
  }
  absl::Status Open(int64_t step) {
    return ranks_[0].Open(step, std::make_shared<PushOutcome>()).status();
  }
  // By both ranks.
  void Commit(int64_t step) {
    const std::vector<std::byte> bytes(kTensorBytes);
    std::vector<std::unique_ptr<RankPush>> pushes;
    auto outcome = std::make_shared<PushOutcome>();
    for (TestRank& rank : ranks_) {
      EMA_ASSERT_OK_AND_ASSIGN(pushes.emplace_back(), rank.Open(step, outcome));
      ASSERT_THAT(TestRank::AddChunk(*pushes.back(), bytes, 0, kTensorBytes), IsOk());
      ASSERT_THAT(pushes.back()->Commit(TestRank::EndOf(bytes, 1)), IsOk());
    }
    ASSERT_THAT(outcome->result, IsOk());
  }

  const std::shared_ptr<CallingAccelerator> accelerator_ = std::make_shared<CallingAccelerator>();
  ModelStore store_{MakeAcceleratorDevice(accelerator_, {.kept_free_bytes = 0}), SmallBlocks()};
  std::shared_ptr<Model> model_;
  std::vector<TestRank> ranks_;
};

TEST_F(SkippedStepTest, IsNotOpenedByWhoWasGettingItsMemory) {
  accelerator_->CallAtNextAllocation([this] { SkipStep(1); });
  EXPECT_THAT(Open(1), ReasonIs(ErrorReason::kStepSkipped));
  EXPECT_TRUE(accelerator_->has_called());
  EXPECT_EQ(model_->QueryPush(ranks_[0].run_epoch(), 1, 0, false)->state,
            Model::PushState::State::kUnknown);
  // Another one skipped meanwhile does not matter.
  accelerator_->CallAtNextAllocation([this] { SkipStep(3); });
  EXPECT_THAT(Open(2), IsOk());
  EXPECT_TRUE(accelerator_->has_called());
}

TEST_F(SkippedStepTest, IsRememberedWhenAnEarlierOneIsSkippedLater) {
  SkipStep(4);
  SkipStep(2);
  EXPECT_THAT(Open(2), ReasonIs(ErrorReason::kStepSkipped));
  EXPECT_THAT(Open(4), ReasonIs(ErrorReason::kStepSkipped));
  EXPECT_THAT(Open(3), IsOk());
}

TEST_F(SkippedStepTest, NamesTheRankThatSaidSoFirst) {
  SkipStep(1);
  SkipStep(1, /*rank=*/0);
  EXPECT_THAT(Open(1), StatusIs(absl::StatusCode::kAborted,
                                HasSubstr("step 1: rank 1 has abandoned it: no memory")));
}

TEST_F(SkippedStepTest, IsForgottenAfterSixteenLaterOnes) {
  for (int64_t step = 17; step >= 1; --step) SkipStep(step);
  for (int64_t step = 2; step <= 17; ++step) {
    EXPECT_THAT(Open(step), ReasonIs(ErrorReason::kStepSkipped)) << step;
  }
  EXPECT_THAT(Open(1), IsOk());
}

TEST_F(SkippedStepTest, TakesNoPlaceOnceALaterOneIsAVersion) {
  for (int64_t step = 1; step <= 16; ++step) SkipStep(step);
  Commit(17);
  for (int64_t step = 1; step <= 16; ++step) SkipStep(step);
  SkipStep(18);
  EXPECT_THAT(Open(18), ReasonIs(ErrorReason::kStepSkipped));
  EXPECT_THAT(Open(16), ReasonIs(ErrorReason::kStaleStep));
  EXPECT_THAT(Open(19), IsOk());
}

}  // namespace
}  // namespace ema
