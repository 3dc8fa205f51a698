// SPDX-License-Identifier: Apache-2.0
//
// float32 weights that come as bfloat16.
#include "server/kernel/cast.h"
#include "tests/core/test_model.h"

namespace ema {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class WireDtypeTest : public testing::Test {
 protected:
  WireDtypeTest() : store_(TestDevice(), SmallBlocks()) {
    model_ = store_
                 .Create({.name = "m",
                          .manifest = MakeManifest({{"w", Dtype::kFloat32, {3}},
                                                    {"n", Dtype::kInt32, {1}},
                                                    {"b", Dtype::kBFloat16, {1}}}),
                          .tracks = {{.name = "ema", .schedule = MakeSchedule("1ba")},
                                     {.name = "raw", .schedule = MakeSchedule("copy")}}})
                 ->model;
  }

  absl::StatusOr<RankLayout> Layout(std::vector<int64_t> tensors, WireDtype wire_dtype) {
    std::vector<Shard> shards;
    for (const int64_t tensor : tensors) shards.push_back(WholeTensor(model_->manifest(), tensor));
    return RankLayout::Create(model_->manifest(), std::move(shards), 0, wire_dtype);
  }

  // All of `values`, the integer and a bfloat16 of 1.
  static std::vector<std::byte> Rounded(const std::vector<float>& values, int32_t integer) {
    std::vector<std::byte> bytes(values.size() * 2 + 6);
    CastScalar(Dtype::kFloat32, reinterpret_cast<const std::byte*>(values.data()), Dtype::kBFloat16,
               bytes.data(), static_cast<int64_t>(values.size()));
    std::memcpy(bytes.data() + values.size() * 2, &integer, sizeof(integer));
    const uint16_t one = BFloat16Bits(1.0f);
    std::memcpy(bytes.data() + values.size() * 2 + 4, &one, sizeof(one));
    return bytes;
  }

  absl::StatusOr<Version> Push(const Model::JoinResult& joined, int64_t step,
                               const std::vector<std::byte>& bytes) {
    auto outcome = std::make_shared<PushOutcome>();
    EMA_ASSIGN_OR_RETURN(
        const std::unique_ptr<RankPush> push,
        model_->OpenPush({.run_epoch = joined.run_epoch,
                          .layout_digest = joined.layout_digest,
                          .step = step,
                          .time = TrainingTime::AtBatch(step)},
                         [outcome](const auto& result) { outcome->result = result; }));
    // Not cut at an element of float32.
    EMA_RETURN_IF_ERROR(TestRank::AddChunk(*push, bytes, 0, 2));
    EMA_RETURN_IF_ERROR(
        TestRank::AddChunk(*push, bytes, 2, static_cast<int64_t>(bytes.size()) - 2));
    EMA_RETURN_IF_ERROR(push->Commit(TestRank::EndOf(bytes, 2)));
    EMA_RETURN_IF_ERROR(outcome->result.status());
    return outcome->result->record;
  }

  // The first tensor of a track.
  std::vector<float> Read(const std::string& track) {
    std::vector<float> values = FloatsOf(*ReadAll(*model_, track));
    values.resize(3);
    return values;
  }

  ModelStore store_;
  std::shared_ptr<Model> model_;
};

TEST_F(WireDtypeTest, TracksAreOfTheRoundedWeightsInTheirOwnDtypes) {
  RankLayout layout = *Layout({0, 1, 2}, WireDtype::kBFloat16);
  EXPECT_EQ(layout.total_bytes(), 3 * 2 + 4 + 2);
  const auto joined = model_->JoinRun({"run"}, 0, 1, std::move(layout));
  ASSERT_THAT(joined, IsOk());
  auto record = Push(*joined, 1, Rounded({1.0f, 1.0f + 0x1p-9f, -3.0f}, 5));
  ASSERT_THAT(record, IsOk());
  EXPECT_EQ(record->wire_dtype, WireDtype::kBFloat16);
  EXPECT_THAT(Read("ema"), ElementsAre(1.0f, 1.0f, -3.0f));
  record = Push(*joined, 2, Rounded({2.0f, 3.0f, 1.0f}, 6));
  ASSERT_THAT(record, IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(1.5f, 2.0f, -1.0f));
  EXPECT_THAT(Read("raw"), ElementsAre(2.0f, 3.0f, 1.0f));
  const std::vector<std::byte> raw = *ReadAll(*model_, "raw");
  int32_t integer = 0;
  std::memcpy(&integer, raw.data() + 12, sizeof(integer));
  EXPECT_EQ(integer, 6);
  EXPECT_EQ(raw.size(), 18);
}

TEST_F(WireDtypeTest, ANonFiniteRoundedWeightIsRefused) {
  const auto joined = model_->JoinRun({"run"}, 0, 1, *Layout({0, 1, 2}, WireDtype::kBFloat16));
  EXPECT_THAT(Push(*joined, 1, Rounded({1.0f, 3.4e38f, 1.0f}, 5)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("element 1")));
}

TEST_F(WireDtypeTest, RanksMustAgree) {
  ASSERT_THAT(model_->JoinRun({"run"}, 0, 2, *Layout({0}, WireDtype::kBFloat16)), IsOk());
  EXPECT_THAT(model_->JoinRun({"run"}, 1, 2, *Layout({1, 2}, WireDtype::kAsPushed)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("wire_dtype: rank 1 gives as pushed, but rank 0 joined with "
                                 "bfloat16")));
  // The same layout in another dtype is another layout.
  EXPECT_NE(Layout({0}, WireDtype::kBFloat16)->digest(),
            Layout({0}, WireDtype::kAsPushed)->digest());
}

}  // namespace
}  // namespace ema
