// SPDX-License-Identifier: Apache-2.0
//
// Builds the next snapshot of a model while the chunks of one step arrive from all ranks.
#ifndef EMA_SERVER_CORE_PUSH_SESSION_H_
#define EMA_SERVER_CORE_PUSH_SESSION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ema/manifest.h"
#include "server/base/chunk_header.h"
#include "server/base/observer.h"
#include "server/base/steady_wait.h"
#include "server/core/concurrency_limit.h"
#include "server/core/coverage.h"
#include "server/core/next_snapshot.h"
#include "server/core/snapshot.h"
#include "server/core/track.h"
#include "server/core/trainer_run.h"
#include "server/device/device.h"

namespace ema {

// The tracks and their states, from which clients know which pushes are due. Mirrors
// ema.v1.PushPlan.
struct PushPlan {
  struct Entry {
    TrackRef track;
    TrackState state;
  };
  int64_t revision = 0;
  std::vector<Entry> tracks;
  // Pushes may leave out the run's frozen tensors.
  bool may_omit_frozen = false;
};

// How a push ended, the same for all ranks.
struct PushResult {
  Version record;
  bool is_duplicate = false;
  PushPlan plan;
  absl::Duration publish_duration;
};
// Called once, from any thread. It may take locks of its own, but not call its model.
using PushCallback = std::function<void(const absl::StatusOr<PushResult>&)>;

// The header of a push.
struct PushStart {
  int64_t run_epoch = 0;
  int64_t rank = 0;
  int64_t layout_digest = 0;
  int64_t step = 0;
  TrainingTime time;
  int64_t plan_revision = 0;  // 0: any.
  bool omits_frozen = false;  // See ema.v1.PushHeader.
  // The rank's parallel streams: see ema.v1.PushHeader.
  int64_t stream_group = 0;
  int64_t stream_count = 0;
  int64_t imported_updates = 0;  // See ema.v1.PushHeader.
  // For Model::Options::gate; 0 without one.
  int64_t incarnation = 0;
  int64_t round = 0;
};
inline constexpr int64_t kMaxStreamsOfRank = 16;

// The commit message of a push.
struct PushTotals {
  int64_t chunk_count = 0;
  int64_t total_bytes = 0;
  uint32_t digest = 0;
};

// The push of one step by all ranks. Made and ended by its Model; held by the streams that feed it.
// Folds each chunk into the next snapshot when it arrives.
//
// Invariant: a range of a rank's bytes is folded by one stream, which has claimed it, and is
// covered only after its checksum matched; the next version exists once every rank has committed
// all of its bytes. Thread-safe: any number of streams add chunks at once. No lock is held while
// folding.
class PushSession {
 public:
  // Allocates the next blocks of the tracks that change. `base`, null before the first commit, is
  // the snapshot that the plan's bases are in. The session holds `permit` until it ends.
  // RESOURCE_EXHAUSTED: no memory; nothing stays allocated.
  static absl::StatusOr<std::shared_ptr<PushSession>> Create(ModelView model,
                                                             std::shared_ptr<const TrainerRun> run,
                                                             SnapshotRef base, StepPlan plan,
                                                             ConcurrencyLimit::Permit permit);

  const StepPlan& plan() const { return plan_; }
  const TrainerRun& run() const { return *run_; }
  SteadyTime begin() const { return begin_; }

  // Opens a stream of `start`'s rank, which may then add chunks, and returns its number.
  //
  // A rank may push by several streams at once: they form a group, whose number and stream count
  // each of them gives in `start`. Only one group of a rank may add chunks: a stream of a higher
  // group ends the rank's earlier streams, FENCED. A stream of group 0 is a group of its own, and
  // always ends the earlier ones. The rank has committed when all streams of its group have.
  //
  // `on_end` is called when the session ends for any reason, or when the stream is fenced. Fails
  // with the session's end status if it has ended. ABORTED, FENCED: the group is lower than the
  // rank's current one. INVALID_ARGUMENT, BAD_REQUEST: the count differs from that of the group's
  // other streams, or all of the group's streams have been opened already.
  absl::StatusOr<int64_t> OpenStream(const PushStart& start, PushCallback on_end)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until the device has folded the stream's chunks. CommitRank() returns its error, if any.
  void AwaitStream(int64_t rank, int64_t stream) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits as AwaitStream(), and drops the stream's `on_end`. Its covered ranges stay covered.
  void CloseStream(int64_t rank, int64_t stream) ABSL_LOCKS_EXCLUDED(mu_);

  // Folds one chunk, whose data are `pieces` end to end (any alignment; elements may span pieces).
  // A chunk that is covered already is compared, not folded. `device_stream` is the caller's own,
  // and from then on the session's, too, which waits for what is queued on it. INVALID_ARGUMENT:
  // BAD_CHUNK, CHUNK_OVERLAP; NON_FINITE, if the model does not take such values (or would skip a
  // tensor that has no value yet), ends the session, and names tensor, index and rank. DATA_LOSS,
  // CHUNK_CORRUPT: wrong checksum; the range counts as missing. ABORTED: FENCED, or what ended the
  // session. UNAVAILABLE, RANGE_BUSY. INTERNAL: the device failed.
  absl::Status AddChunk(int64_t rank, int64_t stream, const ChunkHeader& header,
                        absl::Span<const std::span<const std::byte>> pieces,
                        const std::shared_ptr<DeviceStream>& device_stream)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Handles a stream's commit message: once for each stream. With the last stream of a rank the
  // rank is committed. True if it was the last rank: the caller then publishes. A repeated call
  // with the same digest is OK. FAILED_PRECONDITION, PUSH_INCOMPLETE: bytes are missing; the
  // message names the first tensor. DATA_LOSS, DIGEST_MISMATCH. ABORTED, INTERNAL, NON_FINITE: as
  // AddChunk(): an asynchronous device reports them only now.
  absl::StatusOr<bool> CommitRank(int64_t rank, int64_t stream, uint32_t digest)
      ABSL_LOCKS_EXCLUDED(mu_);

  bool HasRankCommitted(int64_t rank) const ABSL_LOCKS_EXCLUDED(mu_);
  // Ranks that have not committed, at most `limit`.
  std::vector<int64_t> MissingRanks(int64_t limit) const ABSL_LOCKS_EXCLUDED(mu_);
  // At most `limit` ranges of `rank`'s bytes that are not covered.
  std::vector<Coverage::Range> Missing(int64_t rank, int64_t limit) const ABSL_LOCKS_EXCLUDED(mu_);
  // Digest of each rank's bytes. REQUIRES: all ranks have committed.
  std::vector<uint32_t> Digests() const ABSL_LOCKS_EXCLUDED(mu_);
  SteadyTime last_progress() const ABSL_LOCKS_EXCLUDED(mu_);
  // The bytes of all ranks that have arrived and been checked.
  int64_t covered_bytes() const ABSL_LOCKS_EXCLUDED(mu_);

  struct FinishedSnapshot {
    std::shared_ptr<void> hold;  // AwaitFreed() also waits until this is destroyed.
    std::shared_ptr<Snapshot> snapshot;
  };
  // The next snapshot, its record without incarnation and commit time. Null: the session has ended.
  // REQUIRES: all ranks have committed. INTERNAL: the device failed.
  absl::StatusOr<FinishedSnapshot> TakeSnapshot() ABSL_LOCKS_EXCLUDED(mu_);

  // Ends the session; the first call wins, later ones do nothing and return false. Frees the blocks
  // and the base, or leaves that to the folds that are running. Then reports to the observer and
  // calls every open stream's `on_end`.
  bool End(const absl::StatusOr<PushResult>& result) ABSL_LOCKS_EXCLUDED(mu_);
  // Blocks until the session has ended and its blocks and base are freed, or have become a version.
  void AwaitFreed() const { freed_.WaitForNotification(); }

 private:
  struct RankState {
    RankState(int64_t pushed_bytes, int64_t max_chunks) : coverage(pushed_bytes, max_chunks) {}
    Coverage coverage;
    uint32_t frozen_crc32c = 0;  // Over the covered frozen bytes: see ChunkFold::Result.
    // This stream and later ones may add chunks. 0: there is none yet.
    int64_t first_stream = 0;
    int64_t stream_group = 0;
    int64_t stream_count = 0;
    std::optional<uint32_t> group_digest;  // Once one of its streams has committed.
    int64_t unopened_streams = 0;          // Streams of the group.
    int64_t uncommitted_streams = 0;       // Streams of the group.
    std::optional<uint32_t> digest;        // Once committed.
    int64_t work_count = 0;                // As PushSession::work_count_.
    // By tensor: the first non-finite element that an asynchronous device has reported.
    absl::btree_map<int64_t, int64_t> non_finite;
    absl::Status device_status;
  };
  struct OpenedStream {
    int64_t rank = 0;
    int64_t stream = 0;
    PushCallback on_end;
  };
  // What folds write to. Destroyed from the last member to the first.
  struct Memory {
    std::shared_ptr<void> freed;  // Notifies `freed_` when it is destroyed.
    std::unique_ptr<NextSnapshot> next;
    // Streams that have queued work on it; waited for.
    std::vector<std::shared_ptr<DeviceStream>> writers;

    Memory() = default;
    explicit Memory(std::shared_ptr<void> on_freed) : freed(std::move(on_freed)) {}
    Memory(Memory&&) = default;
    Memory& operator=(Memory&&) = default;
    ~Memory();
  };

  PushSession(ModelView model, std::shared_ptr<const TrainerRun> run, StepPlan plan,
              ConcurrencyLimit::Permit permit);

  // The part of a rank's layout that is pushed.
  int64_t PushedBytes(const RankLayout& layout) const;
  // The memory, if the session has ended and nothing uses it; to be destroyed without the lock.
  Memory TakeUnusedMemoryLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void BeginWorkLocked(int64_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // As TakeUnusedMemoryLocked().
  Memory EndWorkLocked(int64_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits for the queued work of a stream; without a stream, of all streams of the rank. REQUIRES:
  // no other thread uses them. INTERNAL: the device has failed, for one of the rank's streams.
  absl::Status AwaitDevice(int64_t rank, std::optional<int64_t> stream) ABSL_LOCKS_EXCLUDED(mu_);
  // Checks a commit message. True: all streams of the rank have committed, and its bytes are
  // complete.
  absl::StatusOr<bool> CheckCommit(int64_t rank, int64_t stream, uint32_t digest)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Applies the model's NonFinitePolicy to `elements`, the first of each tensor. NON_FINITE.
  absl::Status ApplyNonFinitePolicyLocked(int64_t rank, absl::Span<const NonFiniteElement> elements)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The same for RankState::non_finite. REQUIRES: AwaitDevice() has returned for the rank.
  absl::Status CheckFiniteLocked(int64_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckStreamLocked(int64_t rank, int64_t stream) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status FencedByNewerStream(int64_t rank) const;
  absl::Status CheckRange(const RankLayout& layout, const ChunkHeader& header) const;

  const ModelView model_;
  const std::shared_ptr<const TrainerRun> run_;
  const StepPlan plan_;
  const SteadyTime begin_ = SteadyNow();
  absl::Notification freed_;
  Memory memory_;  // Emptied under mu_ when the session has ended and no fold is running.

  mutable absl::Mutex mu_;
  std::vector<RankState> ranks_ ABSL_GUARDED_BY(mu_);
  std::vector<OpenedStream> streams_ ABSL_GUARDED_BY(mu_);
  int64_t last_stream_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t committed_count_ ABSL_GUARDED_BY(mu_) = 0;
  SteadyTime last_progress_ ABSL_GUARDED_BY(mu_);
  // Running folds, and other work on memory_ or on streams without the lock.
  int64_t work_count_ ABSL_GUARDED_BY(mu_) = 0;
  // By rank and stream: those with work that has not been waited for.
  absl::btree_map<std::pair<int64_t, int64_t>, std::shared_ptr<DeviceStream>> queued_
      ABSL_GUARDED_BY(mu_);
  absl::btree_set<int64_t> skipped_tensors_ ABSL_GUARDED_BY(mu_);  // NonFinitePolicy::kSkipTensor.
  std::optional<absl::Status> ended_ ABSL_GUARDED_BY(mu_);
  ConcurrencyLimit::Permit permit_ ABSL_GUARDED_BY(mu_);  // Null once it has ended.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_PUSH_SESSION_H_
