// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_store.h"

#include <algorithm>
#include <functional>
#include <span>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/pacer.h"
#include "server/checkpoint/restore.h"

namespace ema {
namespace {

constexpr std::string_view kLockFileName = "LOCK";
constexpr std::string_view kIncarnationFileName = "INCARNATION";
constexpr std::string_view kScrubbedFileName = "SCRUBBED";
// For what a checkpoint holds besides the weights.
constexpr int64_t kSpareBytes = int64_t{1} << 20;

absl::Status IgnoreAlreadyExists(const absl::Status& status) {
  return absl::IsAlreadyExists(status) ? absl::OkStatus() : status;
}

// Makes `path` and its parents, each one's name synced in its parent.
absl::Status MakeDirectories(FileSystem& file_system, const std::string& path) {
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system.Exists(path));
  if (exists) return absl::OkStatus();
  const std::string parent = ParentPath(path);
  EMA_RETURN_IF_ERROR(MakeDirectories(file_system, parent));
  EMA_RETURN_IF_ERROR(IgnoreAlreadyExists(file_system.CreateDirectory(path)));
  return file_system.SyncDirectory(parent);
}

// Not now.
absl::Status CannotReplace(std::string_view model, std::string_view name, std::string_view why) {
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kCheckpointInUse,
                   absl::StrCat("model \"", std::string(model), "\", checkpoint \"",
                                std::string(name), "\": ", std::string(why),
                                ", so one with the model's settings of now cannot take its place"),
                   absl::Seconds(1));
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

int64_t IncarnationWithoutStore(absl::Time now) { return absl::ToUnixMicros(now); }

absl::StatusOr<std::unique_ptr<CheckpointStore>> CheckpointStore::Open(FileSystem& file_system,
                                                                       const Options& options,
                                                                       absl::Time now) {
  if (options.data_dir.empty() || options.keep_count < 1 || options.max_file_bytes < 1) {
    return absl::InvalidArgumentError(
        "a data directory, and a keep_count and max_file_bytes of 1 or more, are needed");
  }
  std::unique_ptr<CheckpointStore> store(new CheckpointStore(file_system, options));
  const absl::Status status = store->Start(now);
  if (absl::IsAborted(status)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the data directory is used by another server: ", status.message()));
  }
  if (absl::IsPermissionDenied(status) || absl::IsNotFound(status)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the data directory cannot be used: ", status.message()));
  }
  if (GetErrorReason(status) == ErrorReason::kDiskFull) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, ErrorReason::kDiskFull,
        absl::StrCat("the data directory is full: a start needs a few KiB there, and a "
                     "save a checkpoint's bytes: ",
                     status.message()));
  }
  EMA_RETURN_IF_ERROR(status);
  return store;
}

absl::Status CheckpointStore::Start(absl::Time now) {
  EMA_RETURN_IF_ERROR(MakeDirectories(file_system_, options_.data_dir));
  EMA_ASSIGN_OR_RETURN(lock_, file_system_.Lock(JoinPath(options_.data_dir, kLockFileName)));
  EMA_RETURN_IF_ERROR(IgnoreAlreadyExists(file_system_.CreateDirectory(ModelsPath())));
  EMA_RETURN_IF_ERROR(ClearTemporary(options_.data_dir));
  EMA_RETURN_IF_ERROR(ClearTemporary(ModelsPath()));
  EMA_ASSIGN_OR_RETURN(const std::vector<std::string> names, ModelNames());
  for (const std::string& name : names) {
    EMA_RETURN_IF_ERROR(ClearTemporary(ModelPath(name)));
    const std::string path = GetDirectory(name)->path;
    EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(path));
    if (exists) {
      EMA_RETURN_IF_ERROR(WithPlace(ClearTemporary(path), absl::StrCat("models/", name, ": ")));
    }
  }
  return RaiseIncarnation(now);
}

absl::Status CheckpointStore::RaiseIncarnation(absl::Time now) {
  // The clock keeps it growing when the directory is lost, the names of the checkpoints when the
  // file is.
  EMA_ASSIGN_OR_RETURN(int64_t before, HighestIncarnation());
  const absl::StatusOr<std::string> text =
      file_system_.ReadSmallFile(JoinPath(options_.data_dir, kIncarnationFileName), 64);
  if (!text.ok() && !absl::IsNotFound(text.status())) return text.status();
  int64_t stored = 0;
  if (text.ok() && absl::SimpleAtoi(*text, &stored) && stored <= INT64_MAX - kIncarnationsPerLife) {
    before = std::max(before, stored);
  }
  const int64_t incarnation = std::max(before + kIncarnationsPerLife, IncarnationWithoutStore(now));
  EMA_RETURN_IF_ERROR(
      ReplaceFile(options_.data_dir, kIncarnationFileName, absl::StrCat(incarnation, "\n")));
  incarnation_ = incarnation;
  return absl::OkStatus();
}

absl::Status CheckpointStore::AsSaveError(const absl::Status& status) {
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

absl::Status CheckpointStore::CheckPlace() {
  EMA_ASSIGN_OR_RETURN(const bool is_in_place, lock_->IsInPlace());
  EMA_ASSIGN_OR_RETURN(const bool has_models, file_system_.Exists(ModelsPath()));
  if (is_in_place && has_models) return absl::OkStatus();
  // Where a volume was mounted there may still be a folder: it is not ours without `models`.
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kStoreReadOnly,
                   has_models ? "the data directory has been replaced, for its LOCK is not the one "
                                "that this server holds: nothing can be saved until that is back"
                              : "the data directory has gone, nothing can be saved until it is "
                                "back");
}

absl::Status CheckpointStore::CheckMayWrite() {
  EMA_RETURN_IF_ERROR(latch_.status());
  return AsSaveError(CheckPlace());
}

absl::Status CheckpointStore::CheckWritable() {
  EMA_RETURN_IF_ERROR(CheckMayWrite());
  // Each call has its own: they may come at once, or have left one.
  const std::string path =
      JoinPath(ModelsPath(), absl::StrCat(std::string(kTemporaryPrefix), "writable-",
                                          write_count_.fetch_add(1, std::memory_order_relaxed)));
  if (const auto file = file_system_.NewWritableFile(path); !file.ok()) {
    return AsSaveError(file.status());
  }
  return AsSaveError(file_system_.RemoveFile(path));
}

absl::StatusOr<absl::Time> CheckpointStore::ReadScrubTime() {
  EMA_ASSIGN_OR_RETURN(
      const std::string text,
      file_system_.ReadSmallFile(JoinPath(options_.data_dir, kScrubbedFileName), 64));
  absl::Time time;
  if (absl::ParseTime(absl::RFC3339_full, text, &time, nullptr)) return time;
  return absl::NotFoundError("SCRUBBED: not a time");
}

absl::Status CheckpointStore::NoteScrubTime(absl::Time time) {
  EMA_RETURN_IF_ERROR(CheckMayWrite());
  return AsSaveError(ReplaceFile(options_.data_dir, kScrubbedFileName,
                                 absl::StrCat(absl::FormatTime(time, absl::UTCTimeZone()), "\n")));
}

std::string CheckpointStore::NameOf(const Snapshot& snapshot,
                                    const std::vector<std::string>& tracks) {
  const CheckpointId id = IdOf(snapshot.record);
  return tracks.empty() ? CheckpointName(id) : PartialCheckpointName(id, tracks);
}

absl::StatusOr<CheckpointStore::SaveResult> CheckpointStore::Save(Model& model,
                                                                  SnapshotRef snapshot,
                                                                  const SaveOptions& options) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model.config().name);
  saving_count_.fetch_add(1, std::memory_order_relaxed);
  const absl::Cleanup ended = [this] { saving_count_.fetch_sub(1, std::memory_order_relaxed); };
  absl::MutexLock lock(&folder->mu);
  // DeleteModel() may have come first; what it has set aside must not come back.
  if (const absl::Status closed = model.closed(); absl::IsNotFound(closed)) return closed;
  absl::StatusOr<SaveResult> result = SaveLocked(model, *snapshot, options, *folder);
  // What retention lets go may still be there: it was held at the last save, or had a label. What
  // it does not is known if `is_durable`.
  if (GetErrorReason(result.status()) == ErrorReason::kDiskFull && folder->is_durable &&
      RemoveOldLocked(*folder, NameOf(*snapshot, options.tracks)).value_or(false)) {
    result = SaveLocked(model, *snapshot, options, *folder);
  }
  if (!result.ok()) return AsSaveError(result.status());
  return result;
}

absl::StatusOr<CheckpointStore::SaveResult> CheckpointStore::SaveLocked(Model& model,
                                                                        const Snapshot& snapshot,
                                                                        const SaveOptions& options,
                                                                        ModelDirectory& folder) {
  EMA_RETURN_IF_ERROR(CheckMayWrite());
  if (folder.must_delete) EMA_RETURN_IF_ERROR(DeleteLocked(model.config().name, folder));
  const CheckpointId id = IdOf(snapshot.record);
  const bool is_whole = options.tracks.empty();
  SaveResult result{.name = NameOf(snapshot, options.tracks)};
  const std::string path = JoinPath(folder.path, result.name);
  // Before it is written, which may be with later ones.
  const int64_t settings_revision = model.Describe().settings_revision;
  const bool has_old_settings =
      options.with_new_settings && is_whole &&
      model.durable().HasOtherSettings(snapshot.record.id(), model.Describe().settings_revision) &&
      HasTracksOf(model, snapshot);
  const bool is_latest =
      is_whole && folder.latest == id && folder.latest_bytes > 0 && !has_old_settings;
  if (is_latest) {
    if (options.keep) EMA_RETURN_IF_ERROR(Keep(path));
    result.total_bytes = folder.latest_bytes;
  } else {
    EMA_RETURN_IF_ERROR(MakeDurableLocked(model.config().name, folder));
    EMA_ASSIGN_OR_RETURN(const std::optional<int64_t> bytes,
                         FindCompleteLocked(folder, result.name));
    if (bytes.has_value() && !has_old_settings) {
      result.total_bytes = *bytes;
      // An earlier call, or server, may have ended between the rename and this.
      EMA_RETURN_IF_ERROR(Sync(folder.path));
      if (options.keep) EMA_RETURN_IF_ERROR(Keep(path));
    } else {
      if (bytes.has_value()) {
        absl::MutexLock lock(&folder.state_mu);
        EMA_RETURN_IF_ERROR(CheckNotHeldLocked(folder, result.name));
      }
      EMA_ASSIGN_OR_RETURN(result.total_bytes,
                           WriteAndRenameLocked(model, snapshot, options, folder, result.name,
                                                /*has_old_settings=*/bytes.has_value()));
      result.was_written = true;
    }
    if (is_whole && id >= folder.latest) {
      if (id != folder.latest) {
        EMA_RETURN_IF_ERROR(ReplaceFile(folder.path, kLatestFileName, EncodeLatest(result.name)));
      }
      folder.latest = id;
      folder.latest_bytes = result.total_bytes;
    }
  }
  // Also if it then gets no label.
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
    EMA_RETURN_IF_ERROR(PutLabelLocked(folder, label));
  }
  // This version is safe, whatever becomes of older ones; what could not be removed is tried again
  // at the next save.
  if (!is_latest) RemoveOldLocked(folder, result.name).status().IgnoreError();
  return result;
}

absl::Status CheckpointStore::MakeDurableLocked(const std::string& model_name,
                                                ModelDirectory& folder) {
  if (folder.is_durable) {
    EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(folder.path));
    if (exists) return absl::OkStatus();
    ForgetLocked(folder);  // Somebody has removed it under the server.
  }
  EMA_RETURN_IF_ERROR(IgnoreAlreadyExists(file_system_.CreateDirectory(ModelPath(model_name))));
  EMA_RETURN_IF_ERROR(IgnoreAlreadyExists(file_system_.CreateDirectory(folder.path)));
  EMA_RETURN_IF_ERROR(Sync(options_.data_dir));
  EMA_RETURN_IF_ERROR(Sync(ModelsPath()));
  EMA_RETURN_IF_ERROR(Sync(ModelPath(model_name)));
  // A LATEST that was renamed just before the last server ended is on the disk after this.
  EMA_RETURN_IF_ERROR(Sync(folder.path));
  EMA_ASSIGN_OR_RETURN(folder.latest, FindLatest(folder));
  folder.latest_bytes = 0;
  EMA_RETURN_IF_ERROR(IndexLocked(folder));
  folder.is_durable = true;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<int64_t>> CheckpointStore::FindCompleteLocked(
    ModelDirectory& folder, const std::string& name) {
  const std::string path = JoinPath(folder.path, name);
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(path));
  if (!exists || !UnreadProblem(folder, name).ok()) return std::nullopt;
  // It got its name when it was complete, so this fails only if somebody has changed it since.
  const absl::StatusOr<CheckpointManifest> checkpoint = ReadCheckpointManifest(file_system_, path);
  if (checkpoint.ok()) return checkpoint->total_bytes;
  if (!absl::IsDataLoss(checkpoint.status())) return checkpoint.status();
  EMA_RETURN_IF_ERROR(SetAsideCorruptLocked(folder, name, checkpoint.status()));
  return std::nullopt;
}

absl::StatusOr<int64_t> CheckpointStore::WriteAndRenameLocked(
    Model& model, const Snapshot& snapshot, const SaveOptions& options, ModelDirectory& folder,
    const std::string& name, bool has_old_settings) {
  const bool keep = options.keep || WasKept(folder, name);
  // What is kept for good must leave room for what is not. One that is written anew had its room.
  const WriteOptions write_options{.tracks = options.tracks,
                                   .max_file_bytes = options_.max_file_bytes};
  const int64_t needed_bytes =
      (CheckpointDataBytes(model, snapshot, write_options) + kSpareBytes) * (options.keep ? 2 : 1);
  EMA_ASSIGN_OR_RETURN(const int64_t free_bytes, file_system_.FreeBytes(folder.path));
  if (free_bytes < needed_bytes) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, ErrorReason::kDiskFull,
        absl::StrCat("model \"", model.config().name, "\": a checkpoint ",
                     options.keep ? "to be kept, and room for one more, take " : "takes ",
                     needed_bytes, " bytes, the disk has ", free_bytes, " left"));
  }
  const std::string temporary = JoinPath(folder.path, std::string(kTemporaryPrefix).append(name));
  EMA_RETURN_IF_ERROR(file_system_.RemoveTree(temporary));
  absl::StatusOr<CheckpointManifest> written =
      WriteCheckpoint(file_system_, latch_, temporary, model, snapshot, write_options);
  // What is answered for has been read back.
  Pacer pacer(model);
  if (written.ok()) {
    written = VerifyCheckpoint(file_system_, temporary, nullptr, [&pacer] {
      pacer.Rest();
      return absl::OkStatus();
    });
  }
  if (const absl::Status kept = keep && written.ok() ? Keep(temporary) : absl::OkStatus();
      !kept.ok()) {
    written = kept;
  }
  if (written.ok() && has_old_settings && !HasTracksOf(model, snapshot)) {
    written = CannotReplace(folder.model_name, name, "a track of it has just been removed");
  }
  if (!written.ok()) {
    // Best effort: the start-up clears it, too.
    file_system_.RemoveTree(temporary).IgnoreError();
    return written.status();
  }
  EMA_RETURN_IF_ERROR(TakeNameLocked(folder, name, has_old_settings));
  absl::MutexLock lock(&folder.state_mu);
  folder.index[name] = {.name = name,
                        .id = IdOf(written->record),
                        .is_partial = !options.tracks.empty(),
                        .details = DetailsOf(*written)};
  return written->total_bytes;
}

absl::Status CheckpointStore::TakeNameLocked(ModelDirectory& folder, const std::string& name,
                                             bool has_old_settings) {
  const std::string path = JoinPath(folder.path, name);
  const std::string temporary = JoinPath(folder.path, std::string(kTemporaryPrefix).append(name));
  const absl::Status unread = UnreadProblem(folder, name);
  EMA_RETURN_IF_ERROR(CheckPlace());  // Writing may have taken long.
  absl::Status status;
  bool is_exchanged = false;
  if (unread.ok() && has_old_settings) {
    status = ReplaceLocked(folder, name);
  } else if (unread.ok()) {
    status = file_system_.Rename(temporary, path);
  } else {
    // That one may be readable after all.
    status = file_system_.Exchange(temporary, path);
    is_exchanged = status.ok();
    if (absl::IsUnimplemented(status)) {
      EMA_RETURN_IF_ERROR(SetAsideCorruptLocked(folder, name, unread));
      status = file_system_.Rename(temporary, path);
    }
  }
  if (status.ok()) status = Sync(folder.path);
  if (status.ok() && is_exchanged) {
    {
      // What was found of the old one does not hold for the new one.
      absl::MutexLock lock(&folder.state_mu);
      folder.index.erase(name);
    }
    status = SetAsideCorruptLocked(folder, name, unread, kTemporaryPrefix);
  }
  if (!status.ok()) ForgetLocked(folder);  // It may have its name all the same.
  return status;
}

absl::Status CheckpointStore::CheckNotHeldLocked(const ModelDirectory& folder,
                                                 const std::string& name) {
  if (!folder.held.contains(name)) return absl::OkStatus();
  return CannotReplace(folder.model_name, name, "it is being read");
}

absl::Status CheckpointStore::ReplaceLocked(ModelDirectory& folder, const std::string& name) {
  const std::string temporary = JoinPath(folder.path, std::string(kTemporaryPrefix).append(name));
  const auto exchange = [&]() -> absl::Status {
    decltype(folder.index)::node_type entry;
    {
      absl::MutexLock lock(&folder.state_mu);
      EMA_RETURN_IF_ERROR(CheckNotHeldLocked(folder, name));
      entry = folder.index.extract(name);  // Nobody reads it from now on.
    }
    absl::Status status = file_system_.Exchange(temporary, JoinPath(folder.path, name));
    if (status.ok()) return status;
    {
      absl::MutexLock lock(&folder.state_mu);
      folder.index.insert(std::move(entry));
    }
    if (!absl::IsUnimplemented(status)) return status;
    return absl::UnimplementedError(
        absl::StrCat("model \"", folder.model_name, "\", checkpoint \"", name,
                     "\": one with the model's settings of now cannot take its place, as the file "
                     "system cannot exchange two folders; push one more step"));
  };
  absl::Status status = exchange();
  if (status.ok()) {
    EMA_RETURN_IF_ERROR(Sync(folder.path));
  } else if (!absl::IsUnimplemented(status) &&
             GetErrorReason(status) != ErrorReason::kCheckpointInUse) {
    return status;  // It may have been done all the same, and not be on the disk.
  }
  // The old one, or the new one; what stays of it is cleared later.
  file_system_.RemoveTree(temporary).IgnoreError();
  return status;
}

bool CheckpointStore::WasKept(const ModelDirectory& folder, const std::string& name) {
  // A disk that does not say so may have had it.
  const auto entries = file_system_.ListDirectory(folder.path);
  if (!entries.ok()) return true;
  const std::optional<StoredName> wanted = ParseStoredName(name);
  return std::any_of(entries->begin(), entries->end(), [&](const DirectoryEntry& entry) {
    return (entry.name == name || ParseSetAsideName(entry.name) == wanted) &&
           file_system_.Exists(JoinPath(JoinPath(folder.path, entry.name), kKeepFileName))
               .value_or(true);
  });
}

absl::Status CheckpointStore::Keep(const std::string& checkpoint_path) {
  const std::string path = JoinPath(checkpoint_path, kKeepFileName);
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(path));
  if (!exists) {
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file,
                         file_system_.NewWritableFile(path));
    EMA_RETURN_IF_ERROR(latch_.Check(file->Sync()));
    EMA_RETURN_IF_ERROR(file->Close());
  }
  // Also if it was there: a call before may have ended here.
  return Sync(checkpoint_path);
}

absl::Status CheckpointStore::DeleteModel(std::string_view model_name) {
  const std::shared_ptr<ModelDirectory> folder = GetDirectory(model_name);
  absl::MutexLock lock(&folder->mu);
  folder->must_delete = true;
  return AsSaveError(DeleteLocked(std::string(model_name), *folder));
}

absl::Status CheckpointStore::PurgeDeleted(std::string_view model_name) {
  EMA_RETURN_IF_ERROR(CheckMayWrite());
  absl::StatusOr<std::vector<DirectoryEntry>> entries = file_system_.ListDirectory(ModelsPath());
  if (!entries.ok()) return AsSaveError(entries.status());
  for (const DirectoryEntry& entry : *entries) {
    if (DeletedModelName(entry.name) != model_name) continue;
    EMA_RETURN_IF_ERROR(AsSaveError(file_system_.RemoveTree(ModelPath(entry.name))));
  }
  return AsSaveError(Sync(ModelsPath()));
}

absl::Status CheckpointStore::DeleteLocked(const std::string& model_name, ModelDirectory& folder) {
  {
    absl::MutexLock lock(&folder.state_mu);
    folder.index.clear();
    folder.labels.clear();
    folder.lost_labels = absl::OkStatus();
    folder.is_indexed = true;
  }
  folder.missing.reset();
  EMA_RETURN_IF_ERROR(CheckMayWrite());
  const std::string path = ModelPath(model_name);
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system_.Exists(path));
  if (exists) {
    // A model may be deleted and created again many times in one life of the server.
    absl::Status status;
    int64_t count = 0;
    do {
      ++count;
      status = file_system_.Rename(path, ModelPath(DeletedName(incarnation_, count, model_name)));
    } while (absl::IsAlreadyExists(status));
    EMA_RETURN_IF_ERROR(status);
  }
  folder.is_durable = false;
  folder.latest = {};
  folder.latest_bytes = 0;
  // Also if it was not there: a call before may have renamed it without getting here.
  EMA_RETURN_IF_ERROR(Sync(ModelsPath()));
  folder.must_delete = false;
  // Cleared last: after an error a restart may find the corrupt checkpoints again.
  absl::MutexLock lock(&folder.state_mu);
  folder.creation_error = absl::OkStatus();
  return absl::OkStatus();
}

absl::Status CheckpointStore::ReplaceFile(const std::string& directory, std::string_view name,
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

absl::Status CheckpointStore::ClearTemporary(const std::string& directory) {
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                       file_system_.ListDirectory(directory));
  bool is_synced = false;
  for (const DirectoryEntry& entry : entries) {
    if (!entry.name.starts_with(kTemporaryPrefix)) continue;
    // Or a power failure could bring a half-removed checkpoint back under its old name.
    if (!is_synced) EMA_RETURN_IF_ERROR(Sync(directory));
    is_synced = true;
    const std::string path = JoinPath(directory, entry.name);
    EMA_RETURN_IF_ERROR(entry.is_directory ? file_system_.RemoveTree(path)
                                           : file_system_.RemoveFile(path));
  }
  return absl::OkStatus();
}

std::shared_ptr<CheckpointStore::ModelDirectory> CheckpointStore::GetDirectory(
    std::string_view model_name) {
  absl::MutexLock lock(&mu_);
  std::shared_ptr<ModelDirectory>& folder = folders_[std::string(model_name)];
  if (folder == nullptr) {
    folder = std::make_shared<ModelDirectory>(model_name,
                                              JoinPath(ModelPath(model_name), "checkpoints"));
  }
  return folder;
}

}  // namespace ema
