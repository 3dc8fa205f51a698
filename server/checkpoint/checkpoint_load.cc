// SPDX-License-Identifier: Apache-2.0
//
// The part of CheckpointStore that finds checkpoints and loads them.
#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/restore.h"
#include "server/format/checkpoint_files.h"

namespace ema {
namespace {

absl::Status LoadAttachedFiles(FileSystem& file_system, const std::string& path,
                               const CheckpointManifest& checkpoint, Model& model) {
  EMA_ASSIGN_OR_RETURN(const std::vector<AttachedFile> files,
                       ReadAttachedFiles(file_system, path, checkpoint));
  for (const AttachedFile& file : files) {
    EMA_RETURN_IF_ERROR(model.attached_files().AddPart(
        file.name, static_cast<int64_t>(file.bytes.size()), /*offset=*/0, file.bytes));
  }
  return absl::OkStatus();
}

// Whether LoadAll(), which has reached `model`, has loaded it.
bool IsLoaded(const CheckpointStore::LoadReport& report, const std::string& model) {
  return !report.loaded.empty() && report.loaded.back().model == model;
}

// Of CheckMayCreate(). `found` describes what is on the disk.
absl::Status AllCorruptError(const std::string& model, const std::string& found) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, ErrorReason::kAllCheckpointsCorrupt,
      absl::StrCat("model \"", model, "\": every checkpoint is corrupt (", found,
                   "), and a new model would start a new average. Either copy a good checkpoint to "
                   "models/",
                   model,
                   "/checkpoints in the data directory and restart the server, or accept the loss "
                   "with `emactl delete ",
                   model, " --confirm ", model, "` (in Python Client.delete_model(\"", model,
                   "\")) and create the model again"));
}

}  // namespace

absl::StatusOr<CheckpointStore::LoadReport> CheckpointStore::LoadAll(ModelStore& models) {
  LoadReport report;
  EMA_ASSIGN_OR_RETURN(const std::vector<std::string> names, ModelNames());
  for (const std::string& name : names) {
    const std::shared_ptr<ModelDirectory> folder = GetDirectory(name);
    absl::MutexLock lock(&folder->mu);
    EMA_RETURN_IF_ERROR(LoadModelLocked(name, *folder, models, report));
    EMA_RETURN_IF_ERROR(IndexLocked(*folder));  // Again, if something was set aside, or is missing.
    ReportMissingLocked(*folder, report);
    EMA_RETURN_IF_ERROR(NoteAllCorruptLocked(*folder, report));
  }
  return report;
}

absl::Status CheckpointStore::LoadModelLocked(const std::string& model_name, ModelDirectory& folder,
                                              ModelStore& models, LoadReport& report) {
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(folder.path));
  if (!exists) return absl::OkStatus();
  // A server that was killed may have renamed a checkpoint and not synced that: what is loaded is
  // called durable from here on.
  EMA_RETURN_IF_ERROR(Sync(folder.path));
  if (const absl::Status indexed = IndexLocked(folder); !indexed.ok()) {
    return LocateError(indexed, model_name, kLabelsFileName);
  }
  {
    absl::MutexLock lock(&folder.state_mu);
    if (!folder.lost_labels.ok()) report.lost_labels.emplace_back(model_name, folder.lost_labels);
  }
  EMA_RETURN_IF_ERROR(NoteMissingLocked(folder));
  EMA_RETURN_IF_ERROR(ReportMisnamed(folder, report));
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointId> ids, FindCheckpoints(folder));
  for (auto id = ids.begin(); id != ids.end(); ++id) {
    const std::string name = CheckpointName(*id);
    absl::Status status = LoadCheckpoint(model_name, *id, folder, models, report);
    if (status.ok()) {
      // Nobody was told of newer ones: a crash came before LATEST. Training goes on from here, and
      // they are no part of what comes of it.
      for (auto other = std::next(id); other != ids.end(); ++other) {
        if (*other < *id) continue;
        ForgetLocked(folder);
        EMA_ASSIGN_OR_RETURN(std::string abandoned,
                             SetAside(folder, CheckpointName(*other), kAbandonedPrefix));
        report.abandoned.emplace_back(model_name, std::move(abandoned));
      }
      return RestoreKeptTime(folder, **models.Get(model_name));
    }
    if (!absl::IsDataLoss(status)) return LocateError(status, model_name, name);
    EMA_RETURN_IF_ERROR(SetAsideCorruptLocked(folder, name, status));
    report.quarantined.push_back({model_name, name, status});
  }
  return absl::OkStatus();
}

absl::Status CheckpointStore::NoteMissingLocked(ModelDirectory& folder) {
  EMA_ASSIGN_OR_RETURN(const std::optional<std::string> name, ReadLatestName(folder));
  if (!name.has_value()) return absl::OkStatus();
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(JoinPath(folder.path, *name)));
  if (exists) return absl::OkStatus();
  const CheckpointId id = *ParseCheckpointName(*name);
  absl::MutexLock lock(&folder.state_mu);
  for (const auto& [aside, stored] : folder.index) {
    if (stored.id == id && !stored.is_partial) return absl::OkStatus();
  }
  folder.missing = id;
  folder.is_indexed = false;
  return absl::OkStatus();
}

absl::Status CheckpointStore::ReportMisnamed(const ModelDirectory& folder, LoadReport& report) {
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                       file_system_.ListDirectory(folder.path));
  for (const DirectoryEntry& entry : entries) {
    // What begins with a dot is not in use, whoever has named it so.
    if (!entry.is_directory || entry.name[0] == '.' || ParseStoredName(entry.name).has_value()) {
      continue;
    }
    const std::string path = JoinPath(folder.path, entry.name);
    // One that may not be looked into, such as a disk's lost+found, is none of ours.
    if (!file_system_.Exists(JoinPath(path, kManifestFileName)).value_or(false)) continue;
    const absl::StatusOr<CheckpointManifest> checkpoint =
        ReadCheckpointManifest(file_system_, path);
    const bool is_whole = checkpoint.ok() && !checkpoint->is_partial;
    report.misnamed.push_back(
        {folder.model_name, entry.name, is_whole ? CheckpointName(IdOf(checkpoint->record)) : ""});
  }
  return absl::OkStatus();
}

void CheckpointStore::ReportMissingLocked(ModelDirectory& folder, LoadReport& report) {
  const std::string& model = folder.model_name;
  if (folder.missing.has_value()) {
    report.missing.push_back({model, CheckpointName(*folder.missing),
                              IsLoaded(report, model) ? report.loaded.back().checkpoint : ""});
  }
  LabelMap labels;
  {
    absl::MutexLock lock(&folder.state_mu);
    labels = folder.labels;
  }
  for (const auto& [name, label] : labels) {
    const absl::StatusOr<FoundLabel> found = FindLabel(model, name);
    if (found.ok() && !found->checkpoint.ok()) report.bare_labels.emplace_back(model, label);
  }
}

absl::Status CheckpointStore::NoteAllCorruptLocked(ModelDirectory& folder, LoadReport& report) {
  if (IsLoaded(report, folder.model_name)) return absl::OkStatus();
  // LATEST is written only after a complete checkpoint, so the model had one.
  EMA_ASSIGN_OR_RETURN(const bool has_latest,
                       file_system_.Exists(JoinPath(folder.path, kLatestFileName)));
  absl::MutexLock lock(&folder.state_mu);
  int64_t count = 0;
  const Stored* newest = nullptr;
  for (const auto& [name, stored] : folder.index) {
    // A start loads no partial checkpoint, so a corrupt one is no loss. An abandoned one is good.
    if (stored.is_partial || IsLabelsAside(name) || !absl::IsDataLoss(stored.problem)) continue;
    ++count;
    if (newest == nullptr || stored.id > newest->id) newest = &stored;
  }
  if (count == 0 && !has_latest) return absl::OkStatus();
  folder.creation_error = AllCorruptError(
      folder.model_name,
      newest == nullptr
          ? "LATEST is corrupt, and there is no checkpoint"
          : absl::StrCat("count ", count, ", newest ", newest->name, ", step ", newest->id.step));
  report.all_corrupt.emplace_back(folder.model_name, folder.creation_error);
  return absl::OkStatus();
}

absl::Status CheckpointStore::LoadCheckpoint(const std::string& model_name, const CheckpointId& id,
                                             const ModelDirectory& folder, ModelStore& models,
                                             LoadReport& report) {
  const std::string name = CheckpointName(id);
  const std::string path = JoinPath(folder.path, name);
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest checkpoint,
                       ReadCheckpointManifest(file_system_, path));
  EMA_RETURN_IF_ERROR(CheckIdentity(checkpoint, model_name, id, /*is_partial=*/false));
  EMA_ASSIGN_OR_RETURN(const ModelStore::CreateResult created,
                       models.Create(ConfigOf(checkpoint), GlobBudget::Unlimited()));
  if (!created.created) {
    return MakeError(absl::StatusCode::kInternal, ErrorReason::kBug, "the model exists already");
  }
  absl::StatusOr<std::shared_ptr<Snapshot>> snapshot =
      ReadCheckpoint(file_system_, path, checkpoint, *created.model);
  absl::Status status = snapshot.status();
  if (status.ok()) status = LoadAttachedFiles(file_system_, path, checkpoint, *created.model);
  if (!status.ok()) {
    models.Delete(model_name);
    return status;
  }
  created.model->Restore(*std::move(snapshot));
  created.model->durable().SetVersion(checkpoint.record.id(), checkpoint.record.step,
                                      created.model->Describe().settings_revision);
  report.loaded.push_back({model_name, name, checkpoint.record, checkpoint.total_bytes});
  return absl::OkStatus();
}

absl::Status CheckpointStore::RestoreKeptTime(const ModelDirectory& folder, Model& model) {
  if (std::none_of(model.config().tracks.begin(), model.config().tracks.end(),
                   [](const TrackConfig& track) { return track.snapshot_interval.has_value(); })) {
    return absl::OkStatus();
  }
  const int64_t loaded_step = model.history().latest()->step;
  EMA_ASSIGN_OR_RETURN(std::vector<CheckpointId> ids, FindCheckpoints(folder));
  std::sort(ids.begin(), ids.end(), std::greater<>());
  for (const CheckpointId& id : ids) {
    const std::string path = JoinPath(folder.path, CheckpointName(id));
    EMA_ASSIGN_OR_RETURN(const bool is_kept, file_system_.Exists(JoinPath(path, kKeepFileName)));
    if (!is_kept) continue;
    const absl::StatusOr<CheckpointManifest> checkpoint =
        ReadCheckpointManifest(file_system_, path);
    if (absl::IsDataLoss(checkpoint.status())) continue;
    if (!checkpoint.ok())
      return LocateError(checkpoint.status(), model.config().name, CheckpointName(id));
    // Of a future that a rollback has given up.
    if (checkpoint->record.step > loaded_step) continue;
    model.durable().SetKeptTime(checkpoint->record.time);
    break;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<CheckpointId>> CheckpointStore::FindCheckpoints(
    const ModelDirectory& folder) {
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                       file_system_.ListDirectory(folder.path));
  std::vector<CheckpointId> ids;
  for (const DirectoryEntry& entry : entries) {
    if (const auto id = ParseCheckpointName(entry.name)) ids.push_back(*id);
  }
  std::sort(ids.begin(), ids.end(), std::greater<>());
  EMA_ASSIGN_OR_RETURN(const std::optional<std::string> latest, ReadLatestName(folder));
  if (latest.has_value()) {
    const auto it = std::find(ids.begin(), ids.end(), *ParseCheckpointName(*latest));
    if (it != ids.end()) std::rotate(ids.begin(), it, it + 1);
  }
  return ids;
}

absl::StatusOr<CheckpointId> CheckpointStore::FindLatest(const ModelDirectory& folder) {
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointId> ids, FindCheckpoints(folder));
  return ids.empty() ? CheckpointId{} : ids.front();
}

absl::StatusOr<std::optional<std::string>> CheckpointStore::ReadLatestName(
    const ModelDirectory& folder) {
  const absl::StatusOr<std::string> text =
      file_system_.ReadSmallFile(JoinPath(folder.path, kLatestFileName), kMaxLatestBytes);
  // Anything that is wrong with the file itself counts as none: the names say the order, too.
  if (absl::IsNotFound(text.status()) || absl::IsFailedPrecondition(text.status()) ||
      absl::IsDataLoss(text.status())) {
    return std::nullopt;
  }
  EMA_RETURN_IF_ERROR(text.status());
  return ParseLatest(*text);
}

absl::StatusOr<std::string> CheckpointStore::SetAside(const ModelDirectory& folder,
                                                      const std::string& name,
                                                      std::string_view prefix,
                                                      std::string_view now_prefix) {
  EMA_RETURN_IF_ERROR(CheckPlace());
  const std::string path = JoinPath(folder.path, std::string(now_prefix).append(name));
  absl::Status status;
  std::string new_name;
  int64_t count = 0;
  do {
    new_name = absl::StrCat(std::string(prefix), name, count == 0 ? "" : absl::StrCat("-", count));
    status = file_system_.Rename(path, JoinPath(folder.path, new_name));
    ++count;
  } while (absl::IsAlreadyExists(status));
  EMA_RETURN_IF_ERROR(status);
  EMA_RETURN_IF_ERROR(Sync(folder.path));
  return new_name;
}

absl::StatusOr<std::vector<std::string>> CheckpointStore::ModelNames() {
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                       file_system_.ListDirectory(ModelsPath()));
  std::vector<std::string> names;
  for (const DirectoryEntry& entry : entries) {
    if (!ValidateName("model", entry.name).ok()) continue;
    if (entry.is_directory) names.push_back(entry.name);
    // Passed over, a training would begin anew in its place.
    if (entry.is_link) {
      return absl::FailedPreconditionError(
          absl::StrCat("models/", entry.name, " is a symbolic link, expected a folder, in which ",
                       "checkpoints may be a link"));
    }
  }
  return names;
}

absl::StatusOr<int64_t> CheckpointStore::HighestIncarnation() {
  EMA_ASSIGN_OR_RETURN(const std::vector<std::string> names, ModelNames());
  int64_t highest = 0;
  for (const std::string& name : names) {
    const std::string path = GetDirectory(name)->path;
    EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(path));
    if (!exists) continue;
    EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointId> ids, FindCheckpoints(*GetDirectory(name)));
    for (const CheckpointId& id : ids) highest = std::max(highest, id.incarnation);
  }
  return highest;
}

}  // namespace ema
