// SPDX-License-Identifier: Apache-2.0
//
// Uniform fill: at step t every element pushed is c(t), so every snapshot must be constant.
#include <atomic>
#include <thread>

#include "tests/core/test_model.h"

namespace ema {
namespace {

constexpr int64_t kElements = 20000;
constexpr int kRanks = 4;
constexpr int kSteps = 200;

TEST(ConsistencyTest, ReadersNeverSeeHalfAnUpdateWhileRanksPushRetryAndGiveUp) {
  ModelStore store(TestDevice(), SmallBlocks());
  ModelConfig config;
  config.name = "m";
  config.manifest = MakeManifest({{"w", Dtype::kFloat32, {kElements}}});
  config.tracks = {{"ema", MakeSchedule("1ba")}};
  config.max_pinned_versions = 4;
  const std::shared_ptr<Model> model = store.Create(std::move(config))->model;
  std::atomic<bool> done = false;
  std::atomic<int64_t> reads = 0;

  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      int64_t last_version = 0;
      while (!done) {
        const auto snapshot = model->history().Pin(0);
        if (!snapshot.ok()) continue;
        EXPECT_GE((*snapshot)->record.number, last_version);
        last_version = (*snapshot)->record.number;
        const Track& track = *(*snapshot)->tracks[0].track;
        const auto pieces = ReadBlocks(model->device(), track, (*snapshot)->tracks[0].blocks, 0,
                                       track.layout().total_bytes());
        float first = 0;
        std::memcpy(&first, pieces->front().bytes.data(), sizeof(float));
        for (const HostPiece& piece : *pieces) {
          for (size_t k = 0; k < piece.bytes.size(); k += sizeof(float)) {
            float value = 0;
            std::memcpy(&value, piece.bytes.data() + k, sizeof(float));
            ASSERT_EQ(value, first) << "torn at version " << last_version;
          }
        }
        ++reads;
      }
    });
  }

  std::vector<TestRank> ranks;
  constexpr int64_t kShare = kElements / kRanks;
  for (int r = 0; r < kRanks; ++r) {
    ranks.emplace_back(model, "launch", r, kRanks, std::vector<Shard>{{0, {r * kShare}, {kShare}}},
                       false);
    ASSERT_THAT(ranks.back().Join(), IsOk());
  }
  int committed = 0;
  for (int64_t step = 1; step <= kSteps; ++step) {
    const std::vector<std::byte> bytes =
        BytesOf(std::vector<float>(kShare, static_cast<float>(step * 3 % 64)));
    std::atomic<int> ok = 0;
    std::vector<std::thread> pushers;
    for (int r = 0; r < kRanks; ++r) {
      pushers.emplace_back([&, r] {
        auto outcome = std::make_shared<PushOutcome>();
        auto push = ranks[r].Open(step, outcome);
        ASSERT_THAT(push, IsOk());
        // Every seventh step rank 1 stops half-way; the next step must end this one and go through.
        const bool gives_up = step % 7 == 0 && r == 1;
        int64_t chunks = 0;
        const auto total = static_cast<int64_t>(bytes.size());
        for (int64_t offset = 0; offset < total; offset += 3000) {
          if (gives_up && offset > total / 2) return;
          const int64_t length = std::min<int64_t>(3000, total - offset);
          ASSERT_THAT(TestRank::AddChunk(**push, bytes, offset, length), IsOk());
          ASSERT_THAT(TestRank::AddChunk(**push, bytes, offset, length), IsOk());  // A duplicate.
          chunks += 2;
        }
        PushTotals end = TestRank::EndOf(bytes, chunks);
        end.total_bytes *= 2;
        if ((*push)->Commit(end).ok()) ++ok;
      });
    }
    for (std::thread& pusher : pushers) pusher.join();
    if (step % 7 == 0) {
      EXPECT_EQ(ok, kRanks - 1);
      // Rank 1 begins the next step without having committed this one; the others may not, before.
      auto outcome = std::make_shared<PushOutcome>();
      EXPECT_THAT(ranks[1].Open(step + 1, outcome), IsOk());
    } else {
      EXPECT_EQ(ok, kRanks);
      ++committed;
    }
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(model->history().latest()->number, committed);
  EXPECT_GT(reads, 0);
}

}  // namespace
}  // namespace ema
