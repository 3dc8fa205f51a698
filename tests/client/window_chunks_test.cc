// SPDX-License-Identifier: Apache-2.0
//
// When a buffer of the window may be used for another chunk. The server's end of the lane is in
// this process, with a mapping of its own.
#include "client/cpp/push/window_chunks.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/gpu/pinned_ring.h"
#include "server/base/crc32c.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using client_internal::ChunkPlan;
using client_internal::ChunkWriter;
using client_internal::PinnedRing;
using client_internal::StagedChunks;
using client_internal::WindowChunks;

constexpr int64_t kChunkCount = 40;
constexpr int64_t kChunkBytes = 4096;

// A push of 40 chunks through a window of 8 buffers. Every byte of a chunk is its number.
class WindowChunksTest : public testing::Test {
 protected:
  void SetUp() override {
    for (size_t i = 0; i < weights_.size(); ++i) {
      weights_[i] = static_cast<std::byte>(i / kChunkBytes);
    }
    EMA_ASSERT_OK_AND_ASSIGN(client_internal::Gpu* const gpu, ring_.Open(0));
    ASSERT_THAT(ring_.Allocate(*gpu, kChunkBytes, 8, /*is_shared=*/true), IsOk());
    ASSERT_NE(ring_.window(), nullptr);
    gpus_ = {gpu};
    staged_.emplace(&layout_, &plan_, shards_, gpus_, &ring_, &gate_, absl::Span<const Strides>(),
                    SteadyTime::max(), &interrupt_);
    writer_.emplace(&layout_, &plan_, plan_.chunk_count(), shards_, &gate_, &*staged_);
    for (int64_t i = 0; i < kChunkCount; ++i) all_.push_back(i);
    ASSERT_THAT(staged_->Stage(all_), IsOk());

    const std::string name = absl::StrCat("ema-window-chunks-test-", getpid());
    EMA_ASSERT_OK_AND_ASSIGN(const int listening, ListenForLanes(name));
    std::thread connecting([&] { client_ = *LanePipe::Connect(name, ring_.window()); });
    auto accepted = LanePipe::Accept(accept(listening, nullptr, nullptr), nullptr,
                                     [](int64_t) { return true; });
    connecting.join();
    close(listening);
    EMA_ASSERT_OK_AND_ASSIGN(server_, std::move(accepted));
    chunks_.emplace(&plan_, &*writer_, &*staged_, client_.get());
  }

  // True: the frame has the bytes of its chunk, and of no other.
  static bool IsWhole(const LanePipe::Frame& frame) {
    const auto number = static_cast<std::byte>(frame.offset / kChunkBytes);
    return static_cast<int64_t>(frame.bytes.size()) == kChunkBytes &&
           std::all_of(frame.bytes.begin(), frame.bytes.end(),
                       [number](std::byte byte) { return byte == number; });
  }
  void ExpectFreeBuffers(int count) {
    for (int i = 0; i < count; ++i) EXPECT_TRUE(ring_.TryTake().has_value());
    EXPECT_FALSE(ring_.TryTake().has_value());
  }

  const Manifest manifest_ = *Manifest::Create(
      {{.name = "w", .dtype = Dtype::kUInt8, .shape = {kChunkCount * kChunkBytes}}});
  const RankLayout layout_ = *RankLayout::Create(manifest_, {WholeTensor(manifest_, 0)});
  const ChunkPlan plan_{layout_, kChunkBytes};
  std::vector<std::byte> weights_ = std::vector<std::byte>(kChunkCount * kChunkBytes);
  const std::vector<std::span<const std::byte>> shards_ = {std::span(weights_)};
  std::vector<int64_t> all_;
  PinnedRing ring_{PinnedRing::kMinRingBytes};
  client_internal::WeightsGate gate_;
  client_internal::Interrupt interrupt_;
  std::vector<client_internal::Gpu*> gpus_;
  std::optional<StagedChunks> staged_;
  std::optional<ChunkWriter> writer_;
  std::unique_ptr<LanePipe> client_;
  std::unique_ptr<LanePipe> server_;
  std::optional<WindowChunks> chunks_;
};

TEST_F(WindowChunksTest, ABufferIsNotUsedAgainBeforeItsChunkHasBeenRead) {
  std::thread reading([&] {
    for (int64_t i = 0; i < kChunkCount; ++i) {
      const absl::StatusOr<LanePipe::Frame> frame = server_->Receive(nullptr);
      ASSERT_THAT(frame, IsOk());
      EXPECT_EQ(frame->offset, i * kChunkBytes);
      EXPECT_TRUE(IsWhole(*frame)) << i;
      // Meanwhile the client could start a copy into a buffer too early.
      absl::SleepFor(absl::Milliseconds(i % 4));
      EXPECT_TRUE(IsWhole(*frame)) << i;
      EXPECT_EQ(frame->crc32c, Crc32c(0, frame->bytes));
    }
    ASSERT_THAT(server_->SendMessage("reply", nullptr), IsOk());
  });
  for (const int64_t chunk : all_) ASSERT_THAT(chunks_->Send(chunk, nullptr), IsOk());
  EXPECT_EQ(client_->Receive(nullptr)->message, "reply");
  reading.join();
  chunks_->Finish();
  EXPECT_EQ(writer_->Digest(), Crc32c(0, shards_[0]));
  EXPECT_TRUE(gate_.TryRelease(absl::ZeroDuration()));
  chunks_.reset();
  ExpectFreeBuffers(8);
}

TEST_F(WindowChunksTest, AServerThatEndsTheLaneGivesTheBuffersBack) {
  for (int64_t chunk = 0; chunk < 3; ++chunk) {
    ASSERT_THAT(chunks_->Send(chunk, nullptr), IsOk());
  }
  ASSERT_THAT(server_->Receive(nullptr), IsOk());
  server_.reset();
  chunks_.reset();
  // The chunks can be sent again.
  for (int64_t chunk = 0; chunk < 3; ++chunk) {
    const std::optional<int> slot = staged_->Borrow(chunk);
    ASSERT_TRUE(slot.has_value());
    EXPECT_EQ(ring_.slot(*slot)[0], static_cast<std::byte>(chunk));
    staged_->EndLoan(chunk, *slot, /*is_read=*/false);
  }
  staged_->Drop();
  ExpectFreeBuffers(8);
}

TEST_F(WindowChunksTest, AServerThatHangsKeepsWhatItMayStillRead) {
  for (int64_t chunk = 0; chunk < 3; ++chunk) {
    ASSERT_THAT(chunks_->Send(chunk, nullptr), IsOk());
  }
  chunks_.reset();
  staged_->Drop();
  ExpectFreeBuffers(5);
  // The next push gets other memory.
  ASSERT_THAT(ring_.Allocate(*gpus_[0], kChunkBytes, 8, /*is_shared=*/true), IsOk());
  ASSERT_NE(ring_.window(), nullptr);
  std::fill_n(ring_.window()->data(), 8 * kChunkBytes, std::byte{0xff});
  for (int64_t chunk = 0; chunk < 3; ++chunk) {
    const absl::StatusOr<LanePipe::Frame> frame = server_->Receive(nullptr);
    ASSERT_THAT(frame, IsOk());
    EXPECT_TRUE(IsWhole(*frame));
  }
  ExpectFreeBuffers(8);
}

}  // namespace
}  // namespace ema
