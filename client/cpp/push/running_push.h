// SPDX-License-Identifier: Apache-2.0
//
// The interface of the two kinds of pushes to which a PendingPush forwards its calls.
#ifndef EMA_CLIENT_CPP_PUSH_RUNNING_PUSH_H_
#define EMA_CLIENT_CPP_PUSH_RUNNING_PUSH_H_

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/transport/fork_guard.h"
#include "ema/run.h"

namespace ema::client_internal {

// A push to one server (ServerPush) or to all servers of a group (GroupPush). Thread-safe.
// The functions are those of PendingPush, and are not to be called in a forked child, except
// fork_guard().
class RunningPush {
 public:
  virtual ~RunningPush() = default;

  // Throws std::system_error if the system has no thread for it.
  virtual void Start() = 0;

  virtual const ForkGuard& fork_guard() const = 0;
  virtual bool WaitReleased(absl::Duration max_wait, absl::Span<const GpuStream> streams) = 0;
  virtual absl::StatusOr<Version> Wait() = 0;
  virtual bool WaitDone(absl::Duration max_wait) = 0;
  virtual bool done() const = 0;
  // Abandons the push, and makes its streams wait for copies from GPUs, unless that was done
  // before. False: a thread is stuck in a call of the GPU's driver; the caller must keep this
  // object forever, and with it the run's pinned memory.
  [[nodiscard]] virtual bool Abandon() = 0;
  virtual PendingPush::Stats stats() const = 0;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_RUNNING_PUSH_H_
