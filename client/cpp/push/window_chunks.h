// SPDX-License-Identifier: Apache-2.0
//
// Sends the chunks of a push from a window, without copying them.
#ifndef EMA_CLIENT_CPP_PUSH_WINDOW_CHUNKS_H_
#define EMA_CLIENT_CPP_PUSH_WINDOW_CHUNKS_H_

#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "client/cpp/push/chunk_plan.h"
#include "client/cpp/push/staged_chunks.h"
#include "server/wire/lane_pipe.h"

namespace ema::client_internal {

// A GPU has copied the chunks into the ring, which is the window (PinnedRing::window()). A buffer
// is used for another chunk only when the server has read it. For one thread.
class WindowChunks {
 public:
  // `lane`: connected with the window of the ring of `staged`. All pointers outlive this object.
  WindowChunks(const ChunkPlan* plan, ChunkWriter* writer, StagedChunks* staged, LanePipe* lane)
      : plan_(plan), writer_(writer), staged_(staged), lane_(lane) {}
  // If the server may still be reading chunks: ends the lane, and waits until the server has closed
  // its end. If a server that hangs does not, the window is discarded.
  ~WindowChunks();
  WindowChunks(const WindowChunks&) = delete;
  WindowChunks& operator=(const WindowChunks&) = delete;

  // CANCELLED: the chunk cannot be read; see StagedChunks::status(). Other errors as
  // LanePipe::SendWindowChunk().
  absl::Status Send(int64_t chunk, const LanePipe::Stop& stop);
  // To be called when the server has replied: it has read all chunks.
  void Finish() { EndLoans(0, /*is_read=*/true); }

 private:
  // A chunk that the server may be reading.
  struct Sent {
    int64_t chunk = 0;
    int slot = 0;
  };
  // Ends the oldest loans until `remaining` are left.
  void EndLoans(int64_t remaining, bool is_read);

  const ChunkPlan* const plan_;
  ChunkWriter* const writer_;
  StagedChunks* const staged_;
  LanePipe* const lane_;
  std::deque<Sent> sent_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_WINDOW_CHUNKS_H_
