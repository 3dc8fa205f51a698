// SPDX-License-Identifier: Apache-2.0
//
// Saves versions by itself when they are due.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_SCHEDULER_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_SCHEDULER_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"

namespace ema {

// True if `snapshot`, a version of a model whose newest kept version is of `kept_time`, is to be
// kept: a track with a snapshot_interval has been updated in a later interval than that.
bool IsKeepDue(const Snapshot& snapshot, const std::optional<TrainingTime>& kept_time);

// Told of every commit; saves those that are due in a thread of its own, one at a time, so that
// commits never wait. While it saves one of a model, others of that model are passed over: what is
// due then still is at the first commit after. After an error (readers may hold as many versions as
// they may, too) the model's next try is at a commit `retry_delay` later or more. Thread-safe.
class CheckpointScheduler {
 public:
  struct Options {
    // Saves a version so that it is kept; sets Model::SetKeptTime(). Called on the scheduler's
    // thread; may block for as long as it takes.
    std::function<absl::Status(Model&, const SnapshotRef&)> save;
    // Told of an error, once until its code or reason changes or a save succeeds. Called on the
    // scheduler's thread.
    std::function<void(const Model&, const absl::Status&)> on_error;
    absl::Duration retry_delay = absl::Seconds(10);
  };

  explicit CheckpointScheduler(Options options);
  ~CheckpointScheduler();  // Stop().

  // As Model::Options::on_commit. Never waits for the disk.
  void OnCommit(const std::shared_ptr<Model>& model, const Snapshot& snapshot)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until nothing is to be saved of the commits so far. For tests.
  void AwaitIdle() ABSL_LOCKS_EXCLUDED(mu_);

  // Waits for the save that is running; those that are waiting are dropped, and no more begin.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Of a model by name; there while something is to be remembered.
  struct State {
    bool is_busy = false;  // Waiting or being saved.
    absl::Time retry_time = absl::InfinitePast();
    absl::Status last_error;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  void Save(Model& model) ABSL_LOCKS_EXCLUDED(mu_);

  const Options options_;
  absl::Mutex mu_;  // Taken by commits: never held across a save or a call of a model.
  // That wait for their turn: only then is a version pinned, the newest.
  struct Work {
    std::string model_name;
    std::weak_ptr<Model> model;
  };
  std::deque<Work> work_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, State> states_ ABSL_GUARDED_BY(mu_);
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // Joined by Stop(), which only one thread calls at a time.
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_SCHEDULER_H_
