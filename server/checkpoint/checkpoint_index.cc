// SPDX-License-Identifier: Apache-2.0
//
// The part of CheckpointStore that knows what there is of a model, and its labels.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/restore.h"

namespace ema {
namespace {

absl::Status SetAsideEarlier() {
  return MakeError(absl::StatusCode::kDataLoss, ErrorReason::kCheckpointCorrupt,
                   "it was set aside by an earlier server");
}

absl::Status Abandoned() {
  return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                   "a crash had left it newer than LATEST, and training went on from there");
}

absl::Status Missing() {
  return MakeError(absl::StatusCode::kDataLoss, ErrorReason::kCheckpointCorrupt,
                   "it is missing: LATEST named it at the start, and there was no such folder");
}

absl::Status LostLabels(const std::string& why) {
  return MakeError(absl::StatusCode::kDataLoss, ErrorReason::kCheckpointCorrupt,
                   absl::StrCat(why, "; no checkpoint of the model is removed to make room until ",
                                "the file that was set aside has been deleted as a checkpoint is"));
}

absl::Status VersionGone(const CheckpointLabel& label) {
  return MakeError(
      absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
      absl::StrCat("label \"", label.name, "\": version ", label.id.version, " of incarnation ",
                   label.id.incarnation, ", step ", label.step, ", is not on the disk"));
}

absl::Status UnknownLabel(std::string_view model_name, std::string_view label,
                          const LabelMap& labels) {
  constexpr size_t kListed = 16;
  std::vector<std::string> names;
  for (const auto& [name, known] : labels) {
    if (names.size() < kListed) names.push_back(absl::StrCat("\"", name, "\""));
  }
  return MakeError(
      absl::StatusCode::kNotFound, ErrorReason::kLabelNotFound,
      absl::StrCat("model \"", std::string(model_name), "\" has no label \"", std::string(label),
                   "\"; it has ", labels.empty() ? "none" : absl::StrJoin(names, ", "),
                   labels.size() > kListed ? ", ..." : ""));
}

}  // namespace

CheckpointStore::Stored::Details CheckpointStore::DetailsOf(const CheckpointManifest& checkpoint) {
  Stored::Details details{.commit_time = checkpoint.record.commit_time,
                          .total_bytes = checkpoint.total_bytes};
  for (const CheckpointTrack& track : checkpoint.tracks) {
    if (track.weights.has_value()) details.tracks.push_back(track.config.name);
  }
  return details;
}

absl::Status CheckpointStore::IndexLocked(ModelDirectory& folder) {
  {
    absl::MutexLock lock(&folder.state_mu);
    if (folder.is_indexed) return absl::OkStatus();
  }
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(folder.path));
  std::vector<DirectoryEntry> entries;
  // What is still to be deleted is not the model's any more.
  if (exists && !folder.must_delete) {
    EMA_ASSIGN_OR_RETURN(entries, file_system_.ListDirectory(folder.path));
  }
  EMA_RETURN_IF_ERROR(ReadLabelsLocked(folder, entries));
  absl::MutexLock lock(&folder.state_mu);
  std::map<std::string, Stored, std::less<>> index;
  for (const DirectoryEntry& entry : entries) {
    if (IsLabelsAside(entry.name)) {
      index.emplace(entry.name, Stored{.name = entry.name, .problem = folder.lost_labels});
    }
    if (!entry.is_directory) continue;
    Stored stored{.name = entry.name};
    std::optional<StoredName> name = ParseStoredName(entry.name);
    if (!name.has_value()) {
      name = ParseSetAsideName(entry.name);
      if (!name.has_value()) continue;
      stored.problem = entry.name.starts_with(kAbandonedPrefix) ? Abandoned() : SetAsideEarlier();
    }
    if (folder.missing.has_value() && entry.name == CheckpointName(*folder.missing)) {
      folder.missing.reset();  // Somebody has put it back.
    } else if (const auto known = folder.index.find(entry.name); known != folder.index.end()) {
      stored = known->second;
    }
    stored.id = name->id;
    stored.is_partial = name->is_partial;
    index.emplace(entry.name, std::move(stored));
  }
  if (folder.missing.has_value()) {
    const std::string name = CheckpointName(*folder.missing);
    index.emplace(name, Stored{.name = name, .id = *folder.missing, .problem = Missing()});
  }
  folder.index = std::move(index);
  folder.is_indexed = true;
  return absl::OkStatus();
}

absl::Status CheckpointStore::ReadLabelsLocked(ModelDirectory& folder,
                                               std::vector<DirectoryEntry>& entries) {
  LabelMap labels;
  absl::Status lost;
  for (DirectoryEntry& entry : entries) {
    if (IsLabelsAside(entry.name)) lost = LostLabels(absl::StrCat(entry.name, " is there"));
    if (entry.name != kLabelsFileName) continue;
    absl::StatusOr<std::string> text =
        file_system_.ReadSmallFile(JoinPath(folder.path, kLabelsFileName), kMaxLabelsFileBytes);
    // No regular file, or too large for one of ours.
    if (absl::IsFailedPrecondition(text.status())) {
      text = absl::DataLossError(text.status().message());
    }
    absl::StatusOr<LabelMap> parsed =
        text.ok() ? ParseLabels(*text) : absl::StatusOr<LabelMap>(text.status());
    if (absl::IsDataLoss(parsed.status())) {
      EMA_ASSIGN_OR_RETURN(entry.name,
                           SetAside(folder, std::string(kLabelsFileName), kCorruptPrefix));
      lost = LostLabels(std::string(parsed.status().message()));
      continue;
    }
    EMA_RETURN_IF_ERROR(parsed.status());
    labels = *std::move(parsed);
  }
  absl::MutexLock lock(&folder.state_mu);
  folder.labels = std::move(labels);
  // What has been lost stays so until what was set aside has been deleted.
  if (!lost.ok()) folder.lost_labels = lost;
  return absl::OkStatus();
}

absl::Status CheckpointStore::EnsureIndexed(ModelDirectory& folder) {
  {
    absl::MutexLock lock(&folder.state_mu);
    if (folder.is_indexed) return absl::OkStatus();
  }
  absl::MutexLock lock(&folder.mu);
  // What another directory in the place of ours has is none of the model's: what was known stays.
  if (GetErrorReason(CheckPlace()) == ErrorReason::kStoreReadOnly) return absl::OkStatus();
  return IndexLocked(folder);
}

void CheckpointStore::ForgetLocked(ModelDirectory& folder) {
  folder.is_durable = false;
  folder.latest = {};
  folder.latest_bytes = 0;
  absl::MutexLock lock(&folder.state_mu);
  folder.is_indexed = false;
}

absl::Status CheckpointStore::SetAsideCorruptLocked(ModelDirectory& folder, const std::string& name,
                                                    const absl::Status& problem,
                                                    std::string_view now_prefix) {
  // Also after an error it may have gone, and another be the newest.
  ForgetLocked(folder);
  EMA_ASSIGN_OR_RETURN(const std::string new_name,
                       SetAside(folder, name, kCorruptPrefix, now_prefix));
  if (options_.on_set_aside) options_.on_set_aside({folder.model_name, name, problem});
  EMA_ASSIGN_OR_RETURN(folder.latest, FindLatest(folder));
  absl::MutexLock lock(&folder.state_mu);
  folder.index.erase(name);
  if (const auto parsed = ParseSetAsideName(new_name)) {
    folder.index[new_name] = {
        .name = new_name, .id = parsed->id, .is_partial = parsed->is_partial, .problem = problem};
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> CheckpointStore::Quarantine(std::string_view model_name, std::string_view name,
                                                 const absl::Status& problem, bool waits) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  if (waits) {
    folder->mu.Lock();
  } else if (!folder->mu.TryLock()) {
    return false;
  }
  absl::StatusOr<bool> was_latest = QuarantineLocked(*folder, std::string(name), problem);
  folder->mu.Unlock();
  return was_latest;
}

absl::StatusOr<bool> CheckpointStore::QuarantineLocked(ModelDirectory& folder,
                                                       const std::string& name,
                                                       const absl::Status& problem) {
  EMA_RETURN_IF_ERROR(CheckPlace());
  EMA_RETURN_IF_ERROR(IndexLocked(folder));
  {
    absl::MutexLock state_lock(&folder.state_mu);
    const auto it = folder.index.find(name);
    if (it == folder.index.end() || !it->second.problem.ok()) return false;
  }
  EMA_ASSIGN_OR_RETURN(const CheckpointId latest, FindLatest(folder));
  EMA_RETURN_IF_ERROR(SetAsideCorruptLocked(folder, name, problem));
  // Now, or who asks next would wait for the save that follows.
  EMA_RETURN_IF_ERROR(IndexLocked(folder));
  return CheckpointName(latest) == name;
}

absl::StatusOr<bool> CheckpointStore::NoteRead(std::string_view model_name, std::string_view name,
                                               const absl::Status& status) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  {
    absl::MutexLock lock(&folder->state_mu);
    const auto it = folder->index.find(name);
    if (it == folder->index.end() || !it->second.problem.ok()) return false;
    it->second.unread = status;
  }
  if (status.ok()) return false;
  absl::MutexLock lock(&folder->mu);
  EMA_ASSIGN_OR_RETURN(const CheckpointId latest, FindLatest(*folder));
  if (CheckpointName(latest) != name) return false;
  folder->latest_bytes = 0;
  return true;
}

absl::Status CheckpointStore::UnreadProblem(ModelDirectory& folder, const std::string& name) {
  absl::MutexLock lock(&folder.state_mu);
  const auto it = folder.index.find(name);
  return it != folder.index.end() ? it->second.unread : absl::OkStatus();
}

absl::Status CheckpointStore::CheckMayCreate(std::string_view model_name) {
  std::shared_ptr<ModelDirectory> folder;
  {
    absl::MutexLock lock(&mu_);
    // Not GetDirectory(), which would keep an entry for every name that a client asks for.
    const auto it = folders_.find(model_name);
    if (it == folders_.end()) return absl::OkStatus();
    folder = it->second;
  }
  absl::MutexLock lock(&folder->state_mu);
  return folder->creation_error;
}

absl::StatusOr<std::vector<CheckpointStore::Stored>> CheckpointStore::ListNames(
    std::string_view model_name) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  EMA_RETURN_IF_ERROR(EnsureIndexed(*folder));
  std::vector<Stored> all;
  {
    absl::MutexLock lock(&folder->state_mu);
    for (const auto& [name, stored] : folder->index) all.push_back(stored);
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Stored& a, const Stored& b) { return a.id > b.id; });
  return all;
}

std::map<std::string, CheckpointCounts> CheckpointStore::CountAll() {
  std::vector<std::pair<std::string, std::shared_ptr<ModelDirectory>>> folders;
  {
    absl::MutexLock lock(&mu_);
    folders.assign(folders_.begin(), folders_.end());
  }
  std::map<std::string, CheckpointCounts> all;
  for (const auto& [model, folder] : folders) {
    absl::MutexLock lock(&folder->state_mu);
    for (const auto& [name, stored] : folder->index) {
      CheckpointCounts& counts = all[model];
      ++(!stored.unread.ok()                  ? counts.unreadable
         : stored.problem.ok()                ? counts.complete
         : name.starts_with(kAbandonedPrefix) ? counts.abandoned
                                              : counts.corrupt);
    }
  }
  return all;
}

absl::StatusOr<std::vector<CheckpointStore::Stored>> CheckpointStore::List(
    std::string_view model_name, std::optional<std::string_view> name) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  EMA_ASSIGN_OR_RETURN(std::vector<Stored> all, ListNames(model_name));
  if (name.has_value()) std::erase_if(all, [&](const Stored& s) { return s.name != *name; });
  for (Stored& stored : all) {
    if (!stored.problem.ok() || stored.details.has_value()) continue;
    absl::StatusOr<Stored::Details> details = ReadDetails(*folder, stored.name);
    stored.unread.Update(details.status());
    if (details.ok()) stored.details = *std::move(details);
  }
  std::erase_if(all, [](const Stored& stored) { return absl::IsNotFound(stored.unread); });
  return all;
}

absl::StatusOr<CheckpointStore::Stored::Details> CheckpointStore::ReadDetails(
    ModelDirectory& folder, const std::string& name) {
  const absl::StatusOr<CheckpointManifest> checkpoint =
      ReadCheckpointManifest(file_system_, JoinPath(folder.path, name));
  if (checkpoint.ok()) {
    Stored::Details details = DetailsOf(*checkpoint);
    absl::MutexLock lock(&folder.state_mu);
    if (const auto it = folder.index.find(name); it != folder.index.end()) {
      it->second.details = details;
    }
    return details;
  }
  if (!absl::IsDataLoss(checkpoint.status())) return checkpoint.status();
  {
    absl::MutexLock state_lock(&folder.state_mu);
    if (!folder.index.contains(name)) return absl::NotFoundError("");  // Removed meanwhile.
  }
  // Who only asks does not wait for a save.
  if (!folder.mu.TryLock()) return checkpoint.status();
  const absl::Status is_there = CheckIsThereLocked(folder, name);
  folder.mu.Unlock();
  return is_there.ok() ? checkpoint.status() : is_there;
}

absl::Status CheckpointStore::CheckIsThereLocked(ModelDirectory& folder, const std::string& name) {
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(JoinPath(folder.path, name)));
  if (exists) return absl::OkStatus();
  EMA_RETURN_IF_ERROR(CheckPlace());
  absl::MutexLock state_lock(&folder.state_mu);
  folder.index.erase(name);
  return absl::NotFoundError("");
}

absl::StatusOr<std::vector<CheckpointLabel>> CheckpointStore::Labels(std::string_view model_name) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  EMA_RETURN_IF_ERROR(EnsureIndexed(*folder));
  absl::MutexLock lock(&folder->state_mu);
  std::vector<CheckpointLabel> labels;
  for (const auto& [name, label] : folder->labels) labels.push_back(label);
  return labels;
}

absl::StatusOr<CheckpointStore::FoundLabel> CheckpointStore::FindLabel(std::string_view model_name,
                                                                       std::string_view label) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  absl::MutexLock lock(&folder->state_mu);
  const auto it = folder->labels.find(label);
  if (it == folder->labels.end()) return UnknownLabel(model_name, label, folder->labels);
  FoundLabel found{.label = it->second, .checkpoint = VersionGone(it->second)};
  for (const auto& [name, stored] : folder->index) {
    if (stored.is_partial || stored.id.version_id() != found.label.id) {
      continue;
    }
    found.checkpoint = stored.problem;
    if (stored.problem.ok()) break;
  }
  return found;
}

absl::Status CheckpointStore::PutLabel(std::string_view model_name, const CheckpointLabel& label) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  absl::MutexLock lock(&folder->mu);
  EMA_RETURN_IF_ERROR(CheckMayWrite());
  return AsSaveError(PutLabelLocked(*folder, label));
}

absl::Status CheckpointStore::PutLabelLocked(ModelDirectory& folder, const CheckpointLabel& label) {
  EMA_RETURN_IF_ERROR(IndexLocked(folder));
  // A later one is there if its save failed before LATEST: a restart sets it aside.
  absl::StatusOr<CheckpointId> latest = folder.latest;
  if (!folder.is_durable) latest = FindLatest(folder);
  EMA_RETURN_IF_ERROR(latest.status());
  LabelMap labels;
  {
    absl::MutexLock lock(&folder.state_mu);
    const auto is_it = [&](const auto& entry) {
      const Stored& stored = entry.second;
      return stored.problem.ok() && !stored.is_partial && stored.id <= *latest &&
             stored.id.version_id() == label.id;
    };
    if (std::none_of(folder.index.begin(), folder.index.end(), is_it)) {
      return VersionGone(label);
    }
    labels = folder.labels;
  }
  if (const auto it = labels.find(label.name); it != labels.end() && it->second == label) {
    // A call before may have ended between the rename and this.
    return Sync(folder.path);
  }
  labels[label.name] = label;
  if (labels.size() > kMaxLabels) {
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kBadRequest,
                     absl::StrCat("label \"", label.name, "\": the model has ", kMaxLabels,
                                  " labels, as many as it may have"));
  }
  return WriteLabelsLocked(folder, std::move(labels));
}

absl::Status CheckpointStore::RemoveLabel(std::string_view model_name, std::string_view label) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  absl::MutexLock lock(&folder->mu);
  return AsSaveError(RemoveLabelLocked(*folder, label));
}

absl::Status CheckpointStore::RemoveLabelLocked(ModelDirectory& folder, std::string_view label) {
  EMA_RETURN_IF_ERROR(CheckMayWrite());
  EMA_RETURN_IF_ERROR(IndexLocked(folder));
  LabelMap labels;
  {
    absl::MutexLock state_lock(&folder.state_mu);
    labels = folder.labels;
  }
  const auto it = labels.find(label);
  if (it == labels.end()) return UnknownLabel(folder.model_name, label, labels);
  labels.erase(it);
  return WriteLabelsLocked(folder, std::move(labels));
}

absl::Status CheckpointStore::WriteLabelsLocked(ModelDirectory& folder, LabelMap labels) {
  EMA_RETURN_IF_ERROR(ReplaceFile(folder.path, kLabelsFileName, EncodeLabels(labels)));
  absl::MutexLock lock(&folder.state_mu);
  folder.labels = std::move(labels);
  return absl::OkStatus();
}

}  // namespace ema
