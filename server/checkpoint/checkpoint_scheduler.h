// SPDX-License-Identifier: Apache-2.0
//
// Saves versions by itself when they are due.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_SCHEDULER_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_SCHEDULER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"

namespace ema {

// True if `snapshot`, a version of a model whose newest kept version is of `kept_time`, is to be
// kept: a track with a snapshot_interval has been updated in a later interval than that.
bool IsKeepDue(const Snapshot& snapshot, const std::optional<TrainingTime>& kept_time);

// When the newest version of a model is saved, counted from its newest version that is on the disk,
// whoever saved that. Each zero: not by this.
struct SavePolicy {
  int64_t every_commits = 0;
  // After the last save, or the first commit since the start; at the next commit if that is longer
  // ago.
  absl::Duration every = absl::ZeroDuration();
  // When a step has reached or passed a multiple of this.
  int64_t step_multiple = 0;
};

// True if `record`, the newest version, is due by its commits or step.
bool IsSaveDue(const SavePolicy& policy, const Version& record, const VersionId& durable,
               int64_t durable_step);

// Told of every commit; saves those that are due in a thread of its own, one at a time, so that
// commits never wait. While it saves one of a model, others of that model are passed over: if one
// of them was due, the newest is saved after it. After an error (readers may hold as many versions
// as they may, too) the model's next try is `retry_delay` later: at a commit, or by
// SavePolicy::every. Where the disk has no room for a version that is to be kept, only the next try
// to keep one is that much later; one that is due all the same is saved without. Thread-safe.
class CheckpointScheduler {
 public:
  struct Options {
    SavePolicy policy;
    // Saves a version, so that it is kept for good if `keep`; sets Model::durable(), with
    // its kept time if `keep`. Called on the scheduler's thread; may block for as long as it takes.
    std::function<absl::Status(Model&, const SnapshotRef&, bool keep)> save;
    // Told of an error, once until its code or reason changes or all that is due has been saved,
    // and what was to be saved; null: no version could be pinned. Called on the scheduler's thread.
    std::function<void(Model&, const SnapshotRef&, const absl::Status&)> on_error;
    absl::Duration retry_delay = absl::Seconds(10);
  };

  explicit CheckpointScheduler(Options options);
  ~CheckpointScheduler();  // Stop().

  // As Model::Options::on_commit. Never waits for the disk.
  void OnCommit(const std::shared_ptr<Model>& model, const Snapshot& snapshot)
      ABSL_LOCKS_EXCLUDED(mu_);
  // A save by anybody has put a newer version of the model on the disk: SavePolicy::every counts
  // from here.
  void OnSaved(const Model& model) ABSL_LOCKS_EXCLUDED(mu_);
  // Saves the newest version as soon as it can; while it saves one of the model, another after it.
  void SaveNow(const std::shared_ptr<Model>& model) ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until nothing is to be saved of the commits so far, and errors have been told. For tests.
  void AwaitIdle() ABSL_LOCKS_EXCLUDED(mu_);

  // Waits for the save that is running; those that are waiting are dropped, and no more begin.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Of a model by name; there while the model is.
  struct State {
    std::weak_ptr<Model> model;
    bool is_busy = false;          // Waiting or being saved.
    bool is_asked = false;         // SaveNow().
    bool must_look_again = false;  // A version that was due came while it was busy.
    // When SavePolicy::every says so; the last time: nothing has been committed since a save.
    SteadyTime due_time = SteadyTime::max();
    std::optional<SteadyTime> saved_time;
    SteadyTime retry_time = SteadyTime::min();
    SteadyTime keep_retry_time = SteadyTime::min();  // The same of one that is to be kept.
    absl::Status last_error;
  };
  // A save that waits for its turn.
  struct Work {
    std::weak_ptr<Model> model;
    // The version to be saved, if its step is itself a multiple of SavePolicy::step_multiple. Null:
    // whichever is the newest when the turn comes, so that no version is pinned before.
    SnapshotRef snapshot;
    // It was queued because a version, or SaveNow(), came during a save. What was due may have been
    // saved by somebody else meanwhile, so it is no error if no version can be pinned.
    bool is_second_look = false;
  };
  // What a save begins with: of the State then.
  struct Turn {
    bool is_asked = false;
    bool may_keep = true;
    absl::Status last_error;
  };
  // What has become of it.
  struct Outcome {
    bool is_due = false;  // Not only to be kept.
    absl::Status status;
    // DISK_FULL: of the save that was to be kept; then `status` is of the one without, if it is
    // due.
    absl::Status keep_status;

    const absl::Status& error() const { return status.ok() ? keep_status : status; }
    // The model has been deleted: nothing is missing.
    bool is_gone() const { return absl::IsNotFound(status); }
  };

  State& StateOfLocked(const std::shared_ptr<Model>& model) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteSavedLocked(bool is_current, State& state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // To be called when a due time has changed.
  void LookAgainLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SteadyTime NextDueTimeLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Its newest version is saved when its turn comes. REQUIRES: it is not busy.
  void EnqueueLocked(State& state, bool is_second_look = false) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Queues the models whose time has come.
  void QueueDueLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  void Save(Model& model, SnapshotRef snapshot, bool is_second_look) ABSL_LOCKS_EXCLUDED(mu_);
  // Its parts, in order. `is_newest`: no version was queued, the newest is saved.
  Turn BeginSave(const Model& model, bool is_newest) ABSL_LOCKS_EXCLUDED(mu_);
  Outcome SaveVersion(Model& model, const SnapshotRef& snapshot, const Turn& turn) const
      ABSL_LOCKS_EXCLUDED(mu_);
  void EndSave(const Model& model, const Turn& turn, const Outcome& outcome)
      ABSL_LOCKS_EXCLUDED(mu_);

  const Options options_;
  absl::Mutex mu_;  // Taken by commits: never held across a save or a call of a model.
  std::deque<Work> work_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, State, std::less<>> states_ ABSL_GUARDED_BY(mu_);
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool must_look_ ABSL_GUARDED_BY(mu_) = false;  // A due time has changed.
  SteadyWait wait_;     // Woken when one of these, or `work_`, has changed.
  std::thread thread_;  // Joined by Stop(), which only one thread calls at a time.
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_SCHEDULER_H_
