// SPDX-License-Identifier: Apache-2.0
//
// One model: its tracks, its versions, the run that may push, the session that builds the next
// version.
#ifndef EMA_SERVER_CORE_MODEL_H_
#define EMA_SERVER_CORE_MODEL_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ema/manifest.h"
#include "ema/shard.h"
#include "ema/time.h"
#include "ema/version_id.h"
#include "server/base/log_event.h"
#include "server/base/log_throttle.h"
#include "server/base/observer.h"
#include "server/base/steady_wait.h"
#include "server/core/attached_files.h"
#include "server/core/commit_watchers.h"
#include "server/core/concurrency_limit.h"
#include "server/core/durable_state.h"
#include "server/core/memory_budget.h"
#include "server/core/model_config.h"
#include "server/core/model_overview.h"
#include "server/core/open_step.h"
#include "server/core/push_session.h"
#include "server/core/rank_push.h"
#include "server/core/reading.h"
#include "server/core/reading_cache.h"
#include "server/core/run_registry.h"
#include "server/core/snapshot.h"
#include "server/core/track.h"
#include "server/core/trainer_run.h"
#include "server/core/version_history.h"
#include "server/device/device.h"

namespace ema {

// Thread-safe. Always held by shared_ptr. Commits are serialized; PinVersion() never waits for a
// running commit and never sees half of one.
//
// Files: model.cc opens runs, and has pushes and commits; model_tracks.cc makes and changes tracks,
// and keeps synthesized averages; model_reading.cc serves readers; model_rollback.cc goes back, and
// says which launches are fenced and which version is durable; model_query_push.cc answers
// QueryPush; model_statistics.cc computes; model_overview.cc tells how things stand.
class Model : public std::enable_shared_from_this<Model> {
 public:
  struct Options {
    // Size of a block: larger ones cost fewer references, smaller ones are freed sooner.
    int64_t block_bytes = int64_t{32} << 20;
    // Of this life of the model; in every record, and where the epochs of its runs begin.
    int64_t incarnation = 1;
    // Told of runs that are opened, steps that are dropped, and, once for each track, what its
    // owner should know. Called without a lock that readers take.
    LogSink log;
    // Told of every commit, after the trainer's ranks. May be empty. Called from any thread, also
    // from several at once, without a lock of the model's; must not block for long.
    std::function<void(const std::shared_ptr<Model>&, const Snapshot&)> on_commit;
    // Versions can be kept on a disk: tracks may have a snapshot_interval.
    bool has_data_dir = false;
    // Told what becomes of steps. Outlives the model.
    ServerObserver* observer = &ServerObserver::None();
    // Of host memory, for attached files, for what is read, cast or cut out for readers, and for
    // manifests and layouts that are large. Null: the models' own budget, as blocks are host
    // memory.
    std::shared_ptr<MemoryBudget> host_budget;
    // Steps that may be pushed at once, with those of other models. Null: any number.
    std::shared_ptr<ConcurrencyLimit> sessions;
  };

  // Host memory that a model may take without a reservation: for its records, its manifest, the
  // tables of its tracks and the layouts of its run.
  static constexpr int64_t kUncountedBytes = VersionRecords::kMaxBytes + 3 * TrainerRun::kFreeBytes;

  // `tracks`: MakeTracks() of the config's. REQUIRES: config.Validate() is OK. RESOURCE_EXHAUSTED,
  // MEMORY_BUDGET: `budget` is too small for their versions, or the host's for the manifest.
  static absl::StatusOr<std::shared_ptr<Model>> Create(
      ModelConfig config, const std::vector<std::shared_ptr<Track>>& tracks,
      std::shared_ptr<Device> device, std::shared_ptr<MemoryBudget> budget, const Options& options);

  // As it was created or loaded: UpdateTracks() does not change it.
  const ModelConfig& config() const { return config_; }
  const Manifest& manifest() const { return *config_.manifest; }
  Device& device() const { return *device_; }
  // That every checkpoint has, from the next one on.
  AttachedFiles& attached_files() const { return attached_files_; }
  CommitWatchers& watchers() const { return watchers_; }
  DurableState& durable() const { return durable_; }
  VersionHistory& history() const { return history_; }

  // At one moment.
  struct Description {
    std::vector<TrackRef> tracks;
    std::vector<TrackRef> pending_tracks;  // After the next commit; empty: as now.
    int64_t plan_revision = 0;
    // Grows with each change of what a checkpoint has beside a version: the tracks after the next
    // commit, and attached_files().
    int64_t settings_revision = 0;
    int64_t reserved_bytes = 0;
    int64_t run_epoch = 0;
    std::optional<Version> latest;
  };
  Description Describe() const ABSL_LOCKS_EXCLUDED(mu_);

  // --- Tracks ---

  // All or nothing. A track that is put keeps being paused, or not. Takes effect at the next
  // commit, or at once before the first run, or while every track is paused. The same again is OK.
  // INVALID_ARGUMENT: as ValidateTrack(), a name twice, no track left, or a change of what is
  // stored of an existing track, or of the profile that its snapshots have. NOT_FOUND,
  // TRACK_NOT_FOUND. RESOURCE_EXHAUSTED, MEMORY_BUDGET. FAILED_PRECONDITION, NO_DATA_DIR.
  absl::Status UpdateTracks(const TrackChanges& changes) ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<TrackRef> tracks_after_next_commit() const ABSL_LOCKS_EXCLUDED(mu_);
  // Of all tracks, pending and synthesized ones too.
  int64_t reserved_bytes() const ABSL_LOCKS_EXCLUDED(mu_);

  // --- Runs ---

  struct JoinResult {
    int64_t run_epoch = 0;
    int64_t layout_digest = 0;
    bool ready = false;
    std::vector<int64_t> missing_ranks;
    std::optional<Version> latest;
    PushPlan plan;
  };
  // As OpenRun in ema_service.proto. A new launch drops the session of the run before, and must
  // find `newest`, if given, as the newest version (all zero: none). UNAVAILABLE, SESSION_BUSY: it
  // does not, or the model is being rolled back.
  absl::StatusOr<JoinResult> JoinRun(const Launch& launch, int64_t rank, int64_t world_size,
                                     RankLayout layout,
                                     const std::optional<VersionId>& newest = std::nullopt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // True: that launch's run is open, so that JoinRun() joins it. Errors as
  // RunRegistry::CheckLaunch(), and what RefuseNew() or Close() was given.
  absl::StatusOr<bool> IsRunOpen(const Launch& launch) const ABSL_LOCKS_EXCLUDED(mu_);
  // Whether a push at `time`, the first after `from` (nullopt: of all), would update a track that
  // is not paused. INVALID_ARGUMENT, BAD_TIME: a track needs a unit that it lacks, or that it is
  // before the last update in.
  absl::StatusOr<bool> IsDueBy(const TrainingTime& time,
                               const std::optional<TrackStates>& from) const
      ABSL_LOCKS_EXCLUDED(mu_);

  // Makes the version `from`, which `load` gives, the model's newest again, as a version of its
  // own: with values, step, time and state of `from`, in a run epoch of its own. The result is
  // pinned as by PinForSave() (without a data directory as by PinVersion()), also beyond what may
  // be held: then, until one is released, nothing can be pushed, as another version would have no
  // memory. First it ends the
  // open run: its session ends with ABORTED, FENCED, and so do its writers' calls from then on.
  // While `load` runs, which may block for long and allocate one version's memory, JoinRun(),
  // OpenPush() and other calls of this get UNAVAILABLE, SESSION_BUSY; readers go on. What `load`
  // gives has its values in blocks (shared ones, perhaps), and nobody else holds it. Of its tracks,
  // those stay that the model has, by name and in the same form (the log is told of the others);
  // tracks of the model that it has not begin with the next push. Records, watchers and on_commit
  // as at a commit. Errors: those of `load`, what RefuseNew() or Close() was given, or
  // FAILED_PRECONDITION, MODEL_DIFFERS: none of its tracks would stay; the run has been ended,
  // nothing else changed.
  absl::StatusOr<SnapshotRef> RollBack(
      const VersionId& from, absl::FunctionRef<absl::StatusOr<std::shared_ptr<Snapshot>>()> load)
      ABSL_LOCKS_EXCLUDED(push_mu_, mu_);

  // --- Pushes ---

  // Opens a stream of one rank into the session of `start.step`, making that session if need be.
  // `on_end` is called at most once, from any thread (also from inside the RankPush's calls), when
  // the session ends; it may still be running when the RankPush is destroyed, so it must hold what
  // it needs. FAILED_PRECONDITION: RUN_INCOMPLETE, LAYOUT_MISMATCH, PLAN_MISMATCH, PLAN_CHANGED.
  // ABORTED: FENCED, STALE_STEP, STEP_GIVEN_UP. INVALID_ARGUMENT: BAD_TIME, BAD_REQUEST.
  // UNAVAILABLE, SESSION_BUSY: an open earlier step waits for other ranks, or the model is being
  // rolled back, or has no memory for another version yet (see there). RESOURCE_EXHAUSTED. A rank
  // that opens a later step without having committed the open one ends that: STEP_ABANDONED.
  absl::StatusOr<std::unique_ptr<RankPush>> OpenPush(const PushStart& start, PushCallback on_end)
      ABSL_LOCKS_EXCLUDED(push_mu_, mu_);

  struct PushState {
    enum class State { kUnknown, kOpen, kCommitted, kAbandoned } state = State::kUnknown;
    std::optional<Version> record;
    PushPlan plan;  // If committed.
    // The rank's, if this is what was committed last.
    std::optional<uint32_t> digest;
    bool rank_committed = false;
    std::vector<std::pair<Coverage::Range, std::string>> missing;  // With the first tensor's name.
    std::vector<int64_t> missing_ranks;
  };
  // As QueryPush in ema_service.proto.
  absl::StatusOr<PushState> QueryPush(int64_t run_epoch, int64_t step, int64_t rank,
                                      bool abandon_if_unfinished,
                                      std::string_view give_up_reason = {})
      ABSL_LOCKS_EXCLUDED(mu_);

  // Ends the open session if nothing has arrived for `timeout`: SESSION_EXPIRED, naming the ranks
  // that are missing.
  void ExpireSession(SteadyTime now, SteadyTime::duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

  // Refuses new runs and sessions with `status` from here on.
  void RefuseNew(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // RefuseNew(), waits until `deadline` for the open session to end, then ends it. Readers go on.
  void Drain(const absl::Status& status, SteadyTime deadline) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until no push is arriving, nor was one a moment ago; for at most `timeout`.
  void AwaitQuiet(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);
  // Drain() at once; then refuses readers, too, and calls the watchers. Versions that are pinned
  // stay until they are let go.
  void Close(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // OK, or what Close() was given.
  absl::Status closed() const ABSL_LOCKS_EXCLUDED(mu_);

  // --- Versions ---

  // OK, or NOT_FOUND, TRACK_NOT_FOUND, listing the tracks: neither the model nor the newest version
  // has it.
  absl::Status CheckTrack(std::string_view name) const ABSL_LOCKS_EXCLUDED(mu_);

  // Opens one track, or a synthesized average, for a reader: pins its version as PinVersion() does
  // while the result is held. The same asked for again meanwhile gives the same object. NOT_FOUND,
  // TRACK_NOT_FOUND. FAILED_PRECONDITION, NO_VERSION: the track has no value in that version,
  // either. INVALID_ARGUMENT: as Reading::Create(). Other errors as PinVersion(); of these,
  // VERSION_NOT_KEPT comes before TRACK_NOT_FOUND: a version elsewhere may have the track.
  absl::StatusOr<std::shared_ptr<Reading>> OpenReading(std::string_view track, int64_t version,
                                                       int64_t incarnation, Selection selection)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The same of a version that is not in memory: its one track has TrackSnapshot::stored. Pins
  // nothing. INVALID_ARGUMENT: as Reading::Create(). Or the model is closed.
  absl::StatusOr<std::shared_ptr<Reading>> ReadStored(SnapshotRef snapshot, Selection selection)
      ABSL_LOCKS_EXCLUDED(mu_);
  // What ReadStored() has given before, while somebody holds it, so that the version need not be
  // opened again; null: there is none, or the model is closed. Never blocks.
  std::shared_ptr<Reading> FindStoredReading(const VersionId& id, std::string_view track,
                                             const Selection& selection) ABSL_LOCKS_EXCLUDED(mu_);

  // The version that OpenReading() of this track would open for version 0. Absent: nothing has been
  // committed yet, or the track is synthesized: then another average may come under the same
  // version. NOT_FOUND, TRACK_NOT_FOUND.
  absl::StatusOr<std::optional<Version>> NewestOf(std::string_view track) ABSL_LOCKS_EXCLUDED(mu_);
  // The newest version of `step` that OpenReading() of this track can open, among those on the
  // branch that the model is on (see BranchWalk); nullopt: none is in memory. FAILED_PRECONDITION,
  // NO_VERSION. OUT_OF_RANGE: VERSION_NOT_YET; VERSION_NOT_KEPT: synthesized, of another step.
  absl::StatusOr<std::optional<VersionId>> FindStep(std::string_view track, int64_t step)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The record of a version (all zero: the newest), with the statistics of these of its tracks, in
  // that order; none given: of all that average a tensor. The device computes them from the values
  // in memory, then the record has them for as long as it is there. Pins the version meanwhile, and
  // blocks for as long as it takes to read it. Errors as PinVersion(). NOT_FOUND, TRACK_NOT_FOUND.
  // FAILED_PRECONDITION, NO_VERSION: a track has no value in that version. INVALID_ARGUMENT,
  // BAD_REQUEST: a track averages nothing. RESOURCE_EXHAUSTED or INTERNAL: as Device::SumSquares().
  absl::StatusOr<Version> Statistics(const VersionId& id, absl::Span<const std::string> tracks)
      ABSL_LOCKS_EXCLUDED(mu_);

  // How things stand, for people and for metrics: read at once, but never a commit waited for.
  ModelOverview Overview() const ABSL_LOCKS_EXCLUDED(mu_);
  // What statistics there are of the versions that are remembered, oldest first; of many, about
  // `limit` at even distances.
  std::vector<StatisticsPoint> StatisticsHistory(size_t limit) const ABSL_LOCKS_EXCLUDED(mu_);

  // --- Synthesized averages ---

  // What AddSynthesized() needs of a track: one version's memory is reserved. REQUIRES:
  // ValidateTrack() is OK. ALREADY_EXISTS, MODEL_DIFFERS: the model has a track of that name.
  // RESOURCE_EXHAUSTED, MEMORY_BUDGET.
  absl::StatusOr<TrackRef> MakeSynthesizedTrack(const TrackConfig& config) ABSL_LOCKS_EXCLUDED(mu_);
  // Keeps an average that does not come from pushes, under its one track's name. One of that name
  // before it goes, and so does the oldest of more than kMaxSynthesized. It is in memory only, and
  // goes when the model gets a track of that name. Errors as Make..., or the model is closed.
  absl::Status AddSynthesized(SnapshotRef snapshot) ABSL_LOCKS_EXCLUDED(mu_);
  // Null: there is none of that name. Holds it, and the model, until it is dropped; no version
  // counts as pinned by it.
  SnapshotRef FindSynthesized(std::string_view name) ABSL_LOCKS_EXCLUDED(mu_);
  static constexpr size_t kMaxSynthesized = 4;

  // Of all models' device memory.
  const MemoryBudget& budget() const { return *budget_; }
  // A part of it, as MemoryBudget::Reserve(), to be let go of after the blocks that it was for, and
  // without a lock: the device's pool gives up what lies there unused before others may have it.
  absl::StatusOr<std::shared_ptr<const MemoryBudget::Reservation>> ReserveMemory(
      std::string_view what, int64_t bytes) const;

  // Puts a version from a checkpoint in place. Incarnation and run epoch go on above the record's.
  // REQUIRES: nothing has been committed, no run is open; the snapshot's tracks are the model's.
  void Restore(std::shared_ptr<const Snapshot> snapshot) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class RankPush;

  Model(ModelConfig config, std::shared_ptr<Device> device, std::shared_ptr<MemoryBudget> budget,
        const Options& options);

  // Takes the memory of a new track, and it into the model.
  absl::Status AdmitTrackLocked(Track& track) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `tracks` after `changes`, of which `put` has the tracks that are put.
  absl::StatusOr<std::vector<TrackRef>> ChangedLocked(std::vector<TrackRef> tracks,
                                                      const TrackChanges& changes,
                                                      absl::Span<const std::shared_ptr<Track>> put)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // INVALID_ARGUMENT, BAD_TIME: pushes with the units that the trainer reports would fail.
  absl::Status CheckUnitsLocked(const TrackConfig& config, int64_t track_id) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // As PushPlan.may_omit_frozen.
  bool MayOmitFrozenLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Returns what it has replaced, to be let go of without the lock.
  [[nodiscard]] std::vector<TrackRef> ApplyPendingLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // OK, or ALREADY_EXISTS: there is a track of that name, now or from the next commit on.
  absl::Status CheckNoTrackLocked(std::string_view name) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // What pushes are planned by.
  PushPlan PlanLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  int64_t ReservedBytesLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status UnknownTrackLocked(std::string_view name) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // What Options::log is to be told of a commit.
  std::vector<LogEvent> NewWarningsLocked(const Version& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<PushSession::StepPlan> MakePlanLocked(const PushStart& start) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // For a new session. RESOURCE_EXHAUSTED, TOO_MANY_SESSIONS.
  absl::StatusOr<ConcurrencyLimit::Permit> AcquireSessionPermit() const;
  // What a push goes into: one of the two.
  struct Joined {
    std::shared_ptr<PushSession> session;
    std::optional<RankPush::Committed> already_committed;
  };
  absl::StatusOr<Joined> GetSession(const PushStart& start) ABSL_EXCLUSIVE_LOCKS_REQUIRED(push_mu_)
      ABSL_LOCKS_EXCLUDED(mu_);
  // A track of a version. NOT_FOUND, TRACK_NOT_FOUND: the model has not even one without a value.
  // FAILED_PRECONDITION, NO_VERSION.
  absl::StatusOr<const TrackSnapshot*> FindTrack(const Snapshot& version,
                                                 std::string_view name) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Those that Statistics() is about.
  absl::StatusOr<std::vector<const TrackSnapshot*>> AveragingTracks(
      const Snapshot& version, absl::Span<const std::string> names) const ABSL_LOCKS_EXCLUDED(mu_);
  // FAILED_PRECONDITION, MODEL_DIFFERS: the model has no track of the version in the same form.
  absl::Status CheckHasTrackOfLocked(const Snapshot& version) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Makes the snapshot that a rollback has loaded the version after the current one. What is no
  // longer in it; to be freed without the lock.
  std::vector<TrackSnapshot> BecomeNextLocked(Snapshot& loaded, const VersionId& from)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // noexcept: half a commit would hold up all later ones.
  void Publish(const std::shared_ptr<PushSession>& session) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  void FailSession(const std::shared_ptr<PushSession>& session, const absl::Status& status)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Ends `session`, which is not the open one any more, without a version, and tells the log (not
  // of as many as there may be), if it has not ended yet.
  void DropStep(PushSession& session, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  const ModelConfig config_;
  const std::shared_ptr<Device> device_;
  // Outlives the tracks' reservations: a pin may keep a model after its store.
  const std::shared_ptr<MemoryBudget> budget_;
  const std::shared_ptr<MemoryBudget> host_budget_;
  std::unique_ptr<MemoryBudget::Reservation> manifest_memory_;  // Null: it is small.
  // Parts that lock themselves; mutable as a mutex is.
  mutable AttachedFiles attached_files_;
  ReadingCache readings_;
  mutable CommitWatchers watchers_;
  mutable DurableState durable_;
  mutable VersionHistory history_;
  const Options options_;
  // Of steps. A trainer that has diverged drops every one, and hides none that name ranks.
  LogThrottle non_finite_drops_;
  LogThrottle other_drops_;

  // Serializes OpenPush(), which allocates device memory. Readers never take it.
  absl::Mutex push_mu_ ABSL_ACQUIRED_BEFORE(mu_);
  mutable absl::Mutex mu_;  // Readers take it: never held across a device call or a callback.
  std::vector<TrackRef> tracks_ ABSL_GUARDED_BY(mu_);
  std::optional<std::vector<TrackRef>> pending_tracks_ ABSL_GUARDED_BY(mu_);
  int64_t plan_revision_ ABSL_GUARDED_BY(mu_);
  int64_t last_track_id_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_set<std::string> warned_configs_ ABSL_GUARDED_BY(mu_);
  // Oldest first.
  std::vector<SnapshotRef> synthesized_ ABSL_GUARDED_BY(mu_);
  RunRegistry runs_ ABSL_GUARDED_BY(mu_);
  OpenStep open_step_ ABSL_GUARDED_BY(mu_);
  absl::Status closing_ ABSL_GUARDED_BY(mu_);         // Not OK: no new session.
  int64_t tracks_revision_ ABSL_GUARDED_BY(mu_) = 0;  // Of Description::settings_revision.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_MODEL_H_
