// SPDX-License-Identifier: Apache-2.0
#include "server/wire/lane_pipe.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr int64_t kMemoryBytes = 2 * SharedRing::kBytes;
// How long a wait may last before `stop` is asked again, and how long it need not be asked while
// frames flow: asking may be dear, as of Python. Both together are what the header promises.
constexpr absl::Duration kPollInterval = absl::Milliseconds(25);
// What a label's kind says.
enum Kind : int32_t { kMessage = 1, kMessagePart = 2, kChunk = 3 };

absl::Status SystemError(const char* what) {
  return absl::UnavailableError(absl::StrCat("same-host lane: ", what, ": ", std::strerror(errno)));
}

absl::Status WaitEnded() { return absl::CancelledError("same-host lane: the wait was ended"); }

// The address of an abstract socket, and its length.
std::pair<sockaddr_un, socklen_t> AbstractAddress(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t size = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), size);
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size)};
}

// `flags`: 0 or SOCK_NONBLOCK.
absl::StatusOr<int> NewSocket(int flags) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
  if (fd < 0) return SystemError("socket");
  return fd;
}

bool IsOwnUser(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

// One byte, and with it room for one descriptor and no more.
struct DescriptorMessage {
  DescriptorMessage() {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = CMSG_LEN(sizeof(int));
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
};

absl::Status SendDescriptor(int socket, int descriptor) {
  DescriptorMessage message;
  cmsghdr* const header = CMSG_FIRSTHDR(&message.header);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(descriptor));
  if (sendmsg(socket, &message.header, MSG_NOSIGNAL) != 1) return SystemError("sendmsg");
  return absl::OkStatus();
}

absl::StatusOr<int> ReceiveDescriptor(int socket, const LanePipe::Stop& stop) {
  pollfd polled{socket, POLLIN, 0};
  while (poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(kPollInterval))) == 0) {
    if (stop && stop()) {
      return absl::CancelledError("same-host lane: the peer sent no memory descriptor");
    }
  }
  DescriptorMessage message;
  if (recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT) != 1) {
    return SystemError("recvmsg");
  }
  const cmsghdr* const header = CMSG_FIRSTHDR(&message.header);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS ||
      header->cmsg_len != CMSG_LEN(sizeof(int))) {
    return absl::InvalidArgumentError("same-host lane: expected one descriptor");
  }
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(header), sizeof(descriptor));
  return descriptor;
}

// Connects `fd` and passes memory that both will share.
absl::StatusOr<std::unique_ptr<SharedMemory>> OfferMemory(int fd, const std::string& socket_name) {
  const auto [address, size] = AbstractAddress(socket_name);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    return SystemError("connect");
  }
  if (!IsOwnUser(fd)) {
    return absl::FailedPreconditionError("same-host lane: the server runs as another user");
  }
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<SharedMemory> memory, SharedMemory::Create(kMemoryBytes));
  EMA_RETURN_IF_ERROR(SendDescriptor(fd, memory->fd()));
  return memory;
}

absl::StatusOr<std::unique_ptr<SharedMemory>> TakeMemory(int fd, const LanePipe::Stop& stop) {
  if (!IsOwnUser(fd)) {
    return absl::PermissionDeniedError("same-host lane: the client runs as another user");
  }
  EMA_ASSIGN_OR_RETURN(const int descriptor, ReceiveDescriptor(fd, stop));
  return SharedMemory::Map(descriptor, kMemoryBytes);
}

}  // namespace

std::string HostId() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return id;
}

absl::StatusOr<int> ListenForLanes(const std::string& socket_name) {
  EMA_ASSIGN_OR_RETURN(const int fd, NewSocket(0));
  const auto [address, size] = AbstractAddress(socket_name);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0 || listen(fd, 64) != 0) {
    absl::Status status = SystemError("listen");
    close(fd);
    return status;
  }
  return fd;
}

absl::StatusOr<std::unique_ptr<LanePipe>> LanePipe::Connect(const std::string& socket_name) {
  // A server that hangs accepts nobody, and connect() would wait for it.
  EMA_ASSIGN_OR_RETURN(const int fd, NewSocket(SOCK_NONBLOCK));
  absl::StatusOr<std::unique_ptr<SharedMemory>> memory = OfferMemory(fd, socket_name);
  if (!memory.ok()) {
    close(fd);
    return memory.status();
  }
  return std::unique_ptr<LanePipe>(new LanePipe(fd, *std::move(memory), /*is_client=*/true));
}

absl::StatusOr<std::unique_ptr<LanePipe>> LanePipe::Accept(int fd, const Stop& stop) {
  absl::StatusOr<std::unique_ptr<SharedMemory>> memory = TakeMemory(fd, stop);
  if (!memory.ok()) {
    close(fd);
    return memory.status();
  }
  return std::unique_ptr<LanePipe>(new LanePipe(fd, *std::move(memory), /*is_client=*/false));
}

LanePipe::~LanePipe() { close(fd_); }

bool LanePipe::IsPeerClosed() const {
  // Nothing is written to the socket any more: what can be read is its end.
  pollfd polled{fd_, POLLIN | POLLRDHUP, 0};
  return poll(&polled, 1, 0) != 0;
}

absl::Status LanePipe::CheckPeer(const Stop& stop) const {
  if (out_.broken() || in_.broken() || IsPeerClosed()) {
    return absl::UnavailableError("same-host lane: the peer has closed its end");
  }
  if (stop && stop()) return WaitEnded();
  return absl::OkStatus();
}

absl::Status LanePipe::PollStop(const Stop& stop) {
  const SteadyTime now = SteadyNow();
  if (now < next_poll_time_) return absl::OkStatus();
  if (stop && stop()) return WaitEnded();
  next_poll_time_ = After(now, kPollInterval);
  return absl::OkStatus();
}

absl::StatusOr<std::span<std::byte>> LanePipe::WaitForFree(const Stop& stop) {
  while (true) {
    const std::span<std::byte> slot = out_.WaitForFree(kPollInterval);
    if (!slot.empty()) return slot;
    EMA_RETURN_IF_ERROR(CheckPeer(stop));
  }
}

absl::StatusOr<SharedRing::Filled> LanePipe::WaitForFilled(const Stop& stop) {
  while (true) {
    EMA_RETURN_IF_ERROR(PollStop(stop));
    const std::optional<SharedRing::Filled> filled = in_.WaitForFilled(kPollInterval);
    if (filled.has_value()) {
      holds_incoming_ = true;
      return *filled;
    }
    EMA_RETURN_IF_ERROR(CheckPeer(nullptr));
  }
}

void LanePipe::ReleaseIncoming() {
  if (std::exchange(holds_incoming_, false)) in_.Release();
}

absl::Status LanePipe::SendMessage(const std::string& message, const Stop& stop) {
  size_t sent = 0;
  do {
    EMA_ASSIGN_OR_RETURN(const std::span<std::byte> slot, WaitForFree(stop));
    const size_t n = std::min(slot.size(), message.size() - sent);
    std::memcpy(slot.data(), message.data() + sent, n);
    sent += n;
    out_.Publish({.kind = sent == message.size() ? kMessage : kMessagePart,
                  .length_bytes = static_cast<int32_t>(n)});
  } while (sent < message.size());
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> LanePipe::ReserveChunk(const Stop& stop) {
  EMA_RETURN_IF_ERROR(PollStop(stop));
  EMA_ASSIGN_OR_RETURN(const std::span<std::byte> slot, WaitForFree(stop));
  return slot.data();
}

void LanePipe::SendChunk(int64_t offset, int64_t length_bytes, uint32_t crc32c) {
  out_.Publish({.kind = kChunk,
                .length_bytes = static_cast<int32_t>(length_bytes),
                .offset = offset,
                .crc32c = crc32c});
}

absl::StatusOr<LanePipe::Frame> LanePipe::Receive(const Stop& stop) {
  Frame frame;
  bool has_part = false;
  while (true) {
    ReleaseIncoming();
    EMA_ASSIGN_OR_RETURN(const SharedRing::Filled filled, WaitForFilled(stop));
    const auto& [label, bytes] = filled;
    if (label.kind == kChunk && frame.message.empty()) {
      return Frame{.is_chunk = true,
                   .message = {},
                   .offset = label.offset,
                   .crc32c = label.crc32c,
                   .bytes = bytes};
    }
    // Of empty parts there could be any number.
    const bool is_part = label.kind == kMessagePart && !bytes.empty();
    if ((label.kind != kMessage && !is_part) ||
        frame.message.size() + bytes.size() > static_cast<size_t>(kMaxMessageBytes)) {
      return absl::UnavailableError("same-host lane: the peer has violated the protocol");
    }
    frame.message.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (label.kind == kMessage) {
      ReleaseIncoming();
      return frame;
    }
    // `stop` is polled before the next part takes more memory.
    if (!std::exchange(has_part, true)) next_poll_time_ = SteadyTime::min();
  }
}

bool LanePipe::HasIncoming() {
  ReleaseIncoming();
  return in_.WaitForFilled(absl::ZeroDuration()).has_value() || in_.broken() || IsPeerClosed();
}

}  // namespace ema
