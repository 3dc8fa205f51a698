// SPDX-License-Identifier: Apache-2.0
#include "server/wire/lane_pipe.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class LanePipeTest : public testing::Test {
 protected:
  void SetUp() override {
    name_ = absl::StrCat("ema-lane-pipe-test-", getpid());
    EMA_ASSERT_OK_AND_ASSIGN(listening_, ListenForLanes(name_));
    std::thread connecting([this] { client_ = *LanePipe::Connect(name_); });
    auto accepted = LanePipe::Accept(accept(listening_, nullptr, nullptr), nullptr);
    connecting.join();
    EMA_ASSERT_OK_AND_ASSIGN(server_, std::move(accepted));
  }
  void TearDown() override { close(listening_); }

  static absl::Status SendBytes(LanePipe& pipe, int64_t offset, const std::string& bytes) {
    const absl::StatusOr<std::byte*> place = pipe.ReserveChunk(nullptr);
    if (!place.ok()) return place.status();
    std::memcpy(*place, bytes.data(), bytes.size());
    pipe.SendChunk(offset, static_cast<int64_t>(bytes.size()), 7);
    return absl::OkStatus();
  }

  std::string name_;
  int listening_ = -1;
  std::unique_ptr<LanePipe> client_;
  std::unique_ptr<LanePipe> server_;
};

TEST_F(LanePipeTest, MessagesAndChunksGoBothWays) {
  ASSERT_THAT(client_->SendMessage("hello", nullptr), IsOk());
  ASSERT_THAT(SendBytes(*client_, 77, "bytes"), IsOk());
  ASSERT_THAT(server_->SendMessage("", nullptr), IsOk());
  auto frame = server_->Receive(nullptr);
  ASSERT_THAT(frame, IsOk());
  EXPECT_FALSE(frame->is_chunk);
  EXPECT_EQ(frame->message, "hello");
  frame = server_->Receive(nullptr);
  ASSERT_THAT(frame, IsOk());
  EXPECT_TRUE(frame->is_chunk);
  EXPECT_EQ(frame->offset, 77);
  EXPECT_EQ(frame->crc32c, 7u);
  EXPECT_EQ(std::memcmp(frame->bytes.data(), "bytes", 5), 0);
  EXPECT_FALSE(server_->HasIncoming());
  EXPECT_TRUE(client_->HasIncoming());
  EXPECT_EQ(client_->Receive(nullptr)->message, "");
  EXPECT_FALSE(client_->HasIncoming());
}

TEST_F(LanePipeTest, AMessageMayBeLargerThanTheRing) {
  const std::string large(5'000'001, 'x');
  std::thread sending([&] { EXPECT_THAT(client_->SendMessage(large, nullptr), IsOk()); });
  const auto frame = server_->Receive(nullptr);
  sending.join();
  ASSERT_THAT(frame, IsOk());
  EXPECT_TRUE(frame->message == large);
}

TEST_F(LanePipeTest, AMessageThatIsTooLargeIsRefused) {
  std::thread sending([&] {
    (void)client_->SendMessage(std::string(LanePipe::kMaxMessageBytes + 1, 'x'), nullptr);
  });
  EXPECT_THAT(server_->Receive(nullptr),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("violated the protocol")));
  server_.reset();
  sending.join();
}

TEST_F(LanePipeTest, WhatThePeerSentLastIsReadThoughItHasGone) {
  ASSERT_THAT(server_->SendMessage("the reason", nullptr), IsOk());
  server_.reset();
  EXPECT_EQ(client_->Receive(nullptr)->message, "the reason");
  EXPECT_THAT(client_->Receive(nullptr), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("")));
  EXPECT_TRUE(client_->HasIncoming());
}

TEST_F(LanePipeTest, AWriterDoesNotWaitForAPeerThatHasGone) {
  server_.reset();
  absl::Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) status = client_->SendMessage("x", nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(LanePipeTest, AWaitEndsWhenItIsToldTo) {
  const absl::Time end = absl::Now() + absl::Milliseconds(120);
  EXPECT_THAT(server_->Receive([end] { return absl::Now() > end; }),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("")));
}

// Nobody waits here: each frame is there when it is asked for.
TEST_F(LanePipeTest, FramesThatFlowEndWhenTheyAreToldTo) {
  const absl::Time start = absl::Now();
  int asked = 0;
  int received = 0;
  absl::Status status;
  while (status.ok() && absl::Now() < start + absl::Seconds(5)) {
    ASSERT_THAT(SendBytes(*client_, 0, "bytes"), IsOk());
    status = server_
                 ->Receive([&] {
                   ++asked;
                   return absl::Now() > start + absl::Milliseconds(200);
                 })
                 .status();
    ++received;
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  // Not for each.
  EXPECT_LT(asked, received / 2);
}

TEST_F(LanePipeTest, AWriterWhoseFramesFlowEndsWhenItIsToldTo) {
  const absl::Time start = absl::Now();
  absl::Status status;
  while (absl::Now() < start + absl::Seconds(5)) {
    status = client_->ReserveChunk([&] { return absl::Now() > start + absl::Milliseconds(200); })
                 .status();
    if (!status.ok()) break;
    client_->SendChunk(0, 1, 0);
    ASSERT_THAT(server_->Receive(nullptr), IsOk());
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  // It can still say why.
  EXPECT_THAT(client_->SendMessage("why", [] { return true; }), IsOk());
  EXPECT_EQ(server_->Receive(nullptr)->message, "why");
}

TEST_F(LanePipeTest, NobodyIsWaitedForWhoDoesNotAccept) {
  // Until no more may wait to be accepted; a wait for that would never end.
  absl::Status status;
  std::vector<std::unique_ptr<LanePipe>> waiting;
  while (status.ok() && waiting.size() < 1000) {
    absl::StatusOr<std::unique_ptr<LanePipe>> lane = LanePipe::Connect(name_);
    status = lane.status();
    if (lane.ok()) waiting.push_back(*std::move(lane));
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(LanePipeTest, WhoPassesNoMemoryIsRefused) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  EXPECT_THAT(LanePipe::Accept(ends[0], nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("descriptor")));
  close(ends[1]);
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  EXPECT_EQ(LanePipe::Accept(ends[0], [] { return true; }).status().code(),
            absl::StatusCode::kCancelled);
  close(ends[1]);
}

TEST_F(LanePipeTest, NobodyListensElsewhere) {
  EXPECT_EQ(LanePipe::Connect("ema-lane-pipe-test-none").status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(HostIdTest, IsKnownHere) { EXPECT_THAT(HostId(), Not(IsEmpty())); }

}  // namespace
}  // namespace ema
