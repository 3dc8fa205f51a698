// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/model_rollback.h"

#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/core/model_store.h"
#include "server/format/verify.h"

namespace ema {

absl::StatusOr<Version> ModelRollback::Restore(const VersionId& id, std::string_view label) const {
  if ((id.version > 0) == !label.empty()) {
    return BadRequest("version, label: one of the two must be given");
  }
  if (label.empty()) return RollBack(id);
  EMA_ASSIGN_OR_RETURN(const VersionId labelled, versions_.FindLabel(label));
  return RollBack(labelled);
}

absl::StatusOr<Version> ModelRollback::RollBack(const VersionId& id) const {
  Model& model = context_.model;
  if (model.is_partition()) return RollBackPartitions(id);
  absl::StatusOr<SnapshotRef> newest;
  if (const absl::StatusOr<SnapshotRef> pinned = model.history().Pin(id.version, id.incarnation);
      pinned.ok()) {
    // The two versions share their blocks.
    newest = model.RollBack((*pinned)->record.id(),
                            [&] { return std::make_shared<Snapshot>(**pinned); });
  } else {
    EMA_RETURN_IF_ERROR(model.CheckOpen());
    EMA_ASSIGN_OR_RETURN(const auto stored, versions_.Find(id));
    if (!stored.has_value()) {
      EMA_RETURN_IF_ERROR(versions_.CheckNotPartial(id));
      if (GetErrorReason(pinned.status()) == ErrorReason::kTooManyPins) return pinned.status();
      return versions_.VersionNotKeptError(id);
    }
    newest = RollBackToStored(*stored);
  }
  EMA_RETURN_IF_ERROR(newest.status());
  const Version& record = (*newest)->record;
  context_.Log(LogLevel::kInfo, "rolled back",
               {{"step", record.step},
                {"version", record.number},
                {"from_version", record.restored_from->version}});
  EMA_RETURN_IF_ERROR(SaveRollback(record, *newest));
  return record;
}

absl::StatusOr<SnapshotRef> ModelRollback::RollBackToStored(const CheckpointEntry& stored) const {
  CheckpointFolder& folder = context_.folder;
  EMA_ASSIGN_OR_RETURN(const auto held, folder.Hold(stored.name));
  const VersionId id = stored.id.version_id();
  if (held == nullptr) return versions_.VersionNotKeptError(id);
  const std::string path = folder.Path(stored.name);
  // Before anything changes.
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest manifest, Verify(stored));
  absl::Status read;
  absl::StatusOr<SnapshotRef> newest =
      context_.model.RollBack(id, [&]() -> absl::StatusOr<std::shared_ptr<Snapshot>> {
        absl::StatusOr<std::shared_ptr<Snapshot>> snapshot =
            ReadCheckpoint(folder.file_system(), path, manifest, context_.model, StopHook());
        read = snapshot.status();
        return snapshot;
      });
  if (!read.ok()) return versions_.HandleReadError(stored.name, read);
  return newest;
}

absl::StatusOr<CheckpointManifest> ModelRollback::Verify(const CheckpointEntry& stored) const {
  CheckpointFolder& folder = context_.folder;
  absl::StatusOr<CheckpointManifest> manifest =
      VerifyCheckpoint(folder.file_system(), folder.Path(stored.name), nullptr, StopHook());
  if (manifest.ok()) manifest = versions_.CheckIsOf(stored, *std::move(manifest));
  if (!manifest.ok()) return versions_.HandleReadError(stored.name, manifest.status());
  return manifest;
}

PauseHook ModelRollback::StopHook() const {
  return [this] { return context_.queue.is_stopping() ? DrainingError() : absl::OkStatus(); };
}

absl::StatusOr<Version> ModelRollback::RollBackPartitions(const VersionId& id) const {
  EMA_RETURN_IF_ERROR(context_.model.CheckOpen());
  // An earlier call has restored it, and nothing has been committed since.
  const std::optional<Version> latest = context_.model.history().latest();
  if (latest.has_value() && id.Matches(latest->id()) &&
      latest->incarnation != context_.model.incarnation()) {
    return *latest;
  }
  EMA_ASSIGN_OR_RETURN(auto stored, versions_.Find(id));
  if (!stored.has_value()) {
    const absl::StatusOr<SnapshotRef> pinned =
        context_.model.history().PinForSave(id.version, id.incarnation);
    if (!pinned.ok()) {
      EMA_RETURN_IF_ERROR(versions_.CheckNotPartial(id));
      if (GetErrorReason(pinned.status()) == ErrorReason::kTooManyPins) return pinned.status();
      return versions_.VersionNotKeptError(id);
    }
    EMA_RETURN_IF_ERROR(saver_.SaveSnapshot(*pinned, {}).status());
    EMA_ASSIGN_OR_RETURN(stored, versions_.Find((*pinned)->record.id()));
    if (!stored.has_value()) return versions_.VersionNotKeptError(id);
  }
  EMA_ASSIGN_OR_RETURN(const auto held, context_.folder.Hold(stored->name));
  if (held == nullptr) return versions_.VersionNotKeptError(id);
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest manifest, Verify(*stored));
  const Version& record = manifest.record;
  EMA_RETURN_IF_ERROR(context_.folder.partitions()->RollBack(context_.model, record.id()));
  context_.Log(LogLevel::kInfo, "rolled back", {{"step", record.step}, {"version", record.number}});
  return record;
}

absl::Status ModelRollback::SaveRollback(const Version& rollback, const SnapshotRef& newest) const {
  // Otherwise a crash would bring the discarded versions back.
  absl::Status saved = saver_.SaveSnapshot(newest, {}).status();
  if (saved.ok()) return saved;
  context_.scheduler.SaveNow(context_.model.shared_from_this());  // Tries it again.
  return MakeError(
      absl::StatusCode::kUnavailable, GetErrorReason(saved),
      absl::StrCat("model \"", context_.name(), "\" is rolled back to version ",
                   rollback.restored_from->version, " in memory, as version ", rollback.number,
                   ", but that is not on the disk: ", saved.message()));
}

absl::Status ModelRollback::SaveRollbackInMemory() const {
  VersionHistory& history = context_.model.history();
  const VersionId durable = context_.model.durable().version();
  for (const VersionHistory::RecordEntry& entry : history.RecordsAfter(
           durable.version, durable.incarnation, std::numeric_limits<int64_t>::max())) {
    if (!entry.record.restored_from.has_value()) continue;
    EMA_ASSIGN_OR_RETURN(const SnapshotRef newest, history.PinForSave(0));
    return SaveRollback(entry.record, newest);
  }
  return absl::OkStatus();
}

// --- Resuming ---

absl::Status ModelRollback::ResumeMismatchError(const ResumePoint& point,
                                                const std::string& why) const {
  EMA_ASSIGN_OR_RETURN(const std::vector<KnownVersion> known, versions_.Known());
  return MakeError(
      absl::StatusCode::kFailedPrecondition, ErrorReason::kResumeMismatch,
      absl::StrCat("model \"", context_.name(), "\": the trainer is at step ", point.step, "; ",
                   why, "; versions that can be restored: ", ListNearest(known, point.step)));
}

absl::StatusOr<std::optional<VersionId>> ModelRollback::Resume(const Launch& launch,
                                                               const ResumePoint& point) const {
  if (point.step < 0) {
    return BadRequest(absl::StrCat("resume.step: ", point.step, " given, expected 0 or more"));
  }
  EMA_ASSIGN_OR_RETURN(const bool is_open, context_.model.IsRunOpen(launch));
  if (is_open) return std::nullopt;
  const std::optional<Version> latest = context_.model.history().latest();
  EMA_ASSIGN_OR_RETURN(const std::optional<VersionId> target, point.version.has_value()
                                                                  ? TargetAtVersion(point, latest)
                                                                  : TargetAtStep(point, latest));
  if (target.has_value()) {
    EMA_ASSIGN_OR_RETURN(const Version record, RollBack(*target));
    return record.id();
  }
  // An earlier call may have rolled back without getting that onto the disk.
  EMA_RETURN_IF_ERROR(SaveRollbackInMemory());
  return latest.has_value() ? latest->id() : VersionId{};
}

absl::StatusOr<std::optional<VersionId>> ModelRollback::TargetAtVersion(
    const ResumePoint& point, const std::optional<Version>& latest) const {
  const VersionId& id = *point.version;
  if (id.version < 1 || id.incarnation < 0) {
    return BadRequest(absl::StrCat("resume.version: ", id.version, " of incarnation ",
                                   id.incarnation, " given, expected 1 or more of 0 or more"));
  }
  EMA_ASSIGN_OR_RETURN(const std::vector<KnownVersion> known, versions_.Known());
  // The second case: it has been rolled back to, and nothing has been committed since.
  const bool is_there = latest.has_value() &&
                        (id.Matches(latest->id()) ||
                         (latest->restored_from.has_value() && id.Matches(*latest->restored_from)));
  std::optional<int64_t> step;
  if (is_there) step = latest->step;
  for (const KnownVersion& version : known) {
    if (!step.has_value() && id.Matches(version.id)) step = version.step;
  }
  if (!step.has_value()) {
    EMA_RETURN_IF_ERROR(versions_.CheckNotPartial(id));
    return versions_.VersionNotKeptError(id);
  }
  const std::string where =
      absl::StrCat("version ", id.version, ", which it asks for, is at step ", *step);
  if (*step > point.step) {
    return ResumeMismatchError(
        point, where + ": the average would have seen weights that the trainer has not");
  }
  if (*step < point.step && point.time.has_value()) {
    std::optional<TrackStates> from;
    if (is_there) {
      from = context_.model.history().NewestStates();
    } else {
      EMA_ASSIGN_OR_RETURN(from, TrackStatesAt(id));
    }
    EMA_RETURN_IF_ERROR(CheckNotDue(point, from, where));
  }
  return is_there ? std::nullopt : std::optional(id);
}

absl::StatusOr<std::optional<VersionId>> ModelRollback::TargetAtStep(
    const ResumePoint& point, const std::optional<Version>& latest) const {
  const std::string where = latest.has_value()
                                ? absl::StrCat("the average is at step ", latest->step)
                                : "nothing has been committed yet";
  const int64_t latest_step = latest.has_value() ? latest->step : 0;
  if (latest_step == point.step) return std::nullopt;
  if (latest_step < point.step) {
    // If no update was due since, an uninterrupted run has the same average there.
    if (!point.time.has_value()) return ResumeMismatchError(point, where);
    EMA_RETURN_IF_ERROR(CheckNotDue(point, context_.model.history().NewestStates(), where));
    return std::nullopt;
  }
  EMA_ASSIGN_OR_RETURN(const std::vector<KnownVersion> branch, versions_.Branch(*latest));
  std::optional<VersionId> id = VersionAfterStep(branch, point.step);
  if (id.has_value()) return id;
  if (point.time.has_value()) {
    id = VersionAfterStep(branch, point.step, /*is_complete=*/true);
  }
  if (!id.has_value()) return ResumeMismatchError(point, where);
  EMA_ASSIGN_OR_RETURN(const TrackStates from, TrackStatesAt(*id));
  EMA_RETURN_IF_ERROR(CheckNotDue(point, from, where));
  return id;
}

absl::StatusOr<TrackStates> ModelRollback::TrackStatesAt(const VersionId& id) const {
  const absl::StatusOr<SnapshotRef> pinned =
      context_.model.history().Pin(id.version, id.incarnation);
  if (pinned.ok()) return TrackStatesOf(**pinned);
  EMA_ASSIGN_OR_RETURN(const auto stored, versions_.Find(id));
  if (!stored.has_value()) return pinned.status();
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest manifest, versions_.ReadManifest(*stored));
  TrackStates states;
  for (const CheckpointTrack& track : manifest.tracks) {
    if (track.weights.has_value()) states[track.config.name] = track.state;
  }
  return states;
}

absl::Status ModelRollback::CheckNotDue(const ResumePoint& point,
                                        const std::optional<TrackStates>& from,
                                        const std::string& where) const {
  EMA_ASSIGN_OR_RETURN(const bool is_due, context_.model.tracks().IsDueBy(*point.time, from));
  if (!is_due) return absl::OkStatus();
  return ResumeMismatchError(point, where + ", and an update was due between them");
}

}  // namespace ema
