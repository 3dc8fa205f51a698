// SPDX-License-Identifier: Apache-2.0
#include "server/core/track_table.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "include/ema/internal/tensor_pattern.h"

namespace ema {
namespace {

// True if an update to come takes the average for zeros.
bool WillBeginWithZeros(const Track& track, const TrackState& state) {
  const std::vector<const Schedule*> schedules = SchedulesOf(track.config());
  for (size_t i = 0; i < schedules.size(); ++i) {
    const auto* rule = std::get_if<ConstantDecayRule>(&schedules[i]->rule());
    if (rule != nullptr && rule->zero_init == ConstantDecayRule::ZeroInit::kPlain &&
        !state[i].started.has_value()) {
      return true;
    }
  }
  return false;
}

// INVALID_ARGUMENT: snapshots of the track before and after the change would not be of one profile.
absl::Status CheckSameProfile(const Track& before, const TrackConfig& config) {
  const TrackConfig& was = before.config();
  if (!was.snapshot_interval.has_value() && !config.snapshot_interval.has_value()) {
    return absl::OkStatus();
  }
  const Schedule& from = was.schedule;
  const Schedule& to = config.schedule;
  // The rule has the age_offset.
  if (was.snapshot_interval == config.snapshot_interval && from.rule() == to.rule() &&
      from.options().start == to.options().start &&
      from.update_interval().unit == to.update_interval().unit) {
    return absl::OkStatus();
  }
  return BadRequest(absl::StrCat("track \"", config.name, "\" (", before.config_text(),
                                 "): its snapshots must be of one profile, so rule, ema_start, "
                                 "snapshot_interval and the unit of update_interval cannot be "
                                 "changed to those of (",
                                 TrackText(config), "); remove it and add another"));
}

absl::Status CheckDataDir(const TrackConfig& config, bool has_data_dir) {
  if (has_data_dir || !config.snapshot_interval.has_value()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoDataDir,
                   absl::StrCat("track \"", config.name, "\": snapshot_interval \"",
                                config.snapshot_interval->ToString(),
                                "\" needs a server that was started with --data-dir"));
}

bool IsNamedIn(const std::vector<TrackRef>& tracks, std::string_view name) {
  return std::any_of(tracks.begin(), tracks.end(),
                     [&](const TrackRef& track) { return track->name() == name; });
}

// The synthesized average of that name.
auto FindNamed(std::vector<SnapshotRef>& snapshots, std::string_view name) {
  return std::find_if(snapshots.begin(), snapshots.end(), [&](const SnapshotRef& snapshot) {
    return snapshot->tracks[0].track->name() == name;
  });
}

// INVALID_ARGUMENT, BAD_TIME: pushes with the units that the trainer reports would fail.
absl::Status CheckUnits(const TrackConfig& config, int64_t track_id, const Snapshot* newest) {
  if (newest == nullptr) return absl::OkStatus();
  const TrackSnapshot* const now = newest->FindId(track_id);
  const TrainingTime& time = newest->record.time;
  absl::Status status =
      PlanTrack(config, now != nullptr ? now->state : TrackState(), time).status();
  if (status.ok()) return status;
  return MakeError(status.code(), GetErrorReason(status),
                   absl::StrCat("track \"", config.name, "\" (", TrackText(config), "): ",
                                status.message(), "; the trainer reports ", time.ToString()));
}

// As PushPlan.may_omit_frozen.
bool MayOmitFrozen(const std::vector<TrackRef>& tracks, const Snapshot* newest,
                   const RunTable& runs) {
  const TrainerRun* const run = runs.run().get();
  if (newest == nullptr || run == nullptr || !run->is_ready() || !run->has_frozen()) return false;
  if (newest->record.run_epoch != run->epoch() || newest->frozen_digest == 0) return false;
  if (runs.requires_frozen()) return false;
  return std::all_of(tracks.begin(), tracks.end(), [&](const TrackRef& track) {
    if (track->config().paused) return true;
    const TrackSnapshot* const now = newest->FindId(track->id());
    return now != nullptr && now->frozen_digest == newest->frozen_digest &&
           !WillBeginWithZeros(*track, now->state);
  });
}

}  // namespace

absl::StatusOr<std::vector<std::shared_ptr<Track>>> MakeTracks(
    const std::vector<TrackConfig>& configs, const Manifest& manifest, MemoryBudget& memory) {
  const int64_t table_bytes = Track::kBytesPerTensor * manifest.tensor_count();
  const bool is_counted = table_bytes * kMaxTracks > TrainerRun::kUnbudgetedBytes;
  std::vector<std::shared_ptr<Track>> tracks;
  tracks.reserve(configs.size());
  for (const TrackConfig& config : configs) {
    std::shared_ptr<const MemoryBudget::Reservation> reservation;
    if (is_counted) {
      EMA_ASSIGN_OR_RETURN(reservation,
                           memory.Reserve(absl::StrCat("tables of track \"", config.name, "\" for ",
                                                       manifest.tensor_count(), " tensors"),
                                          table_bytes));
    }
    tracks.push_back(std::make_shared<Track>(config, manifest, std::move(reservation)));
  }
  return tracks;
}

absl::Status TrackTable::AddFirst(absl::Span<const std::shared_ptr<Track>> tracks) {
  absl::MutexLock lock(&mu_);
  for (const std::shared_ptr<Track>& track : tracks) {
    EMA_RETURN_IF_ERROR(ReserveLocked(*track));
    tracks_.push_back(track);
  }
  return absl::OkStatus();
}

absl::Status TrackTable::ReserveLocked(Track& track) {
  EMA_RETURN_IF_ERROR(CheckDataDir(track.config(), options_.has_data_dir));
  EMA_ASSIGN_OR_RETURN(auto reservation,
                       options_.memory.Reserve(absl::StrCat("model \"", options_.model_name,
                                                            "\", track \"", track.name(), "\""),
                                               track.MemoryBytes(history_->version_count())));
  track.AddToModel(++last_track_id_, std::move(reservation), options_.block_bytes);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TrackRef>> TrackTable::ChangedLocked(
    const TrackChanges& changes, absl::Span<const std::shared_ptr<Track>> put,
    const Snapshot* newest) {
  std::vector<TrackRef> tracks = AfterNextCommitLocked();
  const auto find = [&tracks](std::string_view name) {
    return std::find_if(tracks.begin(), tracks.end(),
                        [&](const TrackRef& track) { return track->name() == name; });
  };
  for (const std::string& name : changes.remove) {
    if (const auto it = find(name); it != tracks.end()) tracks.erase(it);
  }
  absl::flat_hash_set<std::string_view> put_names;
  for (const std::shared_ptr<Track>& made : put) {
    TrackConfig config = made->config();
    if (!put_names.insert(made->name()).second) return TrackGivenTwiceError(config.name);
    const auto it = find(config.name);
    if (it == tracks.end()) {
      EMA_RETURN_IF_ERROR(CheckUnits(config, /*track_id=*/0, newest));
      EMA_RETURN_IF_ERROR(ReserveLocked(*made));
      tracks.push_back(made);
      continue;
    }
    const Track& before = **it;
    EMA_RETURN_IF_ERROR(CheckUnits(config, before.id(), newest));
    // pause and resume are asked for by name.
    config.paused = before.config().paused;
    if (before.config() == config) continue;
    if (!before.HasFormOf(*made)) {
      return BadRequest(absl::StrCat("track \"", config.name, "\" (", before.config_text(),
                                     "): tensor_rules (but their schedules), buffers, dtype, "
                                     "mean_of_last and copy cannot be changed to those of (",
                                     TrackText(config), "); remove it and add another"));
    }
    EMA_RETURN_IF_ERROR(CheckSameProfile(before, config));
    *it = std::make_shared<const Track>(before, config);
  }
  for (const bool pause : {true, false}) {
    for (const std::string& name : pause ? changes.pause : changes.resume) {
      const auto it = find(name);
      if (it == tracks.end()) return UnknownTrackErrorLocked(name);
      if ((*it)->config().paused == pause) continue;
      TrackConfig config = (*it)->config();
      config.paused = pause;
      *it = std::make_shared<const Track>(**it, std::move(config));
    }
  }
  EMA_RETURN_IF_ERROR(CheckTrackCount(tracks.size()));
  int64_t rule_bytes = 0;
  for (const TrackRef& track : tracks) rule_bytes += RuleBytes(track->config());
  EMA_RETURN_IF_ERROR(CheckRuleBytes(rule_bytes));
  return tracks;
}

absl::StatusOr<TrackTable::Proposal> TrackTable::ProposalLocked(
    const TrackChanges& changes, absl::Span<const std::shared_ptr<Track>> put,
    const Snapshot* newest, int64_t number) {
  const int64_t last_track_id = last_track_id_;
  absl::StatusOr<std::vector<TrackRef>> changed = ChangedLocked(changes, put, newest);
  if (!changed.ok()) {
    last_track_id_ = last_track_id;
    return changed.status();
  }
  return Proposal{{number, *std::move(changed)}, changes.remove, last_track_id};
}

void TrackTable::AcceptLocked(Proposal proposal, Replaced& replaced) {
  const auto drop = [&](std::string_view name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto it = FindNamed(synthesized_, name);
    if (it == synthesized_.end()) return;
    replaced.push_back(std::move(*it));
    synthesized_.erase(it);
  };
  PendingChange& change = proposal.change;
  // The tracks' names come first.
  for (const TrackRef& track : change.tracks) drop(track->name());
  for (const std::string& name : proposal.removed) drop(name);
  const std::vector<TrackRef> before = AfterNextCommitLocked();
  if (change.tracks != before) ++revision_;
  replaced.insert(replaced.end(), before.begin(), before.end());
  if (!pending_.empty() && pending_.back().number == change.number) pending_.pop_back();
  pending_.push_back(std::move(change));
}

void TrackTable::WithdrawLocked(Replaced& replaced) {
  if (!proposal_.has_value()) return;
  const std::vector<TrackRef>& tracks = proposal_->change.tracks;
  replaced.insert(replaced.end(), tracks.begin(), tracks.end());
  last_track_id_ = proposal_->last_track_id;
  proposal_.reset();
}

absl::StatusOr<TrackTable::Replaced> TrackTable::Change(
    const TrackChanges& changes, absl::Span<const std::shared_ptr<Track>> put,
    const Snapshot* newest) {
  Replaced replaced;
  absl::MutexLock lock(&mu_);
  EMA_ASSIGN_OR_RETURN(Proposal proposal,
                       ProposalLocked(changes, put, newest, applied_change_ + 1));
  AcceptLocked(std::move(proposal), replaced);
  if (pending_.back().tracks == tracks_) pending_.clear();
  return replaced;
}

absl::StatusOr<TrackTable::Replaced> TrackTable::Propose(
    const TrackChanges& changes, absl::Span<const std::shared_ptr<Track>> put,
    const Snapshot* newest, int64_t number, int64_t accepted) {
  Replaced replaced;
  absl::MutexLock lock(&mu_);
  if (number <= newest_change_) {
    return absl::AbortedError(absl::StrCat("model \"", options_.model_name, "\": change ", number,
                                           " of the tracks was made before change ",
                                           newest_change_));
  }
  newest_change_ = number;
  AcceptProposalLocked(accepted, replaced);
  WithdrawLocked(replaced);
  EMA_ASSIGN_OR_RETURN(proposal_, ProposalLocked(changes, put, newest, number));
  return replaced;
}

void TrackTable::AcceptProposalLocked(int64_t number, Replaced& replaced) {
  if (!proposal_.has_value() || proposal_->change.number != number) return;
  AcceptLocked(*std::exchange(proposal_, std::nullopt), replaced);
}

TrackTable::Replaced TrackTable::Accept(int64_t number) {
  Replaced replaced;
  absl::MutexLock lock(&mu_);
  AcceptProposalLocked(number, replaced);
  return replaced;
}

TrackTable::Replaced TrackTable::Withdraw(int64_t number) {
  Replaced replaced;
  absl::MutexLock lock(&mu_);
  newest_change_ = std::max(newest_change_, number);
  if (proposal_.has_value() && proposal_->change.number == number) WithdrawLocked(replaced);
  return replaced;
}

TrackTable::Replaced TrackTable::ApplyPending(int64_t in_force) {
  Replaced replaced;
  absl::MutexLock lock(&mu_);
  AcceptProposalLocked(in_force, replaced);
  while (!pending_.empty() && pending_.front().number <= in_force) {
    replaced.insert(replaced.end(), tracks_.begin(), tracks_.end());
    tracks_ = std::move(pending_.front().tracks);
    applied_change_ = pending_.front().number;
    pending_.erase(pending_.begin());
  }
  return replaced;
}

bool TrackTable::AreAllPaused() const {
  absl::MutexLock lock(&mu_);
  return std::all_of(tracks_.begin(), tracks_.end(),
                     [](const TrackRef& track) { return track->config().paused; });
}

PushPlan TrackTable::Plan(const Snapshot* newest, const RunTable& runs) const {
  absl::MutexLock lock(&mu_);
  PushPlan plan{.revision = PlanRevisionLocked(),
                .tracks = {},
                .may_omit_frozen = MayOmitFrozen(tracks_, newest, runs)};
  for (const TrackRef& track : tracks_) {
    const TrackSnapshot* const now = newest != nullptr ? newest->FindId(track->id()) : nullptr;
    plan.tracks.push_back({track, now != nullptr ? now->state : TrackState()});
  }
  return plan;
}

absl::StatusOr<StepPlan> TrackTable::PlanStep(const PushStart& start, const Snapshot* newest,
                                              const RunTable& runs) const {
  absl::MutexLock lock(&mu_);
  if (start.plan_revision != 0 && start.plan_revision != PlanRevisionLocked()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kPlanChanged,
                     absl::StrCat("plan_revision: ", start.plan_revision, " given, model \"",
                                  options_.model_name, "\" has ", PlanRevisionLocked(),
                                  ": its tracks have changed; OpenRun returns the new plan"));
  }
  if (start.omits_frozen && !MayOmitFrozen(tracks_, newest, runs)) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kPlanChanged,
        absl::StrCat(
            "frozen: step ", start.step, " omits the frozen tensors, but model \"",
            options_.model_name,
            runs.requires_frozen()
                ? "\" requires them for the rest of the run: ranks disagreed whether they changed"
                : "\" does not have this run's values in all of its tracks; push them "
                  "until PushPlan.may_omit_frozen is true"));
  }
  constexpr int64_t kMaxUpdates = int64_t{1} << 53;
  if (start.imported_updates < 0 ||
      start.imported_updates > (newest == nullptr ? kMaxUpdates : 0)) {
    return BadRequest(absl::StrCat("imported_updates: ", start.imported_updates, " given, model \"",
                                   options_.model_name, "\" expects ",
                                   newest == nullptr ? "0 to 2^53" : "0: it has a version"));
  }
  StepPlan plan{start.step,  start.time, start.omits_frozen, start.imported_updates,
                start.round, {}};
  for (const TrackRef& track : tracks_) {
    const TrackSnapshot* const base = newest != nullptr ? newest->FindId(track->id()) : nullptr;
    std::vector<Schedule::Update> updates(SchedulesOf(track->config()).size());
    TrackState state = base != nullptr ? base->state : TrackState(updates.size());
    if (start.imported_updates > 0) {
      // This push is the last of them. A mean of the last ones, whose weights are not there, begins
      // with it.
      const bool is_mean_of_last = track->config().schedule.kept_weights_count() > 0;
      const int64_t before = is_mean_of_last ? 0 : start.imported_updates - 1;
      for (Schedule::State& of_schedule : state) {
        of_schedule.update_count = of_schedule.averaged_count = before;
      }
    }
    if (!track->config().paused) {
      absl::StatusOr<std::vector<Schedule::Update>> planned =
          PlanTrack(track->config(), state, start.time);
      if (!planned.ok()) {
        return WithPrefix(planned.status(), absl::StrCat("track \"", track->name(), "\": "));
      }
      updates = *std::move(planned);
      for (Schedule::Update& update : updates) {
        // The values are the average's own, also where an average begins at zero.
        if (start.imported_updates > 0 && update.due) {
          update.update_weight = 1;
          update.from_zero = false;
        }
      }
    }
    plan.tracks.push_back({track, base, std::move(state), std::move(updates)});
  }
  return plan;
}

absl::StatusOr<bool> TrackTable::IsDueBy(const TrainingTime& time,
                                         const std::optional<TrackStates>& from) const {
  EMA_RETURN_IF_ERROR(time.Validate());
  absl::MutexLock lock(&mu_);
  for (const TrackRef& track : tracks_) {
    if (track->config().paused) continue;
    TrackState state;
    if (from.has_value()) {
      const auto found = from->find(track->name());
      if (found != from->end()) state = found->second;
    }
    const absl::StatusOr<std::vector<Schedule::Update>> updates =
        PlanTrack(track->config(), state, time);
    if (!updates.ok()) {
      return WithPrefix(updates.status(), absl::StrCat("track \"", track->name(), "\": "));
    }
    if (IsDue(*updates)) return true;
  }
  return false;
}

TrackTable::State TrackTable::state() const {
  absl::MutexLock lock(&mu_);
  const std::vector<TrackRef>& next = AfterNextCommitLocked();
  return {.tracks = tracks_,
          .pending_tracks = next != tracks_ ? next : std::vector<TrackRef>(),
          .plan_revision = PlanRevisionLocked(),
          .revision = revision_,
          .accepted_change = pending_.empty() ? applied_change_ : pending_.back().number,
          .newest_change = newest_change_,
          .reserved_bytes = ReservedBytesLocked()};
}

std::vector<TrackRef> TrackTable::after_next_commit() const {
  absl::MutexLock lock(&mu_);
  return AfterNextCommitLocked();
}

absl::StatusOr<std::vector<TrackRef>> TrackTable::After(int64_t change) const {
  absl::MutexLock lock(&mu_);
  if (change == applied_change_) return tracks_;
  for (const PendingChange& pending : pending_) {
    if (pending.number == change) return pending.tracks;
  }
  if (proposal_.has_value() && proposal_->change.number == change) return proposal_->change.tracks;
  return MakeError(
      absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
      absl::StrCat("model \"", options_.model_name, "\": its tracks are being changed"),
      absl::Milliseconds(100));
}

int64_t TrackTable::reserved_bytes() const {
  absl::MutexLock lock(&mu_);
  return ReservedBytesLocked();
}

int64_t TrackTable::ReservedBytesLocked() const {
  absl::flat_hash_map<int64_t, int64_t> bytes;  // By track.
  const auto add = [&bytes](const std::vector<TrackRef>& tracks) {
    for (const TrackRef& track : tracks) bytes[track->id()] = track->reserved_bytes();
  };
  add(tracks_);
  for (const PendingChange& pending : pending_) add(pending.tracks);
  if (proposal_.has_value()) add(proposal_->change.tracks);
  for (const SnapshotRef& result : synthesized_) {
    bytes[result->tracks[0].track->id()] = result->tracks[0].track->reserved_bytes();
  }
  int64_t total = 0;
  for (const auto& [id, track_bytes] : bytes) total += track_bytes;
  return total;
}

absl::Status TrackTable::UnknownTrackErrorLocked(std::string_view name) const {
  const auto append_name = [](std::string* out, const TrackRef& track) {
    out->append(track->name());
  };
  const auto append_result = [](std::string* out, const SnapshotRef& result) {
    out->append(result->tracks[0].track->name());
  };
  return MakeError(
      absl::StatusCode::kNotFound, ErrorReason::kTrackNotFound,
      absl::StrCat("model \"", options_.model_name, "\" has no track \"", std::string(name),
                   "\"; it has ", absl::StrJoin(tracks_, ", ", append_name),
                   synthesized_.empty() ? "" : "; synthesized for pulls: ",
                   absl::StrJoin(synthesized_, ", ", append_result)));
}

absl::Status TrackTable::CheckTrack(std::string_view name) const {
  absl::MutexLock lock(&mu_);
  if (IsNamedIn(tracks_, name) || history_->NewestHasTrack(name)) return absl::OkStatus();
  return UnknownTrackErrorLocked(name);
}

absl::StatusOr<const TrackSnapshot*> TrackTable::FindIn(const Snapshot& version,
                                                        std::string_view name) const {
  // A track that was removed is still in the versions that have it.
  if (const TrackSnapshot* const found = version.Find(name)) return found;
  EMA_RETURN_IF_ERROR(CheckTrack(name));
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoVersion,
                   absl::StrCat("track \"", std::string(name), "\" has no value in version ",
                                version.record.number, " yet"));
}

absl::Status TrackTable::CheckNameIsFreeLocked(std::string_view name) const {
  if (!IsNamedIn(tracks_, name) && !IsNamedIn(AfterNextCommitLocked(), name) &&
      !history_->NewestHasTrack(name)) {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kAlreadyExists, ErrorReason::kModelDiffers,
                   absl::StrCat("name \"", std::string(name), "\": model \"", options_.model_name,
                                "\" has a track of that name; a right one is \"post-hoc\""));
}

absl::StatusOr<TrackRef> TrackTable::MakeSynthesizedTrack(const TrackConfig& config) {
  EMA_ASSIGN_OR_RETURN(const std::vector<std::shared_ptr<Track>> made,
                       MakeTracks({config}, *options_.manifest, *options_.host_budget));
  const std::shared_ptr<Track>& track = made[0];
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(history_->CheckOpen());
  EMA_RETURN_IF_ERROR(CheckNameIsFreeLocked(config.name));
  EMA_ASSIGN_OR_RETURN(auto reservation,
                       options_.memory.Reserve(absl::StrCat("model \"", options_.model_name,
                                                            "\", \"", config.name, "\""),
                                               track->layout().total_bytes()));
  track->AddToModel(--last_synthesized_id_, std::move(reservation), options_.block_bytes);
  return track;
}

absl::Status TrackTable::AddSynthesized(SnapshotRef snapshot) {
  SnapshotRef dropped;  // Freed after the lock is released.
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(history_->CheckOpen());
  const std::string& name = snapshot->tracks[0].track->name();
  EMA_RETURN_IF_ERROR(CheckNameIsFreeLocked(name));
  auto it = FindNamed(synthesized_, name);
  if (it == synthesized_.end() && synthesized_.size() == kMaxSynthesized) {
    it = synthesized_.begin();
  }
  if (it != synthesized_.end()) {
    dropped = std::move(*it);
    synthesized_.erase(it);
  }
  synthesized_.push_back(std::move(snapshot));
  return absl::OkStatus();
}

SnapshotRef TrackTable::FindSynthesized(std::string_view name) {
  absl::MutexLock lock(&mu_);
  const auto it = FindNamed(synthesized_, name);
  return it != synthesized_.end() ? WithOwner(*it, options_.keep_alive()) : nullptr;
}

void TrackTable::DropSynthesized() {
  std::vector<SnapshotRef> dropped;  // Freed without the lock.
  absl::MutexLock lock(&mu_);
  dropped.swap(synthesized_);
}

std::vector<LogEvent> TrackTable::NewWarnings(const Version& record) {
  constexpr double kStallGap = 5e-4;  // Of decays of 0.9999 and up.
  std::vector<LogEvent> warnings;
  absl::MutexLock lock(&mu_);
  // `rule`: of the track's, by whose schedule the tensors go; null: the track's own schedule.
  const auto check = [&](const TrackVersion& track,
                         const TrackVersion* rule) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const TrackVersion& by = rule != nullptr ? *rule : track;
    if (by.stall_gap < kStallGap) return;
    LogEvent event{LogLevel::kWarning, "average stalls", {{"model", options_.model_name}}};
    event.fields.emplace_back("track", track.track);
    if (rule != nullptr) event.fields.emplace_back("tensors", rule->track);
    event.fields.emplace_back("schedule", by.config);
    if (!warned_configs_.insert(ToText(event)).second) return;
    event.fields.emplace_back("update_weight", by.update_weight);
    event.fields.emplace_back("stall_gap", by.stall_gap);
    event.fields.emplace_back("hint",
                              "the weight is below what the track's dtype can resolve: values "
                              "stall within stall_gap of their size short of the average; dtype "
                              "float64 resolves far more, at twice the memory of float32");
    warnings.push_back(std::move(event));
  };
  for (const TrackVersion& track : record.tracks) {
    check(track, nullptr);
    for (const TrackVersion& rule : track.rules) check(track, &rule);
  }
  return warnings;
}

}  // namespace ema
