// SPDX-License-Identifier: Apache-2.0
//
// The streams by which one rank pushes a step: one after the other, and several at once.
#include <numeric>

#include "tests/core/test_model.h"

namespace ema {
namespace {

class PushStreamsTest : public testing::Test {
 protected:
  PushStreamsTest() {
    ModelConfig config;
    config.name = "m";
    config.manifest =
        MakeManifest({{"a", Dtype::kFloat32, {10, 100}}, {"b", Dtype::kFloat32, {2000}}});
    config.tracks = {{"raw", MakeSchedule("copy")}};
    model_ = store_.Create(std::move(config))->model;
  }

  static std::vector<float> Values(int first) {
    std::vector<float> values(3000);  // Three blocks of 4 KiB.
    std::iota(values.begin(), values.end(), static_cast<float>(first));
    return values;
  }
  std::vector<float> Read(const std::string& track) { return FloatsOf(*ReadAll(*model_, track)); }

  ModelStore store_{TestDevice(), SmallBlocks()};
  std::shared_ptr<Model> model_;
};

TEST_F(PushStreamsTest, ANewerStreamOfARankFencesTheOlderAndKeepsWhatArrived) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  const std::vector<std::byte> bytes = BytesOf(Values(1));
  const auto total = static_cast<int64_t>(bytes.size());
  auto fenced = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto older, rank.Open(1, fenced));
  ASSERT_THAT(TestRank::AddChunk(*older, bytes, 0, 6000), IsOk());
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto newer, rank.Open(1, outcome));
  EXPECT_THAT(fenced->result, ReasonIs(ErrorReason::kFenced));
  EXPECT_THAT(TestRank::AddChunk(*older, bytes, 6000, 400), ReasonIs(ErrorReason::kFenced));

  EMA_ASSERT_OK_AND_ASSIGN(const auto state, model_->QueryPush(rank.run_epoch(), 1, 0, false));
  EXPECT_EQ(state.state, Model::PushState::State::kOpen);
  ASSERT_EQ(state.missing.size(), 1u);
  EXPECT_EQ(state.missing[0].first.offset, 6000);
  EXPECT_EQ(state.missing[0].first.length_bytes, total - 6000);
  EXPECT_EQ(state.missing[0].second, "b");

  ASSERT_THAT(TestRank::AddChunk(*newer, bytes, 6000, total - 6000), IsOk());
  ASSERT_THAT(newer->Commit({1, total - 6000, Crc32c(0, bytes)}), IsOk());
  EXPECT_EQ(outcome->result->record.number, 1);
  EXPECT_EQ(Read("raw"), Values(1));
}

TEST_F(PushStreamsTest, StreamsOfOneGroupPushSideBySide) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  rank.SetStreams(/*group=*/11, /*count=*/2);
  const std::vector<std::byte> bytes = BytesOf(Values(1));
  const auto total = static_cast<int64_t>(bytes.size());
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto first, rank.Open(1, outcome));
  ASSERT_THAT(TestRank::AddChunk(*first, bytes, 0, 6000), IsOk());
  const uint32_t digest = Crc32c(0, bytes);
  // The first has sent all it has before the second begins: its rank has not.
  ASSERT_THAT(first->Commit({1, 6000, digest}), IsOk());
  EXPECT_EQ(outcome->calls, 0);
  EXPECT_FALSE(model_->QueryPush(rank.run_epoch(), 1, 0, false)->rank_committed);
  EMA_ASSERT_OK_AND_ASSIGN(auto second, rank.Open(1, outcome));
  EXPECT_THAT(rank.Open(1, std::make_shared<PushOutcome>()), ReasonIs(ErrorReason::kBadRequest));
  ASSERT_THAT(TestRank::AddChunk(*second, bytes, 6000, total - 6000), IsOk());
  ASSERT_THAT(second->Commit({1, total - 6000, digest}), IsOk());
  EXPECT_EQ(outcome->calls, 2);  // Each has its reply.
  ASSERT_THAT(outcome->result, IsOk());
  EXPECT_EQ(outcome->result->record.number, 1);
  EXPECT_EQ(Read("raw"), Values(1));
  // Sent again, each stream learns that the step is committed.
  EMA_ASSERT_OK_AND_ASSIGN(auto again, rank.Open(1, outcome));
  ASSERT_THAT(again->Commit({0, 0, digest}), IsOk());
  EXPECT_TRUE(outcome->result->is_duplicate);
}

TEST_F(PushStreamsTest, AStreamOfAnotherGroupFencesAllOfTheOneBefore) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  const std::vector<std::byte> bytes = BytesOf(Values(1));
  const auto total = static_cast<int64_t>(bytes.size());
  rank.SetStreams(11, 3);
  auto fenced = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto first, rank.Open(1, fenced));
  EMA_ASSERT_OK_AND_ASSIGN(auto second, rank.Open(1, fenced));
  ASSERT_THAT(TestRank::AddChunk(*second, bytes, 0, 6000), IsOk());
  rank.SetStreams(0, 0);
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto alone, rank.Open(1, outcome));
  EXPECT_EQ(fenced->calls, 2);
  EXPECT_THAT(fenced->result, ReasonIs(ErrorReason::kFenced));
  EXPECT_THAT(TestRank::AddChunk(*first, bytes, 6000, 400), ReasonIs(ErrorReason::kFenced));
  EXPECT_THAT(second->Commit({1, 6000, Crc32c(0, bytes)}), ReasonIs(ErrorReason::kFenced));
  // What has arrived stays.
  ASSERT_THAT(TestRank::AddChunk(*alone, bytes, 6000, total - 6000), IsOk());
  ASSERT_THAT(alone->Commit({1, total - 6000, Crc32c(0, bytes)}), IsOk());
  EXPECT_EQ(Read("raw"), Values(1));
}

TEST_F(PushStreamsTest, StreamsOfOneGroupMustAgree) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  const std::vector<std::byte> bytes = BytesOf(Values(1));
  rank.SetStreams(11, 2);
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(auto first, rank.Open(1, outcome));
  rank.SetStreams(11, 3);
  EXPECT_THAT(rank.Open(1, outcome), ReasonIs(ErrorReason::kBadRequest));
  // A header that was under way for long does not fence a later try.
  rank.SetStreams(10, 2);
  EXPECT_THAT(rank.Open(1, outcome), ReasonIs(ErrorReason::kFenced));
  rank.SetStreams(11, 2);
  EMA_ASSERT_OK_AND_ASSIGN(auto second, rank.Open(1, outcome));
  EXPECT_EQ(outcome->calls, 0);
  ASSERT_THAT(first->Commit({0, 0, 1}), IsOk());
  EXPECT_THAT(second->Commit({0, 0, 2}), ReasonIs(ErrorReason::kDigestMismatch));
}

TEST_F(PushStreamsTest, StreamCountsThatAreNoneAreRefused) {
  TestRank rank(model_, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  const auto refuses = [&](int64_t group, int64_t count) {
    rank.SetStreams(group, count);
    EXPECT_THAT(rank.Open(1, std::make_shared<PushOutcome>()), ReasonIs(ErrorReason::kBadRequest))
        << group << " " << count;
  };
  refuses(1, -1);
  refuses(1, kMaxStreamsOfRank + 1);
  refuses(0, 2);
  refuses(-1, 0);
  refuses(-1, 2);
  // None has begun a step.
  rank.SetStreams(0, 0);
  EXPECT_THAT(rank.Push(0, BytesOf(Values(1))), IsOk());
}

}  // namespace
}  // namespace ema
