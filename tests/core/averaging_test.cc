// SPDX-License-Identifier: Apache-2.0
//
// What tracks do with what is pushed: rules for tensors, dtypes, values that are not finite,
// first values, and changes while training runs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/core/test_model.h"

namespace ema {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TrackConfig Track(const std::string& name, const std::string& schedule) {
  return {.name = name, .schedule = MakeSchedule(schedule)};
}

class AveragingTest : public testing::Test {
 protected:
  AveragingTest() : store_(TestDevice(), Options()) {}

  ModelStore::Options Options() {
    ModelStore::Options options = SmallBlocks();
    options.model.log = [this](const LogEvent& event) {
      if (event.level == LogLevel::kWarning) warnings_.push_back(ToText(event));
    };
    return options;
  }

  void Create(std::vector<TrackConfig> tracks,
              std::vector<TensorSpec> tensors = {{"w", Dtype::kFloat32, {3}}},
              NonFinitePolicy non_finite = NonFinitePolicy::kReject) {
    ModelConfig config{.name = "m",
                       .manifest = MakeManifest(std::move(tensors)),
                       .tracks = std::move(tracks),
                       .non_finite = non_finite};
    const auto created = store_.Create(std::move(config));
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
    OpenRun("launch");
  }

  void OpenRun(const std::string& launch_id) {
    rank_ = std::make_unique<TestRank>(model_, launch_id);
    ASSERT_THAT(rank_->Join(), IsOk());
  }

  absl::StatusOr<PushResult> Push(int64_t step, const std::vector<float>& values) {
    return rank_->Push(step, BytesOf(values));
  }

  std::vector<float> Read(const std::string& track, int64_t version = 0) {
    const auto bytes = ReadAll(*model_, track, version);
    EXPECT_THAT(bytes, IsOk());
    return bytes.ok() ? FloatsOf(*bytes) : std::vector<float>();
  }

  std::vector<double> ReadDoubles(const std::string& track) {
    const auto bytes = ReadAll(*model_, track);
    EXPECT_THAT(bytes, IsOk());
    std::vector<double> values(bytes.ok() ? bytes->size() / sizeof(double) : 0);
    if (bytes.ok()) std::memcpy(values.data(), bytes->data(), values.size() * sizeof(double));
    return values;
  }

  std::vector<std::string> warnings_;
  ModelStore store_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<TestRank> rank_;
};

TEST_F(AveragingTest, TensorsAreAveragedCopiedOrIgnoredByName) {
  TrackConfig ema = Track("ema", "smoothing=0.5");
  ema.tensor_rules = {{"head.*", TensorAction::kIgnore}, {"norm.scale", TensorAction::kCopy}};
  ema.buffers = TensorAction::kCopy;
  Create({ema, Track("all", "smoothing=0.5")},
         {{"body", Dtype::kFloat32, {1}},
          {"head.a", Dtype::kFloat32, {1}},
          {"norm.scale", Dtype::kFloat32, {1}},
          {"mean", Dtype::kFloat32, {1}, /*is_buffer=*/true}});
  ASSERT_THAT(Push(1, {0, 0, 0, 0}), IsOk());
  ASSERT_THAT(Push(2, {2, 4, 6, 8}), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(1, 6, 8));
  EXPECT_THAT(Read("all"), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(Read("ema", 1), ElementsAre(0, 0, 0));
}

TEST_F(AveragingTest, AnAverageThatBeginsWithZerosDoes) {
  Create({Track("plain", "smoothing=0.75, zero_init=plain"),
          Track("debiased", "smoothing=0.75, zero_init=debias")});
  ASSERT_THAT(Push(1, {4, 8, -4}), IsOk());
  EXPECT_THAT(Read("plain"), ElementsAre(1, 2, -1));
  EXPECT_THAT(Read("debiased"), ElementsAre(4, 8, -4));
  ASSERT_THAT(Push(2, {5, 10, -1}), IsOk());
  EXPECT_THAT(Read("plain"), ElementsAre(2, 4, -1));
}

TEST_F(AveragingTest, TheZerosThatAnAverageBeginsWithTakeLittleMemory) {
  constexpr int64_t kCount = 500'001;  // All in one block.
  ModelStore::Options options = SmallBlocks();
  options.model.block_bytes = int64_t{4} << 20;
  ModelStore store(TestDevice(), options);
  TrackConfig wide = Track("wide", "smoothing=0.75, zero_init=plain");
  wide.dtype = Dtype::kFloat64;
  ModelConfig config{.name = "m",
                     .manifest = MakeManifest({{"w", Dtype::kFloat32, {kCount}}}),
                     .tracks = {Track("plain", "smoothing=0.75, zero_init=plain"), wide}};
  const std::shared_ptr<Model> model = store.Create(std::move(config))->model;
  const int64_t version_bytes = model->tracks().reserved_bytes() / 5;
  TestRank rank(model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  std::vector<float> values(kCount);
  for (int64_t i = 0; i < kCount; ++i) values[i] = static_cast<float>(i);
  const std::vector<std::byte> bytes = BytesOf(values);
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, rank.Open(1, outcome));
  EXPECT_LE(model->device().memory_use().block_bytes, version_bytes + (64 << 10));
  ASSERT_THAT(TestRank::AddChunk(*push, bytes, 0, static_cast<int64_t>(bytes.size())), IsOk());
  ASSERT_THAT(push->Commit(TestRank::EndOf(bytes, 1)), IsOk());
  for (float& value : values) value *= 0.25f;
  EXPECT_EQ(FloatsOf(*ReadAll(*model, "plain")), values);
  const std::vector<double> doubles(values.begin(), values.end());
  const std::vector<std::byte> wide_bytes = *ReadAll(*model, "wide");
  ASSERT_EQ(wide_bytes.size(), doubles.size() * sizeof(double));
  EXPECT_EQ(std::memcmp(wide_bytes.data(), doubles.data(), wide_bytes.size()), 0);
}

TEST_F(AveragingTest, BeforeTheStartATrackIsWhatItsScheduleSays) {
  Create({Track("reinit", "smoothing=0.5, ema_start=3ba"),
          Track("copy", "smoothing=0.5, ema_start=3ba, before_start=copy"),
          Track("hold", "smoothing=0.5, ema_start=3ba, before_start=hold")});
  for (int step = 1; step <= 4; ++step) {
    const float value = static_cast<float>(step);
    ASSERT_THAT(Push(step, {value, value, value}), IsOk());
    const Version version = *model_->history().latest();
    for (const TrackVersion& track : version.tracks) {
      EXPECT_EQ(track.averaged_count, std::max(0, step - 2)) << track.track << " at " << step;
    }
  }
  EXPECT_EQ(Read("reinit", 2)[0], 1);
  EXPECT_EQ(Read("copy", 2)[0], 2);
  EXPECT_EQ(Read("hold", 3)[0], 1);
  EXPECT_EQ(Read("reinit")[0], 3.5);
  EXPECT_EQ(Read("copy")[0], 3.5);
  EXPECT_EQ(Read("hold")[0], 2.5);
}

TEST_F(AveragingTest, AMeanOfTheLastIsThatOfThePushedWeights) {
  TrackConfig fine = Track("fine", "mean_of_last=16");
  fine.dtype = Dtype::kFloat64;
  Create({Track("mean", "mean_of_last=3"), fine, Track("raw", "copy")},
         {{"w", Dtype::kFloat32, {3}}, {"count", Dtype::kInt32, {1}}, {"v", Dtype::kFloat32, {1}}});
  std::vector<double> pushed;
  const auto mean_of = [&pushed](size_t count) {
    count = std::min(count, pushed.size());
    double differences = 0;
    for (size_t i = pushed.size() - count; i < pushed.size(); ++i) {
      differences += pushed[i] - pushed.back();
    }
    return pushed.back() + differences / static_cast<double>(count);
  };
  for (int step = 1; step <= 20; ++step) {
    const float value = std::sin(static_cast<float>(step)) * 1e3f;
    ASSERT_THAT(Push(step, {value, 1, -value, 5.0f * step, value}), IsOk());
    pushed.push_back(value);
    const float mean = static_cast<float>(mean_of(3));
    // The bits that were pushed as an int32 are copied.
    EXPECT_THAT(Read("mean"), ElementsAre(mean, 1, -mean, 5.0f * step, mean)) << step;
    const std::vector<std::byte> bytes = *ReadAll(*model_, "fine");
    double averages[3] = {};
    std::memcpy(averages, bytes.data(), sizeof(averages));
    EXPECT_THAT(averages, ElementsAre(mean_of(16), 1, -mean_of(16))) << step;
    const TrackVersion record = model_->history().latest()->tracks[0];
    EXPECT_EQ(record.update_weight, 1.0f / static_cast<float>(std::min(step, 3)));
    EXPECT_EQ(record.window_steps, std::min(step, 3));
    EXPECT_EQ(record.stall_gap, 0);
  }
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(AveragingTest, AMeanOfTheLastBeginsAtItsStart) {
  Create({Track("reinit", "mean_of_last=3, ema_start=3ba"),
          Track("copy", "mean_of_last=3, ema_start=3ba, before_start=copy"),
          Track("hold", "mean_of_last=3, ema_start=3ba, before_start=hold"),
          Track("rare", "mean_of_last=2, update_interval=2ba")});
  const std::vector<float> from_3 = {3, 3.5, 4, 5};
  const std::vector<float> from_first = {1, 2.5, 10.0f / 3, 5};
  const std::vector<float> rare = {1, 1.5, 1.5, 3, 3, 5};
  for (int step = 1; step <= 6; ++step) {
    const float value = static_cast<float>(step);
    ASSERT_THAT(Push(step, {value, value, value}), IsOk());
    EXPECT_EQ(Read("reinit")[0], step < 3 ? 1 : from_3[step - 3]);
    EXPECT_EQ(Read("copy")[0], step < 3 ? value : from_3[step - 3]);
    EXPECT_EQ(Read("hold")[0], step < 3 ? 1 : from_first[step - 3]);
    EXPECT_EQ(Read("rare")[0], rare[step - 1]);
  }
}

TEST_F(AveragingTest, ASkippedTensorRepeatsItsLatestWeights) {
  Create({Track("mean", "mean_of_last=2")},
         {{"a", Dtype::kFloat32, {2}}, {"b", Dtype::kFloat32, {1}}}, NonFinitePolicy::kSkipTensor);
  ASSERT_THAT(Push(1, {2, 2, 2}), IsOk());
  ASSERT_THAT(Push(2, {4, 4, 4}), IsOk());
  ASSERT_THAT(Push(3, {8, kNan, 8}), IsOk());
  EXPECT_THAT(Read("mean"), ElementsAre(3, 3, 6));
  ASSERT_THAT(Push(4, {6, 6, 10}), IsOk());
  EXPECT_THAT(Read("mean"), ElementsAre(5, 5, 9));
}

TEST_F(AveragingTest, VersionsShareTheWeightsThatAMeanKeeps) {
  Create({Track("mean", "mean_of_last=4")}, {{"w", Dtype::kFloat32, {5000}}});
  const int64_t layout_bytes = model_->Describe().tracks[0]->layout().total_bytes();
  EXPECT_EQ(model_->tracks().reserved_bytes(), 5 * 4 * layout_bytes);  // As SmallBlocks().
  std::vector<SnapshotRef> pinned;
  for (int step = 1; step <= 9; ++step) {
    ASSERT_THAT(Push(step, std::vector<float>(5000, static_cast<float>(step))), IsOk());
    if (step >= 8) pinned.push_back(*model_->history().Pin(0));
  }
  const std::vector<BlocksRef>& before = pinned[0]->tracks[0].latest_weights;
  const std::vector<BlocksRef>& after = pinned[1]->tracks[0].latest_weights;
  ASSERT_THAT(after, SizeIs(3));
  EXPECT_EQ(before[1], after[0]);
  EXPECT_EQ(before[2], after[1]);
  EXPECT_LE(model_->device().memory_use().block_bytes, model_->tracks().reserved_bytes());
}

TEST_F(AveragingTest, TheLengthOfAMeanOfTheLastCannotChange) {
  Create({Track("mean", "mean_of_last=3"), Track("ema", "smoothing=0.5")});
  for (const TrackConfig& changed :
       {Track("mean", "mean_of_last=4"), Track("mean", "smoothing=0.5"),
        Track("ema", "mean_of_last=3")}) {
    EXPECT_THAT(model_->UpdateTracks({.put = {changed}}),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("mean_of_last")));
  }
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  ASSERT_THAT(model_->UpdateTracks({.put = {Track("mean", "mean_of_last=3, update_interval=2ba")}}),
              IsOk());
  ASSERT_THAT(Push(2, {2, 2, 2}), IsOk());
  ASSERT_THAT(Push(4, {7, 7, 7}), IsOk());
  EXPECT_THAT(Read("mean"), ElementsAre(3, 3, 3));
}

TEST_F(AveragingTest, WhatIsCopiedIsTheNewestAlsoWhereTheAverageStays) {
  // The seconds stand still, and with them an average over them.
  TrackConfig fine = Track("fine", "half_life=1s, update_interval=1ba");
  fine.dtype = Dtype::kFloat64;
  Create({Track("ema", "half_life=1s, update_interval=1ba"), fine,
          Track("hold", "smoothing=0.5, ema_start=3ba, before_start=hold")},
         {{"w", Dtype::kFloat32, {2}}, {"count", Dtype::kInt32, {1}}});
  const auto push = [&](int64_t step) {
    PushStart start = rank_->Start(step);
    start.time.Set(TimeUnit::kSecond, 7);
    const std::vector<std::byte> bytes = BytesOf({1.0f * step, 2.0f * step, 3.0f * step});
    EMA_ASSIGN_OR_RETURN(const auto stream, model_->OpenPush(start, [](const auto&) {}));
    EMA_RETURN_IF_ERROR(TestRank::AddChunk(*stream, bytes, 0, 12));
    return stream->Commit(TestRank::EndOf(bytes, 1));
  };
  for (int64_t step = 1; step <= 3; ++step) ASSERT_THAT(push(step), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(1, 2, 9));
  std::vector<std::byte> expected(2 * sizeof(double) + sizeof(float));
  const double averages[] = {1, 2};
  const float copied = 9;  // The bits that were pushed as an int32.
  std::memcpy(expected.data(), averages, sizeof(averages));
  std::memcpy(expected.data() + sizeof(averages), &copied, sizeof(copied));
  EXPECT_EQ(*ReadAll(*model_, "fine"), expected);
  EXPECT_THAT(Read("hold"), ElementsAre(1, 2, 9));
  EXPECT_THAT(Read("ema", 2), ElementsAre(1, 2, 6));
  EXPECT_THAT(Read("hold", 2), ElementsAre(1, 2, 3));
}

TEST_F(AveragingTest, AFloat64TrackGoesOnWhereAFloat32OneStalls) {
  TrackConfig wide = Track("wide", "smoothing=0.99999");
  wide.dtype = Dtype::kFloat64;
  Create({Track("plain", "smoothing=0.99999"), wide}, {{"w", Dtype::kFloat32, {2}}});
  ASSERT_THAT(Push(1, {1, 1}), IsOk());
  constexpr int kSteps = 2000;
  const float target = 1.004f;
  for (int step = 2; step <= kSteps; ++step) ASSERT_THAT(Push(step, {target, target}), IsOk());
  // After the first, a plain step of 4e-8 is less than half a unit of 1.
  EXPECT_EQ(Read("plain")[0], 1);
  const double expected = target - (target - 1.0) * std::pow(0.99999, kSteps - 1);
  EXPECT_NEAR(ReadDoubles("wide")[0], expected, 1e-13);
  ASSERT_EQ(warnings_.size(), 1);
  EXPECT_THAT(warnings_[0], AllOf(HasSubstr("track=plain"), HasSubstr("dtype float64")));
  const Version record = *model_->history().latest();
  EXPECT_NEAR(record.tracks[0].stall_gap, 0x1p-24 / 1e-5, 1e-8);
  EXPECT_EQ(record.tracks[0].update_weight, static_cast<float>(1 - 0.99999));
  EXPECT_EQ(record.tracks[1].update_weight, 1 - 0.99999);
  EXPECT_EQ(record.tracks[1].stall_gap, 0x1p-53 / record.tracks[1].update_weight);
}

TEST_F(AveragingTest, RecordsSayTheWindowAndTheConfig) {
  Create({Track("ema", "smoothing=0.9, update_interval=5ba"), Track("raw", "copy")});
  ASSERT_THAT(Push(5, {0, 0, 0}), IsOk());
  EXPECT_EQ(model_->history().latest()->tracks[0].window_steps, 1);
  ASSERT_THAT(Push(6, {0, 0, 0}), IsOk());
  EXPECT_FALSE(model_->history().latest()->tracks[0].updated);
  EXPECT_EQ(model_->history().latest()->tracks[0].window_steps, 0);
  ASSERT_THAT(Push(10, {0, 0, 0}), IsOk());
  const TrackVersion track = model_->history().latest()->tracks[0];
  EXPECT_NEAR(track.window_steps, 50, 1e-9);
  EXPECT_EQ(track.config, "smoothing=0.9, update_interval=5ba");
  EXPECT_EQ(track.update_count, 2);
}

TEST_F(AveragingTest, ATensorThatIsNotFiniteIsSkippedWhereTheModelSaysSo) {
  Create({Track("ema", "smoothing=0.5"), Track("raw", "copy")},
         {{"a", Dtype::kFloat32, {2}}, {"b", Dtype::kFloat32, {1}}}, NonFinitePolicy::kSkipTensor);
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  ASSERT_THAT(Push(2, {8, kNan, 8}), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(0, 0, 4));
  EXPECT_THAT(Read("raw"), ElementsAre(0, 0, 8));
  EXPECT_EQ(model_->history().latest()->skipped_tensor_count, 1);
  EXPECT_THAT(model_->history().latest()->skipped_tensors, ElementsAre("a"));
  ASSERT_THAT(Push(3, {8, 8, 8}), IsOk());
  EXPECT_EQ(model_->history().latest()->skipped_tensor_count, 0);
  EXPECT_THAT(Read("ema"), ElementsAre(4, 4, 6));
}

TEST_F(AveragingTest, OfNeighboursTheOneThatIsNotFiniteIsNamed) {
  TrackConfig ema = Track("ema", "smoothing=0.5");
  ema.tensor_rules = {{"head", TensorAction::kIgnore}};
  Create({ema, Track("raw", "copy")}, {{"a", Dtype::kFloat32, {2}},
                                       {"none", Dtype::kFloat32, {0}},
                                       {"b", Dtype::kFloat32, {1}},
                                       {"c", Dtype::kFloat32, {2}},
                                       {"head", Dtype::kFloat32, {1}},
                                       {"d", Dtype::kFloat32, {1}}});
  ASSERT_THAT(Push(1, {0, 0, 0, 0, 0, 0, 0}), IsOk());
  const std::pair<const char*, int> places[] = {{"a", 0}, {"a", 1},    {"b", 0}, {"c", 0},
                                                {"c", 1}, {"head", 0}, {"d", 0}};
  int64_t step = 1;
  for (size_t i = 0; i < std::size(places); ++i) {
    std::vector<float> values(std::size(places), 1);
    values[i] = kNan;
    EXPECT_THAT(Push(++step, values),
                AllOf(ReasonIs(ErrorReason::kNonFinite),
                      StatusIs(absl::StatusCode::kInvalidArgument,
                               HasSubstr(absl::StrCat("tensor \"", places[i].first,
                                                      "\" holds NaN or infinity at element ",
                                                      places[i].second)))));
  }
  ASSERT_THAT(Push(++step, {1, 2, 3, 4, 5, 6, 7}), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(0.5, 1, 1.5, 2, 2.5, 3.5));
  EXPECT_THAT(Read("raw"), ElementsAre(1, 2, 3, 4, 5, 6, 7));
}

TEST_F(AveragingTest, WhatOneTrackIgnoresIsNotFoldedIntoItsNextTensor) {
  TrackConfig some = Track("some", "smoothing=0.5");
  some.tensor_rules = {{"b", TensorAction::kIgnore}};
  Create({Track("all", "smoothing=0.5"), some},
         {{"a", Dtype::kFloat32, {1}}, {"b", Dtype::kFloat32, {1}}, {"c", Dtype::kFloat32, {1}}});
  // In "some" c lies where b goes on after a in "all". It is pushed before these.
  const Manifest& manifest = model_->manifest();
  rank_ = std::make_unique<TestRank>(
      model_, "other", /*rank=*/0, /*world_size=*/1,
      std::vector<Shard>{WholeTensor(manifest, 2), WholeTensor(manifest, 0),
                         WholeTensor(manifest, 1)},
      /*whole=*/false);
  ASSERT_THAT(rank_->Join(), IsOk());
  ASSERT_THAT(Push(1, {3, 1, 2}), IsOk());
  EXPECT_THAT(Read("all"), ElementsAre(1, 2, 3));
  EXPECT_THAT(Read("some"), ElementsAre(1, 3));
  ASSERT_THAT(Push(2, {13, 11, 12}), IsOk());
  EXPECT_THAT(Read("all"), ElementsAre(6, 7, 8));
  EXPECT_THAT(Read("some"), ElementsAre(6, 8));
}

TEST_F(AveragingTest, ATensorWithoutAValueYetCannotBeSkipped) {
  Create({Track("ema", "smoothing=0.5")}, {{"a", Dtype::kFloat32, {2}}},
         NonFinitePolicy::kSkipTensor);
  EXPECT_THAT(Push(1, {0, kNan}), ReasonIs(ErrorReason::kNonFinite));
  EXPECT_FALSE(model_->history().latest().has_value());
}

TEST_F(AveragingTest, ValuesThatAreNotFiniteAreAveragedWhereTheModelAllowsThem) {
  Create({Track("ema", "smoothing=0.5")}, {{"a", Dtype::kFloat32, {2}}}, NonFinitePolicy::kAllow);
  ASSERT_THAT(Push(1, {0, 0}), IsOk());
  ASSERT_THAT(Push(2, {4, std::numeric_limits<float>::infinity()}), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(2, std::numeric_limits<float>::infinity()));
}

TEST_F(AveragingTest, AChangeTakesEffectAtTheNextCommitAndKeepsTheAverage) {
  Create({Track("ema", "smoothing=0.5")});
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  ASSERT_THAT(model_->UpdateTracks({.put = {Track("ema", "smoothing=0.75"), Track("new", "copy")}}),
              IsOk());
  EXPECT_EQ(model_->Describe().tracks.size(), 1);
  EXPECT_THAT(model_->Describe().pending_tracks, SizeIs(2));
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult second, Push(2, {4, 4, 4}));
  EXPECT_THAT(Read("ema"), ElementsAre(2, 2, 2));
  EXPECT_EQ(second.record.tracks.size(), 1);
  EXPECT_EQ(second.plan.revision, 8);
  ASSERT_EQ(second.plan.tracks.size(), 2);
  EXPECT_THAT(model_->Describe().pending_tracks, IsEmpty());
  // A new track has no value before the next push.
  EXPECT_THAT(model_->tracks().CheckTrack("new"), IsOk());
  EXPECT_EQ((*model_->history().Pin(0))->Find("new"), nullptr);
  ASSERT_THAT(Push(3, {6, 6, 6}), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(3, 3, 3));
  EXPECT_THAT(Read("new"), ElementsAre(6, 6, 6));
  EXPECT_EQ(model_->history().latest()->tracks[0].config, "smoothing=0.75");
  EXPECT_EQ(model_->history().latest()->tracks[0].update_count, 3);
}

TEST_F(AveragingTest, RulesThatFitIntoNoReplyAreRefused) {
  const std::string tensor(100, 'w');
  Create({Track("ema", "smoothing=0.5")}, {{tensor, Dtype::kFloat32, {1}}});
  const auto with_rules = [&tensor](const std::string& name, size_t count) {
    TrackConfig track = Track(name, "smoothing=0.5");
    track.tensor_rules.assign(count, {tensor});
    return track;
  };
  ASSERT_THAT(model_->UpdateTracks({.put = {with_rules("one", 10'000)}}), IsOk());
  EXPECT_THAT(model_->UpdateTracks({.put = {with_rules("two", 10'000)}}),
              AllOf(ReasonIs(ErrorReason::kBadRequest),
                    StatusIs(absl::StatusCode::kInvalidArgument,
                             AllOf(HasSubstr("tensor_rules"), HasSubstr("at most 2097152")))));
  EXPECT_THAT(model_->Describe().pending_tracks, SizeIs(2));
  EXPECT_THAT(model_->UpdateTracks({.put = {with_rules("two", 10'000)}, .remove = {"one"}}),
              IsOk());
}

TEST_F(AveragingTest, TheSameChangeAgainIsOkAndUndoneItLeavesNothingPending) {
  Create({Track("ema", "smoothing=0.5")});
  const TrackChanges changes{.put = {Track("ema", "smoothing=0.75")}};
  ASSERT_THAT(model_->UpdateTracks(changes), IsOk());
  ASSERT_THAT(model_->UpdateTracks(changes), IsOk());
  EXPECT_THAT(model_->Describe().pending_tracks, Not(IsEmpty()));
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  ASSERT_THAT(model_->UpdateTracks(changes), IsOk());
  EXPECT_THAT(model_->Describe().pending_tracks, IsEmpty());
  EXPECT_EQ(model_->Describe().plan_revision, 8);
}

TEST_F(AveragingTest, APausedTrackStaysAsItIsAndGoesOnWhenResumed) {
  Create({Track("ema", "half_life=1ba"), Track("raw", "copy")});
  ASSERT_THAT(model_->UpdateTracks({.pause = {"ema"}}), IsOk());
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  ASSERT_THAT(Push(2, {8, 8, 8}), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(0, 0, 0));
  EXPECT_FALSE(model_->history().latest()->tracks[0].updated);
  EXPECT_THAT(model_->history().latest()->tracks[0].config, HasSubstr("paused"));
  ASSERT_THAT(model_->UpdateTracks({.resume = {"ema"}}), IsOk());
  ASSERT_THAT(Push(3, {8, 8, 8}), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(0, 0, 0));
  ASSERT_THAT(Push(4, {8, 8, 8}), IsOk());
  // The time that it was paused counts: 3 batches since its last update.
  EXPECT_THAT(Read("ema"), ElementsAre(7, 7, 7));
}

TEST_F(AveragingTest, ARemovedTrackGivesItsMemoryBackAndStaysInOlderVersions) {
  Create({Track("ema", "smoothing=0.5"), Track("raw", "copy")});
  const int64_t reserved_bytes = store_.budget().reserved_bytes();
  ASSERT_THAT(Push(1, {1, 1, 1}), IsOk());
  ASSERT_THAT(model_->UpdateTracks({.remove = {"raw"}}), IsOk());
  ASSERT_THAT(Push(2, {2, 2, 2}), IsOk());
  ASSERT_THAT(Push(3, {3, 3, 3}), IsOk());
  EXPECT_THAT(Read("raw", 2), ElementsAre(2, 2, 2));
  EXPECT_THAT(model_->tracks().CheckTrack("raw"), ReasonIs(ErrorReason::kTrackNotFound));
  EXPECT_EQ(store_.budget().reserved_bytes(), reserved_bytes);
  for (int step = 4; step <= 6; ++step) ASSERT_THAT(Push(step, {3, 3, 3}), IsOk());
  EXPECT_EQ(model_->tracks().reserved_bytes(), reserved_bytes / 2);
  OpenRun("next");  // The rank before still has the plan that it joined with.
  EXPECT_EQ(store_.budget().reserved_bytes(), reserved_bytes / 2);
  EXPECT_LE(TakenBytes(model_->device()), reserved_bytes / 2);

  // One of the same name begins anew.
  ASSERT_THAT(model_->UpdateTracks({.put = {Track("raw", "smoothing=0.5")}}), IsOk());
  ASSERT_THAT(Push(7, {3, 3, 3}), IsOk());
  ASSERT_THAT(Push(8, {5, 5, 5}), IsOk());
  EXPECT_THAT(Read("raw"), ElementsAre(5, 5, 5));
}

TEST_F(AveragingTest, AChangeThatIsRefusedChangesNothing) {
  Create({Track("ema", "smoothing=0.5"), Track("raw", "copy")});
  const int64_t reserved_bytes = store_.budget().reserved_bytes();
  TrackConfig copying = Track("new", "200ba");
  copying.tensor_rules = {{"v*", TensorAction::kCopy}};
  TrackConfig wide = Track("ema", "smoothing=0.5");
  wide.dtype = Dtype::kFloat64;
  for (const TrackChanges& changes :
       {TrackChanges{.put = {Track("new", "copy"), Track("new", "copy")}},
        TrackChanges{.put = {Track("ok", "copy"), copying}},
        TrackChanges{.put = {Track("ema", "copy")}}, TrackChanges{.put = {wide}},
        TrackChanges{.put = {Track("ok", "copy")}, .pause = {"nobody"}},
        TrackChanges{.put = {Track("a b", "copy")}}, TrackChanges{.remove = {"ema", "raw"}}}) {
    EXPECT_FALSE(model_->UpdateTracks(changes).ok());
    EXPECT_THAT(model_->Describe().pending_tracks, IsEmpty());
    EXPECT_EQ(store_.budget().reserved_bytes(), reserved_bytes);
  }
  EXPECT_THAT(model_->UpdateTracks({.resume = {"nobody"}}),
              AllOf(StatusIs(absl::StatusCode::kNotFound, HasSubstr("ema, raw")),
                    ReasonIs(ErrorReason::kTrackNotFound)));
}

TEST_F(AveragingTest, ASchedulePushesCannotFollowIsRefused) {
  Create({Track("ema", "smoothing=0.5")});
  ASSERT_THAT(model_->UpdateTracks({.put = {Track("tokens", "1000tok")}}), IsOk());  // Who knows.
  ASSERT_THAT(model_->UpdateTracks({.remove = {"tokens"}}), IsOk());
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  for (const char* name : {"ema", "tokens"}) {
    EXPECT_THAT(model_->UpdateTracks({.put = {Track(name, "1000tok")}}),
                AllOf(StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("batch 1")),
                      ReasonIs(ErrorReason::kBadTime)));
  }
  ASSERT_THAT(Push(2, {0, 0, 0}), IsOk());
}

TEST_F(AveragingTest, UnitsThatNoTrackNeedsMayGoBackOrBeMissing) {
  Create({Track("ema", "half_life=1ba")});
  rank_->SetTime([](int64_t step) {
    TrainingTime time = TrainingTime::AtBatch(step);
    if (step < 3) time.Set(TimeUnit::kProgress, step == 1 ? 0.9 : 0.4);
    return time;
  });
  for (int step = 1; step <= 3; ++step) {
    ASSERT_THAT(Push(step, {static_cast<float>(step), 0, 0}), IsOk());
  }
  EXPECT_THAT(Read("ema"), ElementsAre(2.25f, 0, 0));
}

TEST_F(AveragingTest, ANewTrackMustFitTheMemoryBudget) {
  Create({Track("ema", "smoothing=0.5")}, {{"w", Dtype::kFloat32, {50'000'000}}});
  EXPECT_THAT(model_->UpdateTracks({.put = {Track("two", "copy")}}),
              ReasonIs(ErrorReason::kMemoryBudget));
  EXPECT_THAT(model_->Describe().pending_tracks, IsEmpty());
}

TEST_F(AveragingTest, APushThatGoesByAnOlderPlanIsRefused) {
  Create({Track("ema", "smoothing=0.5")});
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  ASSERT_THAT(model_->UpdateTracks({.put = {Track("ema", "smoothing=0.75")}}), IsOk());
  PushStart start = rank_->Start(2);
  start.plan_revision = 7;
  // Not yet: the change waits for a commit.
  EXPECT_THAT(model_->OpenPush(start, [](const auto&) {}), IsOk());
  ASSERT_THAT(Push(2, {0, 0, 0}), IsOk());
  start.step = 3;
  start.time = TrainingTime::AtBatch(3);
  EXPECT_THAT(model_->OpenPush(start, [](const auto&) {}), ReasonIs(ErrorReason::kPlanChanged));
  start.plan_revision = 8;
  EXPECT_THAT(model_->OpenPush(start, [](const auto&) {}), IsOk());
}

TEST_F(AveragingTest, ANewRunBeginsWithWhatWasPending) {
  Create({Track("ema", "smoothing=0.5")});
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  ASSERT_THAT(model_->UpdateTracks({.put = {Track("ema", "smoothing=0.75")}}), IsOk());
  OpenRun("next");
  EXPECT_THAT(model_->Describe().pending_tracks, IsEmpty());
  ASSERT_THAT(Push(2, {4, 4, 4}), IsOk());
  EXPECT_THAT(Read("ema"), ElementsAre(1, 1, 1));
}

TEST_F(AveragingTest, CreatingTheModelAgainIsOkAsItWasAndAsItIs) {
  const std::vector<TrackConfig> before = {Track("ema", "smoothing=0.5")};
  const std::vector<TrackConfig> after = {Track("ema", "smoothing=0.75")};
  Create(before);
  ASSERT_THAT(Push(1, {0, 0, 0}), IsOk());
  ASSERT_THAT(model_->UpdateTracks({.put = after}), IsOk());
  ASSERT_THAT(Push(2, {0, 0, 0}), IsOk());
  ModelConfig config = model_->config();
  for (const auto& tracks : {before, after}) {
    config.tracks = tracks;
    EMA_ASSERT_OK_AND_ASSIGN(const auto again, store_.Create(config));
    EXPECT_FALSE(again.created);
  }
  config.tracks = {Track("ema", "smoothing=0.8")};
  EXPECT_THAT(store_.Create(config),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("smoothing=0.75")));
}

// The result of one track does not depend on which other tracks there are.
TEST_F(AveragingTest, ATrackDoesNotFeelOtherTracks) {
  const std::vector<std::string> schedules = {
      "10ba",         "smoothing=0.9, zero_init=plain",      "copy",          "inv_gamma=1",
      "uniform=true", "half_life=30ba, update_interval=3ba", "mean_of_last=5"};
  std::vector<TrackConfig> tracks;
  for (size_t i = 0; i < schedules.size(); ++i) {
    tracks.push_back(Track("t" + std::to_string(i), schedules[i]));
  }
  Create(tracks);
  std::vector<std::shared_ptr<Model>> alone;
  std::vector<TestRank> ranks;
  for (const TrackConfig& track : tracks) {
    alone.push_back(
        store_
            .Create({.name = track.name, .manifest = model_->config().manifest, .tracks = {track}})
            ->model);
    ranks.emplace_back(alone.back(), "launch");
    ASSERT_THAT(ranks.back().Join(), IsOk());
  }
  for (int step = 1; step <= 40; ++step) {
    const auto value = static_cast<float>(std::sin(step));
    const std::vector<float> values = {value, -value, value * 1e-3f};
    ASSERT_THAT(Push(step, values), IsOk());
    for (TestRank& rank : ranks) ASSERT_THAT(rank.Push(step, BytesOf(values)), IsOk());
  }
  for (size_t i = 0; i < tracks.size(); ++i) {
    const auto bytes = ReadAll(*alone[i], tracks[i].name);
    ASSERT_THAT(bytes, IsOk());
    EXPECT_EQ(Read(tracks[i].name), FloatsOf(*bytes)) << schedules[i];
  }
}

}  // namespace
}  // namespace ema
