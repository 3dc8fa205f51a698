// SPDX-License-Identifier: Apache-2.0
//
// Re-reads checkpoints to find bytes that have gone bad.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_SCRUBBER_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_SCRUBBER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/heartbeat.h"
#include "server/base/steady_wait.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/stored_versions.h"
#include "server/core/model_store.h"

namespace ema {

// Re-reads every checkpoint of all models at an interval, in a thread of its own; bad ones are set
// aside, and if one is the newest, the newest version is saved again. Of a model on several servers
// only the home does that. Thread-safe.
class CheckpointScrubber {
 public:
  struct Report {
    int64_t bad_count = 0;         // Set aside.
    int64_t unreadable_count = 0;  // The disk failed. The next scrub reads them again.
    // Not read for another reason: too many files are open, or a newer server has written it. A
    // model that could not be listed counts, too.
    int64_t skipped_count = 0;
    bool is_complete = true;  // False: RequestStop() has been called.
  };

  // `store` and `heartbeat` (which may be null) outlive this; `context_of` gives what
  // StoredVersions needs.
  CheckpointScrubber(CheckpointStore& store, std::function<ModelContext(Model&)> context_of,
                     LogSink log, Heartbeat* heartbeat)
      : store_(store),
        context_of_(std::move(context_of)),
        log_(std::move(log)),
        heartbeat_(heartbeat) {}
  ~CheckpointScrubber() { Stop(); }

  // Starts the thread. `models` outlives this. To be called once.
  void Start(ModelStore& models, absl::Duration interval);
  // Blocks until everything is read, or a few MiB after RequestStop().
  Report Scrub(ModelStore& models);
  // The end of the last complete scrub that skipped nothing, by this server or an earlier one. The
  // first Start() with the directory counts as a scrub, and so does a Start() that cannot read the
  // time. Absent: Start() has not been called.
  std::optional<absl::Time> time() const;

  void RequestStop();
  // RequestStop(), and waits for the thread. Not to be called by two threads at once.
  void Stop();

 private:
  void Run(ModelStore& models, absl::Duration interval);
  // Adds to `report`.
  void ScrubModel(Model& model, Report& report);
  void ScrubCheckpoint(const ModelContext& context, const std::string& name, Report& report);
  // Verifies a checkpoint. CANCELLED: RequestStop() has been called.
  absl::Status Read(const ModelContext& context, const std::string& name);
  void NoteTime(absl::Time time);
  // False: RequestStop() has been called.
  bool Wait(absl::Duration time);

  CheckpointStore& store_;
  const std::function<ModelContext(Model&)> context_of_;
  const LogSink log_;
  Heartbeat* const heartbeat_;

  mutable absl::Mutex mu_;
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<absl::Time> time_ ABSL_GUARDED_BY(mu_);
  SteadyWait wait_;  // Woken by RequestStop().
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_SCRUBBER_H_
