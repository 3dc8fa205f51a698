// SPDX-License-Identifier: Apache-2.0
//
// Where a run's weights pass through on their way from GPUs.
#ifndef EMA_CLIENT_CPP_GPU_PINNED_RING_H_
#define EMA_CLIENT_CPP_GPU_PINNED_RING_H_

#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/gpu/gpu.h"
#include "ema/run.h"

namespace ema::client_internal {

// Pinned buffers, one a chunk, and the GPUs that fill them: of one run, kept from push to push.
// Thread-safe. gRPC drops slices inside any of its functions, so none may be called with a lock
// held under which these functions are called.
class PinnedRing {
 public:
  static constexpr int64_t kMinRingBytes = int64_t{64} << 20;

  // INVALID_ARGUMENT: `max_staging_bytes` is less than that.
  static absl::Status CheckMaxStagingBytes(int64_t max_staging_bytes);

  // `max_bytes`: of all buffers. REQUIRES: at least kMinRingBytes.
  explicit PinnedRing(int64_t max_bytes) : max_bytes_(max_bytes) {}
  // REQUIRES: every buffer has been given back, or is lost. Buffers and GPUs stay as long as the
  // process if copies into lost ones have not ended.
  ~PinnedRing();
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  // The GPU of this index; it lives as long as the ring. Errors as Gpu::Open().
  absl::StatusOr<Gpu*> Open(int index) ABSL_LOCKS_EXCLUDED(gpus_mu_);
  // Makes the side streams start after the trainer's. Returns the GPU of each shard; null: it is in
  // host memory. INTERNAL, DEVICE: copies of an earlier push have not ended. Errors as Open() and
  // Gpu::Follow().
  absl::StatusOr<std::vector<Gpu*>> Follow(const GpuWeights& weights)
      ABSL_LOCKS_EXCLUDED(mu_, gpus_mu_);

  // Once, before buffers are taken: as many of `slot_bytes` as fit into `max_bytes`, `max_slots` at
  // most, or half as many, and so on, down to what fits into kMinRingBytes, where there is no
  // memory for them; again, it does nothing. REQUIRES: 0 < slot_bytes <= kMinRingBytes,
  // max_slots > 0. Errors as Gpu::AllocatePinned(); it may then be tried again.
  absl::Status Allocate(Gpu& gpu, int64_t slot_bytes, int64_t max_slots);
  int slot_count() const { return static_cast<int>(slots_.size()); }
  std::byte* slot(int index) const { return memory_ + index * slot_bytes_; }

  // A buffer that nobody has. It is free again when all who have it have given it back.
  std::optional<int> TryTake() ABSL_LOCKS_EXCLUDED(mu_);
  void Share(int slot) ABSL_LOCKS_EXCLUDED(mu_);  // One more has it.
  void GiveBack(int slot) ABSL_LOCKS_EXCLUDED(mu_);
  // The first bytes of a buffer for gRPC, which gives it back. Absent, and nothing happens, if gRPC
  // has half of the buffers already: the rest are for who sends and for what is copied ahead.
  std::optional<grpc::Slice> TryLend(int slot, int64_t size_bytes) ABSL_LOCKS_EXCLUDED(mu_);
  int max_lent() const { return slot_count() / 2; }
  bool has_lent() const ABSL_LOCKS_EXCLUDED(mu_);

  // A buffer that copies may go into which have not ended and cannot be dropped. Whoever had it
  // must neither read it nor give it back.
  void Lose(int slot) ABSL_LOCKS_EXCLUDED(mu_);
  // Of buffers that are lost.
  int64_t lost_bytes() const ABSL_LOCKS_EXCLUDED(mu_);
  // Gives those back that are lost when all copies have ended, for which it waits. True: none is
  // lost (any more).
  bool TryRecover(absl::Duration max_wait) ABSL_LOCKS_EXCLUDED(mu_, gpus_mu_);

 private:
  struct Slot {
    PinnedRing* ring;
    int index;
  };
  static void DropSlice(void* slot);
  void GiveBackLocked(int slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Mutex gpus_mu_;  // Held across calls of the driver.
  std::map<int, std::unique_ptr<Gpu>> gpus_ ABSL_GUARDED_BY(gpus_mu_);

  const int64_t max_bytes_;
  // Set by Allocate().
  Gpu* owner_ = nullptr;
  std::byte* memory_ = nullptr;
  int64_t slot_bytes_ = 0;
  std::vector<Slot> slots_;

  mutable absl::Mutex mu_;
  std::vector<int> holder_counts_ ABSL_GUARDED_BY(mu_);  // By slot: who has it.
  std::vector<int> free_ ABSL_GUARDED_BY(mu_);
  std::vector<int> lost_ ABSL_GUARDED_BY(mu_);
  int lent_count_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GPU_PINNED_RING_H_
