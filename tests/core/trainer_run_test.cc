// SPDX-License-Identifier: Apache-2.0
#include "server/core/trainer_run.h"

#include "tests/core/test_model.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RunTest : public testing::Test {
 protected:
  RankLayout Rows(int64_t begin, int64_t count) {
    return *RankLayout::Create(*manifest_, {{0, {begin, 0}, {count, 3}}});
  }
  const std::shared_ptr<const Manifest> manifest_ =
      MakeManifest({{"weight", Dtype::kFloat32, {4, 3}}});
};

TEST_F(RunTest, IsReadyWhenAllRanksCoverTheManifestOnce) {
  EMA_ASSERT_OK_AND_ASSIGN(auto run, TrainerRun::Create(manifest_.get(), "launch", 1, 2));
  EXPECT_THAT(run->Join(1, 2, Rows(2, 2)), IsOk());
  EXPECT_FALSE(run->ready());
  EXPECT_THAT(run->MissingRanks(16), ElementsAre(0));
  EXPECT_THAT(run->Join(0, 2, Rows(0, 2)), IsOk());
  EXPECT_TRUE(run->ready());
}

TEST_F(RunTest, JoiningAgainWithTheSameLayoutIsOk) {
  EMA_ASSERT_OK_AND_ASSIGN(auto run, TrainerRun::Create(manifest_.get(), "launch", 1, 2));
  EXPECT_THAT(run->Join(0, 2, Rows(0, 2)), IsOk());
  EXPECT_THAT(run->Join(0, 2, Rows(0, 2)), IsOk());
  EXPECT_THAT(run->Join(0, 2, Rows(0, 1)), ReasonIs(ErrorReason::kBadLayout));
  EXPECT_FALSE(run->ready());
}

TEST_F(RunTest, OverlapAndHoleNameTheTensorAndChangeNothing) {
  EMA_ASSERT_OK_AND_ASSIGN(auto run, TrainerRun::Create(manifest_.get(), "launch", 1, 2));
  EXPECT_THAT(run->Join(0, 2, Rows(0, 2)), IsOk());
  const absl::Status overlap = run->Join(1, 2, Rows(1, 3));
  EXPECT_THAT(overlap, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("weight")));
  EXPECT_THAT(overlap, ReasonIs(ErrorReason::kLayoutOverlap));
  const absl::Status hole = run->Join(1, 2, Rows(3, 1));
  EXPECT_THAT(hole, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("weight")));
  EXPECT_THAT(hole, ReasonIs(ErrorReason::kLayoutHole));
  EXPECT_THAT(run->Join(1, 2, Rows(2, 2)), IsOk());
  EXPECT_TRUE(run->ready());
}

TEST_F(RunTest, RankAndWorldSizeOutOfRangeAreRefused) {
  EXPECT_THAT(TrainerRun::Create(manifest_.get(), "", 1, 1), ReasonIs(ErrorReason::kBadRequest));
  EXPECT_THAT(TrainerRun::Create(manifest_.get(), "launch", 1, 0),
              ReasonIs(ErrorReason::kBadRequest));
  EXPECT_THAT(TrainerRun::Create(manifest_.get(), "launch", 1, 1 << 20),
              ReasonIs(ErrorReason::kBadRequest));
  EMA_ASSERT_OK_AND_ASSIGN(auto run, TrainerRun::Create(manifest_.get(), "launch", 1, 2));
  EXPECT_THAT(run->Join(2, 2, Rows(0, 2)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rank: 2")));
  EXPECT_THAT(run->Join(-1, 2, Rows(0, 2)), ReasonIs(ErrorReason::kBadRequest));
  EXPECT_THAT(run->Join(0, 3, Rows(0, 2)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("world_size: 3")));
}

}  // namespace
}  // namespace ema
