// SPDX-License-Identifier: Apache-2.0
//
// The runs of a model: which launch of a trainer may push, and which ones are fenced.
#ifndef EMA_SERVER_CORE_RUN_TABLE_H_
#define EMA_SERVER_CORE_RUN_TABLE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ema/shard.h"
#include "ema/version.h"
#include "server/core/memory_budget.h"
#include "server/core/push_session.h"
#include "server/core/snapshot.h"
#include "server/core/trainer_run.h"

namespace ema {

// ABORTED, FENCED.
absl::Status FencedError(const std::string& message);

// Identifies one start of a trainer. All its ranks give the same `id`, also when they rejoin.
struct Launch {
  std::string id;
  int64_t last_run_epoch = 0;  // Epoch of the run that it had open; 0: none.
  // For a partition of a whole model (see CommitGate): the epoch that another partition has
  // assigned to the run, and the model's incarnation there. 0: this model assigns the epoch.
  int64_t run_epoch = 0;
  int64_t incarnation = 0;
};

// Invariant: at most one run is open, none during a rollback; run epochs only grow; a fenced
// launch is rejected as long as it is one of the last 64 of them, or reports its last run epoch.
//
// The first rank with a new launch id opens a run, and so fences the run that was open: that
// launch cannot join again, and its pushes get ABORTED, FENCED. A rollback fences, too, and leaves
// no run open. Not thread-safe: the model locks it.
class RunTable {
 public:
  // Epochs begin at `incarnation`, that of the model.
  RunTable(std::string model_name, int64_t incarnation)
      : model_name_(std::move(model_name)), epoch_(incarnation) {}

  // The epoch of the newest run or rollback.
  int64_t epoch() const { return epoch_; }
  // Null: none is open. A run is replaced, never changed, once it is ready; its sessions may keep a
  // fenced one alive.
  const std::shared_ptr<TrainerRun>& run() const { return run_; }

  // OK: the launch's run is open or may be opened. ABORTED, FENCED. INVALID_ARGUMENT: its
  // last_run_epoch is out of range.
  absl::Status CheckLaunch(const Launch& launch) const;
  bool IsOpen(const Launch& launch) const;
  // Joins a rank to the open run. REQUIRES: IsOpen(launch). Errors as TrainerRun::Join().
  absl::Status Join(const Launch& launch, int64_t rank, int64_t world_size, RankLayout layout);
  // Opens a run with the launch's epoch, or the next one, joins its first rank and fences the run
  // that was open.
  // REQUIRES: CheckLaunch() is OK, !IsOpen(launch). Errors as TrainerRun::Create() and Join();
  // nothing changes then.
  absl::Status Open(const Launch& launch, int64_t rank, int64_t world_size, RankLayout layout,
                    const Manifest* manifest, std::shared_ptr<MemoryBudget> host_budget);

  // ABORTED, FENCED: the open run has another epoch; the message names the rollback that made
  // `newest`, if one did. INVALID_ARGUMENT: the run has no such rank.
  absl::Status CheckRank(int64_t run_epoch, int64_t rank, const Snapshot* newest) const;
  // CheckRank(), TrainerRun::failure(), and FAILED_PRECONDITION, RUN_INCOMPLETE or LAYOUT_MISMATCH.
  absl::Status CheckMayPush(const PushStart& start, const Snapshot* newest) const;

  // All later pushes of the run must contain its frozen tensors: a step was lost because some ranks
  // omitted them and others did not.
  void RequireFrozen() { requires_frozen_ = true; }
  bool requires_frozen() const { return requires_frozen_; }

  // UNAVAILABLE, MODEL_BUSY: the model is being rolled back.
  absl::Status CheckNotRollingBack() const;
  // Fences the open run. Until EndRollback() none can be opened.
  void BeginRollback();
  void EndRollback() { is_rolling_back_ = false; }
  // Takes the next epoch, for the version that a rollback makes, and returns it.
  int64_t AllocateRollbackEpoch() { return fence_epoch_ = ++epoch_; }

  // Continues above a version from a checkpoint. `fenced_epoch`: a rollback has fenced the runs up
  // to this epoch; 0: none. REQUIRES: no run has been opened.
  void Restore(const Version& record, int64_t fenced_epoch);

 private:
  void FenceOpenRun();

  const std::string model_name_;
  int64_t epoch_;
  std::shared_ptr<TrainerRun> run_;
  bool is_rolling_back_ = false;
  std::vector<std::string> fenced_launches_;
  // A launch other than the open run's is fenced if its last_run_epoch is not 0 (it has had a run)
  // and is below this epoch, or equals it while a run is open. While a run is open, this is the
  // highest last_run_epoch that the ranks of its launch have reported, or the run's epoch if that
  // is 0. Otherwise it comes from the last rollback or from Restore().
  int64_t fence_epoch_ = 0;
  bool requires_frozen_ = false;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_RUN_TABLE_H_
