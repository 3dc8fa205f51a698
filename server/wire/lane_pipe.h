// SPDX-License-Identifier: Apache-2.0
//
// A same-host lane: messages and chunks both ways between a client and a server, through memory
// that they share. A socket passes the memory, identifies the peer, and shows when it has closed.
#ifndef EMA_SERVER_WIRE_LANE_PIPE_H_
#define EMA_SERVER_WIRE_LANE_PIPE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "server/base/steady_wait.h"
#include "server/wire/shared_ring.h"

namespace ema {

// Identifies this boot of this machine, alike in all its containers. Empty: unknown.
std::string HostId();

// Opens a listening socket, for lanes to connect to, in the abstract namespace: it has no file, and
// ends with its process. Returns its descriptor. UNAVAILABLE: the system refuses.
absl::StatusOr<int> ListenForLanes(const std::string& socket_name);

// One end of a lane. For one thread at a time. Functions that wait call `stop` at least every 50
// ms, and fail with CANCELLED once it returns true: ReserveChunk() and Receive() also while frames
// flow, SendMessage() only while it waits, so that the reason for ending a call can still be sent.
// UNAVAILABLE: the peer has closed the lane or broken its protocol.
class LanePipe {
 public:
  using Stop = std::function<bool()>;

  // The client's end. FAILED_PRECONDITION: another user runs the server. UNAVAILABLE: there is no
  // such socket here (it may be in another container).
  static absl::StatusOr<std::unique_ptr<LanePipe>> Connect(const std::string& socket_name);
  // The server's end, for an accepted connection. Takes ownership of `fd`. PERMISSION_DENIED:
  // another user runs the client. INVALID_ARGUMENT: the client passes something other than lane
  // memory.
  static absl::StatusOr<std::unique_ptr<LanePipe>> Accept(int fd, const Stop& stop);
  ~LanePipe();
  LanePipe(const LanePipe&) = delete;
  LanePipe& operator=(const LanePipe&) = delete;

  // Sends a whole message of at most kMaxMessageBytes.
  absl::Status SendMessage(const std::string& message, const Stop& stop);
  // Returns shared memory of kMaxChunkBytes for the data of the next chunk; the same memory until
  // SendChunk().
  absl::StatusOr<std::byte*> ReserveChunk(const Stop& stop);
  // Sends the data written there. The receiver gets the checksum unverified.
  void SendChunk(int64_t offset, int64_t length_bytes, uint32_t crc32c);

  struct Frame {
    bool is_chunk = false;
    std::string message;  // If it is not a chunk.
    int64_t offset = 0;
    uint32_t crc32c = 0;
    // In the shared memory; valid until the next call of Receive() or HasIncoming().
    std::span<const std::byte> bytes;
  };
  absl::StatusOr<Frame> Receive(const Stop& stop);
  // OK: the peer is there, and `stop` is not true. UNAVAILABLE or CANCELLED otherwise.
  absl::Status CheckPeer(const Stop& stop) const;
  // True: a frame has begun to arrive, or the lane has ended.
  bool HasIncoming();

  static constexpr int64_t kMaxMessageBytes = int64_t{8} << 20;
  static constexpr int64_t kMaxChunkBytes = SharedRing::kSlotBytes;

 private:
  LanePipe(int fd, std::unique_ptr<SharedMemory> memory, bool is_client)
      : fd_(fd),
        memory_(std::move(memory)),
        // The client's threads belong to the application, so they are not moved.
        out_(memory_->data() + (is_client ? 0 : SharedRing::kBytes), /*may_move=*/!is_client),
        in_(memory_->data() + (is_client ? SharedRing::kBytes : 0), /*may_move=*/!is_client) {}

  // CANCELLED: `stop` was due to be called, and returned true.
  absl::Status PollStop(const Stop& stop);
  absl::StatusOr<std::span<std::byte>> WaitForFree(const Stop& stop);
  absl::StatusOr<SharedRing::Filled> WaitForFilled(const Stop& stop);
  void ReleaseIncoming();
  bool IsPeerClosed() const;

  const int fd_;
  const std::unique_ptr<SharedMemory> memory_;
  SharedRing out_;
  SharedRing in_;
  bool holds_incoming_ = false;
  SteadyTime next_poll_time_;  // When `stop` is to be called next.
};

}  // namespace ema

#endif  // EMA_SERVER_WIRE_LANE_PIPE_H_
