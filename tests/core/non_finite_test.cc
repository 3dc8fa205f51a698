// SPDX-License-Identifier: Apache-2.0
//
// Pushed values that are NaN or infinity: which tensors are named, counted and skipped, the same on
// every device.
#include <cmath>
#include <limits>
#include <random>

#include "server/device/accelerator_device.h"
#include "tests/core/test_model.h"
#include "tests/testutil/fake_accelerator.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TrackConfig Track(const std::string& name, const std::string& schedule) {
  return {.name = name, .schedule = MakeSchedule(schedule)};
}

template <typename... Values>
std::vector<std::byte> Raw(Values... values) {
  std::vector<std::byte> bytes;
  const auto append = [&bytes](auto value) {
    const auto* const data = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), data, data + sizeof(value));
  };
  (append(values), ...);
  return bytes;
}

class NonFiniteTest : public testing::Test {
 protected:
  void Create(std::vector<TrackConfig> tracks, std::vector<TensorSpec> tensors,
              NonFinitePolicy non_finite = NonFinitePolicy::kSkipTensor) {
    const auto created = store_.Create({.name = "m",
                                        .manifest = MakeManifest(std::move(tensors)),
                                        .tracks = std::move(tracks),
                                        .non_finite = non_finite});
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
    rank_ = std::make_unique<TestRank>(model_, "launch");
    ASSERT_THAT(rank_->Join(), IsOk());
  }
  std::vector<float> Read(const std::string& track) { return FloatsOf(*ReadAll(*model_, track)); }

  ModelStore store_{TestDevice(), SmallBlocks()};
  std::shared_ptr<Model> model_;
  std::unique_ptr<TestRank> rank_;
};

TEST_F(NonFiniteTest, AnAverageThatHasOverflowedIsNotBlamed) {
  Create({Track("ema", "smoothing=0.5")},
         {{"a", Dtype::kFloat32, {1}}, {"b", Dtype::kFloat32, {1}}});
  ASSERT_THAT(rank_->Push(1, Raw(3e38f, 0.0f)), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult result, rank_->Push(2, Raw(-3e38f, kNan)));
  EXPECT_THAT(result.record.skipped_tensors, ElementsAre("b"));
  EXPECT_EQ(result.record.skipped_tensor_count, 1);
  EXPECT_THAT(Read("ema"), ElementsAre(-std::numeric_limits<float>::infinity(), 0));
}

TEST_F(NonFiniteTest, AFloat64IsSkippedOnlyIfAFloat32AverageCannotHoldIt) {
  TrackConfig track = Track("ema", "smoothing=0.999");
  Create({track}, {{"a", Dtype::kFloat64, {1}}, {"b", Dtype::kFloat32, {1}}});
  ASSERT_THAT(rank_->Push(1, Raw(1.0, 1.0f)), IsOk());
  // The average would be finite.
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult result, rank_->Push(2, Raw(1e39, 1.0f)));
  EXPECT_THAT(result.record.skipped_tensors, ElementsAre("a"));
  EXPECT_THAT(Read("ema"), ElementsAre(1, 1));
}

TEST_F(NonFiniteTest, ADtypeOfFloat64HoldsEveryFiniteFloat64) {
  TrackConfig track = Track("ema", "smoothing=0.5, update_interval=2ba");
  track.dtype = Dtype::kFloat64;
  Create({track, Track("raw", "copy")}, {{"a", Dtype::kFloat64, {1}}, {"b", Dtype::kFloat32, {1}}});
  ASSERT_THAT(rank_->Push(2, Raw(1e300, 1.0f)), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult only_raw, rank_->Push(3, Raw(1e308, 1.0f)));
  EXPECT_EQ(only_raw.record.skipped_tensor_count, 0);
  ASSERT_THAT(rank_->Push(4, Raw(3e300, 2.0f)), IsOk());
  EXPECT_EQ(*ReadAll(*model_, "ema"), Raw(2e300, 1.5));
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult infinite,
                           rank_->Push(6, Raw(std::numeric_limits<double>::infinity(), 2.0f)));
  EXPECT_THAT(infinite.record.skipped_tensors, ElementsAre("a"));
}

TEST_F(NonFiniteTest, ATensorInSeveralShardsHidesNoOther) {
  Create({Track("ema", "smoothing=0.5")},
         {{"a", Dtype::kFloat32, {2}}, {"b", Dtype::kFloat32, {1}}});
  const Manifest& manifest = model_->manifest();
  TestRank rank(model_, "cut", 0, 1, {{0, {0}, {1}}, {0, {1}, {1}}, WholeTensor(manifest, 1)},
                /*whole=*/false);
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(1, Raw(1.0f, 1.0f, 1.0f)), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult result, rank.Push(2, Raw(kNan, kNan, kNan)));
  EXPECT_THAT(result.record.skipped_tensors, ElementsAre("a", "b"));
  EXPECT_THAT(Read("ema"), ElementsAre(1, 1, 1));
}

TEST_F(NonFiniteTest, ATensorThatNoTrackTakesCounts) {
  TrackConfig track = Track("ema", "smoothing=0.5");
  track.tensor_rules = {{"b", TensorAction::kIgnore}};
  Create({track}, {{"a", Dtype::kFloat32, {1}}, {"b", Dtype::kFloat32, {2}}});
  ASSERT_THAT(rank_->Push(1, Raw(1.0f, 1.0f, 1.0f)), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult result, rank_->Push(2, Raw(2.0f, 2.0f, kNan)));
  EXPECT_THAT(result.record.skipped_tensors, ElementsAre("b"));
  EXPECT_THAT(Read("ema"), ElementsAre(1.5f));
}

TEST_F(NonFiniteTest, ARefusedStepNamesTheTensorAlsoIfNoTrackIsDue) {
  Create({Track("ema", "smoothing=0.5, update_interval=5ba")},
         {{"a", Dtype::kFloat32, {1}}, {"b", Dtype::kFloat32, {2}}}, NonFinitePolicy::kReject);
  ASSERT_THAT(rank_->Push(5, Raw(1.0f, 1.0f, 1.0f)), IsOk());
  EXPECT_THAT(rank_->Push(6, Raw(2.0f, 2.0f, kNan)),
              AllOf(StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("tensor \"b\" holds NaN or infinity at element 1")),
                    ReasonIs(ErrorReason::kNonFinite)));
}

TEST_F(NonFiniteTest, AFloat64ThatIsTooLargeIsNotCalledInfinite) {
  Create({Track("ema", "smoothing=0.5")}, {{"a", Dtype::kFloat64, {1}}}, NonFinitePolicy::kReject);
  EXPECT_THAT(rank_->Push(1, Raw(1e300)),
              AllOf(StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("or more than a float32 can, at element 0")),
                    ReasonIs(ErrorReason::kNonFinite)));
}

TEST_F(NonFiniteTest, ARefusedMaskIsToBeLeftOut) {
  Create({Track("ema", "smoothing=0.5")},
         {{"a", Dtype::kFloat32, {1}}, {"mask", Dtype::kFloat32, {1}, /*is_buffer=*/true}},
         NonFinitePolicy::kReject);
  constexpr std::string_view kAdvice = "again with tracks that ignore it";
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_THAT(rank_->Push(1, Raw(1.0f, -kInfinity)),
              AllOf(StatusIs(absl::StatusCode::kInvalidArgument,
                             AllOf(HasSubstr("tensor \"mask\""), HasSubstr(kAdvice))),
                    ReasonIs(ErrorReason::kNonFinite)));
  EXPECT_THAT(rank_->Push(1, Raw(-kInfinity, 1.0f)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("tensor \"a\""), testing::Not(HasSubstr(kAdvice)))));
}

TEST_F(NonFiniteTest, OfSeveralTensorsTheFirstThatWasPushedIsNamed) {
  Create({Track("ema", "smoothing=0.5")},
         {{"a", Dtype::kFloat32, {1}}, {"b", Dtype::kFloat32, {2}}}, NonFinitePolicy::kReject);
  const Manifest& manifest = model_->manifest();
  TestRank rank(model_, "other", 0, 1, {WholeTensor(manifest, 1), WholeTensor(manifest, 0)}, false);
  ASSERT_THAT(rank.Join(), IsOk());
  EXPECT_THAT(rank.Push(1, Raw(1.0f, kNan, kNan)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"b\"")));
}

TEST_F(NonFiniteTest, ATrainerThatHasDivergedDoesNotFillTheLog) {
  constexpr int64_t kSteps = 200;
  std::vector<LogEvent> dropped;
  ModelStore::Options options = SmallBlocks();
  options.model.log = [&dropped](const LogEvent& event) {
    if (event.name == "step dropped") dropped.push_back(event);
  };
  ModelStore store(TestDevice(), options);
  for (const std::string name : {"m", "other"}) {
    const auto created = store.Create({.name = name,
                                       .manifest = MakeManifest({{"a", Dtype::kFloat32, {1}}}),
                                       .tracks = {Track("ema", "smoothing=0.5")},
                                       .non_finite = NonFinitePolicy::kReject});
    ASSERT_THAT(created, IsOk());
    TestRank rank(created->model, "launch");
    ASSERT_THAT(rank.Join(), IsOk());
    dropped.clear();
    for (int64_t step = 1; step <= kSteps; ++step) {
      ASSERT_THAT(rank.Push(step, Raw(kNan)), ReasonIs(ErrorReason::kNonFinite));
    }
    // Each model has its own: what one does hides nothing of the others.
    EXPECT_GE(dropped.size(), 10) << name;
    EXPECT_LT(dropped.size(), kSteps / 2) << name;
    EXPECT_THAT(ToText(dropped.back()), HasSubstr(" more_before=")) << name;
    // Nor anything else that happens to its own.
    const auto stream = rank.Open(kSteps + 1, std::make_shared<PushOutcome>());
    ASSERT_THAT(stream, IsOk());
    created->model->ExpireSession(std::chrono::steady_clock::now() + std::chrono::hours(1),
                                  std::chrono::seconds(60));
    EXPECT_THAT(ToText(dropped.back()), HasSubstr("SESSION_EXPIRED")) << name;
  }
}

// ---- The devices side by side ----------------------------------------------------------------

constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat64};
constexpr int64_t kElements = 3'000;

// One model on one device, and what has become of its pushes.
struct Side {
  Side(std::shared_ptr<Device> device, NonFinitePolicy non_finite)
      : store(std::move(device), SmallBlocks()) {
    std::vector<TensorSpec> tensors;
    for (const Dtype dtype : kDtypes) {
      tensors.push_back({absl::StrCat("t", tensors.size()), dtype, {kElements}});
    }
    TrackConfig wide = Track("wide", "smoothing=0.9");
    wide.dtype = Dtype::kFloat64;
    TrackConfig part = Track("part", "smoothing=0.5, update_interval=2ba");
    part.tensor_rules = {{"t1", TensorAction::kIgnore}};
    model = store
                .Create({.name = "m",
                         .manifest = MakeManifest(std::move(tensors)),
                         .tracks = {wide, part, Track("raw", "copy")},
                         .non_finite = non_finite})
                ->model;
    rank = std::make_unique<TestRank>(model, "launch");
    EXPECT_THAT(rank->Join(), IsOk());
  }

  // What a client is told.
  std::string Push(int64_t step, const std::vector<std::byte>& bytes) {
    const absl::StatusOr<PushResult> result = rank->Push(step, bytes, /*chunk_bytes=*/10'000);
    if (!result.ok()) return result.status().ToString();
    std::string said = absl::StrCat(result->record.skipped_tensor_count, " skipped");
    for (const std::string& tensor : result->record.skipped_tensors) {
      absl::StrAppend(&said, " ", tensor);
    }
    return said;
  }

  ModelStore store;
  std::shared_ptr<Model> model;
  std::unique_ptr<TestRank> rank;
};

std::vector<std::byte> RandomStep(std::mt19937_64& random) {
  std::vector<std::byte> bytes;
  for (const Dtype dtype : kDtypes) {
    const size_t begin = bytes.size();
    const int64_t size = DtypeSize(dtype);
    bytes.resize(begin + kElements * size);  // Zeros.
    for (uint64_t bad = random() % 6; bad > 3; --bad) {
      const size_t at = begin + (random() % kElements) * size;
      // All ones in the exponent; of a float64 also a number that float32 cannot hold.
      const uint64_t bits = dtype == Dtype::kFloat64 && random() % 2 == 0
                                ? uint64_t{0x7e37} << 48
                                : uint64_t{0x7ff1} << (8 * (size - 2));
      std::memcpy(bytes.data() + at, &bits, size);
    }
  }
  return bytes;
}

TEST(NonFiniteDevicesTest, TellTheSame) {
  for (const NonFinitePolicy policy :
       {NonFinitePolicy::kReject, NonFinitePolicy::kSkipTensor, NonFinitePolicy::kAllow}) {
    Side cpu(MakeCpuDevice(0), policy);
    Side late(MakeAcceleratorDevice(
                  std::make_shared<FakeAccelerator>(FakeAccelerator::Options{.max_delay_us = 20}),
                  {.slab_bytes = 16 << 10}),
              policy);
    std::mt19937_64 random(7);
    for (int64_t step = 1; step <= 40; ++step) {
      SCOPED_TRACE(absl::StrCat("seed 7, policy ", static_cast<int>(policy), ", step ", step));
      const std::vector<std::byte> bytes = RandomStep(random);
      ASSERT_EQ(late.Push(step, bytes), cpu.Push(step, bytes));
    }
    if (policy == NonFinitePolicy::kAllow) continue;  // Payloads of NaN may differ.
    for (const char* const track : {"wide", "part", "raw"}) {
      EXPECT_EQ(*ReadAll(*late.model, track), *ReadAll(*cpu.model, track));
    }
  }
}

}  // namespace
}  // namespace ema
