// SPDX-License-Identifier: Apache-2.0
//
// How chunks of weights on a GPU pass through pinned memory, with a CUDA driver in host memory.
#include "client/cpp/push/staged_chunks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "client/cpp/gpu/pinned_ring.h"
#include "ema/error_reason.h"
#include "server/base/crc32c.h"
#include "tests/client/fake_cuda.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using client_internal::ChunkPlan;
using client_internal::ChunkWriter;
using client_internal::PinnedRing;
using client_internal::StagedChunks;

constexpr int kOutOfMemory = 2;  // CUDA's.

TEST(PinnedRingTest, WhereThereIsLessMemoryItTakesHalfAndHalfOfThat) {
  struct Case {
    int64_t limit_mib;
    int slot_count;
  };
  for (const auto [limit_mib, slot_count] :
       {Case{300, 300}, Case{299, 150}, Case{100, 75}, Case{70, 64}, Case{64, 64}}) {
    SCOPED_TRACE(limit_mib);
    PinnedRing ring(int64_t{1} << 30);
    EMA_ASSERT_OK_AND_ASSIGN(client_internal::Gpu* const gpu, ring.Open(0));
    ema_fake_cuda_limit_pinned(limit_mib << 20);
    EXPECT_THAT(ring.Allocate(*gpu, 1 << 20, 300), IsOk());
    EXPECT_EQ(ring.slot_count(), slot_count);
  }
  PinnedRing ring(int64_t{1} << 30);
  EMA_ASSERT_OK_AND_ASSIGN(client_internal::Gpu* const gpu, ring.Open(0));
  ema_fake_cuda_limit_pinned(63 << 20);
  EXPECT_THAT(ring.Allocate(*gpu, 1 << 20, 300), ReasonIs(ErrorReason::kMemoryBudget));
  ema_fake_cuda_limit_pinned(0);
}

TEST(PinnedRingTest, IsInAWindowIfItIsSharedAndLargeEnough) {
  struct Case {
    bool is_shared;
    int64_t slot_count;
    int refusal;
    bool has_window;
  };
  for (const auto [is_shared, slot_count, refusal, has_window] :
       {Case{true, 8, 0, true}, Case{false, 8, 0, false}, Case{true, 7, 0, false},
        Case{true, 8, 801, false}}) {
    SCOPED_TRACE(refusal);
    PinnedRing ring(PinnedRing::kMinRingBytes);
    EMA_ASSERT_OK_AND_ASSIGN(client_internal::Gpu* const gpu, ring.Open(0));
    ema_fake_cuda_refuse_registration(refusal);
    EXPECT_THAT(ring.Allocate(*gpu, 1000, slot_count, is_shared), IsOk());
    EXPECT_EQ(ring.slot_count(), slot_count);
    EXPECT_EQ(ring.window() != nullptr, has_window);
    EXPECT_EQ(ema_fake_cuda_registered_bytes(), has_window ? 8192 : 0);
  }
  ema_fake_cuda_refuse_registration(0);
  EXPECT_EQ(ema_fake_cuda_pinned_bytes(), 0);
}

TEST(PinnedRingTest, ADiscardedWindowIsReplacedWithAllItsBuffers) {
  PinnedRing ring(PinnedRing::kMinRingBytes);
  EMA_ASSERT_OK_AND_ASSIGN(client_internal::Gpu* const gpu, ring.Open(0));
  ASSERT_THAT(ring.Allocate(*gpu, 4096, 8, /*is_shared=*/true), IsOk());
  ASSERT_TRUE(ring.TryTake().has_value());
  ring.DiscardWindow();
  ASSERT_THAT(ring.Allocate(*gpu, 4096, 8, /*is_shared=*/true), IsOk());
  EXPECT_NE(ring.window(), nullptr);
  EXPECT_EQ(ema_fake_cuda_registered_bytes(), 8 * 4096);
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(ring.TryTake().has_value());
  EXPECT_FALSE(ring.TryTake().has_value());
}

// As gRPC has them, each sender keeps its messages for a while.
TEST(StagedChunksTest, SendersUpToTheMaximumAlwaysFindABuffer) {
  const Manifest manifest = *Manifest::Create({{.name = "w", .shape = {100'000}}});
  const RankLayout layout = *RankLayout::Create(manifest, {WholeTensor(manifest, 0)});
  const ChunkPlan plan(layout, 1000);
  std::vector<float> weights(100'000);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i);
  const std::vector<std::span<const std::byte>> shards = {std::as_bytes(std::span(weights))};
  const int64_t pinned_before = ema_fake_cuda_pinned_bytes();
  const int64_t objects_before = ema_fake_cuda_objects();
  {
    PinnedRing ring(PinnedRing::kMinRingBytes);
    EMA_ASSERT_OK_AND_ASSIGN(client_internal::Gpu* const gpu, ring.Open(0));
    ASSERT_THAT(ring.Allocate(*gpu, StagedChunks::SlotBytes(layout, plan), 6), IsOk());
    client_internal::WeightsGate gate;
    const std::vector<client_internal::Gpu*> gpus = {gpu};
    client_internal::Interrupt interrupt;
    StagedChunks staged(&layout, &plan, shards, gpus, &ring, &gate, {}, SteadyTime::max(),
                        &interrupt);
    ChunkWriter writer(&layout, &plan, plan.chunk_count(), shards, &gate, &staged);
    std::vector<int64_t> order(plan.chunk_count());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    ASSERT_THAT(staged.Stage(order), IsOk());
    std::atomic<size_t> next = 0;
    std::atomic<int> missing = 0;
    std::vector<std::jthread> senders;
    for (int i = 0; i < staged.max_senders(); ++i) {
      senders.emplace_back([&] {
        ChunkWriter::Scratch scratch;
        std::vector<grpc::ByteBuffer> kept;
        for (size_t mine = next++; mine < order.size(); mine = next++) {
          std::optional<grpc::ByteBuffer> message = writer.Write(order[mine], scratch);
          if (!message.has_value()) ++missing;
          if (message.has_value()) kept.push_back(*std::move(message));
          if (kept.size() == 4) kept.clear();
        }
      });
    }
    senders.clear();
    EXPECT_EQ(missing, 0);
    EXPECT_FALSE(ring.has_lent());
    EXPECT_EQ(writer.Digest(), Crc32c(0, shards[0]));
    EXPECT_TRUE(gate.TryRelease(absl::ZeroDuration()));
  }
  EXPECT_EQ(ema_fake_cuda_pinned_bytes(), pinned_before);
  EXPECT_EQ(ema_fake_cuda_objects(), objects_before);
}

// Chunks of 1000 bytes in a ring of so many buffers.
class SmallRing {
 public:
  explicit SmallRing(int64_t slot_count) {
    for (size_t i = 0; i < weights_.size(); ++i) weights_[i] = static_cast<float>(i);
    gpus_ = {*ring_.Open(0)};
    EXPECT_THAT(ring_.Allocate(*gpus_[0], StagedChunks::SlotBytes(layout_, plan_), slot_count),
                IsOk());
    staged_.emplace(&layout_, &plan_, shards_, gpus_, &ring_, &gate_, absl::Span<const Strides>(),
                    SteadyTime::max(), &interrupt_);
  }

  StagedChunks& staged() { return *staged_; }
  client_internal::WeightsGate& gate() { return gate_; }
  PinnedRing& ring() { return ring_; }
  // As who has sent it does. The first float of it.
  std::optional<float> TakeAndReturn(int64_t chunk) {
    const std::optional<int> slot = staged_->Take(chunk);
    if (!slot.has_value()) return std::nullopt;
    float first = 0;
    std::memcpy(&first, ring_.slot(*slot), sizeof(first));
    ring_.Return(*slot);
    return first;
  }
  void AwaitCopies() { EXPECT_TRUE(gpus_[0]->AwaitIdle(After(SteadyNow(), absl::Seconds(60)))); }
  void Overwrite() { std::fill(weights_.begin(), weights_.end(), -1.0f); }

 private:
  const Manifest manifest_ = *Manifest::Create({{.name = "w", .shape = {1'000}}});
  const RankLayout layout_ = *RankLayout::Create(manifest_, {WholeTensor(manifest_, 0)});
  const ChunkPlan plan_{layout_, 1000};
  std::vector<float> weights_ = std::vector<float>(1'000);
  const std::vector<std::span<const std::byte>> shards_ = {std::as_bytes(std::span(weights_))};
  PinnedRing ring_{PinnedRing::kMinRingBytes};
  client_internal::WeightsGate gate_;
  client_internal::Interrupt interrupt_;
  std::vector<client_internal::Gpu*> gpus_;
  std::optional<StagedChunks> staged_;
};

TEST(StagedChunksTest, WithRoomForAllEachCanBeSentAgainAfterTheRelease) {
  SmallRing small(4);
  ASSERT_THAT(small.staged().Stage({0, 1, 2, 3}), IsOk());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(small.TakeAndReturn(i), 250.0f * i);
  // The next try asks what is missing, and holds the trainer for so long.
  ASSERT_TRUE(small.gate().BeginReading());
  EXPECT_FALSE(small.gate().TryRelease(absl::ZeroDuration()));
  ASSERT_TRUE(small.staged().Holds({1, 3}));
  ASSERT_THAT(small.staged().Stage({1, 3}), IsOk());
  ASSERT_TRUE(small.gate().TryRelease(absl::ZeroDuration()));
  const int64_t queued = ema_fake_cuda_queued_copies();
  small.Overwrite();
  EXPECT_EQ(small.TakeAndReturn(1), 250.0f);
  ASSERT_THAT(small.staged().Stage({3}), IsOk());
  EXPECT_EQ(small.TakeAndReturn(3), 750.0f);
  EXPECT_EQ(ema_fake_cuda_queued_copies(), queued);
  EXPECT_FALSE(small.ring().TryTake().has_value());
  small.staged().Drop();
  EXPECT_FALSE(small.staged().Holds({1}));
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(small.ring().TryTake().has_value());
}

TEST(StagedChunksTest, WithRoomForSomeNothingIsCopiedAfterTheRelease) {
  SmallRing small(3);
  ASSERT_THAT(small.staged().Stage({0, 1, 2, 3}), IsOk());
  EXPECT_FALSE(small.gate().TryRelease(absl::ZeroDuration()));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(small.TakeAndReturn(i), 250.0f * i);
  ASSERT_TRUE(small.gate().TryRelease(absl::ZeroDuration()));
  EXPECT_FALSE(small.staged().Holds({1, 3}));
  const int64_t queued = ema_fake_cuda_queued_copies();
  EXPECT_THAT(small.staged().Stage({1, 3}), ReasonIs(ErrorReason::kStepAbandoned));
  EXPECT_EQ(ema_fake_cuda_queued_copies(), queued);
}

TEST(StagedChunksTest, ATryThatHasSentNothingCopiesNothingAgain) {
  SmallRing small(3);
  ASSERT_THAT(small.staged().Stage({0, 1, 2, 3}), IsOk());
  const int64_t queued = ema_fake_cuda_queued_copies();
  ASSERT_THAT(small.staged().Stage({0, 1, 2, 3}), IsOk());
  EXPECT_EQ(ema_fake_cuda_queued_copies(), queued);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(small.TakeAndReturn(i), 250.0f * i);
}

// As a lane lends them to the server.
TEST(StagedChunksTest, ALentChunkStaysUntilItHasBeenRead) {
  SmallRing small(3);
  ASSERT_THAT(small.staged().Stage({0, 1, 2, 3}), IsOk());
  const std::optional<int> first = small.staged().Borrow(0);
  const std::optional<int> second = small.staged().Borrow(1);
  ASSERT_TRUE(first.has_value() && second.has_value());
  EXPECT_FALSE(small.gate().TryRelease(absl::ZeroDuration()));
  small.staged().EndLoan(0, *first, /*is_read=*/true);
  // All copies have been started, so the weights may change.
  ASSERT_TRUE(small.gate().TryRelease(absl::ZeroDuration()));
  EXPECT_FALSE(small.staged().Holds({0, 1}));
  // A lane that breaks now needs what it has not read.
  ASSERT_TRUE(small.staged().Holds({1, 2, 3}));
  small.staged().EndLoan(1, *second, /*is_read=*/false);
  ASSERT_TRUE(small.staged().Holds({1, 2, 3}));
  small.AwaitCopies();
  small.Overwrite();
  ASSERT_THAT(small.staged().Stage({1, 2, 3}), IsOk());
  for (int i = 1; i < 4; ++i) EXPECT_EQ(small.TakeAndReturn(i), 250.0f * i);
  small.staged().Drop();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(small.ring().TryTake().has_value());
  EXPECT_FALSE(small.ring().TryTake().has_value());
}

// gRPC may still have a buffer of the push before.
TEST(StagedChunksTest, RoomForAllMayBeFoundWhenTheFirstIsTaken) {
  SmallRing small(4);
  const std::optional<int> slot = small.ring().TryTake();
  ASSERT_TRUE(slot.has_value());
  ASSERT_THAT(small.staged().Stage({0, 1, 2, 3}), IsOk());
  EXPECT_FALSE(small.staged().Holds({0}));
  small.ring().Return(*slot);
  EXPECT_EQ(small.TakeAndReturn(0), 0.0f);
  EXPECT_TRUE(small.staged().Holds({0, 1, 2, 3}));
}

// Before the release, what was taken is copied anew.
TEST(StagedChunksTest, WithRoomForSomeTheWeightsAreReadAgain) {
  SmallRing small(3);
  ASSERT_THAT(small.staged().Stage({0, 1, 2, 3}), IsOk());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(small.TakeAndReturn(i), 250.0f * i);
  ASSERT_THAT(small.staged().Stage({1, 2, 3}), IsOk());
  for (int i = 1; i < 4; ++i) EXPECT_EQ(small.TakeAndReturn(i), 250.0f * i);
  EXPECT_TRUE(small.staged().Holds({1, 2, 3}));
}

// Also where the buffer has a mark already, of the chunk that had it before.
TEST(StagedChunksTest, AChunkWhoseCopyDoesNotStartIsNeverTaken) {
  SmallRing small(2);
  ASSERT_THAT(small.staged().Stage({0, 1, 2, 3}), IsOk());
  ASSERT_TRUE(small.TakeAndReturn(0).has_value());
  ema_fake_cuda_fail(1, kOutOfMemory);  // The copy of the third, into the first one's buffer.
  const std::optional<float> second = small.TakeAndReturn(1);
  ema_fake_cuda_fail(0, 0);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(small.staged().Take(2), std::nullopt);
  EXPECT_EQ(small.staged().Take(3), std::nullopt);
  EXPECT_THAT(small.staged().status(), ReasonIs(ErrorReason::kMemoryBudget));
  small.staged().Drop();
  // Both buffers are there again.
  EXPECT_TRUE(small.ring().TryTake().has_value());
  EXPECT_TRUE(small.ring().TryTake().has_value());
}

}  // namespace
}  // namespace ema
