// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/interrupt.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <utility>

namespace ema::client_internal {

void Interrupt::Fire() {
  std::vector<std::shared_ptr<grpc::ClientContext>> contexts;
  {
    absl::MutexLock lock(&mu_);
    has_fired_ = true;
    wait_.WakeAll();
    contexts = contexts_;
  }
  for (const auto& context : contexts) context->TryCancel();
}

bool Interrupt::fired() {
  {
    absl::MutexLock lock(&mu_);
    if (has_fired_) return true;
  }
  if (poll_ == nullptr || !(*poll_)()) return false;
  Fire();
  return true;
}

bool Interrupt::Sleep(absl::Duration duration) {
  const SteadyTime end = After(SteadyNow(), duration);
  while (!fired()) {
    const SteadyTime now = SteadyNow();
    if (now >= end) return true;
    const auto is_fired = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return has_fired_; };
    absl::MutexLock lock(&mu_);
    wait_.AwaitUntil(mu_, poll_ == nullptr ? end : std::min(end, After(now, kPollInterval)),
                     is_fired);
  }
  return false;
}

void Interrupt::AddCall(std::shared_ptr<grpc::ClientContext> context) {
  grpc::ClientContext* const added = context.get();
  bool fired = false;
  {
    absl::MutexLock lock(&mu_);
    contexts_.push_back(std::move(context));
    fired = has_fired_;
  }
  if (fired) added->TryCancel();
}

void Interrupt::RemoveCall(const grpc::ClientContext* context) {
  std::shared_ptr<grpc::ClientContext> removed;  // Destroyed without the lock.
  absl::MutexLock lock(&mu_);
  const auto found = std::find_if(contexts_.begin(), contexts_.end(),
                                  [context](const auto& other) { return other.get() == context; });
  if (found == contexts_.end()) return;
  removed = std::move(*found);
  contexts_.erase(found);
}

}  // namespace ema::client_internal
