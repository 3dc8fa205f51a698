// SPDX-License-Identifier: Apache-2.0
#include "server/group/part_files.h"

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"
#include "server/checkpoint/checkpoint_load.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/pacer.h"
#include "server/format/checkpoint_files.h"
#include "server/format/checkpoint_name.h"
#include "server/format/manifest_parts.h"
#include "server/group/pin_published.h"

namespace ema::group {
namespace {

// A member is trusted, but its message must not make this server write elsewhere.
absl::Status CheckFolder(std::string_view folder) {
  if (folder.starts_with(kTemporaryPrefix) && folder.find('/') == std::string_view::npos) {
    return absl::OkStatus();
  }
  return BadRequest(
      absl::StrCat("folder: ", Quoted(folder), " given, expected the name of a temporary folder"));
}

WriteOptions OptionsOf(const v1::SavePartRequest& request) {
  WriteOptions options{.tracks = {request.tracks().begin(), request.tracks().end()},
                       .max_file_bytes = request.max_file_bytes(),
                       .tracks_revision = request.tracks_revision()};
  for (const auto& [track, numbers] : request.file_numbers()) {
    options.file_numbers[track] = {static_cast<size_t>(numbers.first()),
                                   static_cast<size_t>(numbers.count())};
  }
  return options;
}

}  // namespace

absl::StatusOr<CheckpointManifest> WriteVerifiedPart(DataDirectory& data, const std::string& path,
                                                     Model& partition, const Snapshot& snapshot,
                                                     const WriteOptions& options) {
  EMA_ASSIGN_OR_RETURN(CheckpointManifest part, WritePart(data.file_system(), data.latch(), path,
                                                          partition, snapshot, options));
  EMA_RETURN_IF_ERROR(VerifyPart(data.file_system(), path, part, Pacer::Hook(partition)));
  return part;
}

absl::StatusOr<v1::SavePartResponse> SavePart(CheckpointStore& store, Model& partition,
                                              const v1::SavePartRequest& request) {
  EMA_RETURN_IF_ERROR(CheckFolder(request.folder()));
  DataDirectory& data = store.data();
  EMA_RETURN_IF_ERROR(data.CheckMayWrite());
  EMA_ASSIGN_OR_RETURN(
      const SnapshotRef snapshot,
      PinPublished(partition, {request.version().version(), request.version().incarnation()},
                   &VersionHistory::PinForSave));
  const std::string path = store.FolderOf(request.model()).Path(request.folder());
  const absl::StatusOr<CheckpointManifest> written =
      WriteVerifiedPart(data, path, partition, *snapshot, OptionsOf(request));
  data.NoteWritten(written.status());
  if (!written.ok()) return data.AsSaveError(written.status());
  v1::SavePartResponse response;
  response.set_manifest(EncodeCheckpointManifest(*written));
  return response;
}

absl::StatusOr<CheckpointManifest> ReadGroupCheckpoint(CheckpointStore& store,
                                                       const std::string& model,
                                                       const GroupCheckpoint& checkpoint) {
  const CheckpointId id{checkpoint.id.incarnation, checkpoint.id.version, checkpoint.step};
  const std::string name = CheckpointName(id);
  FileSystem& file_system = store.data().file_system();
  const std::string path = store.FolderOf(model).Path(name);
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system.Exists(path));
  if (!exists) {
    return LocateError(absl::NotFoundError("there is no such checkpoint"), model, name);
  }
  absl::StatusOr<CheckpointManifest> manifest = ReadCheckpointManifest(file_system, path);
  absl::Status status = manifest.status();
  if (status.ok()) status = CheckIdentity(*manifest, model, id, /*is_partial=*/false);
  if (!status.ok()) return LocateError(status, model, name);
  return manifest;
}

absl::Status LoadPart(CheckpointStore& store, const CheckpointManifest& whole,
                      const ModelRecord& record, size_t partition, Model& model,
                      const PauseHook& rest) {
  const Partition& place = record.partitions[partition];
  FileSystem& file_system = store.data().file_system();
  const std::string name = CheckpointName(IdOf(whole.record));
  const std::string path = store.FolderOf(whole.model_name).Path(name);
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest part,
                       PartOf(whole, place.first_tensor, place.tensor_count));
  absl::StatusOr<std::shared_ptr<Snapshot>> snapshot =
      ReadCheckpoint(file_system, path, part, model, rest);
  absl::Status status = snapshot.status();
  if (status.ok() && model.is_home()) {
    status = LoadAttachedFiles(file_system, path, whole, model);
  }
  if (!status.ok()) return LocateError(status, whole.model_name, name);
  model.Restore(*std::move(snapshot), record.fenced_run_epoch);
  model.durable().SetVersion(whole.record.id(), whole.record.step,
                             model.Describe().settings_revision);
  if (!model.is_home()) return absl::OkStatus();
  return RestoreKeptTime(FolderFiles(store.data(), whole.model_name), model);
}

}  // namespace ema::group
