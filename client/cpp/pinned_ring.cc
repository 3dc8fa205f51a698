// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/pinned_ring.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ema/internal/status_macros.h"

namespace ema::client_internal {

PinnedRing::~PinnedRing() {
  if (memory_ != nullptr) owner_->FreePinned(memory_);
}

absl::StatusOr<Gpu*> PinnedRing::Open(int index) {
  absl::MutexLock lock(&gpus_mu_);
  std::unique_ptr<Gpu>& gpu = gpus_[index];
  if (gpu == nullptr) {
    EMA_ASSIGN_OR_RETURN(gpu, Gpu::Open(index));
  }
  return gpu.get();
}

absl::Status PinnedRing::Allocate(Gpu& gpu, int64_t slot_bytes, int64_t max_slots) {
  if (memory_ != nullptr) return absl::OkStatus();
  const int64_t count = std::min(kMaxBytes / slot_bytes, max_slots);
  EMA_ASSIGN_OR_RETURN(memory_, gpu.AllocatePinned(count * slot_bytes));
  owner_ = &gpu;
  slot_bytes_ = slot_bytes;
  for (int i = 0; i < count; ++i) slots_.push_back({this, i});
  absl::MutexLock lock(&mu_);
  free_.resize(count);
  std::iota(free_.begin(), free_.end(), 0);
  return absl::OkStatus();
}

std::optional<int> PinnedRing::TryTake() {
  absl::MutexLock lock(&mu_);
  if (free_.empty()) return std::nullopt;
  const int slot = free_.back();
  free_.pop_back();
  return slot;
}

void PinnedRing::GiveBack(int slot) {
  absl::MutexLock lock(&mu_);
  free_.push_back(slot);
}

std::optional<grpc::Slice> PinnedRing::TryLend(int slot, int64_t size_bytes) {
  {
    absl::MutexLock lock(&mu_);
    if (lent_count_ >= max_lent()) return std::nullopt;
    ++lent_count_;
  }
  return grpc::Slice(this->slot(slot), static_cast<size_t>(size_bytes), &PinnedRing::DropSlice,
                     &slots_[slot]);
}

void PinnedRing::DropSlice(void* slot) {
  const Slot& dropped = *static_cast<const Slot*>(slot);
  // Nothing may follow the unlock: whoever waits for the last slice may then destroy the ring.
  absl::MutexLock lock(&dropped.ring->mu_);
  dropped.ring->free_.push_back(dropped.index);
  --dropped.ring->lent_count_;
}

bool PinnedRing::has_lent() const {
  absl::MutexLock lock(&mu_);
  return lent_count_ != 0;
}

}  // namespace ema::client_internal
