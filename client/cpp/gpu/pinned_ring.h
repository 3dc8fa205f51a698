// SPDX-License-Identifier: Apache-2.0
//
// Pinned host memory for a run's weights on their way from GPUs.
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
#include "server/wire/shared_memory.h"

namespace ema::client_internal {

// Pinned buffers, each for one chunk, and the GPUs that fill them. They may be in a window, from
// which a server on this host reads (server/wire/lane_pipe.h). Belongs to one run, and is kept
// from push to push. Thread-safe. gRPC may drop slices inside any of its functions, so never call
// gRPC with a lock held that is also held during calls of this class.
class PinnedRing {
 public:
  static constexpr int64_t kMinRingBytes = int64_t{64} << 20;
  // Buffers that each lane with the window needs, so the fewest that a window has.
  static constexpr int64_t kMinWindowSlots = 8;

  // INVALID_ARGUMENT: `max_staging_bytes` is less than kMinRingBytes.
  static absl::Status CheckMaxStagingBytes(int64_t max_staging_bytes);

  // `max_bytes`: size limit of all buffers together. REQUIRES: room for two buffers.
  explicit PinnedRing(int64_t max_bytes) : max_bytes_(max_bytes) {}
  // REQUIRES: every buffer has been given back, or is lost. If copies into lost buffers have not
  // ended, buffers and GPUs are leaked.
  ~PinnedRing();
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  // The GPU with this index; it lives as long as the ring. Errors as Gpu::Open().
  absl::StatusOr<Gpu*> Open(int index) ABSL_LOCKS_EXCLUDED(gpus_mu_);
  // Makes the side streams wait for the trainer's streams. Returns the GPU of each shard; null: it
  // is in host memory. INTERNAL, DEVICE: copies of an earlier push have not ended. Errors as Open()
  // and Gpu::WaitFor().
  absl::StatusOr<std::vector<Gpu*>> WaitForTrainerStreams(const GpuWeights& weights)
      ABSL_LOCKS_EXCLUDED(mu_, gpus_mu_);

  // Allocates the buffers: as many of `slot_bytes` as fit into `max_bytes`, at most `max_slots`. If
  // there is no memory for them, tries half as many, and so on, down to the number that fits into
  // kMinRingBytes. With `is_shared` the buffers are in a window if the system allows that and there
  // are at least kMinWindowSlots. To be called before a push takes buffers; later calls do nothing,
  // except after DiscardWindow(). REQUIRES: 0 < slot_bytes <= kMinRingBytes, max_slots > 0. Errors
  // as Gpu::AllocatePinned(); after an error the caller may try again.
  absl::Status Allocate(Gpu& gpu, int64_t slot_bytes, int64_t max_slots, bool is_shared = false);
  // Null: the buffers are not in a window; window_status() says why.
  const SharedMemory* window() const { return window_.get(); }
  const absl::Status& window_status() const { return window_status_; }
  // Lets the next Allocate() replace the window, because a server that hangs may still read from
  // it. Its buffers that a server may be reading must not be given back.
  void DiscardWindow() { is_discarded_ = true; }
  // True from DiscardWindow() to the next Allocate().
  bool is_discarded() const { return is_discarded_; }
  int slot_count() const { return static_cast<int>(slots_.size()); }
  std::byte* slot(int index) const { return memory_ + index * slot_bytes_; }

  // Takes a free buffer. It is free again when all its holders have given it back.
  std::optional<int> TryTake() ABSL_LOCKS_EXCLUDED(mu_);
  void Share(int slot) ABSL_LOCKS_EXCLUDED(mu_);  // Adds a holder.
  void Return(int slot) ABSL_LOCKS_EXCLUDED(mu_);
  // A slice of the first bytes of a buffer, for gRPC; dropping it gives the buffer back. Absent,
  // without any effect, if gRPC holds half of the buffers already: the others are left to senders
  // and to copies made in advance.
  std::optional<grpc::Slice> TryLend(int slot, int64_t size_bytes) ABSL_LOCKS_EXCLUDED(mu_);
  int max_lent() const { return slot_count() / 2; }
  bool has_lent() const ABSL_LOCKS_EXCLUDED(mu_);

  // Marks a buffer as lost, because copies into it have not ended and cannot be cancelled. Its
  // holder must neither read it nor give it back.
  void MarkLost(int slot) ABSL_LOCKS_EXCLUDED(mu_);
  // Size of the lost buffers.
  int64_t lost_bytes() const ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until all copies have ended, at most `max_wait`, and then frees the lost buffers. True:
  // no buffer is lost (any more).
  bool TryRecover(absl::Duration max_wait) ABSL_LOCKS_EXCLUDED(mu_, gpus_mu_);

 private:
  struct Slot {
    PinnedRing* ring;
    int index;
  };
  static void DropSlice(void* slot);
  absl::Status AllocateWindow(int64_t size_bytes);
  void Free() ABSL_LOCKS_EXCLUDED(mu_);
  void ReturnLocked(int slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Mutex gpus_mu_;  // Held across calls of the driver.
  std::map<int, std::unique_ptr<Gpu>> gpus_ ABSL_GUARDED_BY(gpus_mu_);

  const int64_t max_bytes_;
  // Set by Allocate().
  Gpu* owner_ = nullptr;
  std::unique_ptr<SharedMemory> window_;
  absl::Status window_status_ =
      absl::UnavailableError("there was no same-host lane when the run was opened");
  std::byte* memory_ = nullptr;
  int64_t slot_bytes_ = 0;
  std::vector<Slot> slots_;
  bool is_discarded_ = false;

  mutable absl::Mutex mu_;
  std::vector<int> holder_counts_ ABSL_GUARDED_BY(mu_);  // One for each slot.
  std::vector<int> free_ ABSL_GUARDED_BY(mu_);
  std::vector<int> lost_ ABSL_GUARDED_BY(mu_);
  int lent_count_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GPU_PINNED_RING_H_
