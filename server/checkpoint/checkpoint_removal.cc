// SPDX-License-Identifier: Apache-2.0
//
// The part of CheckpointStore that removes checkpoints, and keeps those that somebody reads.
#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_store.h"

namespace ema {
namespace {

absl::Status InUse(std::string_view model, std::string_view name, const std::string& why) {
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kCheckpointInUse,
                   absl::StrCat("model \"", std::string(model), "\", checkpoint \"",
                                std::string(name), "\": it ", why));
}

}  // namespace

absl::StatusOr<bool> CheckpointStore::StartRemovingLocked(ModelDirectory& folder,
                                                          const std::string& name) {
  {
    absl::MutexLock lock(&folder.state_mu);
    if (folder.held.contains(name)) return false;
    folder.index.erase(name);
  }
  const absl::Status status =
      file_system_.Rename(JoinPath(folder.path, name),
                          JoinPath(folder.path, std::string(kTemporaryPrefix).append(name)));
  if (status.ok() || absl::IsNotFound(status)) return true;
  absl::MutexLock lock(&folder.state_mu);
  folder.is_indexed = false;  // It is still there, perhaps.
  return status;
}

absl::StatusOr<bool> CheckpointStore::RemoveOldLocked(ModelDirectory& folder,
                                                      std::string_view saved_name) {
  EMA_RETURN_IF_ERROR(CheckPlace());
  // What an error has left may have the name that one of these takes on its way out.
  EMA_RETURN_IF_ERROR(ClearTemporary(folder.path));
  std::set<VersionId> labelled;
  {
    absl::MutexLock lock(&folder.state_mu);
    EMA_RETURN_IF_ERROR(folder.lost_labels);
    for (const auto& [name, label] : folder.labels) labelled.insert(label.id);
  }
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                       file_system_.ListDirectory(folder.path));
  // With all tracks, without, and those that a crash has left: of these only the newest is kept,
  // for a LATEST that somebody has put back had newer ones set aside, too.
  enum Kind { kWhole, kPartial, kAbandoned };
  std::vector<std::pair<CheckpointId, std::string>> found[3];
  for (const DirectoryEntry& entry : entries) {
    const bool is_abandoned = entry.name.starts_with(kAbandonedPrefix);
    const std::optional<StoredName> name =
        is_abandoned ? ParseSetAsideName(entry.name) : ParseStoredName(entry.name);
    if (!name.has_value() || !entry.is_directory) continue;
    EMA_ASSIGN_OR_RETURN(
        const bool is_kept,
        file_system_.Exists(JoinPath(JoinPath(folder.path, entry.name), kKeepFileName)));
    const Kind kind = is_abandoned ? kAbandoned : name->is_partial ? kPartial : kWhole;
    if (!is_kept) found[kind].emplace_back(name->id, entry.name);
  }
  bool is_any_removed = false;
  for (const Kind kind : {kWhole, kPartial, kAbandoned}) {
    auto& ids = found[kind];
    std::sort(ids.begin(), ids.end(), std::greater<>());
    const int64_t multiple = options_.keep_step_multiple;
    for (size_t i = kind == kAbandoned ? 1 : options_.keep_count; i < ids.size(); ++i) {
      const auto& [id, name] = ids[i];
      if (name == saved_name || id == folder.latest || labelled.contains(id.version_id()) ||
          (multiple > 0 && id.step % multiple == 0)) {
        continue;
      }
      EMA_ASSIGN_OR_RETURN(const bool is_removed, StartRemovingLocked(folder, name));
      is_any_removed |= is_removed;
    }
  }
  EMA_RETURN_IF_ERROR(ClearTemporary(folder.path));
  return is_any_removed;
}

absl::Status CheckpointStore::Delete(std::string_view model_name, std::string_view name) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  absl::MutexLock lock(&folder->mu);
  return AsSaveError(DeleteCheckpointLocked(*folder, name));
}

absl::Status CheckpointStore::DeleteCheckpointLocked(ModelDirectory& folder,
                                                     std::string_view name) {
  EMA_RETURN_IF_ERROR(CheckMayWrite());
  EMA_RETURN_IF_ERROR(IndexLocked(folder));
  std::optional<Stored> stored;
  std::vector<std::string> labels;
  {
    absl::MutexLock state_lock(&folder.state_mu);
    if (const auto it = folder.index.find(name); it != folder.index.end()) stored = it->second;
    for (const auto& [label_name, label] : folder.labels) {
      if (stored.has_value() && label.id == stored->id.version_id()) {
        labels.push_back(absl::StrCat("\"", label_name, "\""));
      }
    }
  }
  if (stored.has_value()) {
    if (!labels.empty() && stored->problem.ok() && !stored->is_partial) {
      return InUse(folder.model_name, name,
                   absl::StrCat("has the label ", absl::StrJoin(labels, ", ")));
    }
    EMA_ASSIGN_OR_RETURN(const CheckpointId latest, FindLatest(folder));
    if (CheckpointName(latest) == name) {
      return InUse(folder.model_name, name, "is the newest, which a restart goes on from");
    }
    if (!stored->problem.ok()) EMA_RETURN_IF_ERROR(TakeOffLatestLocked(folder, *stored));
    EMA_ASSIGN_OR_RETURN(const bool removing, StartRemovingLocked(folder, std::string(name)));
    if (!removing) return InUse(folder.model_name, name, "is being read; try again");
    if (stored->id == folder.missing) folder.missing.reset();
  }
  // Also if it is gone: a call before may have ended before that was on the disk.
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(folder.path));
  if (exists) EMA_RETURN_IF_ERROR(ClearTemporary(folder.path));
  if (!IsLabelsAside(name)) return absl::OkStatus();
  // Whoever has deleted it has looked at it.
  absl::MutexLock state_lock(&folder.state_mu);
  if (std::none_of(folder.index.begin(), folder.index.end(),
                   [](const auto& entry) { return IsLabelsAside(entry.first); })) {
    folder.lost_labels = absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status CheckpointStore::TakeOffLatestLocked(ModelDirectory& folder, const Stored& stored) {
  EMA_ASSIGN_OR_RETURN(const std::optional<std::string> named, ReadLatestName(folder));
  if (stored.is_partial || named != CheckpointName(stored.id)) return absl::OkStatus();
  EMA_ASSIGN_OR_RETURN(const CheckpointId latest, FindLatest(folder));
  if (latest == stored.id) return absl::OkStatus();  // It has been saved anew.
  if (latest != CheckpointId{}) {
    return ReplaceFile(folder.path, kLatestFileName, EncodeLatest(CheckpointName(latest)));
  }
  EMA_RETURN_IF_ERROR(file_system_.RemoveFile(JoinPath(folder.path, kLatestFileName)));
  return Sync(folder.path);
}

absl::StatusOr<std::unique_ptr<CheckpointStore::HeldCheckpoints>> CheckpointStore::HoldCheckpoints(
    std::string_view model_name) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  auto held = std::make_unique<HeldCheckpoints>(folder);
  absl::MutexLock lock(&folder->mu);
  EMA_RETURN_IF_ERROR(CheckPlace());
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(folder->path));
  // What is still to be deleted is not the model's any more.
  if (!exists || folder->must_delete) return held;
  EMA_ASSIGN_OR_RETURN(held->ids_, FindCheckpoints(*folder));
  std::sort(held->ids_.begin(), held->ids_.end(), std::greater<>());
  absl::MutexLock state_lock(&folder->state_mu);
  for (const CheckpointId& id : held->ids_) {
    held->names_.push_back(CheckpointName(id));
    ++folder->held[held->names_.back()];
  }
  return held;
}

absl::StatusOr<std::unique_ptr<CheckpointStore::HeldCheckpoints>> CheckpointStore::Hold(
    std::string_view model_name, std::string_view name) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  EMA_RETURN_IF_ERROR(EnsureIndexed(*folder));
  auto held = std::make_unique<HeldCheckpoints>(folder);
  absl::MutexLock lock(&folder->state_mu);
  const auto it = folder->index.find(name);
  if (it == folder->index.end() || !it->second.problem.ok()) {
    return std::unique_ptr<HeldCheckpoints>();
  }
  if (!it->second.is_partial) held->ids_ = {it->second.id};
  held->names_ = {std::string(name)};
  ++folder->held[held->names_.back()];
  return held;
}

CheckpointStore::HeldCheckpoints::~HeldCheckpoints() {
  absl::MutexLock lock(&folder_->state_mu);
  for (const std::string& name : names_) {
    const auto it = folder_->held.find(name);
    if (--it->second == 0) folder_->held.erase(it);
  }
}

std::string CheckpointStore::HeldCheckpoints::Path(const CheckpointId& id) const {
  return JoinPath(folder_->path, CheckpointName(id));
}

std::string CheckpointStore::Path(std::string_view model_name, std::string_view name) {
  return JoinPath(GetDirectory(model_name)->path, name);
}

}  // namespace ema
