// SPDX-License-Identifier: Apache-2.0
//
// One rank's part in a step.
#ifndef EMA_SERVER_CORE_RANK_PUSH_H_
#define EMA_SERVER_CORE_RANK_PUSH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/base/chunk_header.h"
#include "server/core/push_session.h"
#include "server/device/device.h"

namespace ema {

class Model;

// One rank's stream of one step. Not thread-safe, but may be destroyed on any thread once no call
// is running; what it has covered stays in the session for a retry.
class RankPush {
 public:
  // A stream of `session`, of that number there, whose rank is `rank`.
  RankPush(std::shared_ptr<Model> model, std::shared_ptr<PushSession> session, int64_t rank,
           int64_t stream, std::shared_ptr<DeviceStream> device_stream);
  // A step that is committed already, which is pushed again.
  struct Committed {
    PushResult result;
    uint32_t digest = 0;  // Of what the rank has pushed.
  };
  RankPush(Committed committed, PushCallback on_end);
  RankPush(const RankPush&) = delete;
  RankPush& operator=(const RankPush&) = delete;
  ~RankPush();

  // As PushSession::AddChunk(). On NON_FINITE the session has ended.
  absl::Status AddChunk(const ChunkHeader& header,
                        absl::Span<const std::span<const std::byte>> pieces);

  // Waits until the device has folded every chunk, and gives back the memory by which they came:
  // who waits for other ranks holds none. What has failed Commit() tells. No chunk may follow.
  void EndChunks();
  // Ends the stream, and its chunks. OK: `on_end` is called, now or when the last rank has
  // committed. INVALID_ARGUMENT, COUNT_MISMATCH: other counts than arrived; else as
  // PushSession::CommitRank(). After an error more chunks may come, unless EndChunks() was called.
  absl::Status Commit(const PushTotals& totals);

  // Of the chunks that it was given, whatever has come of them.
  int64_t total_bytes() const { return total_bytes_; }

 private:
  // All null: the step is committed already, this is a retry.
  const std::shared_ptr<Model> model_;
  const std::shared_ptr<PushSession> session_;
  std::shared_ptr<DeviceStream> device_stream_;  // Null: EndChunks() was called.
  const int64_t rank_ = 0;
  const int64_t stream_ = 0;
  // Of a retry:
  const Committed committed_;
  const PushCallback on_end_;

  int64_t chunk_count_ = 0;
  int64_t total_bytes_ = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_RANK_PUSH_H_
