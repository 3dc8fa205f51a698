// SPDX-License-Identifier: Apache-2.0
//
// A push through a same-host lane.
#ifndef EMA_CLIENT_CPP_PUSH_LANE_PUSH_STREAM_H_
#define EMA_CLIENT_CPP_PUSH_LANE_PUSH_STREAM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "client/cpp/push/push_messages.h"
#include "client/cpp/push/push_stream.h"
#include "client/cpp/push/run_core.h"
#include "client/cpp/push/staged_chunks.h"
#include "client/cpp/push/window_chunks.h"
#include "ema/v1/ema_service.pb.h"

namespace ema::client_internal {

// Copies the chunks into the lane, or, if it has the window in which they are staged, sends them
// from there. The lane goes back to the run after the reply; after an error it is closed.
class LanePushStream final : public PushStream {
 public:
  // `lane`: it has a pipe. `staged`: ignored unless the lane has their window. The pointers outlive
  // this object.
  LanePushStream(RunCore* run, RunCore::PushLane lane, const PushMessages* messages,
                 StagedChunks* staged);
  ~LanePushStream() override;

  absl::Status SendHeader(const v1::PushHeader& header) override;
  absl::Status SendChunk(int64_t chunk) override;
  absl::StatusOr<v1::PushResponse> Commit(const v1::PushCommit& commit) override;
  void Cancel() override { is_cancelled_.store(true, std::memory_order_relaxed); }

 private:
  absl::Status Send(const v1::LaneRequest& request);
  absl::Status SendCopy(int64_t chunk);
  bool MustStop() const;
  // Why the call has failed, after `error`.
  absl::Status WhyEnded(const absl::Status& error);

  RunCore* const run_;
  RunCore::PushLane lane_;
  const PushMessages* const messages_;
  const LanePipe::Stop stop_ = [this] { return MustStop(); };
  std::atomic<bool> is_cancelled_ = false;  // Relaxed: polled.
  std::optional<WindowChunks> in_window_;   // Absent: chunks are copied.
  bool has_replied_ = false;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_LANE_PUSH_STREAM_H_
