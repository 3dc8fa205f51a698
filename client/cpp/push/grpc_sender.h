// SPDX-License-Identifier: Apache-2.0
//
// Sends a push over gRPC.
#ifndef EMA_CLIENT_CPP_PUSH_GRPC_SENDER_H_
#define EMA_CLIENT_CPP_PUSH_GRPC_SENDER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/push/push_messages.h"
#include "client/cpp/push/run_core.h"
#include "client/cpp/transport/connection.h"
#include "ema/v1/ema_service.pb.h"

namespace ema::client_internal {

// Sends the chunks of a push by one stream, or by several over as many connections; a stream takes
// the next chunk when it is free. Keeps the connections of the last try, which may still hold
// slices of the weights. For one thread, except connection_count().
class GrpcSender {
 public:
  explicit GrpcSender(RunCore* run) : run_(run) {}

  struct Options {
    int64_t max_connections = 1;
    bool is_first_try = true;  // Later tries use one connection.
    // The chunks come from pinned memory, so the gate does not know when the last bytes have left.
    bool is_staged = false;
  };
  // Sends `messages` and waits for the reply. Blocks. For the first try of a large push it records
  // the speed in the run.
  absl::StatusOr<v1::PushResponse> Send(const PushMessages& messages, const Options& options);

  // Cuts the connections, so that gRPC drops its slices.
  void BreakConnections();
  void DropConnections() { connections_.clear(); }
  // Connections of the last try, for statistics. From any thread.
  int64_t connection_count() const { return connection_count_.load(std::memory_order_relaxed); }

 private:
  struct Part;
  struct Sending;

  absl::Status Connect(const PushMessages& messages, int64_t count);
  // Sends the header, then chunks until none is left. Called by one thread for each part.
  void SendChunks(Sending& sending, Part& part);
  static void FinishPart(Sending& sending, Part& part);

  RunCore* const run_;
  std::vector<std::shared_ptr<Connection>> connections_;
  std::atomic<int64_t> connection_count_ = 0;  // Relaxed: for statistics.
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_GRPC_SENDER_H_
