// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_load.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/folder_files.h"
#include "server/format/checkpoint_files.h"
#include "server/format/verify.h"

namespace ema {
namespace {

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

// Creates the model and loads that checkpoint into it. After an error there is no such model.
absl::Status LoadCheckpoint(const CheckpointFolder& folder, const CheckpointId& id,
                            ModelStore& models, LoadReport& report) {
  const std::string name = CheckpointName(id);
  const std::string path = folder.Path(name);
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest checkpoint,
                       ReadCheckpointManifest(folder.file_system(), path));
  EMA_RETURN_IF_ERROR(CheckIdentity(checkpoint, folder.model_name(), id, /*is_partial=*/false));
  EMA_ASSIGN_OR_RETURN(const ModelStore::CreateResult created,
                       models.Create(ConfigOf(checkpoint), GlobBudget::Unlimited()));
  if (!created.created) {
    return MakeError(absl::StatusCode::kInternal, ErrorReason::kBug, "the model exists already");
  }
  absl::StatusOr<std::shared_ptr<Snapshot>> snapshot =
      ReadCheckpoint(folder.file_system(), path, checkpoint, *created.model);
  absl::Status status = snapshot.status();
  if (status.ok()) {
    status = LoadAttachedFiles(folder.file_system(), path, checkpoint, *created.model);
  }
  if (!status.ok()) {
    models.Delete(folder.model_name());
    return status;
  }
  created.model->Restore(*std::move(snapshot));
  created.model->durable().SetVersion(checkpoint.record.id(), checkpoint.record.step,
                                      created.model->Describe().settings_revision);
  report.loaded.push_back({folder.model_name(), name, checkpoint.record, checkpoint.total_bytes});
  return absl::OkStatus();
}

absl::Status LoadNewest(const FolderFiles& files, CheckpointFolder& folder, ModelStore& models,
                        LoadReport& report) {
  const std::string& model = folder.model_name();
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointId> ids, files.FindCheckpoints());
  for (auto id = ids.begin(); id != ids.end(); ++id) {
    const std::string name = CheckpointName(*id);
    const absl::Status status = LoadCheckpoint(folder, *id, models, report);
    if (status.ok()) {
      // A crash came before LATEST named newer ones, so no client knows of them. Training continues
      // from this one, and they do not belong to its history.
      for (auto other = std::next(id); other != ids.end(); ++other) {
        if (*other < *id) continue;
        EMA_ASSIGN_OR_RETURN(std::string abandoned, folder.Abandon(*other));
        report.abandoned.emplace_back(model, std::move(abandoned));
      }
      return RestoreKeptTime(files, **models.Get(model));
    }
    if (!absl::IsDataLoss(status)) return LocateError(status, model, name);
    EMA_RETURN_IF_ERROR(folder.SetAsideCorrupt(name, status));
    report.corrupt.push_back({model, name, status});
  }
  return absl::OkStatus();
}

absl::Status ReportMisnamed(const FolderFiles& files, const std::string& model,
                            LoadReport& report) {
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> listing, files.List());
  for (const DirectoryEntry& listed : listing) {
    // A name that starts with a dot is not in use.
    if (!listed.is_directory || listed.name[0] == '.' || ParseStoredName(listed.name).has_value()) {
      continue;
    }
    // A folder that may not be opened, such as a disk's lost+found, is not a checkpoint.
    const std::string manifest = JoinPath(listed.name, kManifestFileName);
    if (!files.Has(manifest).value_or(false)) continue;
    const absl::StatusOr<CheckpointManifest> checkpoint = files.ReadManifest(listed.name);
    const bool is_whole = checkpoint.ok() && !checkpoint->is_partial;
    report.misnamed.push_back(
        {model, listed.name, is_whole ? CheckpointName(IdOf(checkpoint->record)) : ""});
  }
  return absl::OkStatus();
}

// `is_loaded`: the model is the last in report.loaded.
absl::Status ReportProblems(const FolderFiles& files, CheckpointFolder& folder, bool is_loaded,
                            LoadReport& report) {
  const std::string& model = folder.model_name();
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> all, folder.ListNames());
  if (const std::optional<CheckpointId> missing = folder.missing(); missing.has_value()) {
    report.missing.push_back(
        {model, CheckpointName(*missing), is_loaded ? report.loaded.back().checkpoint : ""});
  }
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointLabel> labels, folder.Labels());
  for (const CheckpointLabel& label : labels) {
    const absl::StatusOr<FoundLabel> found = folder.FindLabel(label.name);
    if (found.ok() && !found->checkpoint.ok())
      report.labels_without_checkpoint.emplace_back(model, label);
  }
  if (is_loaded) return absl::OkStatus();
  // LATEST is written only after a complete checkpoint, so the model had one.
  EMA_ASSIGN_OR_RETURN(const bool has_latest, files.Has(kLatestFileName));
  int64_t count = 0;
  const CheckpointEntry* newest = nullptr;
  for (const CheckpointEntry& entry : all) {
    // A corrupt partial checkpoint is no loss, as a start never loads one. An abandoned one is
    // good.
    if (entry.is_partial || IsSetAsideLabelFile(entry.name) || !absl::IsDataLoss(entry.problem))
      continue;
    if (count++ == 0) newest = &entry;
  }
  if (count == 0 && !has_latest) return absl::OkStatus();
  report.all_corrupt.emplace_back(
      model, AllCorruptError(model, newest == nullptr
                                        ? "LATEST is corrupt, and the folder has no checkpoint"
                                        : absl::StrCat("count ", count, ", newest ", newest->name,
                                                       ", step ", newest->id.step)));
  return absl::OkStatus();
}

}  // namespace

absl::Status LoadModel(DataDirectory& data, CheckpointFolder& folder, ModelStore& models,
                       LoadReport& report) {
  const FolderFiles files(data, folder.model_name());
  const size_t loaded_count = report.loaded.size();
  EMA_ASSIGN_OR_RETURN(const bool exists, folder.Recover());
  if (exists) {
    if (const absl::Status lost = folder.lost_labels(); !lost.ok()) {
      report.lost_labels.emplace_back(folder.model_name(), lost);
    }
    EMA_RETURN_IF_ERROR(ReportMisnamed(files, folder.model_name(), report));
    EMA_RETURN_IF_ERROR(LoadNewest(files, folder, models, report));
  }
  return ReportProblems(files, folder, report.loaded.size() > loaded_count, report);
}

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

absl::Status RestoreKeptTime(const FolderFiles& files, Model& model) {
  if (std::none_of(model.config().tracks.begin(), model.config().tracks.end(),
                   [](const TrackConfig& track) { return track.snapshot_interval.has_value(); })) {
    return absl::OkStatus();
  }
  const int64_t loaded_step = model.history().latest()->step;
  EMA_ASSIGN_OR_RETURN(std::vector<CheckpointId> ids, files.FindCheckpoints());
  std::sort(ids.begin(), ids.end(), std::greater<>());
  for (const CheckpointId& id : ids) {
    EMA_ASSIGN_OR_RETURN(const bool is_kept, files.IsKept(CheckpointName(id)));
    if (!is_kept) continue;
    const absl::StatusOr<CheckpointManifest> checkpoint = files.ReadManifest(CheckpointName(id));
    if (absl::IsDataLoss(checkpoint.status())) continue;
    if (!checkpoint.ok()) {
      return LocateError(checkpoint.status(), model.config().name, CheckpointName(id));
    }
    if (checkpoint->record.step > loaded_step) continue;
    model.durable().SetKeptTime(checkpoint->record.time);
    break;
  }
  return absl::OkStatus();
}

}  // namespace ema
