// SPDX-License-Identifier: Apache-2.0
//
// The messages of one try of a push, for every transport.
#ifndef EMA_CLIENT_CPP_PUSH_PUSH_MESSAGES_H_
#define EMA_CLIENT_CPP_PUSH_PUSH_MESSAGES_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cpp/push/chunk_plan.h"
#include "client/cpp/push/weights_gate.h"
#include "client/cpp/transport/interrupt.h"
#include "ema/run.h"
#include "ema/v1/ema_service.pb.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// A chunk cannot be read, because the weights were released, or their GPU has failed.
inline absl::Status UnreadableError() {
  return absl::CancelledError("the weights were released, or cannot be read");
}

// A header, chunks, and a commit. All pointers outlive it.
struct PushMessages {
  // Returns the header. To be called once, when streams of that kind are open: afterwards the
  // server may know the step. `why_no_better`: why they are not of a better kind; may be empty.
  std::function<v1::PushHeader(Lane kind, const std::string& why_no_better)> begin;
  absl::Span<const int64_t> chunks;  // Indices in `plan`, in the order of sending.
  const ChunkPlan* plan = nullptr;
  ChunkWriter* writer = nullptr;
  // CRC32C of all bytes of the push, also those of earlier tries. To be called after the last
  // chunk. Absent: the push must stop.
  std::function<std::optional<uint32_t>()> digest;
  WeightsGate* gate = nullptr;  // Its FinishReading() is called after the last chunk.
  std::atomic<int64_t>* sent_bytes = nullptr;  // Sent bytes are added to it.
  SteadyTime deadline;
  Interrupt* interrupt = nullptr;

  int64_t total_bytes() const {
    int64_t total = 0;
    for (const int64_t chunk : chunks) total += plan->length_bytes(chunk);
    return total;
  }
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_PUSH_MESSAGES_H_
