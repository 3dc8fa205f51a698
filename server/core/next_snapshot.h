// SPDX-License-Identifier: Apache-2.0
//
// The next version of a model, while the chunks of a step are folded into it.
#ifndef EMA_SERVER_CORE_NEXT_SNAPSHOT_H_
#define EMA_SERVER_CORE_NEXT_SNAPSHOT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/manifest.h"
#include "server/base/observer.h"
#include "server/core/snapshot.h"
#include "server/core/track.h"
#include "server/core/trainer_run.h"
#include "server/device/device.h"

namespace ema {

// The effect of a step on one track.
struct TrackPlan {
  TrackRef track;
  const TrackSnapshot* base = nullptr;    // In the base snapshot. Null: it has no value yet.
  TrackState state;                       // Before this step.
  std::vector<Schedule::Update> updates;  // One for each of SchedulesOf().
};

// The plan of a step, which its first header determines.
struct StepPlan {
  int64_t step = 0;
  TrainingTime time;
  bool omits_frozen = false;  // See ema.v1.PushHeader.
  int64_t imported_updates = 0;
  int64_t round = 0;  // In which the step began; see CommitGate.
  std::vector<TrackPlan> tracks;
};

// The parts of a model that a session reads.
struct ModelView {
  std::string name;
  std::shared_ptr<const Manifest> manifest;
  std::shared_ptr<Device> device;
  NonFinitePolicy non_finite = NonFinitePolicy::kReject;
  ServerObserver* observer = &ServerObserver::None();
  // The model is one partition of a whole model: ranks without shards in it need not push.
  bool is_partition = false;
};

// Invariant: the base snapshot never changes, and each element of the new blocks is written only by
// the stream that has claimed its range; so folding a chunk again gives the same bits. Folds may
// run concurrently; the session calls Finish() after the last one.
class NextSnapshot {
 public:
  // The new blocks of one track. Null: none of the block's bytes change, so the base's block stays.
  using TrackBlocks = std::vector<std::shared_ptr<Block>>;

  // Allocates the blocks of the tracks that change. `base`, null before the first commit, is the
  // snapshot that the plan's bases are in. `model`, `run` and `plan` outlive the result.
  // RESOURCE_EXHAUSTED: no memory; nothing stays allocated.
  static absl::StatusOr<std::unique_ptr<NextSnapshot>> Create(const ModelView& model,
                                                              const TrainerRun& run,
                                                              const StepPlan& plan,
                                                              SnapshotRef base);

  const ModelView& model() const { return model_; }
  const TrainerRun& run() const { return run_; }
  const StepPlan& plan() const { return plan_; }
  // The new blocks of plan().tracks[t]; empty if the track does not change.
  const TrackBlocks& next(size_t t) const { return next_[t]; }
  // The new blocks for the pushed weights, which a mean_of_last track keeps for its later means.
  // Empty if the track keeps no weights, or if next(t) has the same values.
  const TrackBlocks& next_weights(size_t t) const { return next_weights_[t]; }
  // A small block of zeros: the current values of averages that begin with zeros. Null: no average
  // does.
  const Block* zeros() const { return zeros_.get(); }

  // Whether the pushed values of a tensor change the track.
  bool Changes(const TrackPlan& plan, int64_t tensor_index) const;
  // Whether they replace the track's values, because the weight is 1. REQUIRES: Changes().
  static bool IsAssigned(const TrackPlan& plan, int64_t tensor_index);
  // The earlier weights that the update averages with the pushed ones, the oldest first: none but
  // for a mean of the last k.
  static absl::Span<const BlocksRef> EarlierWeights(const TrackPlan& plan);
  // A device counts the elements of a run of tensors from the run's first tensor on. Returns the
  // same element, counted in the tensor that holds it.
  NonFiniteElement Locate(NonFiniteElement element) const;

  // Returns the snapshot; its record lacks incarnation and commit time. The `skipped` tensors keep
  // their base's values. `frozen_crc32c`: the XOR of ChunkFold::Result::frozen_crc32c over all
  // chunks. Call once, after the last fold. INTERNAL: the device failed.
  absl::StatusOr<std::shared_ptr<Snapshot>> Finish(const absl::btree_set<int64_t>& skipped,
                                                   uint32_t frozen_crc32c);

 private:
  // A range of a track's bytes.
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };

  NextSnapshot(const ModelView& model, const TrainerRun& run, const StepPlan& plan,
               SnapshotRef base)
      : model_(model), run_(run), plan_(plan), base_(std::move(base)) {}

  absl::Status Allocate();
  // `base`: the blocks whose values `next` has where the track does not change. Null: none.
  absl::Status AllocateTrack(const TrackPlan& plan, const Blocks* base, TrackBlocks& next,
                             DeviceStream& stream) const;
  // Copies the base's values of a range into the new blocks.
  static absl::Status CopyFromBase(const Track& track, const Blocks& base, const TrackBlocks& next,
                                   Range range, DeviceStream& stream);
  // Copies the base's values of whole tensors, in all tracks.
  absl::Status RestoreTensors(const absl::btree_set<int64_t>& tensors) const;
  Version NewRecord(const absl::btree_set<int64_t>& skipped) const;
  TrackVersion RecordOf(const TrackPlan& plan) const;
  // The record of the track's `i`-th schedule.
  TrackVersion ScheduleRecord(const TrackPlan& plan, size_t i) const;
  TrackSnapshot TakeTrack(size_t t, int64_t version, int64_t frozen_digest,
                          const absl::btree_set<int64_t>& skipped);
  // Identifies the values of the run's frozen tensors. A step that omits them has the digest of its
  // base. 0: the run has no frozen tensors.
  int64_t FrozenDigest(uint32_t frozen_crc32c) const;
  // The value of TrackSnapshot::frozen_digest. `pushed`: FrozenDigest().
  int64_t FrozenDigestOf(const TrackPlan& plan, int64_t pushed,
                         const absl::btree_set<int64_t>& skipped) const;

  const ModelView& model_;
  const TrainerRun& run_;
  const StepPlan& plan_;
  const SnapshotRef base_;
  std::vector<TrackBlocks> next_;          // Parallel to plan_.tracks.
  std::vector<TrackBlocks> next_weights_;  // As next_, for next_weights().
  std::shared_ptr<Block> zeros_;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_NEXT_SNAPSHOT_H_
