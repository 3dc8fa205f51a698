// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/group/partition_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "client/cpp/transport/convert_replies.h"
#include "ema/error_reason.h"
#include "tests/testutil/status_matchers.h"

namespace ema::client_internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

Manifest TestManifest() {
  return *Manifest::Create({{.name = "embed", .shape = {8, 4}},
                            {.name = "layer0.w", .shape = {4, 4}},
                            {.name = "layer0.steps", .dtype = Dtype::kInt64, .shape = {1}},
                            {.name = "layer1.w", .shape = {4, 4}},
                            {.name = "head", .shape = {4, 8}, .aliases = {"lm_head"}}});
}

// Partitions of 2, 1 and 2 tensors.
v1::Model TestModel() {
  const Manifest manifest = TestManifest();
  v1::Model model;
  model.set_name("m");
  ToProto(manifest, model.mutable_manifest());
  model.set_manifest_digest(manifest.digest());
  model.set_incarnation(5);
  int64_t first = 0;
  for (const int64_t count : {2, 1, 2}) {
    v1::Partition* const partition = model.add_partitions();
    partition->set_member("ema");
    partition->set_address("h:1");
    partition->set_first_tensor(first);
    partition->set_tensor_count(count);
    first += count;
  }
  TrackConfig track{.name = "ema", .schedule = *Schedule::Parse("100ba")};
  track.tensor_rules.push_back({.pattern = "layer0.*", .action = TensorAction::kIgnore});
  ToProto(track, model.add_tracks());
  return model;
}

TEST(PartitionMapTest, EachPartitionHasItsTensors) {
  EMA_ASSERT_OK_AND_ASSIGN(const PartitionMap map, PartitionMap::Create(TestModel()));
  EXPECT_EQ(map.incarnation(), 5);
  EXPECT_EQ(map.model().manifest, TestManifest());
  ASSERT_THAT(map.partitions(), SizeIs(3));
  EXPECT_EQ(map.partitions()[1].manifest.tensor(0).name, "layer0.steps");
  EXPECT_EQ(map.partitions()[2].first_tensor, 3);
  std::vector<size_t> found;
  for (int64_t i = 0; i < 5; ++i) found.push_back(map.Find(i));
  EXPECT_THAT(found, ElementsAre(0, 0, 1, 2, 2));
}

TEST(PartitionMapTest, RefusesPartitionsThatDoNotHaveEveryTensorOnce) {
  const auto refused = [](int64_t first, int64_t count) {
    v1::Model model = TestModel();
    model.mutable_partitions(1)->set_first_tensor(first);
    model.mutable_partitions(1)->set_tensor_count(count);
    return absl::IsInternal(PartitionMap::Create(model).status());
  };
  EXPECT_FALSE(refused(2, 1));
  EXPECT_TRUE(refused(1, 2));  // Overlap.
  EXPECT_TRUE(refused(3, 1));  // Hole.
  EXPECT_TRUE(refused(2, 0));
  EXPECT_TRUE(refused(2, 2));
  EXPECT_TRUE(refused(2, -1));
  v1::Model model = TestModel();
  model.mutable_partitions()->RemoveLast();
  EXPECT_THAT(PartitionMap::Create(model),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("3 tensors of 5")));
}

TEST(PartitionMapTest, SplitsALayoutAndKeepsItsOrder) {
  EMA_ASSERT_OK_AND_ASSIGN(const PartitionMap map, PartitionMap::Create(TestModel()));
  const Manifest& manifest = map.model().manifest;
  // The last two are frozen.
  EMA_ASSERT_OK_AND_ASSIGN(
      const RankLayout layout,
      RankLayout::Create(manifest,
                         {WholeTensor(manifest, 4),
                          {.tensor_index = 0, .offsets = {2, 0}, .extents = {3, 4}},
                          WholeTensor(manifest, 3),
                          WholeTensor(manifest, 1)},
                         /*frozen_shard_count=*/2));
  const std::vector<PartitionMap::RankPart> parts = map.Split(layout);
  ASSERT_THAT(parts, SizeIs(3));
  EXPECT_THAT(parts[0].shards,
              ElementsAre(Shard{.tensor_index = 0, .offsets = {2, 0}, .extents = {3, 4}},
                          WholeTensor(map.partitions()[0].manifest, 1)));
  EXPECT_THAT(parts[0].places, ElementsAre(1, 3));
  EXPECT_EQ(parts[0].frozen_shard_count, 1);
  EXPECT_THAT(parts[1].shards, IsEmpty());
  EXPECT_THAT(parts[2].shards, ElementsAre(WholeTensor(map.partitions()[2].manifest, 1),
                                           WholeTensor(map.partitions()[2].manifest, 0)));
  EXPECT_THAT(parts[2].places, ElementsAre(0, 2));
  EXPECT_EQ(parts[2].frozen_shard_count, 1);
}

class SelectionTest : public testing::Test {
 protected:
  // The partitions with a selection.
  std::vector<size_t> Parts(const Selection& selection, std::string_view track = "ema") {
    const auto split = map_->Split(selection, track);
    EXPECT_THAT(split, IsOk());
    std::vector<size_t> parts;
    for (size_t i = 0; split.ok() && i < split->size(); ++i) {
      if ((*split)[i].has_value()) parts.push_back(i);
    }
    return parts;
  }

  absl::StatusOr<PartitionMap> map_ = PartitionMap::Create(TestModel());
};

TEST_F(SelectionTest, GoesToThePartitionsThatHaveIt) {
  EXPECT_THAT(Parts({}, "another"), ElementsAre(0, 1, 2));
  // The track has nothing in partition 1.
  EXPECT_THAT(Parts({}), ElementsAre(0, 2));
  EXPECT_THAT(Parts({.tensors = {"embed"}}), ElementsAre(0));
  EXPECT_THAT(Parts({.tensors = {"lm_head"}}), ElementsAre(2));
  EXPECT_THAT(Parts({.tensors = {"*.w"}}), ElementsAre(2));
  EXPECT_THAT(Parts({.tensors = {"*.w"}}, "another"), ElementsAre(0, 2));
  EXPECT_THAT(Parts({.slices = {{.tensor = "embed", .offsets = {0, 0}, .extents = {1, 4}}}}),
              ElementsAre(0));
}

TEST_F(SelectionTest, EachPartitionGetsTheNamesThatItHas) {
  Selection selection{.tensors = {"head", "embed", "*.w"}, .dtype = Dtype::kBFloat16};
  EMA_ASSERT_OK_AND_ASSIGN(const auto split, map_->Split(selection, "another"));
  ASSERT_TRUE(split[0].has_value() && split[2].has_value());
  EXPECT_THAT(split[0]->tensors, ElementsAre("embed", "*.w"));
  EXPECT_THAT(split[2]->tensors, ElementsAre("head", "*.w"));
  EXPECT_EQ(split[0]->dtype, Dtype::kBFloat16);
  EXPECT_FALSE(split[1].has_value());
}

TEST_F(SelectionTest, RefusesWhatTheModelDoesNotHave) {
  const auto error = [this](const Selection& selection) {
    const absl::Status status = map_->Split(selection, "ema").status();
    EXPECT_THAT(status, ReasonIs(ErrorReason::kBadRequest));
    return std::string(status.message());
  };
  EXPECT_THAT(error({.tensors = {"haed"}}), HasSubstr("\"head\""));
  EXPECT_THAT(error({.tensors = {"layer0.w"}}), HasSubstr("ignores every tensor of that name"));
  EXPECT_THAT(error({.slices = {{.tensor = "layer0.w"}}}), HasSubstr("ignores"));
  EXPECT_THAT(error({.slices = {{.tensor = "*.w"}}}), HasSubstr("2 tensors, expected one"));
}

}  // namespace
}  // namespace ema::client_internal
