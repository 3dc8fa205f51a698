// SPDX-License-Identifier: Apache-2.0
//
// The part of a push that brings weights from GPUs.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/push/push.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {

using client_internal::Gpu;
using client_internal::PinnedRing;
using client_internal::StagedChunks;

absl::StatusOr<std::vector<Gpu*>> PendingPush::Impl::Follow(PinnedRing& ring,
                                                            const GpuWeights& weights) {
  // Before the side stream gets more to do: else it would be busy as long as the trainer's is.
  if (!ring.TryRecover(absl::ZeroDuration())) {
    return MakeError(
        absl::StatusCode::kInternal, ErrorReason::kDevice,
        absl::StrCat("copies of a push before have not ended: the GPU hangs, or what the trainer "
                     "had queued on it; ",
                     ring.lost_bytes(), " bytes of pinned memory wait for them"));
  }
  for (const GpuStream& stream : weights.streams) {
    EMA_ASSIGN_OR_RETURN(Gpu* const gpu, ring.Open(stream.device));
    EMA_RETURN_IF_ERROR(gpu->Follow(stream.handle));
  }
  std::vector<Gpu*> gpus;
  for (const int device : weights.devices) {
    Gpu* gpu = nullptr;
    if (device >= 0) {
      EMA_ASSIGN_OR_RETURN(gpu, ring.Open(device));
    }
    gpus.push_back(gpu);
  }
  return gpus;
}

// While the GPU or the host is worked for, it is not the server that is missing.
class PendingPush::Impl::CutOffPause {
 public:
  explicit CutOffPause(Impl* push) : push_(push) {
    absl::MutexLock lock(&push_->mu_);
    since_ = std::exchange(push_->cut_off_since_, SteadyTime::max());
  }
  ~CutOffPause() {
    absl::MutexLock lock(&push_->mu_);
    if (since_ != SteadyTime::max()) push_->cut_off_since_ = since_ + (SteadyNow() - start_);
  }

 private:
  Impl* const push_;
  const SteadyTime start_ = SteadyNow();
  SteadyTime since_;
};

absl::Status PendingPush::Impl::PrepareStaging() {
  if (gpus_.empty() || staged_.has_value() || run_->chunks().chunk_count() == 0) {
    return absl::OkStatus();
  }
  const CutOffPause pause(this);
  PinnedRing& ring = run_->ring();
  const auto any = [](Gpu* gpu) { return gpu != nullptr; };
  const int64_t slot_bytes = StagedChunks::SlotBytes(run_->layout(), run_->chunks());
  // Frozen tensors are seldom pushed: it is not for them that more memory is taken than the least.
  const int64_t max_slots =
      std::max(run_->chunks().ChunksBefore(run_->layout().live_bytes()),
               std::min(run_->chunks().chunk_count(), PinnedRing::kMinRingBytes / slot_bytes));
  EMA_RETURN_IF_ERROR(
      ring.Allocate(**std::find_if(gpus_.begin(), gpus_.end(), any), slot_bytes, max_slots));
  staged_.emplace(&run_->layout(), &run_->chunks(), shards_, gpus_, &ring, &gate_, options_.strides,
                  deadline_, &interrupt_);
  return absl::OkStatus();
}

absl::Status PendingPush::Impl::Stage() {
  if (!staged_.has_value()) return absl::OkStatus();
  const CutOffPause pause(this);
  // Other chunks than last time are read.
  if (!staged_->Holds(chunks_to_send_)) (void)gate_.WantToRead();
  staged_->Stage(chunks_to_send_).IgnoreError();
  return StagingStatus();
}

absl::Status PendingPush::Impl::StagingStatus() const {
  if (!staged_.has_value()) return absl::OkStatus();
  return WithPlace(staged_->status(), absl::StrCat(Name(), ": "));
}

absl::Status PendingPush::Impl::AnnotateLostMemory(const absl::Status& error) const {
  const int64_t lost_bytes = run_->ring().lost_bytes();
  if (lost_bytes == 0 || error.ok()) return error;
  return MakeError(
      error.code(), GetErrorReason(error),
      absl::StrCat(error.message(), "; copies from the GPU had not ended: ", lost_bytes,
                   " bytes of pinned memory are not freed until they have"));
}

void PendingPush::Impl::LeadStreams(absl::Span<const GpuStream> streams) {
  has_led_ = true;
  // What has ended copies nothing, unless the GPU hangs.
  if (gpus_.empty() || (done() && run_->ring().lost_bytes() == 0)) return;
  const auto lead = [this](const GpuStream& stream) {
    const absl::StatusOr<Gpu*> gpu = run_->ring().Open(stream.device);
    // Where the stream cannot wait, the trainer does.
    if (gpu.ok() && !(*gpu)->Lead(stream.handle).ok()) (*gpu)->AwaitIdle(deadline_, interrupt_);
  };
  const std::vector<GpuStream>& started_with = options_.gpu_weights.streams;
  for (const GpuStream& stream : started_with) lead(stream);
  for (const GpuStream& stream : streams) {
    if (std::find(started_with.begin(), started_with.end(), stream) == started_with.end()) {
      lead(stream);
    }
  }
}

}  // namespace ema
