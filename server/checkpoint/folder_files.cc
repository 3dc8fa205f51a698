// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/folder_files.h"

#include <algorithm>
#include <functional>
#include <memory>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/pacer.h"
#include "server/format/verify.h"

namespace ema {

bool FolderFiles::MayBeKept(std::string_view name) const {
  const auto entries = List();
  if (!entries.ok()) return true;
  const std::optional<StoredName> wanted = ParseStoredName(name);
  return std::any_of(entries->begin(), entries->end(), [&](const DirectoryEntry& entry) {
    return (entry.name == name || ParseSetAsideName(entry.name) == wanted) &&
           IsKept(entry.name).value_or(true);
  });
}

absl::StatusOr<CheckpointManifest> FolderFiles::ReadManifest(std::string_view name) const {
  return ReadCheckpointManifest(disk(), Path(name));
}

absl::StatusOr<std::vector<CheckpointId>> FolderFiles::FindCheckpoints() const {
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, List());
  std::vector<CheckpointId> ids;
  for (const DirectoryEntry& entry : entries) {
    if (const auto id = ParseCheckpointName(entry.name)) ids.push_back(*id);
  }
  std::sort(ids.begin(), ids.end(), std::greater<>());
  EMA_ASSIGN_OR_RETURN(const std::optional<std::string> latest, ReadLatestName());
  if (latest.has_value()) {
    const auto it = std::find(ids.begin(), ids.end(), *ParseCheckpointName(*latest));
    if (it != ids.end()) std::rotate(ids.begin(), it, it + 1);
  }
  return ids;
}

absl::StatusOr<CheckpointId> FolderFiles::FindLatest() const {
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointId> ids, FindCheckpoints());
  return ids.empty() ? CheckpointId{} : ids.front();
}

absl::StatusOr<std::optional<std::string>> FolderFiles::ReadLatestName() const {
  const absl::StatusOr<std::string> text =
      disk().ReadSmallFile(Path(kLatestFileName), kMaxLatestBytes);
  // The names of the checkpoints say the order, too, so a bad file is as good as none.
  if (absl::IsNotFound(text.status()) || absl::IsFailedPrecondition(text.status()) ||
      absl::IsDataLoss(text.status())) {
    return std::nullopt;
  }
  EMA_RETURN_IF_ERROR(text.status());
  return ParseLatest(*text);
}

absl::StatusOr<LabelMap> FolderFiles::ReadLabels() const {
  const absl::StatusOr<std::string> text =
      disk().ReadSmallFile(Path(kLabelsFileName), kMaxLabelsFileBytes);
  // Not a regular file, or larger than any that a server writes.
  if (absl::IsFailedPrecondition(text.status())) {
    return absl::DataLossError(text.status().message());
  }
  EMA_RETURN_IF_ERROR(text.status());
  return ParseLabels(*text);
}

absl::Status FolderFiles::WriteLatest(const CheckpointId& id) {
  return data_.ReplaceFile(path_, kLatestFileName, EncodeLatest(CheckpointName(id)));
}

absl::Status FolderFiles::RemoveLatest() {
  EMA_RETURN_IF_ERROR(disk().RemoveFile(Path(kLatestFileName)));
  return Sync();
}

absl::Status FolderFiles::WriteLabels(const LabelMap& labels) {
  return data_.ReplaceFile(path_, kLabelsFileName, EncodeLabels(labels));
}

absl::Status FolderFiles::Keep(const std::string& checkpoint_path) {
  const std::string path = JoinPath(checkpoint_path, kKeepFileName);
  EMA_ASSIGN_OR_RETURN(const bool exists, disk().Exists(path));
  if (!exists) {
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, disk().NewWritableFile(path));
    EMA_RETURN_IF_ERROR(data_.latch().Check(file->Sync()));
    EMA_RETURN_IF_ERROR(file->Close());
  }
  // An earlier call may have made the file and failed before this.
  return data_.Sync(checkpoint_path);
}

absl::StatusOr<CheckpointManifest> FolderFiles::WriteTemporary(
    Model& model, const Snapshot& snapshot, const std::string& name, const WriteOptions& options,
    PartitionedSaves* partitions, bool keep, bool needs_room_for_another) {
  constexpr int64_t kSpareBytes = int64_t{1} << 20;  // For everything but the weights.
  const int64_t needed_bytes = (CheckpointDataBytes(model, snapshot, options) + kSpareBytes) *
                               (needs_room_for_another ? 2 : 1);
  EMA_ASSIGN_OR_RETURN(const int64_t free_bytes, disk().FreeBytes(path_));
  if (free_bytes < needed_bytes) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, ErrorReason::kDiskFull,
        absl::StrCat("model \"", model.config().name, "\": a checkpoint ",
                     needs_room_for_another ? "to be kept and room for one more need " : "needs ",
                     needed_bytes, " bytes, but the disk has ", free_bytes, " left"));
  }
  const std::string path = TemporaryPath(name);
  EMA_RETURN_IF_ERROR(disk().RemoveTree(path));
  const auto write = [&]() -> absl::StatusOr<CheckpointManifest> {
    if (partitions == nullptr) {
      EMA_RETURN_IF_ERROR(
          WriteCheckpoint(disk(), data_.latch(), path, model, snapshot, options).status());
      return VerifyCheckpoint(disk(), path, nullptr, Pacer::Hook(model));
    }
    EMA_RETURN_IF_ERROR(MakeCheckpointFolders(disk(), path, model, snapshot, options));
    EMA_RETURN_IF_ERROR(partitions->Write(path, model, snapshot, options).status());
    return VerifyAllButWeights(disk(), path);
  };
  absl::StatusOr<CheckpointManifest> written = write();
  if (written.ok() && keep) {
    if (const absl::Status kept = Keep(path); !kept.ok()) written = kept;
  }
  if (!written.ok()) RemoveTemporary(name);
  return written;
}

absl::StatusOr<std::string> FolderFiles::SetAside(const std::string& name, std::string_view prefix,
                                                  std::string_view old_prefix) {
  EMA_RETURN_IF_ERROR(data_.CheckPlace());
  const std::string path = Path(std::string(old_prefix).append(name));
  absl::Status status;
  std::string new_name;
  int64_t count = 0;
  do {
    new_name = absl::StrCat(std::string(prefix), name, count == 0 ? "" : absl::StrCat("-", count));
    status = disk().Rename(path, Path(new_name));
    ++count;
  } while (absl::IsAlreadyExists(status));
  EMA_RETURN_IF_ERROR(status);
  EMA_RETURN_IF_ERROR(Sync());
  return new_name;
}

}  // namespace ema
