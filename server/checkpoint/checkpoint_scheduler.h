// SPDX-License-Identifier: Apache-2.0
//
// Saves versions automatically when they are due.
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

// True if `snapshot` should be kept permanently: a track with a snapshot_interval was updated in a
// later interval than that of `kept_time`, the time of the model's newest kept version.
bool IsKeepDue(const Snapshot& snapshot, const std::optional<TrainingTime>& kept_time);

// When the newest version of a model is saved, counted from the newest version on the disk, also if
// a client requested that save. A rule that is zero is off.
struct SavePolicy {
  int64_t every_commits = 0;
  // After the last save, or the first commit since the start; if that time has passed, at the next
  // commit.
  absl::Duration every = absl::ZeroDuration();
  // When a step reaches or passes a multiple of this.
  int64_t step_multiple = 0;
};

// True if `record`, the newest version, is due by `every_commits` or `step_multiple`.
bool IsSaveDue(const SavePolicy& policy, const Version& record, const VersionId& durable,
               int64_t durable_step);

// Saves versions that are due in a thread of its own, one at a time, so that commits never wait.
// While one version of a model is queued or being saved, others of that model are skipped; if one
// of them was due, the newest is saved next. After an error (such as too many pinned versions) the
// model is retried after `retry_delay`: at a commit, or by SavePolicy::every. If the disk has no
// room for a version that is to be kept, only the next attempt to keep one is delayed; a version
// that is due anyway is saved without being kept. Thread-safe.
class CheckpointScheduler {
 public:
  struct Options {
    SavePolicy policy;
    // Saves a version, to be kept permanently if `keep`; sets Model::durable(), and its kept time
    // if `keep`. Called on the scheduler's thread; may block for as long as it takes.
    std::function<absl::Status(Model&, const SnapshotRef&, bool keep)> save;
    // Reports an error, and the version whose save failed; null: no version could be pinned. Called
    // only if code or reason differ from the model's last error, which a success clears. Called on
    // the scheduler's thread.
    std::function<void(Model&, const SnapshotRef&, const absl::Status&)> on_error;
    absl::Duration retry_delay = absl::Seconds(10);
  };

  explicit CheckpointScheduler(Options options);
  ~CheckpointScheduler();  // Stop().

  // For Model::Options::on_commit. Never waits for the disk.
  void OnCommit(const std::shared_ptr<Model>& model, const Snapshot& snapshot)
      ABSL_LOCKS_EXCLUDED(mu_);
  // A save, automatic or requested, has put a newer version of the model on the disk:
  // SavePolicy::every counts from now.
  void OnSaved(const Model& model) ABSL_LOCKS_EXCLUDED(mu_);
  // Saves the newest version as soon as possible; if the model is being saved now, once more after
  // that.
  void SaveNow(const std::shared_ptr<Model>& model) ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until nothing is queued or being saved, and errors have been reported. For tests.
  void AwaitIdle() ABSL_LOCKS_EXCLUDED(mu_);

  // Waits for the running save; drops queued ones, and starts no more.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // The state of one model, by name; removed some time after the model.
  struct State {
    std::weak_ptr<Model> model;
    bool is_busy = false;              // Queued or being saved.
    bool is_save_requested = false;    // SaveNow() was called.
    bool skipped_due_version = false;  // A version became due while the model was busy.
    // When SavePolicy::every makes a save due; max(): nothing has been committed since the last
    // save.
    SteadyTime due_time = SteadyTime::max();
    std::optional<SteadyTime> saved_time;
    SteadyTime retry_time = SteadyTime::min();
    SteadyTime keep_retry_time = SteadyTime::min();  // The same for a save that is to be kept.
    absl::Status last_error;
  };
  // A queued save.
  struct Work {
    std::weak_ptr<Model> model;
    // The version to save if its step is itself a multiple of SavePolicy::step_multiple. Null: the
    // version that is the newest when the save begins, so that none is pinned before.
    SnapshotRef snapshot;
    // Queued because a version became due, or SaveNow() was called, during a save. Another caller
    // may have saved it meanwhile, so it is not an error if no version can be pinned.
    bool is_followup = false;
  };
  // The part of State with which a save begins.
  struct SaveAttempt {
    bool is_save_requested = false;
    bool may_keep = true;
    absl::Status last_error;
  };
  // The result of a save.
  struct Outcome {
    bool is_due = false;  // By SavePolicy or SaveNow(), not only because it is to be kept.
    absl::Status status;
    // DISK_FULL: from the save that was to be kept; `status` is then that of the save without
    // keeping, if one was due.
    absl::Status keep_status;

    const absl::Status& error() const { return status.ok() ? keep_status : status; }
    // The model has been deleted, so no save is missing.
    bool is_gone() const { return absl::IsNotFound(status); }
  };

  State& StateOfLocked(const std::shared_ptr<Model>& model) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteSavedLocked(bool is_current, State& state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Wakes the thread to read the due times. To be called when one has changed.
  void WakeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SteadyTime NextDueTimeLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Queues a save of the model's newest version. REQUIRES: the model is not busy.
  void EnqueueLocked(State& state, bool is_followup = false) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Queues the models whose due time has come.
  void QueueDueLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  void Save(Model& model, SnapshotRef snapshot, bool is_followup) ABSL_LOCKS_EXCLUDED(mu_);
  // The parts of Save(), in order. `is_newest`: the newest version is saved, not a queued one.
  SaveAttempt BeginSave(const Model& model, bool is_newest) ABSL_LOCKS_EXCLUDED(mu_);
  Outcome SaveVersion(Model& model, const SnapshotRef& snapshot, const SaveAttempt& attempt) const
      ABSL_LOCKS_EXCLUDED(mu_);
  void EndSave(const Model& model, const SaveAttempt& attempt, const Outcome& outcome)
      ABSL_LOCKS_EXCLUDED(mu_);

  const Options options_;
  absl::Mutex mu_;  // Taken by commits: never held across a save or a call of a model.
  std::deque<Work> work_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, State, std::less<>> states_ ABSL_GUARDED_BY(mu_);
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool due_times_changed_ ABSL_GUARDED_BY(mu_) = false;  // A due time has changed.
  SteadyWait wait_;     // Woken when one of these, or `work_`, has changed.
  std::thread thread_;  // Joined by Stop(), which only one thread calls at a time.
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_SCHEDULER_H_
