// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/call_queue.h"

#include <grpcpp/grpcpp.h>

#include <utility>

namespace ema {
namespace {

// An alarm whose time is past enters its queue at once. Any other, even for this moment, waits for
// gRPC's timers, which stop while the system's clock is set back.
gpr_timespec AtOnce() { return gpr_inf_past(GPR_CLOCK_MONOTONIC); }

}  // namespace

void CallQueue::Run() {
  // Completions between two pieces of deferred work: the end of the last piece, and a few chunks of
  // pushes.
  constexpr int kMaxCompletions = 8;
  int completions = 0;
  while (true) {
    void* tag = nullptr;
    bool ok = false;
    // With a deadline that is past, gRPC reads from its connections once.
    const gpr_timespec deadline =
        deferred_.empty() ? gpr_inf_future(GPR_CLOCK_MONOTONIC) : gpr_inf_past(GPR_CLOCK_MONOTONIC);
    const grpc::CompletionQueue::NextStatus status = queue_->AsyncNext(&tag, &ok, deadline);
    if (status == grpc::CompletionQueue::SHUTDOWN) return;
    if (status == grpc::CompletionQueue::GOT_EVENT) {
      static_cast<CompletionTag*>(tag)->Complete(ok);
      if (++completions < kMaxCompletions) continue;
    }
    completions = 0;
    if (deferred_.empty()) continue;
    const std::function<void()> work = std::move(deferred_.front());
    deferred_.pop_front();
    work();
  }
}

void CallQueue::Ping() {
  if (heartbeat_->is_busy()) return;
  heartbeat_->Begin();
  ping_alarm_.Set(queue_.get(), AtOnce(), static_cast<CompletionTag*>(&ping_tag_));
}

void CallQueue::Stop() {
  alarm_.Set(queue_.get(), AtOnce(), static_cast<CompletionTag*>(&stop_tag_));
}

}  // namespace ema
