// SPDX-License-Identifier: Apache-2.0
//
// One stream of a rank's push.
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
  // Stream number `stream` of `session`, which belongs to `rank`.
  RankPush(std::shared_ptr<Model> model, std::shared_ptr<PushSession> session, int64_t rank,
           int64_t stream, std::shared_ptr<DeviceStream> device_stream);
  // A committed step that is pushed again.
  struct Committed {
    PushResult result;
    uint32_t digest = 0;  // That of the rank's bytes.
  };
  RankPush(Committed committed, PushCallback on_end);
  RankPush(const RankPush&) = delete;
  RankPush& operator=(const RankPush&) = delete;
  ~RankPush();

  // As PushSession::AddChunk(). On NON_FINITE the session has ended.
  absl::Status AddChunk(const ChunkHeader& header,
                        absl::Span<const std::span<const std::byte>> pieces);

  // Waits until the device has folded every chunk, and releases the device stream, so that a rank
  // that waits for others holds none. Commit() returns the device's error, if any. No chunk may
  // follow.
  void EndChunks();
  // Commits the stream; on success it also calls EndChunks(). OK: `on_end` is called, now or when
  // the last rank has committed. INVALID_ARGUMENT, COUNT_MISMATCH: the counts differ from those
  // received; other errors as PushSession::CommitRank(). After an error more chunks may come,
  // unless EndChunks() was called.
  absl::Status Commit(const PushTotals& totals);

  // Bytes of all chunks passed to AddChunk(), rejected ones included.
  int64_t total_bytes() const { return total_bytes_; }

 private:
  // Null in a retry of a step that is committed already.
  const std::shared_ptr<Model> model_;
  const std::shared_ptr<PushSession> session_;
  std::shared_ptr<DeviceStream> device_stream_;  // Null after EndChunks().
  const int64_t rank_ = 0;
  const int64_t stream_ = 0;
  // Only for a retry.
  const Committed committed_;
  const PushCallback on_end_;

  int64_t chunk_count_ = 0;
  int64_t total_bytes_ = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_RANK_PUSH_H_
