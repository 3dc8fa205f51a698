// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_folder.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/retention.h"

namespace ema {
namespace {

absl::Status InUse(std::string_view model, std::string_view name, const std::string& why) {
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kCheckpointInUse,
                   absl::StrCat("model \"", std::string(model), "\", checkpoint \"",
                                std::string(name), "\": it ", why));
}

// The model has every track that the snapshot has.
bool HasTracksOf(const Model& model, const Snapshot& snapshot) {
  const std::vector<TrackRef> tracks = model.tracks().after_next_commit();
  return absl::c_all_of(snapshot.tracks, [&](const TrackSnapshot& saved) {
    return absl::c_any_of(tracks,
                          [&](const TrackRef& track) { return track->id() == saved.track->id(); });
  });
}

}  // namespace

// --- Saving ---

std::string CheckpointFolder::NameOf(const Snapshot& snapshot,
                                     const std::vector<std::string>& tracks) {
  const CheckpointId id = IdOf(snapshot.record);
  return tracks.empty() ? CheckpointName(id) : PartialCheckpointName(id, tracks);
}

absl::StatusOr<CheckpointFolder::SaveResult> CheckpointFolder::Save(Model& model,
                                                                    const SnapshotRef& snapshot,
                                                                    const SaveOptions& options) {
  saving_count_.fetch_add(1, std::memory_order_relaxed);
  const absl::Cleanup ended = [this] { saving_count_.fetch_sub(1, std::memory_order_relaxed); };
  absl::MutexLock lock(&mu_);
  // SetAsideAll() may have set all checkpoints aside before this: a deleted model is not saved
  // again.
  if (const absl::Status closed = model.CheckOpen(); absl::IsNotFound(closed)) return closed;
  absl::StatusOr<SaveResult> result = SaveLocked(model, *snapshot, options);
  // There may be checkpoints to remove that were held or labelled at the last save. Unless
  // `is_durable_`, it is unknown which ones retention keeps.
  if (GetErrorReason(result.status()) == ErrorReason::kDiskFull && is_durable_ &&
      RemoveOldLocked(model, NameOf(*snapshot, options.tracks)).value_or(false)) {
    result = SaveLocked(model, *snapshot, options);
  }
  if (!result.ok()) return data_.AsSaveError(result.status());
  return result;
}

absl::StatusOr<CheckpointFolder::SaveResult> CheckpointFolder::SaveLocked(
    Model& model, const Snapshot& snapshot, const SaveOptions& options) {
  EMA_RETURN_IF_ERROR(data_.CheckMayWrite());
  if (must_delete_) EMA_RETURN_IF_ERROR(DeleteAllLocked());
  const CheckpointId id = IdOf(snapshot.record);
  const auto remove = [&](const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return StartRemovingLocked(name, &model);
  };
  const bool is_whole = options.tracks.empty();
  SaveResult result{.name = NameOf(snapshot, options.tracks)};
  // Asked for before the write, which may save later settings.
  const int64_t settings_revision = model.Describe().settings_revision;
  const bool has_old_settings =
      options.with_new_settings && is_whole && !records_.is_in_group() &&
      model.durable().HasOtherSettings(snapshot.record.id(), settings_revision) &&
      HasTracksOf(model, snapshot);
  const bool is_latest = is_whole && latest_ == id && latest_bytes_ > 0 && !has_old_settings;
  if (is_latest) {
    if (options.keep) EMA_RETURN_IF_ERROR(files_.Keep(Path(result.name)));
    result.total_bytes = latest_bytes_;
  } else {
    EMA_RETURN_IF_ERROR(MakeDurableLocked());
    EMA_RETURN_IF_ERROR(records_.RemoveUnrecorded(/*saved=*/id, remove));
    EMA_ASSIGN_OR_RETURN(const std::optional<int64_t> bytes, FindCompleteLocked(result.name));
    if (bytes.has_value() && !has_old_settings) {
      result.total_bytes = *bytes;
      // An earlier call, or server, may have ended between the rename and this.
      EMA_RETURN_IF_ERROR(files_.Sync());
      if (options.keep) EMA_RETURN_IF_ERROR(files_.Keep(Path(result.name)));
    } else {
      if (bytes.has_value() && index_.is_held(result.name)) {
        return CannotReplaceError(result.name, "it is being read");
      }
      EMA_ASSIGN_OR_RETURN(result.total_bytes, WriteLocked(model, snapshot, options, result.name,
                                                           /*has_old_settings=*/bytes.has_value()));
      result.was_written = true;
    }
  }
  if (is_whole && (!is_latest || options.keep)) {
    EMA_RETURN_IF_ERROR(records_.Record(model, snapshot.record, result.total_bytes, options.keep,
                                        /*was_recorded=*/id == latest_, remove));
  }
  if (is_whole && id >= latest_) {
    if (id != latest_) EMA_RETURN_IF_ERROR(files_.WriteLatest(id));
    latest_ = id;
    latest_bytes_ = result.total_bytes;
  }
  // It is durable also if it then gets no label.
  if (is_whole) {
    model.durable().SetVersion(
        snapshot.record.id(), snapshot.record.step,
        result.was_written ? std::optional(settings_revision) : std::nullopt);
    if (options.keep) model.durable().SetKeptTime(snapshot.record.time);
  }
  if (options.label.has_value()) {
    CheckpointLabel label = *options.label;
    label.id = snapshot.record.id();
    label.step = snapshot.record.step;
    EMA_RETURN_IF_ERROR(PutLabelLocked(label));
  }
  // This version is safe even if an older one cannot be removed; the next save tries that again.
  if (!is_latest) RemoveOldLocked(model, result.name).status().IgnoreError();
  return result;
}

absl::Status CheckpointFolder::MakeDurableLocked() {
  if (is_durable_) {
    EMA_ASSIGN_OR_RETURN(const bool exists, files_.Exists());
    if (exists) return absl::OkStatus();
    ForgetLocked();  // It has been removed while the server runs.
  }
  EMA_RETURN_IF_ERROR(data_.MakeCheckpointsFolder(model_name_));
  EMA_ASSIGN_OR_RETURN(latest_, files_.FindLatest());
  latest_bytes_ = 0;
  EMA_RETURN_IF_ERROR(IndexLocked());
  is_durable_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<int64_t>> CheckpointFolder::FindCompleteLocked(
    const std::string& name) {
  EMA_ASSIGN_OR_RETURN(const bool exists, files_.Has(name));
  const std::optional<CheckpointEntry> entry = index_.Find(name);
  if (!exists || (entry.has_value() && !entry->read_error.ok())) return std::nullopt;
  // It was complete when it got its name, so this fails only if it has been changed since.
  const absl::StatusOr<CheckpointManifest> checkpoint = files_.ReadManifest(name);
  if (checkpoint.ok()) return checkpoint->total_bytes;
  if (!absl::IsDataLoss(checkpoint.status())) return checkpoint.status();
  EMA_RETURN_IF_ERROR(SetAsideCorruptLocked(name, checkpoint.status()));
  return std::nullopt;
}

absl::StatusOr<int64_t> CheckpointFolder::WriteLocked(Model& model, const Snapshot& snapshot,
                                                      const SaveOptions& options,
                                                      const std::string& name,
                                                      bool has_old_settings) {
  const bool keep = options.keep || files_.MayBeKept(name);
  // A newly kept checkpoint stays for good, so it must leave room for one that is not kept.
  EMA_ASSIGN_OR_RETURN(
      const CheckpointManifest written,
      files_.WriteTemporary(model, snapshot, name,
                            {.tracks = options.tracks, .max_file_bytes = options_.max_file_bytes},
                            options_.partitions, keep, /*needs_room_for_another=*/options.keep));
  if (has_old_settings && !HasTracksOf(model, snapshot)) {
    files_.RemoveTemporary(name);
    return CannotReplaceError(name, "one of its tracks has just been removed");
  }
  EMA_RETURN_IF_ERROR(MoveIntoPlaceLocked(name, has_old_settings));
  index_.Put({.name = name,
              .id = IdOf(written.record),
              .is_partial = !options.tracks.empty(),
              .details = DetailsOf(written)});
  return written.total_bytes;
}

absl::Status CheckpointFolder::MoveIntoPlaceLocked(const std::string& name, bool has_old_settings) {
  const std::optional<CheckpointEntry> old = index_.Find(name);
  const absl::Status read_error = old.has_value() ? old->read_error : absl::OkStatus();
  EMA_RETURN_IF_ERROR(data_.CheckPlace());  // Writing may have taken long.
  absl::Status status;
  bool is_exchanged = false;
  if (read_error.ok() && has_old_settings) {
    status = ReplaceLocked(name);
  } else if (read_error.ok()) {
    status = files_.RenameFromTemporary(name);
  } else {
    // The old one may be readable after all.
    status = files_.ExchangeWithTemporary(name);
    is_exchanged = status.ok();
    if (absl::IsUnimplemented(status)) {
      EMA_RETURN_IF_ERROR(SetAsideCorruptLocked(name, read_error));
      status = files_.RenameFromTemporary(name);
    }
  }
  if (status.ok()) status = files_.Sync();
  if (status.ok() && is_exchanged) {
    index_.Erase(name);  // The entry is about the old one.
    status = SetAsideCorruptLocked(name, read_error, kTemporaryPrefix);
  }
  if (!status.ok()) ForgetLocked();  // It may have its name all the same.
  return status;
}

absl::Status CheckpointFolder::ReplaceLocked(const std::string& name) {
  const auto exchange = [&]() -> absl::Status {
    std::optional<CheckpointEntry> entry;
    if (!index_.EraseUnlessHeld(name, &entry)) return CannotReplaceError(name, "it is being read");
    absl::Status status = files_.ExchangeWithTemporary(name);
    if (status.ok()) return status;
    if (entry.has_value()) index_.Put(*std::move(entry));
    if (!absl::IsUnimplemented(status)) return status;
    return absl::UnimplementedError(
        absl::StrCat("model \"", model_name_, "\", checkpoint \"", name,
                     "\": cannot be replaced by one with the model's current settings, because the "
                     "file system cannot exchange two folders; push one more step"));
  };
  absl::Status status = exchange();
  if (status.ok()) {
    EMA_RETURN_IF_ERROR(files_.Sync());
  } else if (!absl::IsUnimplemented(status) &&
             GetErrorReason(status) != ErrorReason::kCheckpointInUse) {
    return status;  // It may have been exchanged all the same, and not be on the disk.
  }
  // This is the old one, or the new one; what is left of it is cleared later.
  files_.RemoveTemporary(name);
  return status;
}

absl::Status CheckpointFolder::CannotReplaceError(std::string_view name,
                                                  std::string_view why) const {
  return MakeError(
      absl::StatusCode::kUnavailable, ErrorReason::kCheckpointInUse,
      absl::StrCat("model \"", model_name_, "\", checkpoint \"", std::string(name),
                   "\": ", std::string(why),
                   ", so it cannot be replaced by one with the model's current settings"),
      absl::Seconds(1));
}

absl::StatusOr<bool> CheckpointFolder::RemoveOldLocked(Model& model, std::string_view saved_name) {
  EMA_RETURN_IF_ERROR(data_.CheckPlace());
  // A leftover of an error may have the temporary name that one of these needs.
  EMA_RETURN_IF_ERROR(files_.ClearTemporary());
  EMA_RETURN_IF_ERROR(index_.lost_labels());
  EMA_ASSIGN_OR_RETURN(
      const std::vector<std::string> expired,
      FindExpiredCheckpoints(files_, {.keep_count = options_.keep_count,
                                      .keep_step_multiple = options_.keep_step_multiple,
                                      .labels = index_.labels(),
                                      .latest = latest_,
                                      .saved_name = saved_name}));
  bool is_any_removed = false;
  for (const std::string& name : expired) {
    const absl::StatusOr<bool> is_removed = StartRemovingLocked(name, &model);
    if (GetErrorReason(is_removed.status()) == ErrorReason::kCheckpointInUse) continue;
    EMA_RETURN_IF_ERROR(is_removed.status());
    is_any_removed |= *is_removed;
  }
  EMA_RETURN_IF_ERROR(files_.ClearTemporary());
  return is_any_removed;
}

// --- The index ---

void CheckpointFolder::ForgetLocked() {
  is_durable_ = false;
  latest_ = {};
  latest_bytes_ = 0;
  index_.Invalidate();
}

absl::Status CheckpointFolder::IndexLocked() {
  if (index_.is_current()) return absl::OkStatus();
  EMA_ASSIGN_OR_RETURN(const bool exists, files_.Exists());
  std::vector<DirectoryEntry> listing;
  // Checkpoints that are still to be deleted are not the model's any more.
  if (exists && !must_delete_) {
    EMA_ASSIGN_OR_RETURN(listing, files_.List());
  }
  EMA_ASSIGN_OR_RETURN(FolderLabels::OnDisk on_disk, labels_.Read(listing));
  index_.Replace(listing, std::move(on_disk.labels), on_disk.lost);
  return absl::OkStatus();
}

absl::Status CheckpointFolder::EnsureIndexed() {
  if (index_.is_current()) return absl::OkStatus();
  absl::MutexLock lock(&mu_);
  // Another directory in the place of ours says nothing about the model: the old entries stay.
  if (GetErrorReason(data_.CheckPlace()) == ErrorReason::kStoreReadOnly) return absl::OkStatus();
  return IndexLocked();
}

absl::StatusOr<std::vector<CheckpointEntry>> CheckpointFolder::ListNames() {
  EMA_RETURN_IF_ERROR(EnsureIndexed());
  return index_.All();
}

absl::StatusOr<std::vector<CheckpointEntry>> CheckpointFolder::List(
    std::optional<std::string_view> name) {
  EMA_ASSIGN_OR_RETURN(std::vector<CheckpointEntry> all, ListNames());
  if (name.has_value()) std::erase_if(all, [&](const auto& entry) { return entry.name != *name; });
  for (CheckpointEntry& entry : all) {
    if (!entry.problem.ok() || entry.details.has_value()) continue;
    absl::StatusOr<CheckpointEntry::Details> details = ReadDetails(entry.name);
    entry.read_error.Update(details.status());
    if (details.ok()) entry.details = *std::move(details);
  }
  std::erase_if(all,
                [](const CheckpointEntry& entry) { return absl::IsNotFound(entry.read_error); });
  return all;
}

absl::StatusOr<CheckpointEntry::Details> CheckpointFolder::ReadDetails(const std::string& name) {
  const absl::StatusOr<CheckpointManifest> checkpoint = files_.ReadManifest(name);
  if (checkpoint.ok()) {
    CheckpointEntry::Details details = DetailsOf(*checkpoint);
    index_.SetDetails(name, details);
    return details;
  }
  if (!absl::IsDataLoss(checkpoint.status())) return checkpoint.status();
  if (!index_.Find(name).has_value()) return absl::NotFoundError("");  // Removed meanwhile.
  // Listing must not wait for a save.
  if (!mu_.TryLock()) return checkpoint.status();
  const absl::Status is_there = CheckIsThereLocked(name);
  mu_.Unlock();
  return is_there.ok() ? checkpoint.status() : is_there;
}

absl::Status CheckpointFolder::CheckIsThereLocked(const std::string& name) {
  EMA_ASSIGN_OR_RETURN(const bool exists, files_.Has(name));
  if (exists) return absl::OkStatus();
  EMA_RETURN_IF_ERROR(data_.CheckPlace());
  index_.Erase(name);
  return absl::NotFoundError("");
}

absl::Status CheckpointFolder::SetAsideCorruptLocked(const std::string& name,
                                                     const absl::Status& problem,
                                                     std::string_view old_prefix) {
  // It may be gone also after an error, and then another one is the newest.
  ForgetLocked();
  EMA_ASSIGN_OR_RETURN(const std::string new_name,
                       files_.SetAside(name, kCorruptPrefix, old_prefix));
  LogTo(options_.log, LogLevel::kError, "checkpoint set aside",
        {{"model", model_name_}, {"checkpoint", name}, {"error", problem}});
  EMA_ASSIGN_OR_RETURN(latest_, files_.FindLatest());
  index_.Erase(name);
  if (const auto parsed = ParseSetAsideName(new_name)) {
    index_.Put(
        {.name = new_name, .id = parsed->id, .is_partial = parsed->is_partial, .problem = problem});
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> CheckpointFolder::SetAside(std::string_view name, const absl::Status& problem,
                                                bool waits) {
  if (waits) {
    mu_.Lock();
  } else if (!mu_.TryLock()) {
    return false;
  }
  absl::StatusOr<bool> was_latest = SetAsideLocked(std::string(name), problem);
  mu_.Unlock();
  return was_latest;
}

absl::StatusOr<bool> CheckpointFolder::SetAsideLocked(const std::string& name,
                                                      const absl::Status& problem) {
  EMA_RETURN_IF_ERROR(data_.CheckPlace());
  EMA_RETURN_IF_ERROR(IndexLocked());
  const std::optional<CheckpointEntry> entry = index_.Find(name);
  if (!entry.has_value() || !entry->problem.ok()) return false;
  EMA_ASSIGN_OR_RETURN(const CheckpointId latest, files_.FindLatest());
  EMA_RETURN_IF_ERROR(SetAsideCorruptLocked(name, problem));
  // Now, or the next listing would wait for the save that follows.
  EMA_RETURN_IF_ERROR(IndexLocked());
  return CheckpointName(latest) == name;
}

absl::StatusOr<bool> CheckpointFolder::NoteRead(std::string_view name, const absl::Status& status) {
  if (!index_.SetUnread(name, status) || status.ok()) return false;
  absl::MutexLock lock(&mu_);
  EMA_ASSIGN_OR_RETURN(const CheckpointId latest, files_.FindLatest());
  if (CheckpointName(latest) != name) return false;
  latest_bytes_ = 0;
  return true;
}

// --- Removing ---

absl::StatusOr<bool> CheckpointFolder::StartRemovingLocked(const std::string& name, Model* model) {
  if (index_.is_held(name)) return false;
  const std::optional<CheckpointId> id = ParseCheckpointName(name);
  if (id.has_value()) EMA_RETURN_IF_ERROR(records_.Erase(model, id->version_id()));
  if (!index_.EraseUnlessHeld(name)) return false;
  const absl::Status status = files_.RenameToTemporary(name);
  if (status.ok() || absl::IsNotFound(status)) return true;
  index_.Invalidate();  // It may still be there.
  return status;
}

absl::Status CheckpointFolder::Delete(std::string_view name, Model* model) {
  absl::MutexLock lock(&mu_);
  return data_.AsSaveError(DeleteLocked(name, model));
}

absl::Status CheckpointFolder::DeleteLocked(std::string_view name, Model* model) {
  EMA_RETURN_IF_ERROR(data_.CheckMayWrite());
  EMA_RETURN_IF_ERROR(IndexLocked());
  if (const std::optional<CheckpointEntry> entry = index_.Find(name); entry.has_value()) {
    std::vector<std::string> labels;
    for (const auto& [label_name, label] : index_.labels()) {
      if (label.id == entry->id.version_id())
        labels.push_back(absl::StrCat("\"", label_name, "\""));
    }
    if (!labels.empty() && entry->problem.ok() && !entry->is_partial) {
      return InUse(model_name_, name, absl::StrCat("has the label ", absl::StrJoin(labels, ", ")));
    }
    EMA_ASSIGN_OR_RETURN(const CheckpointId latest, files_.FindLatest());
    if (CheckpointName(latest) == name) {
      return InUse(model_name_, name, "is the newest, which a restart loads");
    }
    if (!entry->problem.ok()) EMA_RETURN_IF_ERROR(UpdateLatestBeforeRemovalLocked(*entry));
    EMA_ASSIGN_OR_RETURN(const bool is_removed, StartRemovingLocked(std::string(name), model));
    if (!is_removed) return InUse(model_name_, name, "is being read; try again");
    index_.ForgetMissing(entry->id);
  }
  // Also if it is gone: an earlier call may have ended before that was on the disk.
  EMA_ASSIGN_OR_RETURN(const bool exists, files_.Exists());
  if (exists) EMA_RETURN_IF_ERROR(files_.ClearTemporary());
  // An operator who deletes the file accepts the loss.
  if (IsSetAsideLabelFile(name)) index_.ClearLostLabelsIfDeleted();
  return absl::OkStatus();
}

absl::Status CheckpointFolder::UpdateLatestBeforeRemovalLocked(const CheckpointEntry& entry) {
  EMA_ASSIGN_OR_RETURN(const std::optional<std::string> named, files_.ReadLatestName());
  if (entry.is_partial || named != CheckpointName(entry.id)) return absl::OkStatus();
  EMA_ASSIGN_OR_RETURN(const CheckpointId latest, files_.FindLatest());
  if (latest == entry.id) return absl::OkStatus();  // It has been saved again.
  return latest == CheckpointId{} ? files_.RemoveLatest() : files_.WriteLatest(latest);
}

absl::Status CheckpointFolder::SetAsideAll() {
  absl::MutexLock lock(&mu_);
  must_delete_ = true;
  return data_.AsSaveError(DeleteAllLocked());
}

absl::Status CheckpointFolder::DeleteAllLocked() {
  ForgetLocked();
  records_.ForgetUnrecorded();
  index_.Clear();
  EMA_RETURN_IF_ERROR(data_.CheckMayWrite());
  EMA_RETURN_IF_ERROR(data_.SetAsideModel(model_name_));
  must_delete_ = false;
  return absl::OkStatus();
}

// --- Readers ---

absl::StatusOr<std::unique_ptr<CheckpointFolder::Held>> CheckpointFolder::HoldAll() {
  std::unique_ptr<Held> held(new Held(*this));
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(data_.CheckPlace());
  EMA_ASSIGN_OR_RETURN(const bool exists, files_.Exists());
  if (!exists || must_delete_) return held;
  EMA_ASSIGN_OR_RETURN(held->ids_, files_.FindCheckpoints());
  std::sort(held->ids_.begin(), held->ids_.end(), std::greater<>());
  for (const CheckpointId& id : held->ids_) held->names_.push_back(CheckpointName(id));
  index_.HoldAll(held->names_);
  return held;
}

absl::StatusOr<std::unique_ptr<CheckpointFolder::Held>> CheckpointFolder::Hold(
    std::string_view name) {
  EMA_RETURN_IF_ERROR(EnsureIndexed());
  const std::optional<CheckpointEntry> entry = index_.Hold(name);
  if (!entry.has_value()) return std::unique_ptr<Held>();
  std::unique_ptr<Held> held(new Held(*this));
  if (!entry->is_partial) held->ids_ = {entry->id};
  held->names_ = {entry->name};
  return held;
}

// --- Labels ---

absl::StatusOr<std::vector<CheckpointLabel>> CheckpointFolder::Labels() {
  EMA_RETURN_IF_ERROR(EnsureIndexed());
  std::vector<CheckpointLabel> labels;
  for (auto& [name, label] : index_.labels()) labels.push_back(label);
  return labels;
}

absl::Status CheckpointFolder::PutLabel(const CheckpointLabel& label) {
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(data_.CheckMayWrite());
  return data_.AsSaveError(PutLabelLocked(label));
}

absl::StatusOr<bool> CheckpointFolder::IsDurableLocked(const CheckpointId& id) {
  if (records_.is_in_group()) return records_.Has(id.version_id());
  // A later one is there if its save failed before LATEST: a restart sets it aside.
  if (is_durable_) return id <= latest_;
  EMA_ASSIGN_OR_RETURN(const CheckpointId latest, files_.FindLatest());
  return id <= latest;
}

absl::Status CheckpointFolder::PutLabelLocked(const CheckpointLabel& label) {
  EMA_RETURN_IF_ERROR(IndexLocked());
  const std::vector<CheckpointEntry> all = index_.All();
  const auto labelled = std::find_if(all.begin(), all.end(), [&](const CheckpointEntry& entry) {
    return entry.problem.ok() && !entry.is_partial && entry.id.version_id() == label.id;
  });
  if (labelled == all.end()) return VersionGoneError(label);
  EMA_ASSIGN_OR_RETURN(const bool is_durable, IsDurableLocked(labelled->id));
  if (!is_durable) return VersionGoneError(label);
  return labels_.Put(label);
}

absl::Status CheckpointFolder::RemoveLabel(std::string_view label) {
  absl::MutexLock lock(&mu_);
  return data_.AsSaveError(RemoveLabelLocked(label));
}

absl::Status CheckpointFolder::RemoveLabelLocked(std::string_view label) {
  EMA_RETURN_IF_ERROR(data_.CheckMayWrite());
  EMA_RETURN_IF_ERROR(IndexLocked());
  return labels_.Remove(label);
}

// --- At the start ---

absl::StatusOr<bool> CheckpointFolder::Recover() {
  absl::MutexLock lock(&mu_);
  EMA_ASSIGN_OR_RETURN(const bool exists, files_.Exists());
  if (!exists) return false;
  // A killed server may have renamed a checkpoint without syncing that, and what is loaded counts
  // as durable from here on.
  EMA_RETURN_IF_ERROR(files_.Sync());
  if (const absl::Status indexed = IndexLocked(); !indexed.ok()) {
    return LocateError(indexed, model_name_, kLabelsFileName);
  }
  EMA_ASSIGN_OR_RETURN(const std::optional<std::string> latest, files_.ReadLatestName());
  if (!latest.has_value()) return true;
  EMA_ASSIGN_OR_RETURN(const bool has_latest, files_.Has(*latest));
  const CheckpointId id = *ParseCheckpointName(*latest);
  const std::vector<CheckpointEntry> all = index_.All();
  const bool is_set_aside = std::any_of(all.begin(), all.end(), [&](const CheckpointEntry& entry) {
    return entry.id == id && !entry.is_partial;
  });
  if (!has_latest && !is_set_aside) index_.SetMissing(id);
  return true;
}

absl::Status CheckpointFolder::SetAsideCorrupt(const std::string& name,
                                               const absl::Status& problem) {
  absl::MutexLock lock(&mu_);
  return SetAsideCorruptLocked(name, problem);
}

absl::StatusOr<std::string> CheckpointFolder::Abandon(const CheckpointId& id) {
  absl::MutexLock lock(&mu_);
  ForgetLocked();
  return files_.SetAside(CheckpointName(id), kAbandonedPrefix);
}

absl::StatusOr<std::vector<std::string>> CheckpointFolder::BeginIncarnation(
    const std::optional<CheckpointId>& newest, const std::vector<VersionId>& recorded) {
  absl::MutexLock lock(&mu_);
  ForgetLocked();
  records_.ForgetUnrecorded();
  EMA_RETURN_IF_ERROR(data_.CheckMayWrite());
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointId> ids, files_.FindCheckpoints());
  if (ids.empty()) return std::vector<std::string>();
  if (newest.has_value() && ids.front() != *newest) {
    EMA_RETURN_IF_ERROR(files_.WriteLatest(*newest));
  }
  std::vector<std::string> set_aside;
  for (const CheckpointId& id : ids) {
    if (absl::c_linear_search(recorded, id.version_id())) continue;
    EMA_ASSIGN_OR_RETURN(std::string name, files_.SetAside(CheckpointName(id), kAbandonedPrefix));
    set_aside.push_back(std::move(name));
  }
  return set_aside;
}

}  // namespace ema
