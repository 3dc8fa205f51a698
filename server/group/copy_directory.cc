// SPDX-License-Identifier: Apache-2.0
#include "server/group/copy_directory.h"

#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "server/base/quoted.h"
#include "server/format/checkpoint_files.h"
#include "server/format/verify.h"

namespace ema::group {
namespace {

absl::Status CheckCopyFileName(std::string_view name) {
  if (!name.empty() && name[0] != '.' && name.find('/') == std::string_view::npos &&
      name.find('\0') == std::string_view::npos) {
    return absl::OkStatus();
  }
  return BadRequest(
      absl::StrCat("file: ", Quoted(name), " given, expected the name of a file in a track"));
}

// OK also if the directory is there.
absl::Status MakeOneDirectory(FileSystem& file_system, const std::string& path) {
  const absl::Status made = file_system.CreateDirectory(path);
  return absl::IsAlreadyExists(made) ? absl::OkStatus() : made;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CopyDirectory>> CopyDirectory::Open(FileSystem& file_system,
                                                                   std::string_view path,
                                                                   std::string_view group,
                                                                   std::string_view member) {
  const std::string group_path = JoinPath(path, group);
  std::unique_ptr<CopyDirectory> directory(
      new CopyDirectory(file_system, JoinPath(group_path, member)));
  for (const std::string& one : {std::string(path), group_path, directory->path_}) {
    EMA_RETURN_IF_ERROR(MakeOneDirectory(file_system, one));
  }
  return directory;
}

std::string CopyDirectory::CopyPath(const CopyId& copy) const {
  return JoinPath(JoinPath(path_, copy.model), CheckpointName(copy.version));
}

std::string CopyDirectory::PartPath(const CopyId& copy, int64_t partition) const {
  return JoinPath(CopyPath(copy), absl::StrFormat("part-%05d", partition));
}

absl::StatusOr<std::string> CopyDirectory::PathOf(const CopyFile& file) const {
  EMA_RETURN_IF_ERROR(ValidateName("model", file.copy.model));
  if (!file.partition.has_value()) return JoinPath(CopyPath(file.copy), kManifestFileName);
  const std::string part = PartPath(file.copy, *file.partition);
  if (file.track.empty()) return JoinPath(part, kManifestFileName);
  EMA_RETURN_IF_ERROR(ValidateName("track", file.track));
  EMA_RETURN_IF_ERROR(CheckCopyFileName(file.name));
  return JoinPath(TrackPath(part, file.track), file.name);
}

absl::Status CopyDirectory::MakeDirectory(const std::string& path) {
  if (path == path_) return absl::OkStatus();
  EMA_RETURN_IF_ERROR(MakeDirectory(ParentPath(path)));
  return MakeOneDirectory(file_system_, path);
}

absl::StatusOr<CheckpointManifest> CopyDirectory::WritePart(const CopyId& copy, int64_t partition,
                                                            Model& model, const Snapshot& snapshot,
                                                            const WriteOptions& options) {
  const std::string path = PartPath(copy, partition);
  EMA_RETURN_IF_ERROR(file_system_.RemoveTree(path));
  EMA_RETURN_IF_ERROR(MakeDirectory(ParentPath(path)));
  const int64_t needed_bytes = CheckpointDataBytes(model, snapshot, options);
  EMA_ASSIGN_OR_RETURN(const int64_t free_bytes, file_system_.FreeBytes(path_));
  if (free_bytes < needed_bytes) {
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kDiskFull,
                     absl::StrCat("a copy of this partition needs ", needed_bytes,
                                  " bytes, but --copy-dir has ", free_bytes, " left"));
  }
  EMA_RETURN_IF_ERROR(MakeCheckpointFolders(file_system_, path, model, snapshot, options));
  EMA_ASSIGN_OR_RETURN(CheckpointManifest part,
                       ema::WritePart(file_system_, latch_, path, model, snapshot, options));
  return FinishPart(file_system_, latch_, path, model, std::move(part));
}

absl::Status CopyDirectory::MakePartFolders(const CopyId& copy, int64_t partition,
                                            const CheckpointManifest& part) {
  const std::string path = PartPath(copy, partition);
  EMA_RETURN_IF_ERROR(file_system_.RemoveTree(path));
  EMA_RETURN_IF_ERROR(MakeDirectory(TracksPath(path)));
  for (const CheckpointTrack& track : part.tracks) {
    if (!track.weights.has_value()) continue;
    EMA_RETURN_IF_ERROR(MakeDirectory(TrackPath(path, track.config.name)));
  }
  return absl::OkStatus();
}

absl::Status CopyDirectory::WriteManifest(const CopyId& copy, CheckpointManifest whole) {
  whole.attached_files.clear();
  whole.total_bytes = 0;
  for (CheckpointTrack& track : whole.tracks) track = {.config = std::move(track.config)};
  return WriteText({.copy = copy}, EncodeCheckpointManifest(whole));
}

absl::Status CopyDirectory::WriteText(const CopyFile& file, std::string_view text) {
  EMA_ASSIGN_OR_RETURN(const std::string path, PathOf(file));
  EMA_RETURN_IF_ERROR(MakeDirectory(ParentPath(path)));
  const absl::Status removed = file_system_.RemoveFile(path);
  if (!absl::IsNotFound(removed)) EMA_RETURN_IF_ERROR(removed);
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> written,
                       file_system_.NewWritableFile(path));
  EMA_RETURN_IF_ERROR(written->Append(std::as_bytes(std::span(text))));
  return written->Close();
}

absl::StatusOr<CheckpointManifest> CopyDirectory::ReadManifest(const CopyId& copy) {
  EMA_ASSIGN_OR_RETURN(CheckpointManifest whole,
                       ReadCheckpointManifest(file_system_, CopyPath(copy)));
  EMA_RETURN_IF_ERROR(CheckIdentity(whole, copy.model, copy.version, /*is_partial=*/false));
  return whole;
}

absl::StatusOr<CheckpointManifest> CopyDirectory::ReadPart(const CopyId& copy, int64_t partition) {
  EMA_ASSIGN_OR_RETURN(CheckpointManifest part,
                       ReadPartManifest(file_system_, PartPath(copy, partition)));
  EMA_RETURN_IF_ERROR(CheckIdentity(part, copy.model, copy.version, /*is_partial=*/false));
  return part;
}

absl::Status CopyDirectory::RemoveUnneeded(absl::FunctionRef<bool(const CopyId&)> is_needed) {
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> models, file_system_.ListDirectory(path_));
  absl::Status result;
  for (const DirectoryEntry& model : models) {
    if (model.is_directory) result.Update(RemoveUnneededOf(model.name, is_needed));
  }
  return result;
}

absl::Status CopyDirectory::RemoveUnneededOf(const std::string& model,
                                             absl::FunctionRef<bool(const CopyId&)> is_needed) {
  absl::MutexLock lock(&remove_mu_);
  const std::string path = JoinPath(path_, model);
  const auto copies = file_system_.ListDirectory(path);
  if (absl::IsNotFound(copies.status())) return absl::OkStatus();
  EMA_RETURN_IF_ERROR(copies.status());
  absl::Status result;
  for (const DirectoryEntry& copy : *copies) {
    const std::optional<CheckpointId> version = ParseCheckpointName(copy.name);
    if (version.has_value() && is_needed({model, *version})) continue;
    result.Update(file_system_.RemoveTree(JoinPath(path, copy.name)));
  }
  return result;
}

}  // namespace ema::group
