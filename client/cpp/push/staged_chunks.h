// SPDX-License-Identifier: Apache-2.0
//
// The chunks of a push whose weights are on GPUs.
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

// Brings chunks to pinned buffers in the order in which they will be sent, as many ahead as the
// ring has room for. What the gate calls reading is here starting a copy: once all copies have been
// started, the weights may change as soon as these have ended, which is for the trainer's stream to
// wait for (Gpu::Lead()), not for the trainer. If there is room for all, each stays in its buffer,
// and can be sent again whatever has become of the weights. Thread-safe.
//
// Nobody ever waits for a buffer: with at most max_senders() threads that take the chunks in order,
// each giving back or lending one before it takes the next, a chunk that is asked for finds one.
class StagedChunks {
 public:
  // All outlive this object. `gpus`, by shard: the GPU whose memory it is in; null: the host's,
  // which is read when the copy is started. Buffers are at least slot_bytes() large. `strides`: as
  // for Run::StartPush(). At `deadline`, and when `interrupt` fires, nobody waits for a GPU any
  // more.
  StagedChunks(const RankLayout* layout, const ChunkPlan* plan,
               absl::Span<const std::span<const std::byte>> shards, absl::Span<Gpu* const> gpus,
               PinnedRing* ring, WeightsGate* gate, absl::Span<const Strides> strides,
               SteadyTime deadline, Interrupt* interrupt);
  ~StagedChunks();  // As Drop().

  // What the largest chunk takes.
  static int64_t SlotBytes(const RankLayout& layout, const ChunkPlan& plan);
  int max_senders() const { return ring_->slot_count() - ring_->max_lent(); }

  // These are to be sent next, and are started as far as there is room, unless they are there
  // (Holds()). What was staged for other ones is dropped, and if some of it has been taken.
  // ABORTED, STEP_ABANDONED: the weights have been released, and not all of these are staged. The
  // GPU's error, which ends the push.
  absl::Status Stage(absl::Span<const int64_t> chunks) ABSL_LOCKS_EXCLUDED(mu_);

  // True: all of these are there, or on their way from the GPU: they can be sent also after the
  // release.
  bool Holds(absl::Span<const int64_t> chunks) const ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until a chunk's bytes are in its buffer; then this is the caller's, to give back or lend.
  // Absent: they cannot come, and status() says why. REQUIRES: it was staged, and has not been
  // taken since, unless Holds() is true of it.
  std::optional<int> Take(int64_t chunk) ABSL_LOCKS_EXCLUDED(mu_);
  PinnedRing& ring() const { return *ring_; }

  // Drops what is staged, and waits until nothing is being copied any more. Buffers are lost whose
  // copies do not end, as by Gpu::AwaitIdle(): PinnedRing::lost_bytes() tells.
  void Drop() ABSL_LOCKS_EXCLUDED(mu_);

  // What has gone wrong: a GPU's error, or that the weights have been released too early, or that
  // time was over, or the interrupt.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // The buffer of a chunk, and the GPUs that copy into it.
  struct Staged {
    int slot = 0;
    absl::InlinedVector<Gpu*, 1> gpus;
  };
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
  size_t started_count_ ABSL_GUARDED_BY(mu_) = 0;  // Of these.
  bool keeps_ ABSL_GUARDED_BY(mu_) = false;        // All are staged, and stay until dropped.
  std::map<int64_t, Staged> staged_ ABSL_GUARDED_BY(mu_);  // By chunk.
  std::vector<Staged> failed_ ABSL_GUARDED_BY(mu_);  // Copies may still go into their buffers.
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_STAGED_CHUNKS_H_
