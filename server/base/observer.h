// SPDX-License-Identifier: Apache-2.0
//
// The interface by which the lower layers report events to the metrics.
#ifndef EMA_SERVER_BASE_OBSERVER_H_
#define EMA_SERVER_BASE_OBSERVER_H_

#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ema {

// The phases of one rank's push on one stream. Their sum is the time from its header to the reply.
struct PushPhases {
  absl::Duration receive;  // Waiting for bytes, or for the thread that served other streams.
  absl::Duration fold;     // Checksums and averages.
  absl::Duration wait;     // After its commit message, for the device and for other ranks.
  absl::Duration commit;   // Publishing the step as the next version.
};

// Receives events as they happen. The events of a call come before its reply, except for
// OnRpcEnded() and OnPullEnded() of a call that succeeds over a same-host lane, and OnPushEnded()
// of a gRPC push that ends before its commit message. Every function may be called from any thread
// and while the caller holds locks: it must neither block nor call back. Arguments are valid only
// during the call. The functions of this class do nothing.
class ServerObserver {
 public:
  // Ignores all events.
  static ServerObserver& None() {
    static ServerObserver none;
    return none;
  }

  virtual ~ServerObserver() = default;

  // OnModelCreated() precedes all other events of a model. Events that running calls report after
  // OnModelDeleted() are ignored.
  virtual void OnModelCreated(std::string_view /*model*/) {}
  virtual void OnModelDeleted(std::string_view /*model*/) {}

  // A call, also one over a same-host lane, has ended with `status`. `rpc` is the method's name.
  virtual void OnRpcEnded(std::string_view /*rpc*/, const absl::Status& /*status*/) {}
  // The same for a call that needs no token.
  virtual void OnProbeEnded(std::string_view /*rpc*/, const absl::Status& /*status*/) {}

  // The end of a step, with all shards of all ranks.
  struct StepEnd {
    std::string_view model;
    int64_t step = 0;
    absl::Status status;               // Not OK: the step was dropped.
    absl::Duration duration;           // Since its first header.
    int64_t skipped_tensor_count = 0;  // As in Version.
  };
  virtual void OnStepEnded(const StepEnd& /*end*/) {}

  // The end of one stream of one rank.
  struct PushEnd {
    std::string_view model;
    int64_t received_bytes = 0;        // Also of a push that failed.
    std::optional<PushPhases> phases;  // Absent: its step did not become a version.
  };
  virtual void OnPushEnded(const PushEnd& /*end*/) {}

  struct PullEnd {
    std::string_view model;
    absl::Status status;
    int64_t sent_bytes = 0;
    absl::Duration duration;
  };
  virtual void OnPullEnded(const PullEnd& /*end*/) {}

  // A checkpoint was written, or could not be.
  struct SaveEnd {
    std::string_view model;
    absl::Status status;
    absl::Duration duration;
    bool is_newest = false;  // A restart would now load this version.
  };
  virtual void OnSaveEnded(const SaveEnd& /*end*/) {}

  enum class Refusal {
    kLimit,
    kDescriptors,  // The process has no file descriptor left.
    kLanes,        // The limit on same-host lanes is reached.
  };
  virtual void OnConnectionRefused(Refusal /*reason*/) {}
};

// Returns "limit", "descriptors" or "lanes".
inline std::string_view RefusalName(ServerObserver::Refusal reason) {
  switch (reason) {
    case ServerObserver::Refusal::kLimit:
      return "limit";
    case ServerObserver::Refusal::kDescriptors:
      return "descriptors";
    case ServerObserver::Refusal::kLanes:
      break;
  }
  return "lanes";
}

}  // namespace ema

#endif  // EMA_SERVER_BASE_OBSERVER_H_
