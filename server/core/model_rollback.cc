// SPDX-License-Identifier: Apache-2.0
//
// The part of Model that rolls back to an earlier version.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/core/model.h"

namespace ema {
namespace {

// True: a value of one can be one of the other.
bool IsSame(const Track& a, const Track& b) { return a.name() == b.name() && a.HasFormOf(b); }

// Of a track that a rollback has brought back.
TrackVersion RestoredRecord(const TrackSnapshot& snapshot) {
  const TrackConfig& config = snapshot.track->config();
  const std::vector<const Schedule*> schedules = SchedulesOf(config);
  const auto state = [&](size_t i) {
    return i < snapshot.state.size() ? snapshot.state[i] : Schedule::State();
  };
  TrackVersion record{.track = snapshot.track->name(),
                      .update_count = state(0).update_count,
                      .averaged_count = state(0).averaged_count,
                      .config = snapshot.track->config_text()};
  for (const TensorRule& rule : config.tensor_rules) {
    if (!rule.schedule.has_value()) continue;
    const size_t i = record.rules.size() + 1;
    record.rules.push_back({.track = rule.pattern,
                            .update_count = state(i).update_count,
                            .averaged_count = state(i).averaged_count,
                            .config = schedules[i]->ToString()});
  }
  return record;
}

std::vector<std::string> NamesOf(const std::vector<TrackVersion>& tracks) {
  std::vector<std::string> names;
  names.reserve(tracks.size());
  for (const TrackVersion& track : tracks) names.push_back(track.track);
  return names;
}

// FAILED_PRECONDITION, MODEL_DIFFERS: none of `tracks` is in the version in the same form.
absl::Status CheckHasTrackOf(const std::string& model_name, const std::vector<TrackRef>& tracks,
                             const Snapshot& version) {
  for (const TrackSnapshot& of_version : version.tracks) {
    for (const TrackRef& track : tracks) {
      if (IsSame(*of_version.track, *track)) return absl::OkStatus();
    }
  }
  return MakeError(
      absl::StatusCode::kFailedPrecondition, ErrorReason::kModelDiffers,
      absl::StrCat("model \"", model_name, "\": version ", version.record.number,
                   " has the tracks ", absl::StrJoin(NamesOf(version.record.tracks), ", "),
                   ", but the model has none of them in the same form"));
}

}  // namespace

absl::StatusOr<SnapshotRef> Model::RollBack(
    const VersionId& from, absl::FunctionRef<absl::StatusOr<std::shared_ptr<Snapshot>>()> load) {
  std::shared_ptr<PushSession> fenced;
  std::shared_ptr<PushSession> last;
  std::string target = absl::StrCat("version ", from.version);
  {
    // No session is being made, and none is left: `load` has its memory.
    absl::MutexLock opening(&push_mu_);
    absl::MutexLock lock(&mu_);
    EMA_RETURN_IF_ERROR(closing_);
    EMA_RETURN_IF_ERROR(runs_.CheckNotRollingBack());
    EMA_RETURN_IF_ERROR(open_step_.CheckNotPrepared());
    EMA_RETURN_IF_ERROR(history_.CheckRoomForNext());
    runs_.BeginRollback();
    fenced = open_step_.EndRun();
    last = open_step_.previous_session();
    if (const std::optional<Version> record = history_.FindRecord(from)) {
      absl::StrAppend(&target, ", step ", record->step);
    }
  }
  if (fenced != nullptr) {
    DropStep(*fenced, FencedError(absl::StrCat("step ", fenced->plan().step, ": the model \"",
                                               config_.name, "\" is rolled back to ", target)));
  }
  history_.AwaitFreed();
  if (last != nullptr) last->AwaitFreed();
  absl::StatusOr<std::shared_ptr<Snapshot>> loaded = CatchExceptions([&] { return load(); });
  SnapshotRef evicted;
  SnapshotRef result;
  std::vector<TrackSnapshot> dropped;
  TrackTable::Replaced replaced;
  std::vector<std::string> left_out;
  {
    absl::MutexLock lock(&mu_);
    absl::Status refused = loaded.status();
    refused.Update(closing_);
    if (refused.ok()) {
      refused = CheckHasTrackOf(config_.name, tracks_.after_next_commit(), **loaded);
    }
    // Before a run may begin, which has its memory.
    if (!refused.ok()) loaded = refused;
    runs_.EndRollback();
    EMA_RETURN_IF_ERROR(refused);
    left_out = NamesOf((*loaded)->record.tracks);
    // Before Publish(): the new version keeps only tracks of the new list.
    replaced = tracks_.ApplyPending();
    dropped = MakeNextVersionLocked(**loaded, from);
    for (const TrackVersion& kept : (*loaded)->record.tracks) std::erase(left_out, kept.track);
    evicted = history_.Publish(*loaded, absl::Now(), /*home_pinned_versions=*/{});
    result = history_.PinRestored(*loaded);
    durable_.RollBackTo((*loaded)->record);
  }
  // Freed before anyone learns of the version and may push: the next one needs this memory.
  dropped.clear();
  history_.Free(std::move(evicted));
  Announce(**loaded);
  if (!left_out.empty()) {
    LogTo(options_.log, LogLevel::kWarning, "rolled back without some tracks",
          {{"model", config_.name},
           {"version", from.version},
           {"tracks", absl::StrJoin(left_out, ",")},
           {"why", "the model no longer has them, or has them in another form"}});
  }
  return result;
}

std::vector<TrackSnapshot> Model::MakeNextVersionLocked(Snapshot& loaded, const VersionId& from) {
  Version& record = loaded.record;
  const SnapshotRef current = history_.newest();
  record.number = current != nullptr ? current->record.number + 1 : 1;
  record.run_epoch = runs_.AllocateRollbackEpoch();
  record.restored_from = from;
  record.tracks.clear();
  record.skipped_tensor_count = 0;
  record.skipped_tensors.clear();
  std::vector<TrackSnapshot> kept;
  for (const TrackRef& track : tracks_.after_next_commit()) {
    const auto found = std::find_if(
        loaded.tracks.begin(), loaded.tracks.end(),
        [&](const TrackSnapshot& snapshot) { return IsSame(*snapshot.track, *track); });
    if (found == loaded.tracks.end()) continue;
    // It may have been configured otherwise since.
    found->track = track;
    found->block_versions.assign(found->blocks.size(), record.number);
    record.tracks.push_back(RestoredRecord(*found));
    kept.push_back(std::move(*found));
    loaded.tracks.erase(found);
  }
  loaded.tracks.swap(kept);
  return kept;
}

}  // namespace ema
