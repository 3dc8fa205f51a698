// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/fork_guard.h"

#include <atomic>
#include <utility>

#include "ema/error_reason.h"

namespace ema::client_internal {

absl::Status ForkGuard::Check() const {
  if (!forked()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kBadRequest,
                   "this object was made before this process was forked and works in its parent "
                   "only; use it there, or make clients in processes that are spawned, not forked");
}

absl::Status CheckGrpcUsable() {
  static std::atomic<pid_t> user = 0;
  pid_t expected = 0;
  const pid_t self = getpid();
  if (user.compare_exchange_strong(expected, self) || expected == self) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kBadRequest,
                   "a client was made before this process was forked, so gRPC cannot work here; "
                   "spawn the process instead, or make the first client after the fork");
}

void LeakForever(std::shared_ptr<void> object) {
  // A list that stays reachable, so that leak checkers in the child see what it is.
  struct Kept {
    std::shared_ptr<void> object;
    Kept* next;
  };
  static std::atomic<Kept*> head = nullptr;
  Kept* const kept = new Kept{std::move(object), head.load(std::memory_order_relaxed)};
  while (!head.compare_exchange_weak(kept->next, kept)) {
  }
}

}  // namespace ema::client_internal
