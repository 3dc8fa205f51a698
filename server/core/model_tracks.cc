// SPDX-License-Identifier: Apache-2.0
//
// The part of Model that makes and changes tracks.
#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "include/ema/internal/tensor_pattern.h"
#include "server/core/model.h"

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
                                 "changed, by (",
                                 TrackText(config), "); remove it and add another"));
}

absl::Status CheckDataDir(const TrackConfig& config, bool has_data_dir) {
  if (has_data_dir || !config.snapshot_interval.has_value()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoDataDir,
                   absl::StrCat("track \"", config.name, "\": snapshot_interval \"",
                                config.snapshot_interval->ToString(),
                                "\" needs a server that was started with --data-dir"));
}

// The synthesized average of that name.
std::vector<SnapshotRef>::iterator FindNamed(std::vector<SnapshotRef>& snapshots,
                                             std::string_view name) {
  return std::find_if(snapshots.begin(), snapshots.end(), [&](const SnapshotRef& snapshot) {
    return snapshot->tracks[0].track->name() == name;
  });
}

}  // namespace

absl::StatusOr<std::vector<std::shared_ptr<Track>>> MakeTracks(
    const std::vector<TrackConfig>& configs, const Manifest& manifest, MemoryBudget& memory) {
  const int64_t table_bytes = Track::kBytesPerTensor * manifest.tensor_count();
  const bool is_counted = table_bytes * kMaxTracks > TrainerRun::kFreeBytes;
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

absl::Status Model::AdmitTrackLocked(Track& track) {
  EMA_RETURN_IF_ERROR(CheckDataDir(track.config(), options_.has_data_dir));
  EMA_ASSIGN_OR_RETURN(
      auto reservation,
      ReserveMemory(absl::StrCat("model \"", config_.name, "\", track \"", track.name(), "\""),
                    track.MemoryBytes(history_.version_count())));
  track.AddToModel(++last_track_id_, std::move(reservation), options_.block_bytes);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TrackRef>> Model::ChangedLocked(
    std::vector<TrackRef> tracks, const TrackChanges& changes,
    absl::Span<const std::shared_ptr<Track>> put) {
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
    if (!put_names.insert(made->name()).second) return TrackGivenTwice(config.name);
    const auto it = find(config.name);
    if (it == tracks.end()) {
      EMA_RETURN_IF_ERROR(CheckUnitsLocked(config, /*track_id=*/0));
      EMA_RETURN_IF_ERROR(AdmitTrackLocked(*made));
      tracks.push_back(made);
      continue;
    }
    const Track& before = **it;
    EMA_RETURN_IF_ERROR(CheckUnitsLocked(config, before.id()));
    // pause and resume are asked for by name.
    config.paused = before.config().paused;
    if (before.config() == config) continue;
    if (!before.HasFormOf(*made)) {
      return BadRequest(absl::StrCat("track \"", config.name, "\" (", before.config_text(),
                                     "): tensor_rules (but their schedules), buffers, compensated "
                                     "and copy cannot be changed, by (",
                                     TrackText(config), "); remove it and add another"));
    }
    EMA_RETURN_IF_ERROR(CheckSameProfile(before, config));
    *it = std::make_shared<const Track>(before, config);
  }
  for (const bool pause : {true, false}) {
    for (const std::string& name : pause ? changes.pause : changes.resume) {
      const auto it = find(name);
      if (it == tracks.end()) return UnknownTrackLocked(name);
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

absl::Status Model::CheckUnitsLocked(const TrackConfig& config, int64_t track_id) const {
  const SnapshotRef current = history_.newest();
  if (current == nullptr) return absl::OkStatus();
  const TrackSnapshot* const now = current->FindId(track_id);
  absl::Status status =
      PlanTrack(config, now != nullptr ? now->state : TrackState(), current->record.time).status();
  if (status.ok()) return status;
  return MakeError(
      status.code(), GetErrorReason(status),
      absl::StrCat("track \"", config.name, "\" (", TrackText(config), "): ", status.message(),
                   "; the trainer reports ", current->record.time.ToString()));
}

absl::Status Model::UpdateTracks(const TrackChanges& changes) {
  if (!changes.put.empty()) EMA_RETURN_IF_ERROR(CheckTrackCount(changes.put.size()));
  GlobBudget budget;
  for (const TrackConfig& config : changes.put) {
    EMA_RETURN_IF_ERROR(ValidateTrack(config, manifest(), budget));
  }
  EMA_ASSIGN_OR_RETURN(const std::vector<std::shared_ptr<Track>> put,
                       MakeTracks(changes.put, manifest(), *host_budget_));
  // Freed, as what is not used of `put`, after the lock is let go.
  std::vector<SnapshotRef> dropped;
  std::vector<TrackRef> replaced;
  std::optional<std::vector<TrackRef>> not_to_come;
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(history_.closed());
  EMA_ASSIGN_OR_RETURN(std::vector<TrackRef> changed,
                       ChangedLocked(pending_tracks_.value_or(tracks_), changes, put));
  const auto drop = [&](std::string_view name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto it = FindNamed(synthesized_, name);
    if (it == synthesized_.end()) return;
    dropped.push_back(std::move(*it));
    synthesized_.erase(it);
  };
  // The tracks' names come first.
  for (const TrackRef& track : changed) drop(track->name());
  for (const std::string& name : changes.remove) drop(name);
  if (changed != pending_tracks_.value_or(tracks_)) ++tracks_revision_;
  not_to_come = std::exchange(pending_tracks_, std::move(changed));
  if (*pending_tracks_ == tracks_) pending_tracks_.reset();
  const bool all_paused = std::all_of(tracks_.begin(), tracks_.end(),
                                      [](const TrackRef& track) { return track->config().paused; });
  // Without a run, or an active track, there may never be a next commit.
  if (runs_.run() == nullptr || all_paused) replaced = ApplyPendingLocked();
  return absl::OkStatus();
}

std::vector<TrackRef> Model::ApplyPendingLocked() {
  if (!pending_tracks_.has_value()) return {};
  ++plan_revision_;
  return std::exchange(tracks_, *std::exchange(pending_tracks_, std::nullopt));
}

bool Model::MayOmitFrozenLocked() const {
  const SnapshotRef current = history_.newest();
  const TrainerRun* const run = runs_.run().get();
  if (current == nullptr || run == nullptr || !run->ready() || !run->has_frozen()) return false;
  // Once is a write that not all ranks have seen. Twice is a tensor of some ranks that goes on
  // changing: each time the others would leave theirs out, and the step be lost.
  if (runs_.has_frozen_mismatches()) return false;
  return std::all_of(tracks_.begin(), tracks_.end(),
                     [&](const TrackRef& track) ABSL_SHARED_LOCKS_REQUIRED(mu_) {
                       if (track->config().paused) return true;
                       const TrackSnapshot* const now = current->FindId(track->id());
                       return now != nullptr && now->frozen_run_epoch == run->epoch() &&
                              !WillBeginWithZeros(*track, now->state);
                     });
}

PushPlan Model::PlanLocked() const {
  const SnapshotRef current = history_.newest();
  PushPlan plan{.revision = plan_revision_, .tracks = {}, .may_omit_frozen = MayOmitFrozenLocked()};
  for (const TrackRef& track : tracks_) {
    const TrackSnapshot* const now = current != nullptr ? current->FindId(track->id()) : nullptr;
    plan.tracks.push_back({track, now != nullptr ? now->state : TrackState()});
  }
  return plan;
}

std::vector<TrackRef> Model::tracks_after_next_commit() const {
  absl::MutexLock lock(&mu_);
  return pending_tracks_.value_or(tracks_);
}

int64_t Model::reserved_bytes() const {
  absl::MutexLock lock(&mu_);
  return ReservedBytesLocked();
}

int64_t Model::ReservedBytesLocked() const {
  absl::flat_hash_map<int64_t, int64_t> bytes;  // By track.
  for (const TrackRef& track : tracks_) bytes[track->id()] = track->reserved_bytes();
  for (const TrackRef& track : pending_tracks_.value_or(std::vector<TrackRef>())) {
    bytes[track->id()] = track->reserved_bytes();
  }
  for (const SnapshotRef& result : synthesized_) {
    bytes[result->tracks[0].track->id()] = result->tracks[0].track->reserved_bytes();
  }
  int64_t total = 0;
  for (const auto& [id, track_bytes] : bytes) total += track_bytes;
  return total;
}

absl::Status Model::UnknownTrackLocked(std::string_view name) const {
  const auto append_name = [](std::string* out, const TrackRef& track) {
    out->append(track->name());
  };
  const auto append_result = [](std::string* out, const SnapshotRef& result) {
    out->append(result->tracks[0].track->name());
  };
  return MakeError(absl::StatusCode::kNotFound, ErrorReason::kTrackNotFound,
                   absl::StrCat("model \"", config_.name, "\" has no track \"", std::string(name),
                                "\"; it has ", absl::StrJoin(tracks_, ", ", append_name),
                                synthesized_.empty() ? "" : "; synthesized for pulls: ",
                                absl::StrJoin(synthesized_, ", ", append_result)));
}

absl::Status Model::CheckTrack(std::string_view name) const {
  absl::MutexLock lock(&mu_);
  const bool is_known = std::any_of(tracks_.begin(), tracks_.end(),
                                    [&](const TrackRef& track) { return track->name() == name; }) ||
                        history_.NewestHasTrack(name);
  return is_known ? absl::OkStatus() : UnknownTrackLocked(name);
}

absl::Status Model::CheckNoTrackLocked(std::string_view name) const {
  const auto is_named = [&](const TrackRef& track) { return track->name() == name; };
  if (std::none_of(tracks_.begin(), tracks_.end(), is_named) &&
      (!pending_tracks_.has_value() ||
       std::none_of(pending_tracks_->begin(), pending_tracks_->end(), is_named)) &&
      !history_.NewestHasTrack(name)) {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kAlreadyExists, ErrorReason::kModelDiffers,
                   absl::StrCat("name \"", std::string(name), "\": model \"", config_.name,
                                "\" has a track of that name; a right one is \"post-hoc\""));
}

absl::StatusOr<TrackRef> Model::MakeSynthesizedTrack(const TrackConfig& config) {
  EMA_ASSIGN_OR_RETURN(const std::vector<std::shared_ptr<Track>> made,
                       MakeTracks({config}, manifest(), *host_budget_));
  const std::shared_ptr<Track>& track = made[0];
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(history_.closed());
  EMA_RETURN_IF_ERROR(CheckNoTrackLocked(config.name));
  EMA_ASSIGN_OR_RETURN(auto reservation, ReserveMemory(absl::StrCat("model \"", config_.name,
                                                                    "\", \"", config.name, "\""),
                                                       track->layout().total_bytes()));
  track->AddToModel(++last_track_id_, std::move(reservation), options_.block_bytes);
  return track;
}

absl::Status Model::AddSynthesized(SnapshotRef snapshot) {
  SnapshotRef dropped;  // Freed after the lock is let go.
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(history_.closed());
  const std::string& name = snapshot->tracks[0].track->name();
  EMA_RETURN_IF_ERROR(CheckNoTrackLocked(name));
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

SnapshotRef Model::FindSynthesized(std::string_view name) {
  absl::MutexLock lock(&mu_);
  const auto it = FindNamed(synthesized_, name);
  if (it == synthesized_.end()) return nullptr;
  const Snapshot* const raw = it->get();
  return SnapshotRef(raw, [model = shared_from_this(), snapshot = *it](const Snapshot*) mutable {
    // Its memory goes back while the model, and so the budget, is there.
    snapshot.reset();
  });
}

std::vector<LogEvent> Model::NewWarningsLocked(const Version& record) {
  constexpr double kStallGap = 5e-4;  // Of decays of 0.9999 and up.
  std::vector<LogEvent> warnings;
  // `rule`: of the track's, by whose schedule the tensors go; null: the track's own schedule.
  const auto check = [&](const TrackVersion& track,
                         const TrackVersion* rule) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const TrackVersion& by = rule != nullptr ? *rule : track;
    if (by.stall_gap < kStallGap) return;
    LogEvent event{LogLevel::kWarning, "float32 stalls", {{"model", config_.name}}};
    event.fields.emplace_back("track", track.track);
    if (rule != nullptr) event.fields.emplace_back("tensors", rule->track);
    event.fields.emplace_back("schedule", by.config);
    if (!warned_configs_.insert(ToText(event)).second) return;
    event.fields.emplace_back("update_weight", by.update_weight);
    event.fields.emplace_back("stall_gap", by.stall_gap);
    event.fields.emplace_back("hint",
                              "the weight is below what float32 can resolve: values stall within "
                              "stall_gap of their size short of the average; a compensated track "
                              "does not");
    warnings.push_back(std::move(event));
  };
  for (const TrackVersion& track : record.tracks) {
    check(track, nullptr);
    for (const TrackVersion& rule : track.rules) check(track, &rule);
  }
  return warnings;
}

}  // namespace ema
