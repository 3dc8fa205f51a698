// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/stored_versions.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/partitioned_saves.h"
#include "server/format/label_file.h"
#include "server/format/manifest_parts.h"
#include "server/format/verify.h"

namespace ema {
namespace {

bool IsInMemory(const Model& model, const VersionId& id) {
  const std::vector<VersionHistory::RecordEntry> records =
      model.history().RecordsAfter(id.version - 1, id.incarnation, /*limit=*/1);
  return !records.empty() && records[0].record.id() == id && records[0].available;
}

std::vector<KnownVersion> VersionsOf(const std::vector<CheckpointEntry>& entries,
                                     bool with_partial) {
  std::vector<KnownVersion> versions;
  for (const CheckpointEntry& entry : entries) {
    if (entry.is_partial && !with_partial) continue;
    versions.push_back({.id = entry.id.version_id(), .step = entry.id.step, .can_restore = true});
  }
  return versions;
}

}  // namespace

// --- Finding ---

absl::StatusOr<std::vector<CheckpointEntry>> StoredVersions::List(
    std::optional<std::string_view> name) const {
  EMA_ASSIGN_OR_RETURN(std::vector<CheckpointEntry> stored, context_.folder.List(name));
  bool is_any_bad = false;
  for (const CheckpointEntry& entry : stored) {
    if (!absl::IsDataLoss(entry.read_error)) continue;
    HandleReadError(entry.name, entry.read_error).IgnoreError();
    is_any_bad = true;
  }
  if (!is_any_bad) return stored;
  return context_.folder.List(name);  // Some have new names.
}

absl::StatusOr<std::vector<CheckpointEntry>> StoredVersions::Readable(bool with_discarded) const {
  EMA_ASSIGN_OR_RETURN(std::vector<CheckpointEntry> all, context_.folder.ListNames());
  std::erase_if(all, [](const CheckpointEntry& entry) { return !entry.problem.ok(); });
  const PartitionedSaves* const partitions = context_.folder.partitions();
  if (partitions == nullptr || all.empty()) return all;
  EMA_ASSIGN_OR_RETURN(const RecordedCheckpoints recorded, partitions->Recorded(context_.name()));
  std::erase_if(all, [&](const CheckpointEntry& entry) {
    const VersionId id = entry.id.version_id();
    return (!entry.is_partial && !recorded.Has(id)) ||
           (!with_discarded && !recorded.IsInHistory(id));
  });
  return all;
}

absl::StatusOr<std::optional<CheckpointEntry>> StoredVersions::Find(const VersionId& id,
                                                                    bool is_partial) const {
  EMA_ASSIGN_OR_RETURN(std::vector<CheckpointEntry> all,
                       Readable(/*with_discarded=*/id.incarnation != 0));
  for (CheckpointEntry& entry : all) {
    if (entry.is_partial == is_partial && id.Matches(entry.id.version_id())) {
      return std::optional(std::move(entry));
    }
  }
  return std::optional<CheckpointEntry>();
}

absl::StatusOr<std::vector<KnownVersion>> StoredVersions::OnDisk(bool with_partial) const {
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> all, Readable(/*with_discarded=*/false));
  return VersionsOf(all, with_partial);
}

absl::StatusOr<std::vector<KnownVersion>> StoredVersions::Known() const {
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> all, Readable(/*with_discarded=*/true));
  return MergeKnownVersions(context_.model.history(), VersionsOf(all, /*with_partial=*/false));
}

absl::StatusOr<std::vector<KnownVersion>> StoredVersions::Branch(const Version& latest) const {
  EMA_ASSIGN_OR_RETURN(const std::vector<KnownVersion> on_disk, OnDisk(/*with_partial=*/false));
  return BranchOf(MergeKnownVersions(context_.model.history(), on_disk), latest);
}

absl::StatusOr<VersionId> StoredVersions::FindLabel(std::string_view label) const {
  EMA_ASSIGN_OR_RETURN(const FoundLabel found, context_.folder.FindLabel(label));
  if (found.checkpoint.ok() || IsInMemory(context_.model, found.label.id)) return found.label.id;
  return WithPrefix(
      found.checkpoint,
      absl::StrCat("model \"", context_.name(), "\", label \"", std::string(label), "\": version ",
                   found.label.id.version, ", step ", found.label.step, ": "));
}

// --- Errors ---

absl::Status StoredVersions::CheckIsDurable(const VersionId& id, bool is_partial) const {
  EMA_RETURN_IF_ERROR(context_.data.sync_error());
  if (is_partial) return absl::OkStatus();
  bool is_durable = id <= context_.model.durable().version();
  if (const PartitionedSaves* const partitions = context_.folder.partitions()) {
    EMA_ASSIGN_OR_RETURN(const RecordedCheckpoints recorded, partitions->Recorded(context_.name()));
    is_durable = recorded.Has(id);
  }
  if (is_durable) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("model \"", context_.name(),
                                             "\": the save of version ", id.version,
                                             " has not finished, or has failed"));
}

absl::Status StoredVersions::CheckNotPartial(const VersionId& id) const {
  EMA_ASSIGN_OR_RETURN(const auto partial, Find(id, /*is_partial=*/true));
  if (!partial.has_value()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kPartialCheckpoint,
                   absl::StrCat("model \"", context_.name(), "\": only some tracks of version ",
                                id.version, " were saved, as ", partial->name));
}

absl::Status StoredVersions::CheckLabel(std::string_view label) const {
  if (FindLabel(label).ok()) return absl::OkStatus();
  return ValidateNewLabel(label);
}

absl::Status StoredVersions::VersionNotKeptError(const VersionId& id) const {
  EMA_ASSIGN_OR_RETURN(const std::vector<KnownVersion> known, Known());
  int64_t step = 0;
  if (const auto latest = context_.model.history().latest()) step = latest->step;
  return MakeError(
      absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
      absl::StrCat("model \"", context_.name(), "\": version ", id.version,
                   id.incarnation == 0 ? "" : absl::StrCat(" of incarnation ", id.incarnation),
                   " is neither in memory nor on the disk; there are ", ListNearest(known, step)));
}

// --- Reading ---

absl::StatusOr<CheckpointManifest> StoredVersions::CheckIsOf(const CheckpointEntry& entry,
                                                             CheckpointManifest checkpoint) const {
  EMA_RETURN_IF_ERROR(CheckIdentity(checkpoint, context_.name(), entry.id, entry.is_partial));
  const Manifest& own = context_.model.manifest();
  if (context_.model.is_partition()) {
    // The checkpoint is of the whole model.
    const std::optional<int64_t> first = checkpoint.manifest.Find(own.tensor(0).name);
    auto part = PartOf(checkpoint, first.value_or(-1), own.tensor_count());
    if (part.ok()) checkpoint = *std::move(part);
  }
  if (checkpoint.manifest != own) {
    return CorruptManifest(absl::StrCat(
        "it has other tensors than the model (here: the checkpoint, there: the model): ",
        checkpoint.manifest.DifferenceFrom(own)));
  }
  return checkpoint;
}

absl::StatusOr<CheckpointManifest> StoredVersions::ReadManifest(
    const CheckpointEntry& entry) const {
  absl::StatusOr<CheckpointManifest> checkpoint =
      ReadCheckpointManifest(context_.folder.file_system(), context_.folder.Path(entry.name));
  if (checkpoint.ok()) checkpoint = CheckIsOf(entry, *std::move(checkpoint));
  if (checkpoint.ok()) return checkpoint;
  return HandleReadError(entry.name, checkpoint.status());
}

absl::StatusOr<SnapshotRef> StoredVersions::OpenVersion(const VersionId& id,
                                                        std::string_view track) const {
  CheckpointFolder& folder = context_.folder;
  EMA_ASSIGN_OR_RETURN(std::vector<CheckpointEntry> found,
                       Readable(/*with_discarded=*/id.incarnation != 0));
  std::erase_if(found,
                [&](const CheckpointEntry& entry) { return !id.Matches(entry.id.version_id()); });
  // Complete checkpoints first.
  std::stable_partition(found.begin(), found.end(),
                        [](const CheckpointEntry& entry) { return !entry.is_partial; });
  std::set<std::string> others;
  for (const CheckpointEntry& entry : found) {
    // Held while its files are opened; they stay open after it has been removed.
    EMA_ASSIGN_OR_RETURN(const auto held, folder.Hold(entry.name));
    if (held == nullptr) continue;
    EMA_ASSIGN_OR_RETURN(const CheckpointManifest checkpoint, ReadManifest(entry));
    if (entry.is_partial) {
      const std::vector<std::string> tracks = DetailsOf(checkpoint).tracks;
      if (std::find(tracks.begin(), tracks.end(), track) == tracks.end()) {
        others.insert(tracks.begin(), tracks.end());
        continue;
      }
    }
    absl::StatusOr<SnapshotRef> opened =
        OpenStoredVersion(folder.file_system(), folder.Path(entry.name), checkpoint, track,
                          [context = context_, weak_model = context_.model.weak_from_this(),
                           name = entry.name](const absl::Status& problem) {
                            const std::shared_ptr<Model> model = weak_model.lock();
                            if (model == nullptr) return;
                            StoredVersions(context).HandleReadError(name, problem).IgnoreError();
                          });
    if (!opened.ok()) return HandleReadError(entry.name, opened.status());
    return opened;
  }
  if (others.empty()) return VersionNotKeptError(id);
  return MakeError(
      absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
      absl::StrCat("model \"", context_.name(), "\", track \"", std::string(track), "\": version ",
                   id.version, " was saved only with these tracks: ", absl::StrJoin(others, ", ")));
}

// --- Bad checkpoints ---

absl::Status StoredVersions::HandleReadError(const std::string& name,
                                             const absl::Status& status) const {
  // Deleting a model removes its files, which is no corruption. The caller must not wait for a
  // save, as calls of other models wait behind it. Only the home changes the checkpoints of a model
  // on several servers.
  if (absl::IsDataLoss(status) && context_.model.CheckOpen().ok() && context_.model.is_home()) {
    SetAside(name, status, /*waits=*/false);
  }
  return LocateError(status, context_.name(), name);
}

void StoredVersions::SetAside(const std::string& name, const absl::Status& problem,
                              bool waits) const {
  const absl::StatusOr<bool> was_latest = context_.folder.SetAside(name, problem, waits);
  if (!was_latest.ok()) {
    context_.Log(LogLevel::kError, "corrupt checkpoint not set aside",
                 {{"checkpoint", name}, {"error", problem}, {"why_not", was_latest.status()}});
    return;
  }
  if (*was_latest) return context_.scheduler.SaveNow(context_.model.shared_from_this());
  PartitionedSaves* const partitions = context_.folder.partitions();
  const std::optional<CheckpointId> id = ParseCheckpointName(name);
  if (partitions == nullptr || !waits || !id.has_value()) return;
  if (const absl::Status removed = partitions->Remove(context_.model, id->version_id());
      !removed.ok()) {
    context_.Log(LogLevel::kWarning, "corrupt checkpoint still in the registry",
                 {{"checkpoint", name}, {"error", removed}});
  }
}

void StoredVersions::NoteUnreadable(const std::string& name, const absl::Status& problem) const {
  context_.Log(LogLevel::kError, "checkpoint not readable",
               {{"checkpoint", name}, {"error", problem}});
  if (!context_.model.is_home()) return;
  // If it is unknown whether it is the newest, the next scrub asks again.
  if (context_.folder.NoteRead(name, problem).value_or(false)) {
    context_.scheduler.SaveNow(context_.model.shared_from_this());
  }
}

}  // namespace ema
