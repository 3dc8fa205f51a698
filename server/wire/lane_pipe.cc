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
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr int64_t kMemoryBytes = 2 * SharedRing::kBytes;
// How long a wait may last before `stop` is asked again, and how long it need not be asked while
// frames flow: asking may be dear, as of Python. Both together are what the header promises.
constexpr absl::Duration kPollInterval = absl::Milliseconds(25);
// What a label's kind says.
enum Kind : int32_t { kMessage = 1, kMessagePart = 2, kChunk = 3, kWindowChunk = 4 };

absl::Status LaneError(const char* what) {
  return absl::UnavailableError(absl::StrCat("same-host lane: ", what, ": ", std::strerror(errno)));
}

absl::Status ProtocolViolation() {
  return absl::UnavailableError("same-host lane: the peer has violated the protocol");
}

absl::Status WaitEnded() { return absl::CancelledError("same-host lane: the wait was ended"); }

// The address, and its length.
std::pair<sockaddr_un, socklen_t> SocketAddress(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // The name of an abstract socket follows a zero byte.
  const size_t begin = name.starts_with('/') ? 0 : 1;
  const size_t size = std::min(name.size(), sizeof(address.sun_path) - begin);
  std::memcpy(address.sun_path + begin, name.data(), size);
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + begin + size)};
}

// `flags`: 0 or SOCK_NONBLOCK.
absl::StatusOr<int> NewSocket(int flags) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
  if (fd < 0) return LaneError("socket");
  return fd;
}

bool IsOwnUser(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

// The most descriptors that a client passes: the lane's memory, and a window.
constexpr size_t kMaxDescriptors = 2;

// One byte, and with it room for `count` descriptors.
struct DescriptorMessage {
  explicit DescriptorMessage(size_t count) {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = CMSG_LEN(count * sizeof(int));
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr header{};
};

absl::Status SendDescriptors(int socket, const std::vector<int>& descriptors) {
  DescriptorMessage message(descriptors.size());
  cmsghdr* const header = CMSG_FIRSTHDR(&message.header);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  if (sendmsg(socket, &message.header, MSG_NOSIGNAL) != 1) return LaneError("sendmsg");
  return absl::OkStatus();
}

// Returns one or two descriptors, which the caller closes.
absl::StatusOr<std::vector<int>> ReceiveDescriptors(int socket, const LanePipe::Stop& stop) {
  pollfd polled{socket, POLLIN, 0};
  while (poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(kPollInterval))) == 0) {
    if (stop && stop()) {
      return absl::CancelledError("same-host lane: the peer sent no memory descriptor");
    }
  }
  DescriptorMessage message(kMaxDescriptors);
  if (recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT) != 1) {
    return LaneError("recvmsg");
  }
  std::vector<int> descriptors;
  const cmsghdr* const header = CMSG_FIRSTHDR(&message.header);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    descriptors.resize((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(descriptors.data(), CMSG_DATA(header), descriptors.size() * sizeof(int));
  }
  if (descriptors.empty() || (message.header.msg_flags & MSG_CTRUNC) != 0) {
    for (const int descriptor : descriptors) close(descriptor);
    return absl::InvalidArgumentError("same-host lane: expected one or two descriptors");
  }
  return descriptors;
}

// Connects `fd` and passes memory that both will share, and the window if there is one.
absl::StatusOr<std::unique_ptr<SharedMemory>> OfferMemory(int fd, const std::string& socket_name,
                                                          const SharedMemory* window) {
  const auto [address, size] = SocketAddress(socket_name);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    return LaneError(absl::StrCat("connect to ", socket_name).c_str());
  }
  if (!IsOwnUser(fd)) {
    return absl::FailedPreconditionError("same-host lane: the server runs as another user");
  }
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<SharedMemory> memory, SharedMemory::Create(kMemoryBytes));
  std::vector<int> descriptors = {memory->fd()};
  if (window != nullptr) descriptors.push_back(window->fd());
  EMA_RETURN_IF_ERROR(SendDescriptors(fd, descriptors));
  return memory;
}

struct OfferedMemory {
  std::unique_ptr<SharedMemory> lane;
  std::unique_ptr<SharedMemory> window;  // Null: there is none, or it was not admitted.
  bool has_offered_window = false;
};

absl::StatusOr<OfferedMemory> MapOfferedMemory(int fd, const LanePipe::Stop& stop,
                                               const SharedMemory::Admit& admit_window) {
  if (!IsOwnUser(fd)) {
    return absl::PermissionDeniedError("same-host lane: the client runs as another user");
  }
  EMA_ASSIGN_OR_RETURN(const std::vector<int> descriptors, ReceiveDescriptors(fd, stop));
  OfferedMemory offered;
  offered.has_offered_window = descriptors.size() > 1;
  // Both take ownership, so both are called, whatever the first returns.
  absl::StatusOr<std::unique_ptr<SharedMemory>> lane =
      SharedMemory::Map(descriptors[0], kMemoryBytes);
  if (offered.has_offered_window) {
    EMA_ASSIGN_OR_RETURN(offered.window, SharedMemory::MapWindow(descriptors[1], admit_window));
  }
  EMA_ASSIGN_OR_RETURN(offered.lane, std::move(lane));
  return offered;
}

}  // namespace

std::string HostId() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return id;
}

absl::StatusOr<int> ListenForLanes(const std::string& socket_name) {
  EMA_ASSIGN_OR_RETURN(const int fd, NewSocket(0));
  const auto [address, size] = SocketAddress(socket_name);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0 || listen(fd, 64) != 0) {
    absl::Status status = LaneError("listen");
    close(fd);
    return status;
  }
  return fd;
}

absl::StatusOr<std::unique_ptr<LanePipe>> LanePipe::Connect(const std::string& socket_name,
                                                            const SharedMemory* window) {
  // A server that hangs accepts nobody, and connect() would wait for it.
  EMA_ASSIGN_OR_RETURN(const int fd, NewSocket(SOCK_NONBLOCK));
  absl::StatusOr<std::unique_ptr<SharedMemory>> memory = OfferMemory(fd, socket_name, window);
  if (!memory.ok()) {
    close(fd);
    return memory.status();
  }
  std::unique_ptr<LanePipe> pipe(new LanePipe(fd, *std::move(memory), /*is_client=*/true));
  if (window != nullptr) pipe->window_begin_ = window->data();
  return pipe;
}

absl::StatusOr<std::unique_ptr<LanePipe>> LanePipe::Accept(
    int fd, const Stop& stop, const SharedMemory::Admit& admit_window) {
  absl::StatusOr<OfferedMemory> offered = MapOfferedMemory(fd, stop, admit_window);
  if (!offered.ok()) {
    close(fd);
    return offered.status();
  }
  std::unique_ptr<LanePipe> pipe(new LanePipe(fd, std::move(offered->lane), /*is_client=*/false));
  pipe->window_ = std::move(offered->window);
  pipe->has_offered_window_ = offered->has_offered_window;
  return pipe;
}

LanePipe::~LanePipe() {
  window_.reset();           // Before the peer sees the end, and offers the memory for another one.
  shutdown(fd_, SHUT_RDWR);  // A child process may have the socket, too.
  close(fd_);
}

bool LanePipe::IsPeerClosed() const {
  // Nothing is written to the socket any more: what can be read is its end.
  pollfd polled{fd_, POLLIN | POLLRDHUP, 0};
  return poll(&polled, 1, 0) != 0;
}

absl::Status LanePipe::CheckPeer(const Stop& stop) const {
  if (out_.is_broken() || in_.is_broken() || IsPeerClosed()) {
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

absl::Status LanePipe::AwaitPlace(const Stop& stop) { return ReserveChunk(stop).status(); }

void LanePipe::SendWindowChunk(int64_t offset, std::span<const std::byte> bytes, uint32_t crc32c) {
  out_.Publish({.kind = kWindowChunk,
                .length_bytes = static_cast<int32_t>(bytes.size()),
                .offset = offset,
                .crc32c = crc32c,
                .window_offset = bytes.data() - window_begin_});
}

bool LanePipe::AwaitPeerEnd(SteadyTime deadline) {
  shutdown(fd_, SHUT_WR);
  pollfd polled{fd_, POLLIN | POLLRDHUP, 0};
  while (true) {
    const auto left = absl::ToInt64Milliseconds(std::max(Until(deadline), absl::ZeroDuration()));
    if (poll(&polled, 1, static_cast<int>(std::min<int64_t>(left, 1000))) > 0) return true;
    if (SteadyNow() >= deadline) return false;
  }
}

absl::StatusOr<std::span<const std::byte>> LanePipe::FindInWindow(
    const SharedRing::Label& label) const {
  if (window_ == nullptr || label.window_offset < 0 ||
      label.window_offset > window_->size_bytes() - label.length_bytes) {
    return ProtocolViolation();
  }
  return std::span<const std::byte>(window_->data() + label.window_offset,
                                    static_cast<size_t>(label.length_bytes));
}

absl::StatusOr<LanePipe::Frame> LanePipe::Receive(const Stop& stop) {
  Frame frame;
  bool has_part = false;
  while (true) {
    ReleaseIncoming();
    EMA_ASSIGN_OR_RETURN(const SharedRing::Filled filled, WaitForFilled(stop));
    const auto& [label, bytes] = filled;
    if ((label.kind == kChunk || label.kind == kWindowChunk) && frame.message.empty()) {
      frame = {.is_chunk = true,
               .message = {},
               .offset = label.offset,
               .crc32c = label.crc32c,
               .bytes = bytes};
      if (label.kind == kWindowChunk) {
        EMA_ASSIGN_OR_RETURN(frame.bytes, FindInWindow(label));
      }
      return frame;
    }
    // Of empty parts there could be any number.
    const bool is_part = label.kind == kMessagePart && !bytes.empty();
    if ((label.kind != kMessage && !is_part) ||
        frame.message.size() + bytes.size() > static_cast<size_t>(kMaxMessageBytes)) {
      return ProtocolViolation();
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
  return in_.WaitForFilled(absl::ZeroDuration()).has_value() || in_.is_broken() || IsPeerClosed();
}

}  // namespace ema
