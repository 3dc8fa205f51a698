// SPDX-License-Identifier: Apache-2.0
//
// Steps of 256 ranks: all of them commit once, or nothing happens and nothing is kept.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include "tests/core/test_model.h"
#include "tests/testutil/random_layout.h"
#include "tests/testutil/wrapped_device.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kRanks = 256;
constexpr int kThreads = 8;
constexpr unsigned kSeed = 20240611;

// A CPU device that knows how much of its memory is in use.
class CountingDevice final : public WrappedDevice {
 public:
  CountingDevice() : WrappedDevice(MakeCpuDevice(int64_t{64} << 20)) {}

  int64_t bytes_in_use() const { return *bytes_in_use_; }

  absl::StatusOr<std::shared_ptr<Block>> Allocate(int64_t size_bytes) override {
    EMA_ASSIGN_OR_RETURN(std::shared_ptr<Block> block, WrappedDevice::Allocate(size_bytes));
    *bytes_in_use_ += size_bytes;
    Block* const raw = block.get();
    return std::shared_ptr<Block>(
        raw, [block = std::move(block), count = bytes_in_use_, size_bytes](Block*) mutable {
          block.reset();
          *count -= size_bytes;
        });
  }

 private:
  const std::shared_ptr<std::atomic<int64_t>> bytes_in_use_ =
      std::make_shared<std::atomic<int64_t>>(0);
};

class ManyRanksTest : public testing::Test {
 protected:
  // What one rank of one step has.
  struct Stream {
    int64_t rank = 0;
    std::unique_ptr<RankPush> push;
    std::shared_ptr<PushOutcome> outcome = std::make_shared<PushOutcome>();
    int64_t sent_bytes = 0;
    int64_t chunk_count = 0;
  };

  void SetUp() override {
    ModelConfig config;
    config.name = "m";
    config.manifest = manifest_;
    config.tracks = {{"ema", MakeSchedule("1ba")}};
    EMA_ASSERT_OK_AND_ASSIGN(const auto created, store_.Create(std::move(config)));
    model_ = created.model;
    std::mt19937 random(kSeed);
    shards_ = CutForRanks(random, *manifest_, kRanks, 150);
  }

  void Join() {
    std::vector<int64_t> order(kRanks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(kSeed));
    for (int64_t r = 0; r < kRanks; ++r) {
      ranks_.emplace_back(model_, "launch", r, kRanks, shards_[r], /*whole=*/false);
    }
    for (const int64_t r : order) ASSERT_THAT(ranks_[r].Join(), IsOk());
  }

  // A rank's bytes of a step at which every element is `value`.
  std::vector<std::byte> BytesOfRank(int64_t rank, float value) const {
    int64_t elements = 0;
    for (const Shard& shard : shards_[rank]) elements += shard.element_count();
    return BytesOf(std::vector<float>(elements, value));
  }

  // Pushes a step by all ranks but `missing`, on threads that each serve many ranks in turns, a
  // random chunk at a time. Gives the streams as they are after that.
  std::vector<Stream> PushStep(int64_t step, float value, const std::vector<int64_t>& missing) {
    std::vector<Stream> streams;
    for (int64_t r = 0; r < kRanks; ++r) {
      if (std::find(missing.begin(), missing.end(), r) == missing.end()) {
        streams.emplace_back().rank = r;
      }
    }
    std::shuffle(streams.begin(), streams.end(), std::mt19937(kSeed + step));
    const size_t share = (streams.size() + kThreads - 1) / kThreads;
    std::vector<std::thread> threads;
    for (size_t begin = 0; begin < streams.size(); begin += share) {
      const std::span<Stream> part =
          std::span(streams).subspan(begin, std::min(share, streams.size() - begin));
      threads.emplace_back([this, part, step, value] { PushPart(part, step, value); });
    }
    for (std::thread& thread : threads) thread.join();
    return streams;
  }

  void PushPart(std::span<Stream> streams, int64_t step, float value) {
    std::mt19937 random(kSeed + static_cast<unsigned>(streams.front().rank));
    std::vector<Stream*> open;
    for (Stream& stream : streams) open.push_back(&stream);
    while (!open.empty()) {
      const auto it = open.begin() + Below(random, static_cast<int64_t>(open.size()));
      Stream& stream = **it;
      if (stream.push == nullptr) {
        EMA_ASSERT_OK_AND_ASSIGN(stream.push, ranks_[stream.rank].Open(step, stream.outcome));
        continue;
      }
      const std::vector<std::byte> bytes = BytesOfRank(stream.rank, value);
      const int64_t left = static_cast<int64_t>(bytes.size()) - stream.sent_bytes;
      if (left == 0) {
        ASSERT_THAT(stream.push->Commit(TestRank::EndOf(bytes, stream.chunk_count)), IsOk());
        open.erase(it);
        continue;
      }
      const int64_t length = std::min<int64_t>(left, 4 * (1 + Below(random, 50)));
      ASSERT_THAT(TestRank::AddChunk(*stream.push, bytes, stream.sent_bytes, length), IsOk());
      stream.sent_bytes += length;
      ++stream.chunk_count;
    }
  }

  void ExpectConstant(float value) {
    EMA_ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, ReadAll(*model_, "ema"));
    for (const float element : FloatsOf(bytes)) ASSERT_EQ(element, value);
  }

  const std::shared_ptr<const Manifest> manifest_ =
      MakeManifest({{"wide", Dtype::kFloat32, {101, 83}},
                    {"deep", Dtype::kFloat32, {3, 5, 7, 11}},
                    {"long", Dtype::kFloat32, {4099}}});
  const std::shared_ptr<CountingDevice> device_ = std::make_shared<CountingDevice>();
  ModelStore store_{device_, SmallBlocks()};
  std::shared_ptr<Model> model_;
  std::vector<std::vector<Shard>> shards_;
  std::vector<TestRank> ranks_;
};

TEST_F(ManyRanksTest, AStepOf256RanksBecomesOneVersion) {
  Join();
  std::atomic<int> commit_count = 0;
  const int64_t watcher = model_->watchers().Watch([&] { ++commit_count; });
  float average = 0;
  for (int64_t step = 1; step <= 6; ++step) {
    const auto value = static_cast<float>(step * step);
    const std::vector<Stream> streams = PushStep(step, value, {});
    ASSERT_FALSE(HasFatalFailure());
    for (const Stream& stream : streams) {
      ASSERT_EQ(stream.outcome->calls, 1);
      ASSERT_THAT(stream.outcome->result, IsOk());
      EXPECT_EQ(stream.outcome->result->record.number, step);
      EXPECT_FALSE(stream.outcome->result->is_duplicate);
    }
    EXPECT_EQ(commit_count, step);
    average = step == 1 ? value : average + (value - average) / 2;
    ExpectConstant(average);
  }
  model_->watchers().Unwatch(watcher);
}

TEST_F(ManyRanksTest, AStepWithMissingRanksExpiresByTheirNamesAndGivesItsMemoryBack) {
  Join();
  PushStep(1, 1.0f, {});
  const int64_t bytes_before = device_->bytes_in_use();
  std::vector<Stream> streams = PushStep(2, 9.0f, {77, 130});
  EXPECT_GT(device_->bytes_in_use(), bytes_before);

  constexpr auto kTimeout = std::chrono::milliseconds(30);
  model_->ExpireSession(std::chrono::steady_clock::now(), std::chrono::hours(1));
  for (const Stream& stream : streams) ASSERT_EQ(stream.outcome->calls, 0);
  model_->ExpireSession(std::chrono::steady_clock::now() + kTimeout, kTimeout);
  // The streams are still there: it is not they who hold the memory.
  EXPECT_EQ(device_->bytes_in_use(), bytes_before);
  for (const Stream& stream : streams) {
    ASSERT_EQ(stream.outcome->calls, 1);
    EXPECT_THAT(stream.outcome->result,
                StatusIs(absl::StatusCode::kAborted, HasSubstr("missing ranks: 77, 130")));
    EXPECT_THAT(stream.outcome->result, ReasonIs(ErrorReason::kSessionExpired));
  }
  EXPECT_EQ(model_->history().latest()->number, 1);
  ExpectConstant(1.0f);

  PushStep(3, 5.0f, {});
  EXPECT_EQ(model_->history().latest()->number, 2);
  EXPECT_EQ(model_->history().latest()->step, 3);
  ExpectConstant(1.0f + 0.75f * 4.0f);
}

TEST_F(ManyRanksTest, AStepDoesNotCommitBeforeTheLastOfItsRanks) {
  Join();
  for (const int64_t late : {0, 100, 255}) {
    const int64_t step = late + 1;
    const int64_t before =
        model_->history().latest().has_value() ? model_->history().latest()->number : 0;
    const std::vector<Stream> streams = PushStep(step, 2.0f, {late});
    EXPECT_EQ(model_->history().latest().has_value() ? model_->history().latest()->number : 0,
              before);
    auto outcome = std::make_shared<PushOutcome>();
    EMA_ASSERT_OK_AND_ASSIGN(const auto push, ranks_[late].Open(step, outcome));
    const std::vector<std::byte> bytes = BytesOfRank(late, 2.0f);
    int64_t chunks = 0;
    if (!bytes.empty()) {
      // Not all of it, and none of it is a commit.
      EXPECT_THAT(push->Commit({0, 0, Crc32c(0, bytes)}), ReasonIs(ErrorReason::kPushIncomplete));
      EXPECT_EQ(model_->history().latest().has_value() ? model_->history().latest()->number : 0,
                before);
      ASSERT_THAT(TestRank::AddChunk(*push, bytes, 0, static_cast<int64_t>(bytes.size())), IsOk());
      chunks = 1;
    }
    ASSERT_THAT(push->Commit(TestRank::EndOf(bytes, chunks)), IsOk());
    ASSERT_THAT(outcome->result, IsOk());
    EXPECT_EQ(model_->history().latest()->number, before + 1);
    for (const Stream& stream : streams) ASSERT_EQ(stream.outcome->calls, 1);
  }
}

TEST_F(ManyRanksTest, TheyShareHowManySmallChunksAStepMayHave) {
  constexpr int64_t kWorld = 4096;
  constexpr int64_t kOfFirst = 200;
  constexpr int64_t kIgnored = int64_t{1} << 30;
  // One for each of its shards, none for its bytes, and its share of 2^18.
  constexpr int64_t kChunks = 2 + (int64_t{1} << 18) / kWorld;
  ModelConfig config{.name = "shared",
                     .manifest = MakeManifest({{"w", Dtype::kFloat32, {kOfFirst + kWorld - 1}},
                                               {"ignored", Dtype::kFloat32, {kIgnored}}}),
                     .tracks = {{.name = "ema",
                                 .schedule = MakeSchedule("1ba"),
                                 .tensor_rules = {{"ignored", TensorAction::kIgnore}}}}};
  const std::shared_ptr<Model> model = store_.Create(std::move(config))->model;
  TestRank first(model, "launch", 0, kWorld, {{0, {0}, {kOfFirst}}, {1, {0}, {kIgnored}}},
                 /*whole=*/false);
  ASSERT_THAT(first.Join(), IsOk());
  for (int64_t r = 1; r < kWorld; ++r) {
    TestRank rank(model, "launch", r, kWorld, {{0, {kOfFirst + r - 1}, {1}}}, /*whole=*/false);
    ASSERT_THAT(rank.Join(), IsOk());
  }
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, first.Open(1, std::make_shared<PushOutcome>()));
  const std::vector<std::byte> bytes = BytesOf(std::vector<float>(kOfFirst, 1.0f));
  for (int64_t i = 0; i < kChunks; ++i) {
    ASSERT_THAT(TestRank::AddChunk(*push, bytes, 4 * i, 4), IsOk()) << i;
  }
  EXPECT_THAT(TestRank::AddChunk(*push, bytes, 4 * kChunks, 4), ReasonIs(ErrorReason::kBadChunk));
}

TEST_F(ManyRanksTest, OverlapHoleAndExcessAreRefusedByName) {
  Join();
  const auto join = [this](const std::string& launch, int64_t rank, int64_t world_size,
                           std::vector<Shard> shards) -> absl::Status {
    EMA_ASSIGN_OR_RETURN(RankLayout layout, RankLayout::Create(*manifest_, std::move(shards)));
    return model_->JoinRun({launch}, rank, world_size, std::move(layout)).status();
  };
  // Two ranks hold one element; then nobody does.
  const std::vector<Shard> rows = {{0, {0, 0}, {101, 82}}, WholeTensor(*manifest_, 1)};
  for (int64_t rank = 0; rank < 2999; ++rank) {
    const std::vector<Shard> shards = rank == 12 ? rows : std::vector<Shard>{};
    ASSERT_THAT(join("overlap", rank, 3000, shards), IsOk());
  }
  const absl::Status overlap = join("overlap", 2999, 3000, {{0, {100, 81}, {1, 2}}});
  EXPECT_THAT(overlap, ReasonIs(ErrorReason::kLayoutOverlap));
  EXPECT_THAT(std::string(overlap.message()),
              AllOf(HasSubstr("\"wide\""), HasSubstr("12"), HasSubstr("2999")));
  ASSERT_THAT(join("hole", 0, 2, rows), IsOk());
  const absl::Status hole =
      join("hole", 1, 2, {{0, {1, 82}, {100, 1}}, WholeTensor(*manifest_, 2)});
  EXPECT_THAT(hole, ReasonIs(ErrorReason::kLayoutHole));
  EXPECT_THAT(std::string(hole.message()), AllOf(HasSubstr("\"wide\""), HasSubstr("1 of")));

  // One rank too many, and bytes that no rank has.
  EXPECT_THAT(join("hole", 2, 2, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rank: 2 given")));
  const std::vector<Shard> rest = {{0, {0, 82}, {101, 1}}, WholeTensor(*manifest_, 2)};
  TestRank whole(model_, "hole", 0, 2, rows, /*whole=*/false);
  TestRank other(model_, "hole", 1, 2, rest, /*whole=*/false);
  EXPECT_THAT(whole.Join(), ReasonIs(ErrorReason::kLayoutHole));  // That rank 1 got.
  ASSERT_THAT(other.Join(), IsOk());
  ASSERT_THAT(whole.Join(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, other.Open(1, std::make_shared<PushOutcome>()));
  const std::vector<std::byte> bytes = BytesOf(std::vector<float>(101 + 4099 + 1, 1.0f));
  const auto total = static_cast<int64_t>(bytes.size());
  EXPECT_THAT(TestRank::AddChunk(*push, bytes, 0, total),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr(absl::StrCat("is not inside the rank's ", total - 4, " bytes"))));
  EXPECT_THAT(TestRank::AddChunk(*push, bytes, 0, total - 4), IsOk());
}

}  // namespace
}  // namespace ema
