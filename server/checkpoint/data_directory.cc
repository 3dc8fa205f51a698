// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/data_directory.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "server/base/random_hex.h"
#include "server/format/checkpoint_name.h"

namespace ema {
namespace {

constexpr std::string_view kLockFileName = "LOCK";
constexpr std::string_view kIncarnationFileName = "INCARNATION";
constexpr std::string_view kScrubbedFileName = "SCRUBBED";
constexpr std::string_view kMembersFolder = "members";
constexpr std::string_view kGroupFolder = "GROUP";
constexpr std::string_view kIdFileName = "ID";

absl::Status IgnoreAlreadyExists(const absl::Status& status) {
  return absl::IsAlreadyExists(status) ? absl::OkStatus() : status;
}

// Makes `path` and its parents, and syncs each name in its parent.
absl::Status MakeDirectories(FileSystem& file_system, const std::string& path) {
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system.Exists(path));
  if (exists) return absl::OkStatus();
  const std::string parent = ParentPath(path);
  EMA_RETURN_IF_ERROR(MakeDirectories(file_system, parent));
  EMA_RETURN_IF_ERROR(IgnoreAlreadyExists(file_system.CreateDirectory(path)));
  return file_system.SyncDirectory(parent);
}

// The name of a folder of a model; empty: there is none.
absl::StatusOr<std::string> FindModel(FileSystem& file_system, const std::string& models_path) {
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system.Exists(models_path));
  if (!exists) return "";
  EMA_ASSIGN_OR_RETURN(const auto entries, file_system.ListDirectory(models_path));
  for (const DirectoryEntry& entry : entries) {
    if (entry.is_directory && ValidateName("model", entry.name).ok()) return entry.name;
  }
  return "";
}

// NOT_FOUND: no group has used the directory.
absl::StatusOr<std::string> ReadGroupId(FileSystem& file_system, const std::string& path,
                                        std::string_view group) {
  const std::string folder = JoinPath(path, kGroupFolder);
  EMA_ASSIGN_OR_RETURN(const std::string text,
                       file_system.ReadSmallFile(JoinPath(folder, kIdFileName), 1024));
  // The group's name, a space, the id, and a newline.
  const std::vector<std::string> words = absl::StrSplit(text, absl::ByAnyChar(" \n"));
  if (words.size() != 3 || words[1].empty() || !words[2].empty()) {
    return absl::FailedPreconditionError(
        "the data directory's GROUP/ID is damaged; expected a line with the group's name and an "
        "id");
  }
  if (words[0] != group) {
    return absl::FailedPreconditionError(absl::StrCat("the data directory belongs to group \"",
                                                      words[0], "\", expected \"",
                                                      std::string(group), "\" (--group)"));
  }
  return words[1];
}

}  // namespace

int64_t IncarnationWithoutStore(absl::Time now) { return absl::ToUnixMicros(now); }

DataDirectory::DataDirectory(FileSystem& file_system, std::string path, LogSink log,
                             std::string member)
    : file_system_(file_system),
      path_(std::move(path)),
      own_path_(member.empty() ? path_ : JoinPath(JoinPath(path_, kMembersFolder), member)),
      log_(std::move(log)),
      latch_([this](const std::string& why) {
        LogTo(log_, LogLevel::kError, "checkpoints read-only", {{"error", why}});
      }) {}

absl::StatusOr<std::unique_ptr<DataDirectory>> DataDirectory::Open(FileSystem& file_system,
                                                                   std::string path, LogSink log,
                                                                   absl::Time now,
                                                                   std::string member) {
  if (!member.empty()) EMA_RETURN_IF_ERROR(ValidateName("member", member));
  const std::string holder = member.empty()
                                 ? "another server"
                                 : absl::StrCat("another process of member \"", member, "\"");
  std::unique_ptr<DataDirectory> directory(
      new DataDirectory(file_system, std::move(path), std::move(log), std::move(member)));
  const absl::Status status = directory->Start(now);
  if (absl::IsAborted(status)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the data directory is used by ", holder, ": ", status.message()));
  }
  if (absl::IsPermissionDenied(status) || absl::IsNotFound(status)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the data directory cannot be used: ", status.message()));
  }
  if (GetErrorReason(status) == ErrorReason::kDiskFull) {
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kDiskFull,
                     absl::StrCat("the data directory is full: the server needs a few KiB there to "
                                  "start, and the bytes of a checkpoint for each save: ",
                                  status.message()));
  }
  EMA_RETURN_IF_ERROR(status);
  return directory;
}

absl::Status DataDirectory::Start(absl::Time now) {
  EMA_RETURN_IF_ERROR(MakeDirectories(file_system_, own_path_));
  EMA_ASSIGN_OR_RETURN(lock_, file_system_.Lock(JoinPath(own_path_, kLockFileName)));
  EMA_RETURN_IF_ERROR(IgnoreAlreadyExists(file_system_.CreateDirectory(ModelsPath())));
  EMA_RETURN_IF_ERROR(ClearTemporary(own_path_));
  if (!is_shared()) {
    EMA_RETURN_IF_ERROR(LockMembers());
    EMA_RETURN_IF_ERROR(ClearAllTemporary());
  }
  return RaiseIncarnation(now);
}

absl::Status DataDirectory::LockMembers() {
  const std::string members = JoinPath(path_, kMembersFolder);
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(members));
  if (!exists) return absl::OkStatus();
  EMA_ASSIGN_OR_RETURN(const auto entries, file_system_.ListDirectory(members));
  for (const DirectoryEntry& entry : entries) {
    if (!entry.is_directory) continue;
    const std::string folder = JoinPath(members, entry.name);
    absl::StatusOr<std::unique_ptr<FileLock>> lock =
        file_system_.Lock(JoinPath(folder, kLockFileName));
    if (!lock.ok()) return WithPrefix(lock.status(), absl::StrCat("members/", entry.name, ": "));
    member_locks_.push_back(*std::move(lock));
  }
  return absl::OkStatus();
}

absl::Status DataDirectory::ClearAllTemporary() {
  EMA_RETURN_IF_ERROR(ClearTemporary(ModelsPath()));
  EMA_ASSIGN_OR_RETURN(const std::vector<std::string> names, ModelNames());
  for (const std::string& name : names) {
    EMA_RETURN_IF_ERROR(ClearTemporary(ModelPath(name)));
    const std::string path = CheckpointsPath(name);
    EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(path));
    if (exists) {
      EMA_RETURN_IF_ERROR(WithPrefix(ClearTemporary(path), absl::StrCat("models/", name, ": ")));
    }
  }
  return absl::OkStatus();
}

// --- The group ---

absl::StatusOr<std::string> DataDirectory::FindGroupId(FileSystem& file_system,
                                                       const std::string& path,
                                                       std::string_view group) {
  EMA_RETURN_IF_ERROR(ValidateName("group", group));
  // Asked first: a group has an id before it has models.
  EMA_ASSIGN_OR_RETURN(const bool has_lock, file_system.Exists(JoinPath(path, kLockFileName)));
  EMA_ASSIGN_OR_RETURN(const std::string model, FindModel(file_system, JoinPath(path, "models")));
  absl::StatusOr<std::string> id = ReadGroupId(file_system, path, group);
  if (!absl::IsNotFound(id.status()) || (!has_lock && model.empty())) return id;
  return absl::FailedPreconditionError(
      absl::StrCat("the data directory belongs to a server without a group (it has ",
                   has_lock ? std::string(kLockFileName) : "models/" + model,
                   ", but not GROUP); expected an empty directory, or that of group \"",
                   std::string(group), "\""));
}

absl::StatusOr<std::string> DataDirectory::GroupId(std::string_view group) {
  absl::StatusOr<std::string> id = FindGroupId(file_system_, path_, group);
  if (!absl::IsNotFound(id.status())) return id;
  EMA_RETURN_IF_ERROR(WriteGroupId(group));
  return FindGroupId(file_system_, path_, group);
}

absl::Status DataDirectory::WriteGroupId(std::string_view group) {
  // A folder that is not empty is never replaced by a rename, so one server only succeeds, and the
  // others see the complete file.
  const std::string id = RandomHex(4);
  const std::string temporary =
      JoinPath(path_, absl::StrCat(std::string(kTemporaryPrefix), "group-", id));
  EMA_RETURN_IF_ERROR(file_system_.CreateDirectory(temporary));
  absl::Status status = [&]() -> absl::Status {
    EMA_RETURN_IF_ERROR(
        ReplaceFile(temporary, kIdFileName, absl::StrCat(std::string(group), " ", id, "\n")));
    return file_system_.Rename(temporary, JoinPath(path_, kGroupFolder));
  }();
  if (!status.ok()) file_system_.RemoveTree(temporary).IgnoreError();
  EMA_RETURN_IF_ERROR(IgnoreAlreadyExists(status));
  return Sync(path_);
}

absl::Status DataDirectory::RaiseIncarnation(absl::Time now) {
  // It must grow also if the directory is lost, by the clock, or if the file is, by the names of
  // the checkpoints.
  int64_t before = 0;
  EMA_ASSIGN_OR_RETURN(const std::vector<std::string> models, ModelNames());
  for (const std::string& model : models) {
    EMA_ASSIGN_OR_RETURN(const int64_t newest, NewestIncarnation(model));
    before = std::max(before, newest);
  }
  const absl::StatusOr<std::string> text =
      file_system_.ReadSmallFile(JoinPath(own_path_, kIncarnationFileName), 64);
  if (!text.ok() && !absl::IsNotFound(text.status())) return text.status();
  int64_t stored = 0;
  if (text.ok() && absl::SimpleAtoi(*text, &stored) &&
      stored <= INT64_MAX - kIncarnationsPerStart) {
    before = std::max(before, stored);
  }
  const int64_t incarnation =
      std::max(before + kIncarnationsPerStart, IncarnationWithoutStore(now));
  EMA_RETURN_IF_ERROR(
      ReplaceFile(own_path_, kIncarnationFileName, absl::StrCat(incarnation, "\n")));
  incarnation_ = incarnation;
  return absl::OkStatus();
}

absl::StatusOr<int64_t> DataDirectory::NewestIncarnation(std::string_view model) const {
  const std::string path = CheckpointsPath(model);
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(path));
  if (!exists) return 0;
  EMA_ASSIGN_OR_RETURN(const auto entries, file_system_.ListDirectory(path));
  int64_t newest = 0;
  for (const DirectoryEntry& entry : entries) {
    std::optional<StoredName> name = ParseStoredName(entry.name);
    if (!name.has_value()) name = ParseSetAsideName(entry.name);
    if (name.has_value()) newest = std::max(newest, name->id.incarnation);
  }
  return newest;
}

absl::StatusOr<std::vector<std::string>> DataDirectory::ModelNames() const {
  EMA_ASSIGN_OR_RETURN(const auto entries, file_system_.ListDirectory(ModelsPath()));
  std::vector<std::string> names;
  for (const DirectoryEntry& entry : entries) {
    if (!ValidateName("model", entry.name).ok()) continue;
    if (entry.is_directory) names.push_back(entry.name);
    // If it were ignored, its training would start from scratch.
    if (entry.is_link) {
      return absl::FailedPreconditionError(
          absl::StrCat("models/", entry.name, " is a symbolic link; expected a folder (only the ",
                       "checkpoints folder in it may be a link)"));
    }
  }
  return names;
}

// --- Health ---

absl::Status DataDirectory::CheckPlace() const {
  EMA_ASSIGN_OR_RETURN(const bool is_in_place, lock_->IsInPlace());
  EMA_ASSIGN_OR_RETURN(const bool has_models, file_system_.Exists(ModelsPath()));
  if (is_in_place && has_models) return absl::OkStatus();
  // An unmounted volume may leave an empty folder: without `models` it is not ours.
  return MakeError(
      absl::StatusCode::kUnavailable, ErrorReason::kStoreReadOnly,
      has_models ? "the data directory has been replaced (its LOCK is not the one that this server "
                   "holds); nothing can be saved until the original directory is restored"
                 : "the data directory is missing; nothing can be saved until it is restored");
}

absl::Status DataDirectory::CheckMayWrite() const {
  EMA_RETURN_IF_ERROR(latch_.status());
  return AsSaveError(CheckPlace());
}

absl::Status DataDirectory::CheckWritable() {
  const auto probe = [this]() -> absl::Status {
    EMA_RETURN_IF_ERROR(CheckMayWrite());
    // Calls may run at once, or leave their file, so each has a name of its own.
    // Members have folders of their own for it, as their names would be equal.
    const std::string path =
        JoinPath(is_shared() ? own_path_ : ModelsPath(),
                 absl::StrCat(std::string(kTemporaryPrefix), "writable-",
                              probe_count_.fetch_add(1, std::memory_order_relaxed)));
    EMA_RETURN_IF_ERROR(file_system_.NewWritableFile(path).status());
    return file_system_.RemoveFile(path);
  };
  absl::Status status = AsSaveError(probe());
  NoteWritten(status);
  return status;
}

absl::Status DataDirectory::health() const {
  EMA_RETURN_IF_ERROR(sync_error());
  absl::MutexLock lock(&mu_);
  return unwritable_;
}

void DataDirectory::NoteWritten(const absl::Status& status) {
  const bool is_unwritable =
      GetErrorReason(status) == ErrorReason::kStoreReadOnly && sync_error().ok();
  // No other error is about the disk as a whole.
  if (!status.ok() && !is_unwritable) return;
  {
    absl::MutexLock lock(&mu_);
    if (unwritable_.ok() == status.ok()) return;
    unwritable_ = status;
  }
  if (is_unwritable) {
    LogTo(log_, LogLevel::kError, "checkpoints read-only", {{"error", status}});
  } else {
    LogTo(log_, LogLevel::kInfo, "checkpoints writable again", {});
  }
}

std::optional<int64_t> DataDirectory::free_bytes() const {
  absl::MutexLock lock(&mu_);
  return free_bytes_;
}

void DataDirectory::UpdateFreeBytes() {
  const absl::StatusOr<int64_t> bytes = file_system_.FreeBytes(path_);
  absl::MutexLock lock(&mu_);
  free_bytes_ = bytes.ok() ? std::optional(*bytes) : std::nullopt;
}

absl::Status DataDirectory::AsSaveError(const absl::Status& status) const {
  if (GetErrorReason(status) != ErrorReason::kUnspecified) return status;
  if (absl::IsNotFound(status)) {
    absl::Status place = CheckPlace();
    if (GetErrorReason(place) == ErrorReason::kStoreReadOnly) return place;
  }
  if (absl::IsNotFound(status) || absl::IsAlreadyExists(status) ||
      absl::IsPermissionDenied(status) || absl::IsDataLoss(status) || absl::IsUnavailable(status)) {
    return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDiskFailed,
                     std::string(status.message()));
  }
  return status;
}

// --- Changes ---

absl::Status DataDirectory::MakeCheckpointsFolder(std::string_view model) {
  EMA_RETURN_IF_ERROR(IgnoreAlreadyExists(file_system_.CreateDirectory(ModelPath(model))));
  EMA_RETURN_IF_ERROR(IgnoreAlreadyExists(file_system_.CreateDirectory(CheckpointsPath(model))));
  EMA_RETURN_IF_ERROR(Sync(path_));
  EMA_RETURN_IF_ERROR(Sync(ModelsPath()));
  EMA_RETURN_IF_ERROR(Sync(ModelPath(model)));
  // Makes a LATEST durable that was renamed just before the last server ended.
  return Sync(CheckpointsPath(model));
}

absl::Status DataDirectory::ReplaceFile(const std::string& directory, std::string_view name,
                                        const std::string& text) {
  const std::string temporary = JoinPath(directory, std::string(kTemporaryPrefix).append(name));
  if (const absl::Status status = file_system_.RemoveFile(temporary); !absl::IsNotFound(status)) {
    EMA_RETURN_IF_ERROR(status);
  }
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file,
                       file_system_.NewWritableFile(temporary));
  EMA_RETURN_IF_ERROR(file->Append(std::as_bytes(std::span(text))));
  EMA_RETURN_IF_ERROR(latch_.Check(file->Sync()));
  EMA_RETURN_IF_ERROR(file->Close());
  EMA_RETURN_IF_ERROR(CheckPlace());
  EMA_RETURN_IF_ERROR(file_system_.Rename(temporary, JoinPath(directory, name)));
  return Sync(directory);
}

absl::Status DataDirectory::ClearTemporary(const std::string& directory) {
  EMA_ASSIGN_OR_RETURN(const auto entries, file_system_.ListDirectory(directory));
  bool is_synced = false;
  for (const DirectoryEntry& entry : entries) {
    if (!entry.name.starts_with(kTemporaryPrefix)) continue;
    // Otherwise a power failure could bring a half-removed checkpoint back under its old name.
    if (!is_synced) EMA_RETURN_IF_ERROR(Sync(directory));
    is_synced = true;
    const std::string path = JoinPath(directory, entry.name);
    EMA_RETURN_IF_ERROR(entry.is_directory ? file_system_.RemoveTree(path)
                                           : file_system_.RemoveFile(path));
  }
  return absl::OkStatus();
}

absl::Status DataDirectory::SetAsideModel(std::string_view model) {
  const std::string path = ModelPath(model);
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(path));
  if (exists) {
    // A model may be deleted and created again many times between two starts of the server.
    absl::Status status;
    int64_t count = 0;
    do {
      ++count;
      status = file_system_.Rename(path, ModelPath(DeletedName(incarnation_, count, model)));
    } while (absl::IsAlreadyExists(status));
    EMA_RETURN_IF_ERROR(status);
  }
  // An earlier call may have renamed it and failed before this.
  return Sync(ModelsPath());
}

absl::Status DataDirectory::PurgeDeleted(std::string_view model) {
  EMA_RETURN_IF_ERROR(CheckMayWrite());
  const auto entries = file_system_.ListDirectory(ModelsPath());
  if (!entries.ok()) return AsSaveError(entries.status());
  for (const DirectoryEntry& entry : *entries) {
    if (DeletedModelName(entry.name) != model) continue;
    EMA_RETURN_IF_ERROR(AsSaveError(file_system_.RemoveTree(ModelPath(entry.name))));
  }
  return AsSaveError(Sync(ModelsPath()));
}

absl::StatusOr<absl::Time> DataDirectory::ReadScrubTime() const {
  EMA_ASSIGN_OR_RETURN(const std::string text,
                       file_system_.ReadSmallFile(JoinPath(own_path_, kScrubbedFileName), 64));
  absl::Time time;
  if (absl::ParseTime(absl::RFC3339_full, text, &time, nullptr)) return time;
  return absl::NotFoundError("SCRUBBED: not a time");
}

absl::Status DataDirectory::WriteScrubTime(absl::Time time) {
  EMA_RETURN_IF_ERROR(CheckMayWrite());
  return AsSaveError(ReplaceFile(own_path_, kScrubbedFileName,
                                 absl::StrCat(absl::FormatTime(time, absl::UTCTimeZone()), "\n")));
}

}  // namespace ema
