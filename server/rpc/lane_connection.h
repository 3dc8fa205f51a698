// SPDX-License-Identifier: Apache-2.0
//
// The server's end of one same-host lane: pushes and pulls, one after another.
#ifndef EMA_SERVER_RPC_LANE_CONNECTION_H_
#define EMA_SERVER_RPC_LANE_CONNECTION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/v1/lane.pb.h"
#include "server/core/memory_budget.h"
#include "server/rpc/pull_handler.h"
#include "server/rpc/rpc_context.h"
#include "server/wire/lane_pipe.h"

namespace ema {

// Names the process at the other end of the lane `fd`: "lane:pid=4711".
std::string PeerName(int fd);

// Has a thread of its own, on which Run() serves calls until the client closes the lane, a call
// fails, or `is_stopping`. Chunks are folded where the client has written them.
class LaneConnection final : public StreamCall {
 public:
  // `windows`: for the client's window. All three outlive it.
  LaneConnection(RpcContext* rpc, MemoryBudget* windows, const std::atomic<bool>* is_stopping)
      : rpc_(rpc), windows_(windows), is_stopping_(*is_stopping) {}

  // Takes ownership of `fd`, a connection to the lanes' socket.
  void Run(int fd);

 private:
  void End(StreamEnd why) override {
    (why == StreamEnd::kRevoked ? is_revoked_ : is_stalled_).store(true, std::memory_order_relaxed);
  }

  // Accepts the lane, and maps its window if there is memory for it. False: the lane has ended.
  bool Accept(int fd);
  // Receives the message that begins a call. INVALID_ARGUMENT, BAD_REQUEST: it is another message.
  // Other errors: the lane has ended.
  absl::StatusOr<v1::LaneRequest> ReceiveRequest();
  absl::Status Serve(v1::LaneRequest request);
  absl::Status ServePush(const v1::PushHeader& header);
  absl::Status ServePull(v1::PullRequest request);
  // Header, chunks, trailer.
  absl::Status SendVersion(v1::PullRequest request, PullHandler& handler);
  // Copies a chunk into as many slots as it needs, and returns their number.
  absl::StatusOr<int64_t> SendChunk(const PullHandler::Chunk& chunk);
  // Receives the next frame of a call. An error says why the call ends.
  absl::StatusOr<LanePipe::Frame> Receive(const LanePipe::Stop& has_ended);
  absl::Status Send(const v1::LaneResponse& response);
  // True: stop waiting for the client.
  bool MustEnd() const;
  absl::Status WhyEnded(const absl::Status& status) const;

  RpcContext* const rpc_;
  MemoryBudget* const windows_;
  const std::atomic<bool>& is_stopping_;
  std::unique_ptr<MemoryBudget::Reservation> window_memory_;  // Null: there is no window.
  std::unique_ptr<LanePipe> pipe_;
  std::string peer_;            // Constant once connected.
  bool has_lost_step_ = false;  // The client's messages may belong to a call that has ended.
  // Of the current call. Relaxed: polled.
  std::atomic<bool> is_stalled_ = false;
  std::atomic<bool> is_revoked_ = false;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_LANE_CONNECTION_H_
