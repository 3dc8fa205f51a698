// SPDX-License-Identifier: Apache-2.0
//
// Tensors that are neighbours are folded as one. What comes of it is what comes of the same weights
// when each tensor is pushed by itself.
#include <algorithm>
#include <array>
#include <random>
#include <span>

#include "tests/core/test_model.h"
#include "tests/testutil/random_layout.h"
#include "tests/testutil/wrapped_device.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kBlockElements = 1024;  // float32 in a block of SmallBlocks().

std::shared_ptr<const Manifest> RandomManifest(std::mt19937& random) {
  constexpr std::array<Dtype, 6> kDtypes = {Dtype::kFloat32,  Dtype::kFloat32, Dtype::kFloat32,
                                            Dtype::kBFloat16, Dtype::kFloat64, Dtype::kInt8};
  std::vector<TensorSpec> tensors(1 + Below(random, 40));
  Dtype dtype = Dtype::kFloat32;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (OneIn(random, 4)) dtype = kDtypes[Below(random, kDtypes.size())];
    const int64_t max_elements = OneIn(random, 5) ? 3 * kBlockElements : 200;
    const int64_t elements = OneIn(random, 8) ? 0 : 1 + Below(random, max_elements);
    const char group = "abc"[Below(random, 3)];
    tensors[i] = {std::string(1, group) + std::to_string(i), dtype, {elements}};
  }
  return MakeManifest(std::move(tensors));
}

// Tracks of all kinds, some with rules that single out groups of tensors.
std::vector<TrackConfig> RandomTracks(std::mt19937& random, const Manifest& manifest) {
  const std::array<Schedule, 5> schedules = {
      MakeSchedule("copy"), MakeSchedule("10ba"), MakeSchedule("smoothing=0.75, zero_init=plain"),
      MakeSchedule("inv_gamma=1"), MakeSchedule("3ba", "2ba")};
  std::vector<TrackConfig> tracks;
  for (int64_t i = Below(random, 3); i >= 0; --i) {
    const int64_t schedule = Below(random, schedules.size());
    const bool is_copy = schedule == 0;
    TrackConfig track = {.name = absl::StrCat("track", i), .schedule = schedules[schedule]};
    if (!is_copy && OneIn(random, 4)) track.dtype = Dtype::kFloat64;
    for (const char* const pattern : {"a*", "b*"}) {
      TensorRule rule = {.pattern = pattern, .action = TensorAction::kIgnore};
      if (!is_copy && OneIn(random, 2)) rule.action = TensorAction::kCopy;
      if (!is_copy && OneIn(random, 3)) {
        rule.action = TensorAction::kAverage;
        rule.schedule = *RuleSchedule(MakeSchedule("2ba"), track.schedule);
      }
      if (OneIn(random, 3)) track.tensor_rules.push_back(std::move(rule));
    }
    track = WithoutUnmatchedRules(std::move(track), manifest);
    if (!ValidateTrack(track, manifest).ok()) track.tensor_rules.clear();  // They ignored all.
    tracks.push_back(std::move(track));
  }
  return tracks;
}

class NeighboursTest : public testing::Test {
 protected:
  std::vector<std::byte> RandomBytes(const Manifest& manifest, const std::vector<Shard>& shards,
                                     std::vector<std::vector<std::byte>>& by_tensor) {
    std::vector<std::byte> bytes;
    for (const Shard& shard : shards) {
      const std::vector<std::byte>& tensor = by_tensor[shard.tensor_index];
      const int64_t size = DtypeSize(manifest.tensor(shard.tensor_index).dtype);
      const auto begin = tensor.begin() + shard.offsets[0] * size;
      bytes.insert(bytes.end(), begin, begin + shard.extents[0] * size);
    }
    return bytes;
  }

  // In chunks of random length, each in pieces of random length that may cut an element.
  absl::Status PushInPieces(TestRank& rank, const RankLayout& layout, int64_t step,
                            const std::vector<std::byte>& bytes) {
    const auto outcome = std::make_shared<PushOutcome>();
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<RankPush> push, rank.Open(step, outcome));
    int64_t chunks = 0;
    for (int64_t offset = 0; offset < std::ssize(bytes); ++chunks) {
      int64_t end = offset + 1 + Below(random_, OneIn(random_, 2) ? 20'000 : 300);
      while (end < std::ssize(bytes) && !layout.IsElementBoundary(end)) ++end;
      end = std::min<int64_t>(end, std::ssize(bytes));
      const std::span<const std::byte> chunk(bytes.data() + offset, end - offset);
      std::vector<std::span<const std::byte>> pieces;
      for (size_t at = 0; at < chunk.size();) {
        const int64_t wanted = Below(random_, OneIn(random_, 2) ? 9000 : 8);
        const size_t size = std::min(static_cast<size_t>(wanted), chunk.size() - at);
        pieces.push_back(chunk.subspan(at, size));
        at += size;
      }
      EMA_RETURN_IF_ERROR(
          push->AddChunk({offset, Crc32c(0, chunk), static_cast<int64_t>(chunk.size())}, pieces));
      offset = end;
    }
    EMA_RETURN_IF_ERROR(push->Commit(TestRank::EndOf(bytes, chunks)));
    return outcome->result.status();
  }

  std::mt19937 random_;
};

TEST_F(NeighboursTest, AreFoldedAsEachByItself) {
  int joined = 0;
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    random_.seed(seed);
    ModelStore store(TestDevice(), SmallBlocks());
    const std::shared_ptr<const Manifest> manifest = RandomManifest(random_);
    ModelConfig config = {
        .name = "joined",
        .manifest = manifest,
        .tracks = RandomTracks(random_, *manifest),
        .non_finite = OneIn(random_, 4) ? NonFinitePolicy::kSkipTensor : NonFinitePolicy::kAllow};
    EMA_ASSERT_OK_AND_ASSIGN(const auto one, store.Create(config));
    config.name = "apart";
    EMA_ASSERT_OK_AND_ASSIGN(const auto other, store.Create(config));

    // Most tensors whole and in order; some cut, some elsewhere.
    std::vector<Shard> shards;
    std::vector<Shard> apart;
    for (int64_t i = 0; i < manifest->tensor_count(); ++i) {
      const int64_t elements = manifest->tensor(i).element_count();
      if (elements > 1 && OneIn(random_, 6)) {
        const int64_t cut = 1 + Below(random_, elements - 1);
        shards.push_back({i, {0}, {cut}});
        shards.push_back({i, {cut}, {elements - cut}});
      } else {
        shards.push_back(WholeTensor(*manifest, i));
      }
      apart.insert(apart.begin(), WholeTensor(*manifest, i));
    }
    if (OneIn(random_, 3)) {
      std::swap(shards[Below(random_, std::ssize(shards))],
                shards[Below(random_, std::ssize(shards))]);
    }
    EMA_ASSERT_OK_AND_ASSIGN(const RankLayout layout, RankLayout::Create(*manifest, shards));
    int ranges = 0;
    layout.ForEachJoinedRange(0, layout.total_bytes(), [&](const auto&) { return ++ranges; });
    joined += ranges < std::ssize(shards) ? 1 : 0;
    TestRank rank(one.model, "launch", 0, 1, shards, /*whole=*/false);
    TestRank single(other.model, "launch", 0, 1, apart, /*whole=*/false);
    ASSERT_THAT(rank.Join(), IsOk());
    ASSERT_THAT(single.Join(), IsOk());

    for (int64_t step = 1; step <= 3; ++step) {
      std::vector<std::vector<std::byte>> weights(manifest->tensor_count());
      for (int64_t i = 0; i < manifest->tensor_count(); ++i) {
        const TensorSpec& spec = manifest->tensor(i);
        weights[i].resize(spec.element_count() * DtypeSize(spec.dtype));
        // Below the exponents that are not finite, but for some tensors: a first average must be.
        const bool is_wild = step > 1 && OneIn(random_, 10);
        for (std::byte& byte : weights[i]) {
          byte = static_cast<std::byte>(is_wild && OneIn(random_, 3) ? 0xff : Below(random_, 0x3f));
        }
      }
      ASSERT_THAT(PushInPieces(rank, layout, step, RandomBytes(*manifest, shards, weights)),
                  IsOk());
      // One chunk, one piece a tensor.
      const auto outcome = std::make_shared<PushOutcome>();
      EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<RankPush> push, single.Open(step, outcome));
      const std::vector<std::byte> bytes = RandomBytes(*manifest, apart, weights);
      int64_t offset = 0;
      int64_t chunks = 0;
      for (const Shard& shard : apart) {
        const auto size = std::ssize(weights[shard.tensor_index]);
        if (size == 0) continue;
        ASSERT_THAT(TestRank::AddChunk(*push, bytes, offset, size), IsOk());
        offset += size;
        ++chunks;
      }
      ASSERT_THAT(push->Commit(TestRank::EndOf(bytes, chunks)), IsOk());
      ASSERT_THAT(outcome->result, IsOk());
      for (const TrackConfig& track : config.tracks) {
        const auto joined_bytes = ReadAll(*one.model, track.name);
        const auto apart_bytes = ReadAll(*other.model, track.name);
        ASSERT_EQ(joined_bytes.status(), apart_bytes.status());
        if (joined_bytes.ok()) {
          ASSERT_EQ(*joined_bytes, *apart_bytes) << track.name;
        }
      }
    }
  }
  EXPECT_GT(joined, 200);
}

// Gives out memory from the end of an arena on: each block ends where the one before it begins.
class DescendingDevice : public WrappedDevice {
 public:
  using WrappedDevice::WrappedDevice;
  absl::StatusOr<std::shared_ptr<Block>> Allocate(int64_t size_bytes) override {
    if (arena_ == nullptr) {
      EMA_ASSIGN_OR_RETURN(arena_, WrappedDevice::Allocate(kArenaBytes));
    }
    left_ -= size_bytes;
    struct Piece : Block {
      Piece(std::byte* data, int64_t size_bytes, std::shared_ptr<Block> arena)
          : Block(data, size_bytes), arena(std::move(arena)) {}
      const std::shared_ptr<Block> arena;
    };
    return std::make_shared<Piece>(arena_->data() + left_, size_bytes, arena_);
  }

 private:
  static constexpr int64_t kArenaBytes = int64_t{1} << 20;
  std::shared_ptr<Block> arena_;
  int64_t left_ = kArenaBytes;
};

// Neighbours in memory need be none in the track.
TEST_F(NeighboursTest, InMemoryAloneAreNotOneRun) {
  ModelStore store(std::make_shared<DescendingDevice>(MakeCpuDevice(0)), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto created,
      store.Create({.name = "m",
                    .manifest = MakeManifest({{"first", Dtype::kFloat32, {kBlockElements}},
                                              {"last", Dtype::kFloat32, {kBlockElements}}}),
                    .tracks = {{"raw", MakeSchedule("copy")}},
                    .non_finite = NonFinitePolicy::kReject}));
  const Manifest& manifest = created.model->manifest();
  TestRank rank(created.model, "launch", 0, 1, {WholeTensor(manifest, 1), WholeTensor(manifest, 0)},
                /*whole=*/false);
  ASSERT_THAT(rank.Join(), IsOk());
  std::vector<float> weights(2 * kBlockElements, 1.0F);
  weights[kBlockElements + 7] = std::numeric_limits<float>::infinity();
  EXPECT_THAT(rank.Push(1, BytesOf(weights)),
              AllOf(ReasonIs(ErrorReason::kNonFinite),
                    StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"first\""))));
}

}  // namespace
}  // namespace ema
