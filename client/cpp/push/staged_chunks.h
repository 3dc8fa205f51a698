// SPDX-License-Identifier: Apache-2.0
//
// Copies the chunks of a push from GPUs to pinned memory.
#ifndef EMA_CLIENT_CPP_PUSH_STAGED_CHUNKS_H_
#define EMA_CLIENT_CPP_PUSH_STAGED_CHUNKS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/cpp/gpu/gpu.h"
#include "client/cpp/gpu/pinned_ring.h"
#include "client/cpp/push/chunk_plan.h"
#include "client/cpp/push/shard_weights.h"
#include "client/cpp/push/weights_gate.h"
#include "client/cpp/transport/interrupt.h"
#include "ema/shard.h"

namespace ema::client_internal {

// Copies chunks to pinned buffers in the order in which they will be sent, as far ahead as the ring
// has room. For the gate, starting a copy counts as reading: once all copies have been started, the
// weights may change as soon as the copies have ended, and the trainer's stream, not the trainer,
// waits for that (Gpu::MakeWait()). If there is room for all chunks, each stays in its buffer and
// can be sent again, even after the weights have changed. Thread-safe.
//
// No thread waits for a free buffer: with at most max_senders() threads that take the chunks in
// order, each returning or lending its buffer before it takes the next chunk, there is a buffer for
// every chunk that is taken.
class StagedChunks {
 public:
  // All pointers outlive this object. `gpus`: the GPU of each shard; null: the shard is in host
  // memory and is read when its copy is started. Buffers have at least SlotBytes(). `strides`: see
  // PushOptions. After `deadline`, and when `interrupt` fires, no call waits for a GPU any more.
  StagedChunks(const RankLayout* layout, const ChunkPlan* plan,
               absl::Span<const std::span<const std::byte>> shards, absl::Span<Gpu* const> gpus,
               PinnedRing* ring, WeightsGate* gate, absl::Span<const Strides> strides,
               SteadyTime deadline, Interrupt* interrupt);
  ~StagedChunks();  // Calls Drop().

  // Buffer size for the largest chunk.
  static int64_t SlotBytes(const RankLayout& layout, const ChunkPlan& plan);
  int max_senders() const { return ring_->slot_count() - ring_->max_lent(); }

  // Sets the chunks to be sent next, and starts their copies as far as there is room, unless all
  // are there (Holds()). Drops other staged chunks, and also these if some of them have been taken.
  // ABORTED, STEP_ABANDONED: the weights were released before all of these were staged. Other
  // errors are a GPU's, and end the push.
  absl::Status Stage(absl::Span<const int64_t> chunks) ABSL_LOCKS_EXCLUDED(mu_);

  // True: all of these chunks are in pinned memory or being copied there, and no other chunk is
  // still to be copied, so they can be sent even after the release.
  bool Holds(absl::Span<const int64_t> chunks) const ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until a chunk's bytes are in its buffer, and returns the buffer; the caller must give it
  // back or lend it. Absent: the copy failed; see status(). REQUIRES: the chunk was staged and has
  // not been taken since, unless Holds() is true for it.
  std::optional<int> Take(int64_t chunk) ABSL_LOCKS_EXCLUDED(mu_);
  // The same, but the chunk stays staged, so that it can be sent again. The caller must end the
  // loan instead of giving the buffer back.
  std::optional<int> Borrow(int64_t chunk) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends a loan. With `is_read`, because the receiver has read the bytes, the chunk's buffer is
  // used for another chunk, unless there is room for all.
  void EndLoan(int64_t chunk, int slot, bool is_read) ABSL_LOCKS_EXCLUDED(mu_);
  PinnedRing& ring() const { return *ring_; }

  // Drops all staged chunks, and waits until no copy is running. Buffers whose copies do not end,
  // as in Gpu::AwaitIdle(), are lost: see PinnedRing::lost_bytes().
  void Drop() ABSL_LOCKS_EXCLUDED(mu_);

  // The first error: of a GPU, or that the weights were released too early, the deadline passed, or
  // the interrupt fired.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // The buffer of a chunk, and the GPUs that copy into it.
  struct Staged {
    int slot = 0;
    absl::InlinedVector<Gpu*, 1> gpus;
  };
  // Take(), or Borrow() if `stays`.
  std::optional<int> Await(int64_t chunk, bool stays) ABSL_LOCKS_EXCLUDED(mu_);
  bool HoldsLocked(absl::Span<const int64_t> chunks) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void StartMoreLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status StartCopies(int64_t chunk, Staged& staged) const;
  void DropLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const RankLayout* const layout_;
  const ChunkPlan* const plan_;
  const ShardWeights weights_;
  const absl::Span<Gpu* const> gpus_;
  PinnedRing* const ring_;
  WeightsGate* const gate_;
  const SteadyTime deadline_;
  Interrupt* const interrupt_;

  mutable absl::Mutex mu_;  // Serializes the starts, and is held across calls of the driver.
  std::vector<int64_t> order_ ABSL_GUARDED_BY(mu_);
  size_t started_count_ ABSL_GUARDED_BY(mu_) = 0;  // In `order_`.
  bool keeps_ ABSL_GUARDED_BY(mu_) = false;        // All are staged, until they are dropped.
  std::map<int64_t, Staged> staged_ ABSL_GUARDED_BY(mu_);  // Keyed by chunk.
  std::vector<Staged> failed_ ABSL_GUARDED_BY(mu_);  // Copies may still go into their buffers.
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_STAGED_CHUNKS_H_
