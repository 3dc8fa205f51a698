// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/restore.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/safetensors.h"

namespace ema {
namespace {

// Read, verified and copied at once; fits in most machines' last cache.
constexpr int64_t kReadBytes = int64_t{4} << 20;

absl::Status Corrupt(const std::string& problem) {
  return MakeError(absl::StatusCode::kDataLoss, ErrorReason::kCheckpointCorrupt, problem);
}

// A file of a checkpoint that is missing, short or no regular file is the checkpoint's fault; all
// else is the disk's.
absl::Status BlameCheckpoint(const absl::Status& status) {
  if (absl::IsNotFound(status) || absl::IsDataLoss(status) || absl::IsFailedPrecondition(status)) {
    return Corrupt(std::string(status.message()));
  }
  return status;
}

// Tensor indices, and where each starts in a file.
using FilePlaces = std::vector<std::pair<int64_t, int64_t>>;

// Checks the header of a track's file: its checksum, and that it holds `expected` tensors, all the
// track's, in its dtypes.
absl::StatusOr<FilePlaces> ReadHeader(const RandomAccessFile& file, const CheckpointFile& saved,
                                      const StorageLayout& layout, const Manifest& manifest,
                                      size_t expected) {
  if (file.size_bytes() != saved.file_bytes) {
    return Corrupt(
        absl::StrCat("its file has ", file.size_bytes(), " bytes, expected ", saved.file_bytes));
  }
  absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(file);
  if (absl::IsInvalidArgument(header.status())) {
    return Corrupt(std::string(header.status().message()));
  }
  if (!header.ok()) return BlameCheckpoint(header.status());
  std::string bytes(header->header_bytes, '\0');
  if (const absl::Status status = file.Read(0, std::as_writable_bytes(std::span(bytes)));
      !status.ok()) {
    return BlameCheckpoint(status);
  }
  if (Crc32c(0, std::as_bytes(std::span(bytes))) != saved.header_crc32c) {
    return Corrupt("the checksum of its header is wrong");
  }
  if (header->tensors.size() != expected) {
    return Corrupt(
        absl::StrCat("its file has ", header->tensors.size(), " tensors, expected ", expected));
  }
  FilePlaces places;
  for (const SafetensorsTensor& tensor : header->tensors) {
    const std::optional<int64_t> i = manifest.Find(tensor.spec.name);
    if (!i.has_value() || tensor.spec.shape != manifest.tensor(*i).shape ||
        tensor.spec.dtype != layout.entry(*i).dtype || !layout.entry(*i).is_stored) {
      return Corrupt(absl::StrCat("tensor \"", tensor.spec.name, "\": its file has ",
                                  tensor.spec.TypeString(), ", the manifest does not"));
    }
    places.emplace_back(*i, header->header_bytes + tensor.begin);
  }
  return places;
}

absl::Status ReadTensor(const RandomAccessFile& file, int64_t file_offset, uint32_t expected_crc,
                        int64_t index, int64_t length_bytes, const TensorVisitor& visit,
                        std::vector<std::byte>& buffer) {
  uint32_t crc = 0;
  for (int64_t done = 0; done < length_bytes; done += kReadBytes) {
    const std::span<std::byte> bytes =
        std::span(buffer).first(std::min(kReadBytes, length_bytes - done));
    if (const absl::Status status = file.Read(file_offset + done, bytes); !status.ok()) {
      return BlameCheckpoint(status);
    }
    crc = Crc32c(crc, bytes);
    EMA_RETURN_IF_ERROR(visit(index, done, bytes));
  }
  if (crc != expected_crc) return Corrupt("its checksum is wrong");
  return absl::OkStatus();
}

absl::StatusOr<Blocks> RestoreBlocks(FileSystem& file_system, const std::string& file_path,
                                     const CheckpointFile& saved, const Track& track, Model& model,
                                     size_t expected) {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<BlocksWriter> writer,
                       BlocksWriter::Create(model.device(), track));
  EMA_RETURN_IF_ERROR(
      ReadTrackFile(file_system, file_path, saved, model.manifest(), track.layout(), expected,
                    [&](int64_t index, int64_t offset, std::span<const std::byte> bytes) {
                      return writer->Write(track.layout().entry(index).offset + offset, bytes);
                    }));
  return writer->Finish();
}

absl::StatusOr<TrackSnapshot> RestoreTrack(FileSystem& file_system, const std::string& path,
                                           const CheckpointTrack& saved, TrackRef track,
                                           Model& model) {
  const auto count = [&](const auto& is_in_file) {
    return static_cast<size_t>(
        std::count_if(track->actions().begin(), track->actions().end(), is_in_file));
  };
  TrackSnapshot snapshot{.track = track,
                         .block_versions = std::vector<int64_t>(track->block_count()),
                         .state = saved.state,
                         .last_steps = saved.last_steps};
  EMA_ASSIGN_OR_RETURN(
      snapshot.blocks,
      RestoreBlocks(file_system, TrackFilePath(path, track->name()), *saved.weights, *track, model,
                    count([](TensorAction action) { return action != TensorAction::kIgnore; })));
  if (saved.low_parts.has_value()) {
    EMA_ASSIGN_OR_RETURN(
        snapshot.low_blocks,
        RestoreBlocks(file_system, LowPartsFilePath(path, track->name()), *saved.low_parts, *track,
                      model,
                      count([](TensorAction action) { return action == TensorAction::kAverage; })));
  }
  return snapshot;
}

}  // namespace

absl::Status LocateError(const absl::Status& status, std::string_view model,
                         std::string_view checkpoint) {
  const std::string message = absl::StrCat("model \"", std::string(model), "\", checkpoint \"",
                                           std::string(checkpoint), "\": ", status.message());
  const ErrorReason reason = GetErrorReason(status);
  if (reason == ErrorReason::kUnspecified) return absl::Status(status.code(), message);
  return MakeError(status.code(), reason, message);
}

absl::Status ReadTrackFile(FileSystem& file_system, const std::string& file_path,
                           const CheckpointFile& saved, const Manifest& manifest,
                           const StorageLayout& layout, size_t tensor_count,
                           const TensorVisitor& visit) {
  absl::StatusOr<std::unique_ptr<RandomAccessFile>> file = file_system.OpenFile(file_path);
  if (!file.ok()) return BlameCheckpoint(file.status());
  EMA_ASSIGN_OR_RETURN(const FilePlaces places,
                       ReadHeader(**file, saved, layout, manifest, tensor_count));
  std::vector<std::byte> buffer(
      std::min<int64_t>(kReadBytes, std::max<int64_t>(saved.file_bytes, 1)));
  for (const auto& [i, file_offset] : places) {
    const absl::Status status = ReadTensor(**file, file_offset, saved.tensor_crc32c[i], i,
                                           layout.entry(i).length_bytes, visit, buffer);
    if (absl::IsDataLoss(status)) {
      return Corrupt(absl::StrCat("tensor \"", manifest.tensor(i).name, "\": ", status.message()));
    }
    EMA_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckpointManifest> ReadCheckpointManifest(FileSystem& file_system,
                                                          const std::string& path) {
  const absl::StatusOr<std::string> text =
      file_system.ReadSmallFile(JoinPath(path, kManifestFileName), kMaxManifestFileBytes);
  if (!text.ok()) return BlameCheckpoint(text.status());
  EMA_ASSIGN_OR_RETURN(CheckpointManifest checkpoint, ParseCheckpointManifest(*text));
  ModelConfig config = ConfigOf(checkpoint);
  absl::Status status = config.Validate();
  config.tracks = checkpoint.created_tracks;
  status.Update(config.Validate());
  if (!status.ok()) return Corrupt(absl::StrCat("manifest.json: ", status.message()));
  return checkpoint;
}

ModelConfig ConfigOf(const CheckpointManifest& checkpoint) {
  ModelConfig config;
  config.name = checkpoint.model_name;
  config.manifest = std::make_shared<const Manifest>(checkpoint.manifest);
  for (const CheckpointTrack& track : checkpoint.tracks) config.tracks.push_back(track.config);
  config.created_tracks = checkpoint.created_tracks;
  config.max_pinned_versions = checkpoint.max_pinned_versions;
  config.non_finite = checkpoint.non_finite;
  return config;
}

absl::StatusOr<std::shared_ptr<Snapshot>> ReadCheckpoint(FileSystem& file_system,
                                                         const std::string& path,
                                                         const CheckpointManifest& checkpoint,
                                                         Model& model) {
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->record = checkpoint.record;
  const PushPlan plan = model.plan();
  for (size_t t = 0; t < checkpoint.tracks.size(); ++t) {
    const CheckpointTrack& saved = checkpoint.tracks[t];
    if (!saved.weights.has_value()) continue;
    absl::StatusOr<TrackSnapshot> restored =
        RestoreTrack(file_system, path, saved, plan.tracks[t].track, model);
    if (absl::IsDataLoss(restored.status())) {
      return Corrupt(
          absl::StrCat("track \"", saved.config.name, "\": ", restored.status().message()));
    }
    EMA_RETURN_IF_ERROR(restored.status());
    snapshot->tracks.push_back(*std::move(restored));
  }
  return snapshot;
}

}  // namespace ema
