// SPDX-License-Identifier: Apache-2.0
//
// The tracks of a model, now and from the next commit on, and its synthesized averages.
#ifndef EMA_SERVER_CORE_TRACK_TABLE_H_
#define EMA_SERVER_CORE_TRACK_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ema/manifest.h"
#include "ema/time.h"
#include "server/base/log_event.h"
#include "server/core/device_memory.h"
#include "server/core/model_config.h"
#include "server/core/push_session.h"
#include "server/core/run_table.h"
#include "server/core/snapshot.h"
#include "server/core/track.h"
#include "server/core/version_history.h"

namespace ema {

// Makes a track for each config, for TrackTable::AddFirst(). RESOURCE_EXHAUSTED, MEMORY_BUDGET:
// `memory` has no room for their tables; those of a manifest with few tensors are not counted (see
// Model::kUnbudgetedBytes).
absl::StatusOr<std::vector<std::shared_ptr<Track>>> MakeTracks(
    const std::vector<TrackConfig>& configs, const Manifest& manifest, MemoryBudget& memory);

// Invariant: each track and each synthesized average has a name and an id of its own, and the
// memory of all its versions is reserved. A model has 1 to kMaxTracks tracks.
//
// Thread-safe. The model changes the tracks under its own lock, so reads under the model's lock are
// consistent. Lock order: the model's, this one's, the history's.
class TrackTable {
 public:
  static constexpr size_t kMaxSynthesized = 4;

  struct Options {
    std::string model_name;
    std::shared_ptr<const Manifest> manifest;
    DeviceMemory memory;
    std::shared_ptr<MemoryBudget> host_budget;
    int64_t block_bytes = 0;
    int64_t incarnation = 1;  // Of the model. Plan revisions begin with it.
    bool has_data_dir = false;
    KeepAlive keep_alive;
  };
  // `history` is the model's, and outlives the table.
  TrackTable(Options options, const VersionHistory* history)
      : options_(std::move(options)), history_(history) {}

  // --- Queries ---

  struct State {  // At one moment.
    std::vector<TrackRef> tracks;
    std::vector<TrackRef> pending_tracks;  // After the next commit; empty: no change.
    int64_t plan_revision = 0;
    int64_t revision = 0;  // Grows whenever after_next_commit() changes.
    // The number of the newest change that was accepted, and of the newest that was proposed or
    // withdrawn.
    int64_t accepted_change = 0;
    int64_t newest_change = 0;
    int64_t reserved_bytes = 0;  // For all tracks, also pending, proposed and synthesized ones.
  };
  State state() const ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<TrackRef> after_next_commit() const ABSL_LOCKS_EXCLUDED(mu_);
  // The tracks after the change of that number, which has been accepted, here or at the home.
  // UNAVAILABLE, MODEL_BUSY: they have been changed again.
  absl::StatusOr<std::vector<TrackRef>> After(int64_t change) const ABSL_LOCKS_EXCLUDED(mu_);
  int64_t reserved_bytes() const ABSL_LOCKS_EXCLUDED(mu_);
  bool AreAllPaused() const ABSL_LOCKS_EXCLUDED(mu_);
  // NOT_FOUND, TRACK_NOT_FOUND: neither the model nor its newest version has the track; the message
  // lists the tracks.
  absl::Status CheckTrack(std::string_view name) const ABSL_LOCKS_EXCLUDED(mu_);
  // A track of a version. Errors as CheckTrack(). FAILED_PRECONDITION, NO_VERSION: it has no value
  // in that version.
  absl::StatusOr<const TrackSnapshot*> FindIn(const Snapshot& version, std::string_view name) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Whether a push at `time` would update a track that is not paused. `from`: the states of the
  // tracks before it; nullopt: nothing was pushed before. INVALID_ARGUMENT, BAD_TIME: a track needs
  // a unit that `time` lacks, or its last update was later.
  absl::StatusOr<bool> IsDueBy(const TrainingTime& time,
                               const std::optional<TrackStates>& from) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // The plan that clients get.
  PushPlan Plan(const Snapshot* newest, const RunTable& runs) const ABSL_LOCKS_EXCLUDED(mu_);
  // Decides for each track whether the step updates it, and its update weight. FAILED_PRECONDITION,
  // PLAN_CHANGED. INVALID_ARGUMENT: BAD_REQUEST, BAD_TIME.
  absl::StatusOr<StepPlan> PlanStep(const PushStart& start, const Snapshot* newest,
                                    const RunTable& runs) const ABSL_LOCKS_EXCLUDED(mu_);

  // --- Changes, by the model under its lock ---

  // Adds the model's first tracks. RESOURCE_EXHAUSTED, MEMORY_BUDGET. FAILED_PRECONDITION,
  // NO_DATA_DIR.
  absl::Status AddFirst(absl::Span<const std::shared_ptr<Track>> tracks) ABSL_LOCKS_EXCLUDED(mu_);
  // References to be dropped without a lock: they may free much.
  using Replaced = std::vector<std::shared_ptr<const void>>;
  // Changes the pending tracks, all or nothing; `put` was made from `changes.put`. Errors as
  // Model::UpdateTracks().
  absl::StatusOr<Replaced> Change(const TrackChanges& changes,
                                  absl::Span<const std::shared_ptr<Track>> put,
                                  const Snapshot* newest) ABSL_LOCKS_EXCLUDED(mu_);
  // Makes the tracks after the pending changes up to number `in_force` the current ones. If that
  // change is still a proposal, accepts it first.
  [[nodiscard]] Replaced ApplyPending(int64_t in_force = INT64_MAX) ABSL_LOCKS_EXCLUDED(mu_);

  // The same change in several partitions of a model: it has a number, which is higher than those
  // of all earlier changes. Each partition keeps it as a proposal, with its memory reserved, until
  // it is accepted, or withdrawn everywhere because one partition has refused it. There is one
  // proposal at most; a newer one replaces it.

  // Keeps a proposal, which is made from the tracks after the change `accepted`, and accepts that
  // one if it still is a proposal. Errors as Change(). ABORTED: `number` is not the highest.
  absl::StatusOr<Replaced> Propose(const TrackChanges& changes,
                                   absl::Span<const std::shared_ptr<Track>> put,
                                   const Snapshot* newest, int64_t number, int64_t accepted)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Makes the proposed tracks the pending ones. REQUIRES: the proposal has that number.
  [[nodiscard]] Replaced Accept(int64_t number) ABSL_LOCKS_EXCLUDED(mu_);
  // Drops the proposal of that number, which will also be refused if it comes later.
  [[nodiscard]] Replaced Withdraw(int64_t number) ABSL_LOCKS_EXCLUDED(mu_);

  // Warnings about schedules in the record of a commit, each once.
  std::vector<LogEvent> NewWarnings(const Version& record) ABSL_LOCKS_EXCLUDED(mu_);

  // --- Synthesized averages ---

  // Makes a track for AddSynthesized(), with the memory of one version reserved. REQUIRES:
  // ValidateTrack() is OK. ALREADY_EXISTS, MODEL_DIFFERS: the model has a track of that name.
  // RESOURCE_EXHAUSTED, MEMORY_BUDGET. Or the status given to Model::Close().
  absl::StatusOr<TrackRef> MakeSynthesizedTrack(const TrackConfig& config) ABSL_LOCKS_EXCLUDED(mu_);
  // Keeps an average that was not pushed, in memory only, under the name of its one track. Replaces
  // the average of that name, else the oldest of kMaxSynthesized. Change() drops it if it puts or
  // removes that name. Errors as MakeSynthesizedTrack().
  absl::Status AddSynthesized(SnapshotRef snapshot) ABSL_LOCKS_EXCLUDED(mu_);
  // Null: there is none of that name. The result keeps the model alive, and pins no version.
  SnapshotRef FindSynthesized(std::string_view name) ABSL_LOCKS_EXCLUDED(mu_);
  void DropSynthesized() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct PendingChange {
    int64_t number = 0;
    std::vector<TrackRef> tracks;  // All, after the change.
  };
  struct Proposal {
    PendingChange change;
    std::vector<std::string> removed;  // Names.
    int64_t last_track_id = 0;         // Before its tracks were made.
  };

  // Reserves the memory of a new track, and gives it its id.
  absl::Status ReserveLocked(Track& track) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<std::vector<TrackRef>> ChangedLocked(const TrackChanges& changes,
                                                      absl::Span<const std::shared_ptr<Track>> put,
                                                      const Snapshot* newest)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<Proposal> ProposalLocked(const TrackChanges& changes,
                                          absl::Span<const std::shared_ptr<Track>> put,
                                          const Snapshot* newest, int64_t number)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // These add the tracks that they drop to `replaced`.
  void AcceptLocked(Proposal proposal, Replaced& replaced) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Does nothing if the proposal has another number.
  void AcceptProposalLocked(int64_t number, Replaced& replaced) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WithdrawLocked(Replaced& replaced) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  const std::vector<TrackRef>& AfterNextCommitLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return pending_.empty() ? tracks_ : pending_.back().tracks;
  }
  int64_t PlanRevisionLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return options_.incarnation + applied_change_;
  }
  // ALREADY_EXISTS, MODEL_DIFFERS: there is a track of that name, now or from the next commit on.
  absl::Status CheckNameIsFreeLocked(std::string_view name) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status UnknownTrackErrorLocked(std::string_view name) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  int64_t ReservedBytesLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const Options options_;
  const VersionHistory* const history_;

  mutable absl::Mutex mu_;
  std::vector<TrackRef> tracks_ ABSL_GUARDED_BY(mu_);
  std::vector<PendingChange> pending_ ABSL_GUARDED_BY(mu_);  // Accepted, oldest first.
  std::optional<Proposal> proposal_ ABSL_GUARDED_BY(mu_);
  // Numbers of changes. 0: the tracks are those of the creation.
  int64_t applied_change_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t newest_change_ ABSL_GUARDED_BY(mu_) = 0;  // Proposed or withdrawn.
  int64_t revision_ ABSL_GUARDED_BY(mu_) = 0;
  // The ids of tracks count up, and are the same in all partitions of a model. Those of synthesized
  // averages count down.
  int64_t last_track_id_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t last_synthesized_id_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<SnapshotRef> synthesized_ ABSL_GUARDED_BY(mu_);  // Oldest first.
  absl::flat_hash_set<std::string> warned_configs_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_TRACK_TABLE_H_
