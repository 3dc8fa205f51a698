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
#include "server/wire/shared_memory.h"
#include "server/wire/shared_ring.h"

namespace ema {

// Identifies this boot of this machine, alike in all its containers. Empty: unknown.
std::string HostId();

// Opens a listening socket, for lanes to connect to, in the abstract namespace: it has no file, is
// seen only in its network namespace, and ends with its process. Returns its descriptor.
// UNAVAILABLE: the system refuses.
absl::StatusOr<int> ListenForLanes(const std::string& socket_name);

// One end of a lane. A chunk is in a slot of the lane's own memory, or in a window: memory of the
// client that the server maps, for chunks that a GPU has written there. For one thread at a time.
// Functions that wait call `stop` at least every 50 ms, and fail with CANCELLED once it returns
// true: ReserveChunk() and Receive() also while frames flow, SendMessage() only while it waits, so
// that the reason for ending a call can still be sent. UNAVAILABLE: the peer has closed the lane or
// broken its protocol.
class LanePipe {
 public:
  using Stop = std::function<bool()>;

  // The client's end. `socket_name`: the absolute path of a socket file, or a name in the abstract
  // namespace. FAILED_PRECONDITION: another user runs the server. UNAVAILABLE: there is no such
  // socket here (it may be in another container). `window`: made by
  // SharedMemory::CreateWindow(); null: the lane has none. It must outlive the SendWindowChunk()
  // calls.
  static absl::StatusOr<std::unique_ptr<LanePipe>> Connect(const std::string& socket_name,
                                                           const SharedMemory* window = nullptr);
  // The server's end, for an accepted connection. Takes ownership of `fd`. Maps the client's window
  // if `admit_window` returns true for its size. PERMISSION_DENIED: another user runs the client.
  // INVALID_ARGUMENT: the client passes something other than lane memory and a window.
  static absl::StatusOr<std::unique_ptr<LanePipe>> Accept(
      int fd, const Stop& stop, const SharedMemory::Admit& admit_window = nullptr);
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

  // Waits until a frame can be sent.
  absl::Status AwaitPlace(const Stop& stop);
  // The client's end: sends a chunk of at most kMaxChunkBytes that is in the window. Its bytes must
  // not change until the server has read it: until unread_frame_count() is at most the number of
  // frames that were sent after it, or AwaitPeerEnd() has returned true. REQUIRES: AwaitPlace() has
  // succeeded since the last frame was sent.
  void SendWindowChunk(int64_t offset, std::span<const std::byte> bytes, uint32_t crc32c);
  // The number of frames that this end has sent, and the peer has not finished reading.
  int64_t unread_frame_count() const { return out_.unreleased_count(); }
  // Ends the lane, and waits until the peer has closed its end; then it reads neither lane nor
  // window any more. False: it has not by `deadline`.
  bool AwaitPeerEnd(SteadyTime deadline);

  // The server's end: true if the client has passed a window, and if it is mapped.
  bool has_offered_window() const { return has_offered_window_; }
  bool has_window() const { return window_ != nullptr; }

  struct Frame {
    bool is_chunk = false;
    std::string message;  // If it is not a chunk.
    int64_t offset = 0;
    uint32_t crc32c = 0;
    // In the lane's memory or in the window; valid until the next call of Receive() or
    // HasIncoming().
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
  // The bytes of a chunk in the window. UNAVAILABLE: they are not inside it.
  absl::StatusOr<std::span<const std::byte>> FindInWindow(const SharedRing::Label& label) const;
  bool IsPeerClosed() const;

  const int fd_;
  const std::unique_ptr<SharedMemory> memory_;
  // The server's end. Set by Accept().
  std::unique_ptr<SharedMemory> window_;
  bool has_offered_window_ = false;
  const std::byte* window_begin_ = nullptr;  // The client's end. Set by Connect().
  SharedRing out_;
  SharedRing in_;
  bool holds_incoming_ = false;
  SteadyTime next_poll_time_;  // When `stop` is to be called next.
};

}  // namespace ema

#endif  // EMA_SERVER_WIRE_LANE_PIPE_H_
