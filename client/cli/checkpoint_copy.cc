// SPDX-License-Identifier: Apache-2.0
#include "client/cli/checkpoint_copy.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/random_hex.h"
#include "server/format/checkpoint_files.h"
#include "server/format/checkpoint_name.h"
#include "server/format/verify.h"

namespace ema::cli {
namespace {

constexpr int64_t kCopyBytes = int64_t{4} << 20;

absl::Status CopyFile(FileSystem& file_system, const std::string& from, const std::string& to) {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<RandomAccessFile> source, file_system.OpenFile(from));
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> copy, file_system.NewWritableFile(to));
  std::vector<std::byte> buffer(std::min(kCopyBytes, source->size_bytes()));
  for (int64_t done = 0; done < source->size_bytes(); done += kCopyBytes) {
    const auto bytes = std::span(buffer).first(std::min(kCopyBytes, source->size_bytes() - done));
    EMA_RETURN_IF_ERROR(source->Read(done, bytes));
    EMA_RETURN_IF_ERROR(copy->Append(bytes));
  }
  EMA_RETURN_IF_ERROR(copy->Sync());
  return copy->Close();
}

absl::Status CopyTree(FileSystem& file_system, const std::string& from, const std::string& to) {
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, file_system.ListDirectory(from));
  EMA_RETURN_IF_ERROR(file_system.CreateDirectory(to));
  for (const DirectoryEntry& entry : entries) {
    const auto copy = entry.is_directory ? CopyTree : CopyFile;
    EMA_RETURN_IF_ERROR(copy(file_system, JoinPath(from, entry.name), JoinPath(to, entry.name)));
  }
  return file_system.SyncDirectory(to);
}

absl::StatusOr<CheckpointManifest> CopyAndVerify(FileSystem& file_system, const std::string& from,
                                                 const std::string& to) {
  EMA_RETURN_IF_ERROR(CopyTree(file_system, from, to));
  absl::StatusOr<CheckpointManifest> copied = VerifyCheckpoint(file_system, to);
  if (!absl::IsDataLoss(copied.status())) return copied;
  // Finds out whether the original is corrupt, too.
  EMA_RETURN_IF_ERROR(VerifyCheckpoint(file_system, from).status());
  return WithPrefix(copied.status(), "the copy: ");
}

}  // namespace

absl::StatusOr<CheckpointManifest> CopyVerified(FileSystem& file_system, const std::string& from,
                                                const std::string& to) {
  const std::string parent = ParentPath(to);
  const std::string name = BaseName(to);
  const std::string target = JoinPath(parent, name);
  EMA_ASSIGN_OR_RETURN(const bool has_source, file_system.Exists(from));
  if (!has_source) return absl::NotFoundError("no such checkpoint");
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system.Exists(target));
  if (exists) return absl::AlreadyExistsError("the target exists");
  // Read before anything is written; it is verified with the copy.
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest checkpoint,
                       ReadCheckpointManifest(file_system, from));
  EMA_RETURN_IF_ERROR(CheckNoUnknownFiles(file_system, from, checkpoint));
  const std::string temporary =
      JoinPath(parent, absl::StrCat(std::string(kTemporaryPrefix), name, "-", RandomHex(2)));
  absl::StatusOr<CheckpointManifest> copied = CopyAndVerify(file_system, from, temporary);
  if (copied.ok()) {
    if (const absl::Status status = file_system.Rename(temporary, target); !status.ok()) {
      copied = status;
    }
  }
  if (!copied.ok()) {
    // Best effort: the name shows that the folder is temporary.
    file_system.RemoveTree(temporary).IgnoreError();
    return copied.status();
  }
  EMA_RETURN_IF_ERROR(file_system.SyncDirectory(parent));
  return copied;
}

}  // namespace ema::cli
