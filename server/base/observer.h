// SPDX-License-Identifier: Apache-2.0
//
// What the layers below tell whoever counts what the server does.
#ifndef EMA_SERVER_BASE_OBSERVER_H_
#define EMA_SERVER_BASE_OBSERVER_H_

#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ema {

// Where the time of one rank's push has gone, on one stream. Together they are the time from its
// header to the reply.
struct PushPhases {
  absl::Duration receive;  // No byte of it was there, or the thread was at other streams.
  absl::Duration fold;     // Checksums and averages.
  absl::Duration wait;     // After its commit message: for the device, and for other ranks.
  absl::Duration commit;   // The step became the next version.
};

// Told of events as they happen, before clients are (of calls without a request, after them). Every
// function may be called from any thread, also with locks of the caller's held: it must neither
// block nor call back. What is given is valid during the call only. The functions of this class do
// nothing.
class ServerObserver {
 public:
  // Nobody.
  static ServerObserver& None();

  virtual ~ServerObserver() = default;

  // Before any other event of a model of that name, and after the last that counts: what calls that
  // still run tell later is of no model.
  virtual void OnModelCreated(std::string_view /*model*/) {}
  virtual void OnModelDeleted(std::string_view /*model*/) {}

  // A call has ended with `status`; `rpc` is the method's name. Those by same-host lanes, too.
  virtual void OnRpcEnded(std::string_view /*rpc*/, const absl::Status& /*status*/) {}
  // The same of a call that anybody may make.
  virtual void OnProbeEnded(std::string_view /*rpc*/, const absl::Status& /*status*/) {}

  // All shards of one step.
  struct StepEnd {
    std::string_view model;
    int64_t step = 0;
    absl::Status status;               // Not OK: it was dropped.
    absl::Duration duration;           // From its first header on.
    int64_t skipped_tensor_count = 0;  // As Version has it.
  };
  virtual void OnStepEnded(const StepEnd& /*end*/) {}

  // One stream of one rank.
  struct PushEnd {
    std::string_view model;
    int64_t received_bytes = 0;        // Whatever has come of them.
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
    bool is_newest = false;  // A restart loads a later version than before it.
  };
  virtual void OnSaveEnded(const SaveEnd& /*end*/) {}

  enum class Refusal {
    kLimit,
    kDescriptors,  // The process has no file descriptor left.
    kLanes,        // A same-host lane: there are as many as there may be.
  };
  virtual void OnConnectionRefused(Refusal /*reason*/) {}
};

// "limit", "descriptors", "lanes".
std::string_view RefusalName(ServerObserver::Refusal reason);

}  // namespace ema

#endif  // EMA_SERVER_BASE_OBSERVER_H_
