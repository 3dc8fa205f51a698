// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/weights_gate.h"

namespace ema::client_internal {

bool WeightsGate::BeginReading() {
  absl::MutexLock lock(&mu_);
  if (is_released_) return false;
  is_reading_ = true;
  return true;
}

void WeightsGate::FinishReading() {
  absl::MutexLock lock(&mu_);
  is_reading_ = false;
  wait_.WakeAll();
}

bool WeightsGate::BeginRead() {
  absl::MutexLock lock(&mu_);
  if (is_released_) return false;
  ++reader_count_;
  return true;
}

void WeightsGate::EndRead() {
  absl::MutexLock lock(&mu_);
  --reader_count_;
  last_use_ = SteadyNow();
  wait_.WakeAll();
}

void WeightsGate::AddSlice() {
  absl::MutexLock lock(&mu_);
  ++slice_count_;
}

void WeightsGate::DropSlice(void* gate) {
  WeightsGate* const self = static_cast<WeightsGate*>(gate);
  // Nothing may follow the unlock: the thread that waits for the last slice may destroy the gate.
  absl::MutexLock lock(&self->mu_);
  ++self->left_slice_count_;
  if (--self->slice_count_ > 0) return;
  self->last_use_ = SteadyNow();
  self->wait_.WakeAll();
}

bool WeightsGate::HasSlices() const {
  absl::MutexLock lock(&mu_);
  return slice_count_ != 0;
}

bool WeightsGate::TryRelease(absl::Duration max_wait) {
  const auto left = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return HasLeftLocked(); };
  absl::MutexLock lock(&mu_);
  const bool has_left = wait_.AwaitUntil(mu_, After(SteadyNow(), max_wait), left);
  if (has_left) is_released_ = true;
  return has_left;
}

void WeightsGate::ForceRelease() {
  absl::MutexLock lock(&mu_);
  is_released_ = true;
}

void WeightsGate::AwaitNoReader() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &WeightsGate::HasNoReaderLocked));
}

SteadyTime WeightsGate::left_time() const {
  absl::MutexLock lock(&mu_);
  return HasLeftLocked() ? last_use_ : SteadyTime::max();
}

int64_t WeightsGate::left_slice_count() const {
  absl::MutexLock lock(&mu_);
  return left_slice_count_;
}

}  // namespace ema::client_internal
