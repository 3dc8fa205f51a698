// SPDX-License-Identifier: Apache-2.0
//
// Sends the tries of a push.
#ifndef EMA_CLIENT_CPP_PUSH_PUSH_SENDER_H_
#define EMA_CLIENT_CPP_PUSH_PUSH_SENDER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/push/cut_off_clock.h"
#include "client/cpp/push/push_messages.h"
#include "client/cpp/push/push_stream.h"
#include "client/cpp/push/run_core.h"
#include "client/cpp/push/staged_chunks.h"
#include "client/cpp/transport/connection.h"
#include "ema/run.h"
#include "ema/v1/ema_service.pb.h"

namespace ema::client_internal {

// Sends the chunks of a push through same-host lanes if there are some, else over gRPC: by one
// stream, or by several, each with a lane or connection of its own; a stream takes the next chunk
// when it is free. Keeps the connections of the last try over gRPC, which may still hold slices of
// the weights. For one thread, except connection_count().
class PushSender {
 public:
  // `clock` is paused while lanes are opened. Both outlive this object.
  PushSender(RunCore* run, CutOffClock* clock) : run_(run), clock_(clock) {}

  // Sends `messages` and waits for the reply. Blocks. `staged`: the chunks, if they come from
  // pinned memory. Only a first try of a large push uses several streams; it records the speed in
  // the run. Errors as those of PushStream.
  absl::StatusOr<v1::PushResponse> Send(const PushMessages& messages, StagedChunks* staged,
                                        bool is_first_try);

  // Cuts the connections, so that gRPC drops its slices.
  void BreakConnections();
  void DropConnections() { connections_.clear(); }
  // Connections or lanes of the last try, for statistics. From any thread.
  int64_t connection_count() const { return connection_count_.load(std::memory_order_relaxed); }

 private:
  struct Streams {
    std::vector<std::unique_ptr<PushStream>> list;
    Lane kind = Lane::kGrpc;
    std::string why_no_better;  // Why they are not of a better kind; empty: there is none.
  };
  class Sending;

  // Opens at least one stream, and up to `count`. Errors as Client::Impl::Connect().
  absl::StatusOr<Streams> Open(const PushMessages& messages, StagedChunks* staged, int64_t count);

  RunCore* const run_;
  CutOffClock* const clock_;
  std::vector<std::shared_ptr<Connection>> connections_;
  absl::Status broken_lane_;  // Not OK: a single lane has broken, so lanes are avoided.
  std::atomic<int64_t> connection_count_ = 0;  // Relaxed: for statistics.
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_PUSH_SENDER_H_
