// SPDX-License-Identifier: Apache-2.0
//
// One model: the owner of its tracks, its versions, its runs and the step that is being pushed.
#ifndef EMA_SERVER_CORE_MODEL_H_
#define EMA_SERVER_CORE_MODEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ema/manifest.h"
#include "ema/shard.h"
#include "ema/version_id.h"
#include "server/base/log_event.h"
#include "server/base/log_throttle.h"
#include "server/base/observer.h"
#include "server/base/steady_wait.h"
#include "server/core/attached_files.h"
#include "server/core/commit_gate.h"
#include "server/core/commit_watchers.h"
#include "server/core/concurrency_limit.h"
#include "server/core/device_memory.h"
#include "server/core/durable_state.h"
#include "server/core/memory_budget.h"
#include "server/core/model_config.h"
#include "server/core/model_overview.h"
#include "server/core/open_step.h"
#include "server/core/push_session.h"
#include "server/core/rank_push.h"
#include "server/core/reading_cache.h"
#include "server/core/run_table.h"
#include "server/core/snapshot.h"
#include "server/core/track.h"
#include "server/core/track_table.h"
#include "server/core/trainer_run.h"
#include "server/core/version_history.h"
#include "server/device/device.h"

namespace ema {

// Owns the parts of one model and changes them together: opening a run, beginning a step, a commit
// and a rollback each change several parts atomically, under the model's lock.
//
// Thread-safe. Always held by shared_ptr. Commits are serialized; readers never wait for one and
// never see half of one. Files: model.cc, and model_rollback.cc for rollbacks.
class Model : public std::enable_shared_from_this<Model> {
 public:
  struct Options {
    // Size of a block: larger ones cost fewer references, smaller ones are freed sooner.
    int64_t block_bytes = int64_t{32} << 20;
    // The model's incarnation: it is in every record, and the run epochs begin with it.
    int64_t incarnation = 1;
    // Gets opened runs, dropped steps and warnings about schedules, each warning once. Called
    // without a lock that readers take.
    LogSink log;
    // Called after every commit and rollback, when the trainer's ranks have their replies; from any
    // thread, even several at once, without a lock of the model. Must not block for long. May be
    // empty.
    std::function<void(const std::shared_ptr<Model>&, const Snapshot&)> on_commit;
    // Versions can be kept on a disk: tracks may have a snapshot_interval.
    bool has_data_dir = false;
    // Decides when a complete step is published, if the model is one partition of a whole model.
    // Null: at once.
    std::shared_ptr<CommitGate> gate;
    // Gets the steps' events. Outlives the model.
    ServerObserver* observer = &ServerObserver::None();
    // Host memory for attached files, for bytes that are read, cast or sliced for readers, and for
    // large manifests and layouts. Null: the budget of the versions, as blocks are host memory.
    std::shared_ptr<MemoryBudget> host_budget;
    // Limits how many steps are pushed at once, over all models. Null: no limit.
    std::shared_ptr<ConcurrencyLimit> sessions;
  };

  // Host memory that a model may take without a reservation: for its records, its manifest, the
  // tables of its tracks and the layouts of its run.
  static constexpr int64_t kUnbudgetedBytes =
      VersionRecords::kMaxBytes + 3 * TrainerRun::kUnbudgetedBytes;

  // `tracks`: made from config.tracks by MakeTracks(). REQUIRES: config.Validate() is OK.
  // RESOURCE_EXHAUSTED, MEMORY_BUDGET: `budget` is too small for their versions, or the host's for
  // the manifest.
  static absl::StatusOr<std::shared_ptr<Model>> Create(
      ModelConfig config, const std::vector<std::shared_ptr<Track>>& tracks,
      std::shared_ptr<Device> device, std::shared_ptr<MemoryBudget> budget, const Options& options);

  // The model is one partition of a whole model.
  bool is_partition() const { return options_.gate != nullptr; }
  // Whether this server answers for the whole model, and saves it: false for a partition whose home
  // is another server.
  bool is_home() const { return !is_partition() || options_.gate->is_home(); }
  // The current round of the partitions, for replies; 0: the model is not a partition, or no round
  // has begun.
  int64_t round() const { return is_partition() ? options_.gate->round() : 0; }
  int64_t incarnation() const { return options_.incarnation; }

  // The config of the creation or load: UpdateTracks() does not change it.
  const ModelConfig& config() const { return config_; }
  const Manifest& manifest() const { return *config_.manifest; }
  Device& device() const { return *memory_.device; }
  const DeviceMemory& memory() const { return memory_; }

  // --- Parts that lock themselves ---

  // Files that every later checkpoint has.
  AttachedFiles& attached_files() const { return attached_files_; }
  VersionHistory& history() const { return history_; }
  TrackTable& tracks() const { return tracks_; }
  ReadingCache& readings() const { return readings_; }
  DurableState& durable() const { return durable_; }
  CommitWatchers& watchers() const { return watchers_; }

  // A consistent view of the parts.
  struct Description {
    std::vector<TrackRef> tracks;
    std::vector<TrackRef> pending_tracks;  // After the next commit; empty: no change.
    int64_t plan_revision = 0;  // Grows with each change of the tracks that affects pushes.
    // Grows with each change of the settings in a checkpoint: the tracks after the next commit, and
    // attached_files().
    int64_t settings_revision = 0;
    int64_t reserved_bytes = 0;
    int64_t run_epoch = 0;
    int64_t begun_step = 0;  // The newest step begun in the run; 0: none.
    std::optional<Version> latest;
    DurableState::Saved saved;
    std::shared_ptr<const PushSession> session;  // The open step's; null: none is open.
    std::optional<ModelOverview::Run> run;       // The open one.
  };
  Description Describe() const ABSL_LOCKS_EXCLUDED(mu_);

  // Changes tracks, all or nothing. A replaced track keeps its paused state. Takes effect at the
  // next commit; immediately if no run is open or every track is paused. Repeating a change is OK.
  // INVALID_ARGUMENT: as ValidateTrack(), a name twice, no track left, or a change to the stored
  // form of an existing track, or to the profile of its snapshots. NOT_FOUND, TRACK_NOT_FOUND.
  // RESOURCE_EXHAUSTED, MEMORY_BUDGET. FAILED_PRECONDITION, NO_DATA_DIR.
  absl::Status UpdateTracks(const TrackChanges& changes) ABSL_LOCKS_EXCLUDED(mu_);

  // The same change in several partitions of a model, in steps that TrackTable describes. Errors of
  // ProposeTracks() as UpdateTracks(), but the caller has validated the tracks: a rule may match no
  // tensor of this partition.
  absl::Status ProposeTracks(const TrackChanges& changes, int64_t number, int64_t accepted)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Returns whether the change should take effect now: no run is open, or every track is paused.
  bool AcceptTracks(int64_t number) ABSL_LOCKS_EXCLUDED(mu_);
  void WithdrawTracks(int64_t number) ABSL_LOCKS_EXCLUDED(mu_);
  // Applies the changes of tracks that the gate has put in force. If a prepared step is open, they
  // are applied when its version is published.
  void ApplyTracksInForce() ABSL_LOCKS_EXCLUDED(mu_);

  // --- Runs ---

  struct JoinResult {
    int64_t run_epoch = 0;
    int64_t layout_digest = 0;
    bool ready = false;
    std::vector<int64_t> missing_ranks;
    std::optional<Version> latest;
    PushPlan plan;
  };
  // Handles OpenRun of ema_service.proto. A new launch drops the previous run's session. `newest`,
  // if given, must then be the newest version (all zero: no version). UNAVAILABLE, MODEL_BUSY:
  // `newest` is not the newest version, the model is being rolled back, or a prepared step has not
  // ended. Also returns the errors of RunTable::CheckLaunch() and CommitGate::CheckLaunch().
  absl::StatusOr<JoinResult> JoinRun(const Launch& launch, int64_t rank, int64_t world_size,
                                     RankLayout layout,
                                     const std::optional<VersionId>& newest = std::nullopt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // True: that launch's run is open, so JoinRun() would join it. Errors as
  // RunTable::CheckLaunch(), or the status given to StopAcceptingWork() or Close().
  absl::StatusOr<bool> IsRunOpen(const Launch& launch) const ABSL_LOCKS_EXCLUDED(mu_);
  // Publishes the version `from`, which `load` returns, again as the newest: a new version with the
  // values, step, time and state of `from`, in a run epoch of its own. First ends the open run: its
  // session, and later calls of its writers, get ABORTED, FENCED. While `load` runs, which may
  // block for long and allocate one version's memory, JoinRun(), OpenPush() and other rollbacks get
  // UNAVAILABLE, MODEL_BUSY; readers continue. The blocks of the result of `load` may be shared,
  // the result itself must not be. The new version keeps those of its tracks that the model has, by
  // name and in the same form (the log names the others); tracks that only the model has begin with
  // the next push. Adds a record and calls watchers and on_commit, like a commit.
  //
  // The result is pinned by VersionHistory::PinRestored(), even beyond the limit on pins: then
  // nothing can be pushed until a pin is released, as there is no memory for another version.
  //
  // Errors: those of `load`; the status given to StopAcceptingWork() or Close(); UNAVAILABLE,
  // MODEL_BUSY: pinned versions leave no memory for another one; FAILED_PRECONDITION,
  // MODEL_DIFFERS: no track would be kept. An error before `load` runs changes nothing; after a
  // later one the run has ended.
  absl::StatusOr<SnapshotRef> RollBack(
      const VersionId& from, absl::FunctionRef<absl::StatusOr<std::shared_ptr<Snapshot>>()> load)
      ABSL_LOCKS_EXCLUDED(push_mu_, mu_);

  // --- Pushes ---

  // Opens a stream of one rank into the session of `start.step`, making that session if need be.
  // `on_end` is called at most once, from any thread (also from inside the RankPush's calls), when
  // the session ends; it may still run when the RankPush is destroyed, so it must own what it uses.
  // FAILED_PRECONDITION: RUN_INCOMPLETE, LAYOUT_MISMATCH, PLAN_MISMATCH, PLAN_CHANGED. ABORTED:
  // FENCED, STALE_STEP, STEP_SKIPPED. INVALID_ARGUMENT: BAD_TIME, BAD_REQUEST. UNAVAILABLE,
  // MODEL_BUSY: an open earlier step waits for other ranks, or the model is being rolled back, or
  // has no memory for another version yet (see RollBack()). RESOURCE_EXHAUSTED. A rank that opens a
  // later step without having committed the open one drops that one: STEP_ABANDONED. Errors also as
  // CommitGate::CheckPush().
  absl::StatusOr<std::unique_ptr<RankPush>> OpenPush(const PushStart& start, PushCallback on_end)
      ABSL_LOCKS_EXCLUDED(push_mu_, mu_);

  struct PushState {
    enum class State { kUnknown, kOpen, kCommitted, kAbandoned } state = State::kUnknown;
    std::optional<Version> record;
    PushPlan plan;  // If committed.
    // The digest of the rank's bytes, if this is the last committed step.
    std::optional<uint32_t> digest;
    bool rank_committed = false;
    std::vector<std::pair<Coverage::Range, std::string>> missing;  // With the first tensor's name.
    std::vector<int64_t> missing_ranks;
  };
  // Handles QueryPush of ema_service.proto. `round`: as there. Errors also as
  // CommitGate::AbandonRound().
  absl::StatusOr<PushState> QueryPush(int64_t run_epoch, int64_t step, int64_t rank,
                                      bool abandon_if_unfinished, std::string_view skip_reason = {},
                                      int64_t round = 0) ABSL_LOCKS_EXCLUDED(mu_);

  // Ends the open session if it has received nothing for `timeout`: SESSION_EXPIRED, naming the
  // missing ranks.
  void ExpireSession(SteadyTime now, SteadyTime::duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

  // --- For Options::gate ---

  // What the partitions of a whole model have agreed on for the version of a prepared step.
  struct Decision {
    absl::Time commit_time;
    // In all partitions: as in the version's record.
    int64_t skipped_tensor_count = 0;
    std::vector<std::string> skipped_tensors;
    // Versions that readers or saves have pinned at the home: these are evicted last.
    std::vector<int64_t> home_pinned_versions;
  };
  // Makes the version of the prepared step of `round` the newest one, atomically. False, and no
  // effect: there is none.
  bool PublishPrepared(int64_t round, Decision decision) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the open step, prepared or not, without a version, if it began in `round` or an earlier
  // one.
  void DropOpenStep(int64_t round, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  // --- Closing ---

  // Refuses new runs and sessions with `status` from here on.
  void StopAcceptingWork(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // StopAcceptingWork(), waits until `deadline` for the open session to end, then ends it, unless
  // it is prepared. Readers continue.
  void Drain(const absl::Status& status, SteadyTime deadline) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns once no step has been open during the last 100 ms, or after `timeout`.
  void AwaitNoPush(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);
  // Rejects readers, then new runs and sessions; ends the open session without waiting, and calls
  // the watchers. Versions that are pinned stay until they are released.
  void Close(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // OK, or the status given to Close().
  absl::Status CheckOpen() const ABSL_LOCKS_EXCLUDED(mu_);

  // Makes a version from a checkpoint the newest one. Incarnation and run epoch continue above the
  // record's. Launches that report an earlier run epoch than the record's are fenced, and so are
  // those up to `fenced_run_epoch` (0: no others). REQUIRES: nothing has been committed, no run is
  // open, and the snapshot's tracks are the model's.
  void Restore(std::shared_ptr<const Snapshot> snapshot, int64_t fenced_run_epoch = 0)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Makes a copy of a version of another server the newest one, with its record as it is. Evicts an
  // old version, and calls watchers and on_commit, like a commit. REQUIRES: nothing pushes to the
  // model or rolls it back; only one thread calls this; the copy's tracks are the model's; its
  // number is above the newest version's.
  void PublishCopy(std::shared_ptr<const Snapshot> copy) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class RankPush;

  Model(ModelConfig config, DeviceMemory memory, const Options& options);

  KeepAlive keep_alive() {
    return [this] { return shared_from_this(); };
  }
  // The session of a step, or the result of a step that is committed already: exactly one is set.
  struct StepSession {
    std::shared_ptr<PushSession> session;
    std::optional<RankPush::Committed> already_committed;
  };
  // Finds the session of the step, or makes it.
  absl::StatusOr<StepSession> GetSession(const PushStart& start)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(push_mu_) ABSL_LOCKS_EXCLUDED(mu_);
  // For a new session. RESOURCE_EXHAUSTED, TOO_MANY_SESSIONS.
  absl::StatusOr<ConcurrencyLimit::Permit> AcquireSessionPermit() const;
  // Commits the step of `session`. REQUIRES: all its ranks have committed. noexcept: a commit that
  // stops halfway would block all later ones.
  void CompleteStep(const std::shared_ptr<PushSession>& session) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  // For Options::gate: the complete step becomes prepared, unless it is no longer open.
  void Prepare(OpenStep::Prepared step) ABSL_LOCKS_EXCLUDED(mu_);
  // The remaining work for a published step, without the model's lock.
  struct PublishedStep {
    OpenStep::Prepared step;
    SnapshotRef evicted;
    TrackTable::Replaced replaced;
    PushPlan plan;
    std::vector<LogEvent> warnings;
  };
  // Applies pending changes of the tracks, of a partition only those that are in force. The result
  // is to be dropped without the lock.
  [[nodiscard]] TrackTable::Replaced ApplyPendingLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Makes the version of a step that was the open one the newest. `home_pinned_versions`: see
  // Decision.
  PublishedStep PublishLocked(OpenStep::Prepared step, absl::Time commit_time,
                              const std::vector<int64_t>& home_pinned_versions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Answers the ranks, frees what has been replaced, and announces the version.
  void FinishPublishing(PublishedStep published) ABSL_LOCKS_EXCLUDED(mu_);
  // Calls the watchers and on_commit for a published version.
  void Announce(const Snapshot& version) ABSL_LOCKS_EXCLUDED(mu_);
  void FailSession(const std::shared_ptr<PushSession>& session, const absl::Status& status)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Ends `session`, which is no longer the open one, without a version. Logs that, throttled, and
  // informs the gate, unless the session had ended before.
  void DropStep(PushSession& session, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // Turns the snapshot that a rollback has loaded into the version after the newest. Returns the
  // tracks that it does not keep, to be freed without the lock.
  std::vector<TrackSnapshot> MakeNextVersionLocked(Snapshot& loaded, const VersionId& from)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const ModelConfig config_;
  const Options options_;
  // Before the tracks, whose reservations use its budget: a pinned model can outlive its store.
  const DeviceMemory memory_;
  const std::shared_ptr<MemoryBudget> host_budget_;
  std::unique_ptr<MemoryBudget::Reservation> manifest_memory_;  // Null: it is small.

  // Synchronized by themselves, and mutable like a mutex.
  mutable AttachedFiles attached_files_;
  mutable VersionHistory history_;
  mutable TrackTable tracks_;
  mutable ReadingCache readings_;
  mutable DurableState durable_;
  mutable CommitWatchers watchers_;
  // Throttle log lines about dropped steps. Steps that are not finite have a throttle of their own,
  // so a trainer that has diverged suppresses no line that names ranks.
  LogThrottle non_finite_drops_;
  LogThrottle other_drops_;

  // Serializes OpenPush(), which allocates device memory. Readers never take it.
  absl::Mutex push_mu_ ABSL_ACQUIRED_BEFORE(mu_);
  // Held while parts change together, and taken before the parts' own locks. Not held across a
  // callback, nor across a device call, except where a refused rollback frees what it has loaded.
  mutable absl::Mutex mu_;
  RunTable runs_ ABSL_GUARDED_BY(mu_);
  OpenStep open_step_ ABSL_GUARDED_BY(mu_);
  absl::Status closing_ ABSL_GUARDED_BY(mu_);  // Not OK: no new run, no new session.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_MODEL_H_
