// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/interrupt.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <utility>

namespace ema::client_internal {

void Interrupt::Fire() {
  std::shared_ptr<grpc::ClientContext> context;
  {
    absl::MutexLock lock(&mu_);
    fired_ = true;
    context = context_;
  }
  if (context != nullptr) context->TryCancel();
}

bool Interrupt::fired() {
  {
    absl::MutexLock lock(&mu_);
    if (fired_) return true;
  }
  if (poll_ == nullptr || !(*poll_)()) return false;
  Fire();
  return true;
}

bool Interrupt::Sleep(absl::Duration duration) {
  const absl::Time end = absl::Now() + duration;
  while (!fired()) {
    const absl::Duration left = end - absl::Now();
    if (left <= absl::ZeroDuration()) return true;
    absl::MutexLock lock(&mu_);
    mu_.AwaitWithTimeout(absl::Condition(&fired_),
                         poll_ == nullptr ? left : std::min(left, kPollInterval));
  }
  return false;
}

void Interrupt::SetCall(std::shared_ptr<grpc::ClientContext> context) {
  bool fired = false;
  std::shared_ptr<grpc::ClientContext> previous;  // Destroyed without the lock.
  {
    absl::MutexLock lock(&mu_);
    previous = std::exchange(context_, context);
    fired = fired_;
  }
  if (fired && context != nullptr) context->TryCancel();
}

}  // namespace ema::client_internal
