// SPDX-License-Identifier: Apache-2.0
//
// 256 ranks of one trainer, over one connection, with fewer places for streams than ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "ema/client.h"
#include "tests/integration/fill_model.h"
#include "tests/testutil/random_layout.h"
#include "tests/testutil/server_process.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRanks = 256;
constexpr unsigned kSeed = 20240611;
constexpr absl::Duration kTimeout = absl::Seconds(100);

class ManyRanksOverSocketsTest : public testing::Test {
 protected:
  void SetUp() override {
    EMA_ASSERT_OK_AND_ASSIGN(
        server_, ServerProcess::Start(EMA_SERVER_BINARY,
                                      {"--session-timeout", "3s", "--memory-bytes", "1G"}));
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_->address(), {.chunk_bytes = 64}));
    ASSERT_THAT(client_->CreateModel(kFillModel, FillManifest(1), FillTracks()), IsOk());
    std::mt19937 random(kSeed);
    const auto shards = CutForRanks(random, FillManifest(1), kRanks, 100);
    order_.resize(kRanks);
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin(), order_.end(), random);
    runs_.resize(kRanks);
    bytes_.resize(kRanks);
    for (const int64_t rank : order_) {
      EMA_ASSERT_OK_AND_ASSIGN(runs_[rank], client_->OpenRun(kFillModel, {.launch_id = "life",
                                                                          .rank = rank,
                                                                          .world_size = kRanks,
                                                                          .shards = shards[rank]}));
      bytes_[rank] = std::make_unique<FillBytes>(runs_[rank]->manifest(), runs_[rank]->layout());
    }
  }

  // What came of a step, by rank; those in `missing` do not push it.
  std::vector<absl::StatusOr<Version>> Push(int64_t step, const std::vector<int64_t>& missing) {
    std::vector<std::unique_ptr<PendingPush>> pushes(kRanks);
    for (const int64_t rank : order_) {
      if (std::find(missing.begin(), missing.end(), rank) != missing.end()) continue;
      bytes_[rank]->Set(FillValue(step));
      auto push = runs_[rank]->StartPush(step, TrainingTime::AtBatch(step), bytes_[rank]->shards(),
                                         kTimeout);
      EXPECT_THAT(push, IsOk());
      if (push.ok()) pushes[rank] = *std::move(push);
    }
    std::vector<absl::StatusOr<Version>> versions;
    for (const auto& push : pushes) {
      if (push != nullptr) versions.push_back(push->Wait());
    }
    return versions;
  }

  void ExpectCopied(int64_t version, int value) {
    std::vector<std::byte> pulled;
    const auto target = [&](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
      pulled.resize(info.total_bytes);
      return std::span(pulled);
    };
    EMA_ASSERT_OK_AND_ASSIGN(const PullInfo info,
                             client_->Pull(kFillModel, "raw", {}, target, kTimeout));
    EXPECT_EQ(info.version.number, version);
    const FillSight sight = Look(info, pulled, /*is_copy=*/true);
    EXPECT_EQ(sight.torn, "");
    EXPECT_EQ(sight.copied, value);
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Client> client_;
  std::vector<int64_t> order_;
  std::vector<std::unique_ptr<ema::Run>> runs_;
  std::vector<std::unique_ptr<FillBytes>> bytes_;
};

TEST_F(ManyRanksOverSocketsTest, StepsCommitOnceAndAMissingRankIsNamed) {
  for (int64_t step = 1; step <= 3; ++step) {
    for (const absl::StatusOr<Version>& version : Push(step, {})) {
      ASSERT_THAT(version, IsOk());
      EXPECT_EQ(version->number, step);
    }
    ASSERT_NO_FATAL_FAILURE(ExpectCopied(step, FillValue(step)));
  }

  for (const absl::StatusOr<Version>& version : Push(4, {5, 250})) {
    ASSERT_THAT(version, StatusIs(absl::StatusCode::kAborted, HasSubstr("missing ranks: 5, 250")));
    EXPECT_THAT(version, ReasonIs(ErrorReason::kSessionExpired));
  }
  ASSERT_NO_FATAL_FAILURE(ExpectCopied(3, FillValue(3)));

  for (const absl::StatusOr<Version>& version : Push(5, {})) {
    ASSERT_THAT(version, IsOk());
    EXPECT_EQ(version->number, 4);
    EXPECT_EQ(version->step, 5);
  }
  ASSERT_NO_FATAL_FAILURE(ExpectCopied(4, FillValue(5)));
  EXPECT_EQ(server_->Stop(), 0);
}

}  // namespace
}  // namespace ema
