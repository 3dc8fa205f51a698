// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/gpu/pinned_ring.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/transport/fork_guard.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {

absl::Status PinnedRing::CheckMaxStagingBytes(int64_t max_staging_bytes) {
  if (max_staging_bytes >= kMinRingBytes) return absl::OkStatus();
  return BadRequest(
      absl::StrCat("max_staging_bytes ", max_staging_bytes, ": must be at least ", kMinRingBytes));
}

PinnedRing::~PinnedRing() {
  if (!TryRecover(Gpu::kIdleGrace)) {
    absl::MutexLock lock(&gpus_mu_);
    for (auto& [index, gpu] : gpus_) LeakForever(std::move(gpu));
    LeakForever(std::move(window_));
    return;
  }
  Free();
}

absl::StatusOr<Gpu*> PinnedRing::Open(int index) {
  absl::MutexLock lock(&gpus_mu_);
  std::unique_ptr<Gpu>& gpu = gpus_[index];
  if (gpu == nullptr) {
    EMA_ASSIGN_OR_RETURN(gpu, Gpu::Open(index));
  }
  return gpu.get();
}

absl::StatusOr<std::vector<Gpu*>> PinnedRing::WaitForTrainerStreams(const GpuWeights& weights) {
  // Before the side stream gets more work: later it would be busy as long as the trainer's is.
  if (!TryRecover(absl::ZeroDuration())) {
    return MakeError(
        absl::StatusCode::kInternal, ErrorReason::kDevice,
        absl::StrCat(
            "copies of an earlier push have not ended: the GPU hangs, or work that the trainer "
            "had queued on it does; ",
            lost_bytes(), " bytes of pinned memory wait for them"));
  }
  for (const GpuStream& stream : weights.streams) {
    EMA_ASSIGN_OR_RETURN(Gpu* const gpu, Open(stream.device));
    EMA_RETURN_IF_ERROR(gpu->WaitFor(stream.handle));
  }
  std::vector<Gpu*> gpus;
  for (const int device : weights.devices) {
    Gpu* gpu = nullptr;
    if (device >= 0) {
      EMA_ASSIGN_OR_RETURN(gpu, Open(device));
    }
    gpus.push_back(gpu);
  }
  return gpus;
}

absl::Status PinnedRing::Allocate(Gpu& gpu, int64_t slot_bytes, int64_t max_slots, bool is_shared) {
  if (std::exchange(is_discarded_, false)) Free();
  if (memory_ != nullptr) return absl::OkStatus();
  owner_ = &gpu;
  slot_bytes_ = slot_bytes;
  int64_t count = std::min(max_bytes_ / slot_bytes, max_slots);
  if (is_shared) {
    window_status_ = count >= kMinWindowSlots
                         ? AllocateWindow(count * slot_bytes)
                         : absl::UnavailableError("the weights are too small for a window");
  }
  if (window_ == nullptr) {
    absl::StatusOr<std::byte*> memory = gpu.AllocatePinned(count * slot_bytes);
    while (absl::IsResourceExhausted(memory.status()) && count > kMinRingBytes / slot_bytes) {
      count = std::max(count / 2, kMinRingBytes / slot_bytes);
      memory = gpu.AllocatePinned(count * slot_bytes);
    }
    EMA_ASSIGN_OR_RETURN(memory_, memory);
  }
  for (int i = 0; i < count; ++i) slots_.push_back({this, i});
  absl::MutexLock lock(&mu_);
  holder_counts_.resize(count);
  free_.resize(count);
  std::iota(free_.begin(), free_.end(), 0);
  return absl::OkStatus();
}

absl::Status PinnedRing::AllocateWindow(int64_t size_bytes) {
  // The driver pins whole pages.
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const int64_t window_bytes = (size_bytes + page_bytes - 1) / page_bytes * page_bytes;
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<SharedMemory> window,
                       SharedMemory::CreateWindow(window_bytes));
  EMA_RETURN_IF_ERROR(owner_->RegisterPinned(window->data(), window_bytes));
  window_ = std::move(window);
  memory_ = window_->data();
  return absl::OkStatus();
}

void PinnedRing::Free() {
  if (memory_ == nullptr) return;
  if (window_ != nullptr) {
    owner_->UnregisterPinned(memory_);
    window_.reset();
  } else {
    owner_->FreePinned(memory_);
  }
  memory_ = nullptr;
  slots_.clear();
  absl::MutexLock lock(&mu_);
  holder_counts_.clear();
  free_.clear();
}

std::optional<int> PinnedRing::TryTake() {
  absl::MutexLock lock(&mu_);
  if (free_.empty()) return std::nullopt;
  const int slot = free_.back();
  free_.pop_back();
  holder_counts_[slot] = 1;
  return slot;
}

void PinnedRing::Share(int slot) {
  absl::MutexLock lock(&mu_);
  ++holder_counts_[slot];
}

void PinnedRing::Return(int slot) {
  absl::MutexLock lock(&mu_);
  ReturnLocked(slot);
}

void PinnedRing::ReturnLocked(int slot) {
  if (--holder_counts_[slot] == 0) free_.push_back(slot);
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
  // Nothing may follow the unlock: the thread that waits for the last slice may destroy the ring.
  absl::MutexLock lock(&dropped.ring->mu_);
  dropped.ring->ReturnLocked(dropped.index);
  --dropped.ring->lent_count_;
}

bool PinnedRing::has_lent() const {
  absl::MutexLock lock(&mu_);
  return lent_count_ != 0;
}

void PinnedRing::MarkLost(int slot) {
  absl::MutexLock lock(&mu_);
  lost_.push_back(slot);
}

int64_t PinnedRing::lost_bytes() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(lost_.size()) * slot_bytes_;
}

bool PinnedRing::TryRecover(absl::Duration max_wait) {
  if (lost_bytes() == 0) return true;
  {
    const SteadyTime wait_end = After(SteadyNow(), max_wait);
    absl::MutexLock lock(&gpus_mu_);
    for (auto& [index, gpu] : gpus_) {
      if (gpu != nullptr && !gpu->AwaitIdle(wait_end)) return false;
    }
  }
  absl::MutexLock lock(&mu_);
  for (const int slot : lost_) ReturnLocked(slot);
  lost_.clear();
  return true;
}

}  // namespace ema::client_internal
