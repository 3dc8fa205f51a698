// SPDX-License-Identifier: Apache-2.0
//
// The part of CheckpointManager that brings a model back to an earlier version.
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "server/checkpoint/restore.h"
#include "server/core/model_store.h"
#include "server/format/verify.h"

namespace ema {

absl::StatusOr<Version> CheckpointManager::Restore(Model& model, const VersionId& id,
                                                   std::string_view label) {
  if ((id.version > 0) == !label.empty()) {
    return BadRequest("version, label: one of the two must be given");
  }
  if (label.empty()) return GoBack(model, id);
  EMA_ASSIGN_OR_RETURN(const VersionId labelled, FindLabel(model, label));
  return GoBack(model, labelled);
}

absl::StatusOr<Version> CheckpointManager::GoBack(Model& model, const VersionId& id) {
  absl::StatusOr<SnapshotRef> newest;
  if (const absl::StatusOr<SnapshotRef> pinned = model.history().Pin(id.version, id.incarnation);
      pinned.ok()) {
    // The blocks are shared.
    newest = model.RollBack((*pinned)->record.id(),
                            [&] { return std::make_shared<Snapshot>(**pinned); });
  } else {
    EMA_RETURN_IF_ERROR(model.closed());
    EMA_ASSIGN_OR_RETURN(const auto stored, FindStored(model, id));
    if (!stored.has_value()) {
      EMA_RETURN_IF_ERROR(CheckNotPartial(model, id));
      if (GetErrorReason(pinned.status()) == ErrorReason::kTooManyPins) return pinned.status();
      return NotKept(model, id);
    }
    newest = GoBackToStored(model, *stored);
  }
  EMA_RETURN_IF_ERROR(newest.status());
  const Version& record = (*newest)->record;
  Log(LogLevel::kInfo, "rolled back", model,
      {{"step", record.step},
       {"version", record.number},
       {"from_version", record.restored_from->version}});
  EMA_RETURN_IF_ERROR(SaveRollback(model, record, *newest));
  return record;
}

absl::Status CheckpointManager::SaveRollback(Model& model, const Version& rollback,
                                             const SnapshotRef& newest) {
  // Or a crash would bring the future back that has been given up.
  absl::Status saved = SaveSnapshot(model, newest, {}).status();
  if (saved.ok()) return saved;
  // It is tried again, too.
  scheduler_->SaveNow(model.shared_from_this());
  return MakeError(
      absl::StatusCode::kUnavailable, GetErrorReason(saved),
      absl::StrCat("model \"", model.config().name, "\" is rolled back to version ",
                   rollback.restored_from->version, " in memory, as version ", rollback.number,
                   ", but that is not on the disk: ", saved.message()));
}

absl::Status CheckpointManager::SaveRollbackInMemory(Model& model) {
  const VersionId durable = model.durable().version();
  for (const VersionHistory::RecordEntry& entry : model.history().RecordsAfter(
           durable.version, durable.incarnation, std::numeric_limits<int64_t>::max())) {
    if (!entry.record.restored_from.has_value()) continue;
    EMA_ASSIGN_OR_RETURN(const SnapshotRef newest, model.history().PinForSave(0));
    return SaveRollback(model, entry.record, newest);
  }
  return absl::OkStatus();
}

absl::StatusOr<SnapshotRef> CheckpointManager::GoBackToStored(
    Model& model, const CheckpointStore::Stored& stored) {
  const std::string& model_name = model.config().name;
  FileSystem& files = store_->file_system();
  EMA_ASSIGN_OR_RETURN(const auto held, store_->Hold(model_name, stored.name));
  const VersionId id = stored.id.version_id();
  if (held == nullptr) return NotKept(model, id);
  const std::string path = store_->Path(model_name, stored.name);
  // Before anything changes, and without memory for it.
  const RestBetweenReads rest = [this] {
    return Rest(absl::ZeroDuration()) ? absl::OkStatus() : DrainingError();
  };
  absl::StatusOr<CheckpointManifest> manifest = VerifyCheckpoint(files, path, nullptr, rest);
  if (manifest.ok()) manifest = CheckIsOf(model, stored, *std::move(manifest));
  if (!manifest.ok()) return StoredError(model, stored.name, manifest.status());
  absl::Status read;
  absl::StatusOr<SnapshotRef> newest =
      model.RollBack(id, [&]() -> absl::StatusOr<std::shared_ptr<Snapshot>> {
        absl::StatusOr<std::shared_ptr<Snapshot>> snapshot =
            ReadCheckpoint(files, path, *manifest, model, rest);
        read = snapshot.status();
        return snapshot;
      });
  if (!read.ok()) return StoredError(model, stored.name, read);
  return newest;
}

absl::Status CheckpointManager::CheckNotPartial(const Model& model, const VersionId& id) {
  EMA_ASSIGN_OR_RETURN(const auto partial, FindStored(model, id, /*is_partial=*/true));
  if (!partial.has_value()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kPartialCheckpoint,
                   absl::StrCat("model \"", model.config().name, "\": of version ", id.version,
                                " only some tracks were saved, as ", partial->name));
}

// --- Resuming ---

absl::Status CheckpointManager::Mismatch(const Model& model, const ResumePoint& point,
                                         const std::string& why) {
  EMA_ASSIGN_OR_RETURN(const std::vector<KnownVersion> known, Known(model));
  return MakeError(
      absl::StatusCode::kFailedPrecondition, ErrorReason::kResumeMismatch,
      absl::StrCat("model \"", model.config().name, "\": the trainer stands at step ", point.step,
                   ", ", why, "; versions that can be restored: ", ListNearest(known, point.step)));
}

absl::StatusOr<std::optional<VersionId>> CheckpointManager::Resume(Model& model,
                                                                   const Launch& launch,
                                                                   const ResumePoint& point) {
  if (point.step < 0) {
    return BadRequest(absl::StrCat("resume.step: ", point.step, " given, expected 0 or more"));
  }
  EMA_ASSIGN_OR_RETURN(const bool is_open, model.IsRunOpen(launch));
  if (is_open) return std::nullopt;
  const std::optional<Version> latest = model.history().latest();
  EMA_ASSIGN_OR_RETURN(const std::optional<VersionId> target,
                       point.version.has_value() ? TargetAtVersion(model, point, latest)
                                                 : TargetAtStep(model, point, latest));
  if (target.has_value()) {
    EMA_ASSIGN_OR_RETURN(const Version record, GoBack(model, *target));
    return record.id();
  }
  // A call before may have gone back without getting that onto the disk.
  EMA_RETURN_IF_ERROR(SaveRollbackInMemory(model));
  return latest.has_value() ? latest->id() : VersionId{};
}

absl::StatusOr<std::optional<VersionId>> CheckpointManager::TargetAtVersion(
    Model& model, const ResumePoint& point, const std::optional<Version>& latest) {
  const VersionId& id = *point.version;
  if (id.version < 1 || id.incarnation < 0) {
    return BadRequest(absl::StrCat("resume.version: ", id.version, " of incarnation ",
                                   id.incarnation, " given, expected 1 or more of 0 or more"));
  }
  EMA_ASSIGN_OR_RETURN(const std::vector<KnownVersion> known, Known(model));
  // A rollback to it has been made, and nothing has been committed since.
  const bool is_there = latest.has_value() &&
                        (id.Names(latest->id()) ||
                         (latest->restored_from.has_value() && id.Names(*latest->restored_from)));
  std::optional<int64_t> step;
  if (is_there) step = latest->step;
  for (const KnownVersion& version : known) {
    if (!step.has_value() && id.Names(version.id)) step = version.step;
  }
  if (!step.has_value()) {
    EMA_RETURN_IF_ERROR(CheckNotPartial(model, id));
    return NotKept(model, id);
  }
  const std::string where =
      absl::StrCat("version ", id.version, " that it asks for at step ", *step);
  if (*step > point.step) {
    return Mismatch(model, point,
                    where + ": the average would have seen weights that the trainer has not");
  }
  if (*step < point.step && point.time.has_value()) {
    std::optional<TrackStates> from;
    if (is_there) {
      from = model.history().NewestStates();
    } else {
      EMA_ASSIGN_OR_RETURN(from, TrackStatesAt(model, id));
    }
    EMA_RETURN_IF_ERROR(CheckNotDue(model, point, from, where));
  }
  return is_there ? std::nullopt : std::optional(id);
}

absl::StatusOr<std::optional<VersionId>> CheckpointManager::TargetAtStep(
    Model& model, const ResumePoint& point, const std::optional<Version>& latest) {
  const std::string where = latest.has_value() ? absl::StrCat("the average at step ", latest->step)
                                               : "and nothing has been committed yet";
  const int64_t latest_step = latest.has_value() ? latest->step : 0;
  if (latest_step == point.step) return std::nullopt;
  if (latest_step < point.step) {
    // What an uninterrupted run has there, if no update was due since.
    if (!point.time.has_value()) return Mismatch(model, point, where);
    EMA_RETURN_IF_ERROR(CheckNotDue(model, point, model.history().NewestStates(), where));
    return std::nullopt;
  }
  EMA_ASSIGN_OR_RETURN(const std::vector<KnownVersion> known, Known(model));
  const std::vector<KnownVersion> branch = BranchOf(known, *latest);
  std::optional<VersionId> id = VersionAfterStep(branch, point.step);
  if (id.has_value()) return id;
  if (point.time.has_value()) {
    id = VersionAfterStep(branch, point.step, /*is_complete=*/true);
  }
  if (!id.has_value()) return Mismatch(model, point, where);
  EMA_ASSIGN_OR_RETURN(const TrackStates from, TrackStatesAt(model, *id));
  EMA_RETURN_IF_ERROR(CheckNotDue(model, point, from, where));
  return id;
}

absl::StatusOr<TrackStates> CheckpointManager::TrackStatesAt(Model& model, const VersionId& id) {
  const absl::StatusOr<SnapshotRef> pinned = model.history().Pin(id.version, id.incarnation);
  if (pinned.ok()) return TrackStatesOf(**pinned);
  EMA_ASSIGN_OR_RETURN(const auto stored, FindStored(model, id));
  if (!stored.has_value()) return pinned.status();
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest manifest, ReadManifest(model, *stored));
  TrackStates states;
  for (const CheckpointTrack& track : manifest.tracks) {
    if (track.weights.has_value()) states[track.config.name] = track.state;
  }
  return states;
}

absl::Status CheckpointManager::CheckNotDue(Model& model, const ResumePoint& point,
                                            const std::optional<TrackStates>& from,
                                            const std::string& where) {
  EMA_ASSIGN_OR_RETURN(const bool is_due, model.tracks().IsDueBy(*point.time, from));
  if (!is_due) return absl::OkStatus();
  return Mismatch(model, point, where + ", and an update was due between");
}

}  // namespace ema
