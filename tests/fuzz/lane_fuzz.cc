// SPDX-License-Identifier: Apache-2.0
//
// The server's end of a lane, whose peer writes anything into the memory that they share: numbers
// of frames, their labels, and how far it has read. The server must stay inside of the memory,
// return what a label says or an error, and never wait for a peer that has sent a whole frame.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>

#include "server/wire/lane_pipe.h"
#include "tests/fuzz/fuzz.h"

namespace ema {
namespace {

// The control words of a ring, as shared_ring.cc places them.
constexpr int64_t kReaderCount = 128;
constexpr int64_t kLabels = 256;
constexpr int64_t kLabelBytes = 32;
// The kinds of lane_pipe.cc.
constexpr int32_t kMessage = 1;
constexpr int32_t kMessagePart = 2;
constexpr int32_t kChunk = 3;
constexpr int32_t kWindowChunk = 4;
constexpr int64_t kWindowBytes = int64_t{1} << 20;

// A client, and the server's pipe to it. Made once and used until the server finds that the client
// has broken the protocol, because mapping the memory takes longer than all else.
struct Lane {
  Lane() {
    int sockets[2];
    EMA_FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    client = sockets[0];
    memory = *SharedMemory::Create(2 * SharedRing::kBytes);
    window = *SharedMemory::CreateWindow(kWindowBytes);
    const int descriptors[] = {memory->fd(), window->fd()};
    char byte = 0;
    iovec data{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(descriptors))] = {};
    msghdr message{.msg_iov = &data, .msg_iovlen = 1, .msg_control = control};
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(descriptors));
    std::memcpy(CMSG_DATA(header), descriptors, sizeof(descriptors));
    EMA_FUZZ_CHECK(sendmsg(client, &message, 0) == 1);
    server = *LanePipe::Accept(sockets[1], nullptr, [](int64_t) { return true; });
    EMA_FUZZ_CHECK(server->has_window());
  }
  ~Lane() { close(client); }

  // Of the ring that the server reads, or of the one that it writes.
  std::atomic<int32_t>& Word(bool incoming, int64_t offset) {
    std::byte* const ring = memory->data() + (incoming ? 0 : SharedRing::kBytes);
    return *reinterpret_cast<std::atomic<int32_t>*>(ring + offset);
  }

  int client = -1;
  std::unique_ptr<SharedMemory> memory;
  std::unique_ptr<SharedMemory> window;
  std::unique_ptr<LanePipe> server;
};

// Writes the labels of up to four frames, of which the last one ends its message, and their number.
void SendFrames(FuzzInput& input, Lane& lane) {
  const int32_t position = lane.Word(true, kReaderCount);
  const int32_t count = input.Byte() % 6;
  for (int32_t i = 0; i < count; ++i) {
    const int64_t slot = static_cast<uint32_t>(position + i) % SharedRing::kSlotCount;
    const int64_t label = kLabels + slot * kLabelBytes;
    int32_t kind = input.Byte() % 6;
    if (kind == kMessagePart && i + 1 == count) kind = kMessage;
    lane.Word(true, label) = kind;
    // Three bytes are more than a slot; the fourth one makes negative lengths.
    lane.Word(true, label + 4) = static_cast<int32_t>(input.Number(input.Byte() % 5));
    lane.Word(true, label + 8) = static_cast<int32_t>(input.Number(2));
    // Of 64 bits, the upper half of which makes negative and huge offsets.
    lane.Word(true, label + 24) = static_cast<int32_t>(input.Number(input.Byte() % 5));
    lane.Word(true, label + 28) = static_cast<int32_t>(input.Byte() % 4 == 0 ? input.Number(4) : 0);
  }
  lane.Word(true, 0) = position + count;
}

// False: the lane has ended.
bool ReceiveFrames(Lane& lane) {
  while (lane.server->HasIncoming()) {
    const int32_t position = lane.Word(true, kReaderCount);
    const int64_t slot = static_cast<uint32_t>(position) % SharedRing::kSlotCount;
    const int64_t label = kLabels + slot * kLabelBytes;
    const absl::StatusOr<LanePipe::Frame> frame = lane.server->Receive(nullptr);
    CheckMessage(frame.status());
    if (!frame.ok()) {
      EMA_FUZZ_CHECK(frame.status().code() == absl::StatusCode::kUnavailable);
      return lane.server->CheckPeer(nullptr).ok();
    }
    if (frame->is_chunk) {
      const int32_t kind = lane.Word(true, label);
      EMA_FUZZ_CHECK(kind == kChunk || kind == kWindowChunk);
      EMA_FUZZ_CHECK(static_cast<int32_t>(frame->bytes.size()) == lane.Word(true, label + 4));
      if (!frame->bytes.empty()) {  // Both are in the mapping, or the process ends.
        (void)*const_cast<const volatile std::byte*>(&frame->bytes.front());
        (void)*const_cast<const volatile std::byte*>(&frame->bytes.back());
      }
    } else {
      EMA_FUZZ_CHECK(frame->message.size() <= LanePipe::kMaxMessageBytes);
      EMA_FUZZ_CHECK(static_cast<int32_t>(frame->message.size()) >= lane.Word(true, label + 4));
    }
  }
  return lane.server->CheckPeer(nullptr).ok();
}

// Sends a chunk to a peer that claims to have read any number of them. False: the lane has ended.
bool SendToPeer(FuzzInput& input, Lane& lane) {
  const int32_t sent = lane.Word(false, 0);
  const auto free = static_cast<int32_t>(input.Number(4));
  // A full ring would be waited for.
  lane.Word(false, kReaderCount) = sent - (free == SharedRing::kSlotCount ? 0 : free);
  const absl::StatusOr<std::byte*> place = lane.server->ReserveChunk(nullptr);
  CheckMessage(place.status());
  if (!place.ok()) return false;
  std::memset(*place, 7, LanePipe::kMaxChunkBytes);
  lane.server->SendChunk(0, LanePipe::kMaxChunkBytes, 7);
  return true;
}

}  // namespace
}  // namespace ema

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static std::unique_ptr<ema::Lane> lane;
  if (lane == nullptr) lane = std::make_unique<ema::Lane>();
  // Forgets the frames that the previous input has left.
  EMA_FUZZ_CHECK(lane->server->CheckPeer(nullptr).ok());
  lane->server->HasIncoming();
  lane->Word(true, 0) = lane->Word(true, ema::kReaderCount).load();

  ema::FuzzInput input(data, size);
  bool is_alive = true;
  while (is_alive && !input.empty()) {
    if (input.Byte() % 8 == 0) {
      is_alive = ema::SendToPeer(input, *lane);
    } else {
      ema::SendFrames(input, *lane);
      is_alive = ema::ReceiveFrames(*lane);
    }
  }
  if (!is_alive) lane.reset();
  return 0;
}
