// SPDX-License-Identifier: Apache-2.0
//
// A same-host lane: messages and chunks both ways between a client and a server, through memory
// that they share. A socket passes the memory, shows who the peer is, and tells when it has gone.
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

// This boot of this machine, the same in its containers. Empty: unknown.
std::string HostId();

// A socket in the abstract namespace that lanes connect to: it has no file, and goes with its
// process. The fd, listening. INTERNAL.
absl::StatusOr<int> ListenForLanes(const std::string& socket_name);

// One end. For one thread at a time. Functions that wait ask `stop` at least every 50 ms, and end
// with CANCELLED when it is true: ReserveChunk() and Receive() also while frames flow,
// SendMessage() only while it waits, so that why a call has ended can still be said. UNAVAILABLE:
// the peer has gone, or has not kept to the rules.
class LanePipe {
 public:
  using Stop = std::function<bool()>;

  // The client's end. FAILED_PRECONDITION: the server is another user's. UNAVAILABLE: there is no
  // such socket here (it may be another container's).
  static absl::StatusOr<std::unique_ptr<LanePipe>> Connect(const std::string& socket_name);
  // The server's, of an accepted connection. Takes `fd`. PERMISSION_DENIED: the client is another
  // user's. INVALID_ARGUMENT: what it passes is no such memory.
  static absl::StatusOr<std::unique_ptr<LanePipe>> Accept(int fd, const Stop& stop);
  ~LanePipe();
  LanePipe(const LanePipe&) = delete;
  LanePipe& operator=(const LanePipe&) = delete;

  // A whole message, of at most kMaxMessageBytes.
  absl::Status SendMessage(const std::string& message, const Stop& stop);
  // Shared memory of kMaxChunkBytes for the data of the next chunk. Asked for again, the same.
  absl::StatusOr<std::byte*> ReserveChunk(const Stop& stop);
  // Sends what has been written there. The checksum goes along, and is nobody's here to look at.
  void SendChunk(int64_t offset, int64_t length_bytes, uint32_t crc32c);

  struct Frame {
    bool is_chunk = false;
    std::string message;  // If it is none.
    int64_t offset = 0;
    uint32_t crc32c = 0;
    // In the shared memory; valid until the next call of Receive() or HasIncoming().
    std::span<const std::byte> bytes;
  };
  absl::StatusOr<Frame> Receive(const Stop& stop);
  // For `stop`: a part of a message has come, and takes memory.
  bool has_part() const { return has_part_; }
  // OK while there is a reason to wait for the peer: it is there, and `stop` is not true.
  absl::Status CheckPeer(const Stop& stop) const;
  // True: a frame of the peer's has begun to arrive, or the peer has gone.
  bool HasIncoming();

  static constexpr int64_t kMaxMessageBytes = int64_t{8} << 20;
  static constexpr int64_t kMaxChunkBytes = SharedRing::kSlotBytes;

 private:
  LanePipe(int fd, std::unique_ptr<SharedMemory> memory, bool is_client)
      : fd_(fd),
        memory_(std::move(memory)),
        // The client's threads are its user's.
        out_(memory_->data() + (is_client ? 0 : SharedRing::kBytes), /*may_move=*/!is_client),
        in_(memory_->data() + (is_client ? SharedRing::kBytes : 0), /*may_move=*/!is_client) {}

  // CANCELLED: it is time to ask `stop`, and it is true.
  absl::Status AskNowAndThen(const Stop& stop);
  absl::StatusOr<std::span<std::byte>> WaitForFree(const Stop& stop);
  absl::StatusOr<SharedRing::Filled> WaitForFilled(const Stop& stop);
  void ReleaseIncoming();
  bool PeerHasGone() const;

  const int fd_;
  const std::unique_ptr<SharedMemory> memory_;
  SharedRing out_;
  SharedRing in_;
  bool holds_incoming_ = false;
  bool has_part_ = false;
  SteadyTime ask_at_;  // When `stop` is to be asked next.
};

}  // namespace ema

#endif  // EMA_SERVER_WIRE_LANE_PIPE_H_
