// SPDX-License-Identifier: Apache-2.0
#include "server/wire/lane_pipe.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <iterator>
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

int64_t CountDescriptors() {
  const std::filesystem::directory_iterator open_files("/proc/self/fd");
  return std::distance(begin(open_files), end(open_files));
}

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

TEST_F(LanePipeTest, OtherNumbersOfDescriptorsAreRefused) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto memory, SharedMemory::Create(2 * SharedRing::kBytes));
  const int descriptors[] = {memory->fd(), memory->fd(), memory->fd()};
  const int64_t before = CountDescriptors();
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(descriptors))] = {};
  msghdr message{.msg_iov = &data, .msg_iovlen = 1, .msg_control = control};
  message.msg_controllen = CMSG_LEN(sizeof(descriptors));
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(descriptors));
  std::memcpy(CMSG_DATA(header), descriptors, sizeof(descriptors));
  ASSERT_EQ(sendmsg(ends[1], &message, 0), 1);
  EXPECT_THAT(LanePipe::Accept(ends[0], nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("one or two descriptors")));
  close(ends[1]);
  EXPECT_EQ(CountDescriptors(), before);
}

// A lane with a window, both ends of which are in this process.
class WindowPipeTest : public LanePipeTest {
 protected:
  static constexpr int64_t kWindowBytes = int64_t{1} << 20;

  void SetUp() override {
    name_ = absl::StrCat("ema-window-pipe-test-", getpid());
    EMA_ASSERT_OK_AND_ASSIGN(listening_, ListenForLanes(name_));
    Connect([](int64_t) { return true; });
  }
  void Connect(const SharedMemory::Admit& admit) {
    EMA_ASSERT_OK_AND_ASSIGN(window_, SharedMemory::CreateWindow(kWindowBytes));
    std::thread connecting([this] { client_ = *LanePipe::Connect(name_, window_.get()); });
    auto accepted = LanePipe::Accept(accept(listening_, nullptr, nullptr), nullptr, admit);
    connecting.join();
    EMA_ASSERT_OK_AND_ASSIGN(server_, std::move(accepted));
  }
  absl::Status Send(int64_t window_offset, int64_t length_bytes) {
    const absl::Status status = client_->AwaitPlace(nullptr);
    if (!status.ok()) return status;
    client_->SendWindowChunk(
        77, {window_->data() + window_offset, static_cast<size_t>(length_bytes)}, 7);
    return absl::OkStatus();
  }

  std::unique_ptr<SharedMemory> window_;
};

TEST_F(WindowPipeTest, ChunksAreReadWhereTheClientHasWrittenThem) {
  ASSERT_TRUE(server_->has_window());
  std::memcpy(window_->data() + 4096, "bytes", 5);
  ASSERT_THAT(Send(4096, 5), IsOk());
  ASSERT_THAT(Send(kWindowBytes - LanePipe::kMaxChunkBytes, LanePipe::kMaxChunkBytes), IsOk());
  ASSERT_THAT(client_->SendMessage("between", nullptr), IsOk());
  EXPECT_EQ(client_->unread_frame_count(), 3);
  auto frame = server_->Receive(nullptr);
  ASSERT_THAT(frame, IsOk());
  EXPECT_TRUE(frame->is_chunk);
  EXPECT_EQ(frame->offset, 77);
  EXPECT_EQ(frame->crc32c, 7u);
  ASSERT_EQ(frame->bytes.size(), 5u);
  EXPECT_EQ(std::memcmp(frame->bytes.data(), "bytes", 5), 0);
  window_->data()[4096] = std::byte{'B'};
  EXPECT_EQ(frame->bytes[0], std::byte{'B'});
  // The chunk is the receiver's until it asks for the next frame.
  EXPECT_EQ(client_->unread_frame_count(), 3);
  frame = server_->Receive(nullptr);
  ASSERT_THAT(frame, IsOk());
  EXPECT_EQ(static_cast<int64_t>(frame->bytes.size()), LanePipe::kMaxChunkBytes);
  EXPECT_EQ(client_->unread_frame_count(), 2);
  EXPECT_EQ(server_->Receive(nullptr)->message, "between");
  EXPECT_EQ(client_->unread_frame_count(), 0);
}

TEST_F(WindowPipeTest, ChunksOutsideTheWindowEndTheLane) {
  struct Case {
    int64_t window_offset;
    int64_t length_bytes;
  };
  for (const auto [window_offset, length_bytes] :
       {Case{-1, 1}, Case{kWindowBytes, 1}, Case{kWindowBytes - 7, 8}, Case{int64_t{1} << 40, 8},
        Case{-(int64_t{1} << 40), 8}, Case{kWindowBytes - 1, LanePipe::kMaxChunkBytes}}) {
    SCOPED_TRACE(window_offset);
    ASSERT_THAT(Send(window_offset, length_bytes), IsOk());
    EXPECT_THAT(server_->Receive(nullptr),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("violated the protocol")));
    Connect([](int64_t) { return true; });
  }
}

TEST_F(WindowPipeTest, WithoutAWindowItsChunksEndTheLane) {
  Connect([](int64_t size_bytes) { return size_bytes < kWindowBytes; });
  EXPECT_TRUE(server_->has_offered_window());
  ASSERT_FALSE(server_->has_window());
  ASSERT_THAT(Send(0, 0), IsOk());
  EXPECT_THAT(server_->Receive(nullptr),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("violated the protocol")));
}

TEST_F(WindowPipeTest, TheClientLearnsWhenTheServerReadsNoMore) {
  ASSERT_THAT(Send(0, 8), IsOk());
  EXPECT_FALSE(client_->AwaitPeerEnd(After(SteadyNow(), absl::Milliseconds(20))));
  // The server finds what was sent, and then the end.
  EXPECT_THAT(server_->Receive(nullptr), IsOk());
  EXPECT_THAT(server_->Receive(nullptr), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("")));
  std::thread ending([&] { server_.reset(); });
  EXPECT_TRUE(client_->AwaitPeerEnd(After(SteadyNow(), absl::Seconds(20))));
  ending.join();
}

TEST_F(LanePipeTest, NobodyListensElsewhere) {
  EXPECT_EQ(LanePipe::Connect("ema-lane-pipe-test-none").status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(HostIdTest, IsKnownHere) { EXPECT_THAT(HostId(), Not(IsEmpty())); }

}  // namespace
}  // namespace ema
