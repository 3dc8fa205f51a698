// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/checkpoint/safetensors.h"

namespace ema {
namespace {

// Bytes that are asked of the device at once: bounds the host memory that a GPU's track needs.
constexpr int64_t kReadBytes = int64_t{32} << 20;

absl::Status SyncAndClose(WritableFile& file, SyncLatch& latch) {
  EMA_RETURN_IF_ERROR(latch.Check(file.Sync()));
  return file.Close();
}

std::string TracksPath(std::string_view checkpoint_path) {
  return JoinPath(checkpoint_path, "tracks");
}

std::string TrackPath(std::string_view checkpoint_path, std::string_view track_name) {
  return JoinPath(TracksPath(checkpoint_path), track_name);
}

// Tensors in the order of a file: by falling element size, so that each is aligned to its own. Low
// parts are those of averages.
std::vector<int64_t> FileOrder(const Track& track, bool low_parts) {
  const StorageLayout& layout = track.layout();
  std::vector<int64_t> order;
  for (int64_t i = 0; i < static_cast<int64_t>(layout.entries().size()); ++i) {
    if (layout.entry(i).is_stored && (!low_parts || track.action(i) == TensorAction::kAverage)) {
      order.push_back(i);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&layout](int64_t a, int64_t b) {
    return DtypeSize(layout.entry(a).dtype) > DtypeSize(layout.entry(b).dtype);
  });
  return order;
}

// "format" is what transformers' from_pretrained insists on.
std::map<std::string, std::string> FileMetadata(const Model& model, const Track& track,
                                                const VersionRecord& record) {
  return {{"format", "pt"},
          {"ema.model", model.config().name},
          {"ema.track", track.name()},
          {"ema.step", absl::StrCat(record.step)},
          {"ema.version", absl::StrCat(record.version)},
          {"ema.incarnation", absl::StrCat(record.incarnation)}};
}

// Appends one tensor's bytes and returns their CRC32C.
absl::StatusOr<uint32_t> WriteTensor(WritableFile& file, Device& device, const Track& track,
                                     const Blocks& blocks, const StorageLayout::Entry& entry) {
  uint32_t crc = 0;
  for (int64_t done = 0; done < entry.length_bytes; done += kReadBytes) {
    const int64_t n = std::min(kReadBytes, entry.length_bytes - done);
    EMA_ASSIGN_OR_RETURN(const std::vector<HostPiece> pieces,
                         ReadBlocks(device, track, blocks, entry.offset + done, n));
    for (const HostPiece& piece : pieces) {
      crc = Crc32c(crc, piece.bytes);
      EMA_RETURN_IF_ERROR(file.Append(piece.bytes));
    }
  }
  return crc;
}

// Where a checkpoint is written.
struct Place {
  FileSystem& file_system;
  SyncLatch& latch;
  const std::string& path;
};

absl::StatusOr<CheckpointFile> WriteFile(const Place& place, const std::string& file_path,
                                         Model& model, const TrackSnapshot& snapshot,
                                         bool low_parts, const VersionRecord& record) {
  const Track& track = *snapshot.track;
  const std::vector<int64_t> order = FileOrder(track, low_parts);
  std::vector<TensorSpec> specs;
  specs.reserve(order.size());
  for (const int64_t i : order) {
    TensorSpec& spec = specs.emplace_back(model.manifest().tensor(i));
    spec.dtype = track.layout().entry(i).dtype;
    if (spec.name == kSafetensorsMetadataKey) {
      return absl::FailedPreconditionError(
          absl::StrCat("tensor \"", spec.name, "\": a safetensors file cannot hold this name"));
    }
  }
  const std::string header = EncodeSafetensorsHeader(specs, FileMetadata(model, track, record));
  const auto header_bytes = std::as_bytes(std::span(header));
  if (static_cast<int64_t>(header.size()) > kMaxSafetensorsHeaderBytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "model \"", model.config().name, "\": its names and shapes take ", header.size(),
        " bytes, a safetensors file can hold ", kMaxSafetensorsHeaderBytes));
  }
  CheckpointFile result;
  result.header_crc32c = Crc32c(0, header_bytes);
  result.file_bytes = static_cast<int64_t>(header.size());
  result.tensor_crc32c.resize(model.manifest().tensor_count());
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file,
                       place.file_system.NewWritableFile(file_path));
  EMA_RETURN_IF_ERROR(file->Append(header_bytes));
  for (const int64_t i : order) {
    const StorageLayout::Entry& entry = track.layout().entry(i);
    EMA_ASSIGN_OR_RETURN(result.tensor_crc32c[i],
                         WriteTensor(*file, model.device(), track,
                                     low_parts ? snapshot.low_blocks : snapshot.blocks, entry));
    result.file_bytes += entry.length_bytes;
  }
  EMA_RETURN_IF_ERROR(SyncAndClose(*file, place.latch));
  return result;
}

absl::StatusOr<CheckpointTrack> WriteTrack(const Place& place, Model& model,
                                           const TrackSnapshot& snapshot,
                                           const VersionRecord& record) {
  const std::string& name = snapshot.track->name();
  CheckpointTrack result{.config = snapshot.track->config(),
                         .state = snapshot.state,
                         .last_steps = snapshot.last_steps};
  const std::string directory = TrackPath(place.path, name);
  EMA_RETURN_IF_ERROR(place.file_system.CreateDirectory(directory));
  EMA_ASSIGN_OR_RETURN(result.weights,
                       WriteFile(place, TrackFilePath(place.path, name), model, snapshot,
                                 /*low_parts=*/false, record));
  if (snapshot.track->config().compensated) {
    EMA_ASSIGN_OR_RETURN(result.low_parts,
                         WriteFile(place, LowPartsFilePath(place.path, name), model, snapshot,
                                   /*low_parts=*/true, record));
  }
  EMA_RETURN_IF_ERROR(place.latch.Check(place.file_system.SyncDirectory(directory)));
  return result;
}

absl::Status WriteManifest(FileSystem& file_system, SyncLatch& latch, const std::string& path,
                           const CheckpointManifest& manifest) {
  const std::string text = EncodeCheckpointManifest(manifest);
  // What could not be read back must not become the newest checkpoint.
  if (const absl::Status status = ParseCheckpointManifest(text).status(); !status.ok()) {
    return MakeError(absl::StatusCode::kInternal, ErrorReason::kBug,
                     absl::StrCat("cannot read what was to be written: ", status.message()));
  }
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file,
                       file_system.NewWritableFile(JoinPath(path, kManifestFileName)));
  EMA_RETURN_IF_ERROR(file->Append(std::as_bytes(std::span(text))));
  return SyncAndClose(*file, latch);
}

}  // namespace

std::string TrackFilePath(std::string_view checkpoint_path, std::string_view track_name) {
  return JoinPath(TrackPath(checkpoint_path, track_name), "model.safetensors");
}

std::string LowPartsFilePath(std::string_view checkpoint_path, std::string_view track_name) {
  return JoinPath(TrackPath(checkpoint_path, track_name), "low_parts.safetensors");
}

int64_t CheckpointDataBytes(const Snapshot& snapshot) {
  int64_t bytes = 0;
  for (const TrackSnapshot& track : snapshot.tracks) {
    bytes += track.track->layout().total_bytes() * (track.track->config().compensated ? 2 : 1);
  }
  return bytes;
}

absl::StatusOr<CheckpointManifest> WriteCheckpoint(FileSystem& file_system, SyncLatch& latch,
                                                   const std::string& path, Model& model,
                                                   const Snapshot& snapshot) {
  EMA_RETURN_IF_ERROR(file_system.CreateDirectory(path));
  EMA_RETURN_IF_ERROR(file_system.CreateDirectory(TracksPath(path)));
  CheckpointManifest manifest{.model_name = model.config().name,
                              .manifest = model.manifest(),
                              .max_pinned_versions = model.config().max_pinned_versions,
                              .non_finite = model.config().non_finite,
                              .created_tracks = model.config().created_tracks,
                              .record = snapshot.record};
  if (manifest.created_tracks.empty()) manifest.created_tracks = model.config().tracks;
  const Place place{file_system, latch, path};
  // All that the model has now, with the values that they had then.
  for (const TrackRef& track : model.tracks_after_next_commit()) {
    CheckpointTrack saved{.config = track->config()};
    if (const TrackSnapshot* const values = snapshot.FindId(track->id()); values != nullptr) {
      EMA_ASSIGN_OR_RETURN(saved, WriteTrack(place, model, *values, snapshot.record));
      manifest.total_bytes += saved.weights->file_bytes;
      if (saved.low_parts.has_value()) manifest.total_bytes += saved.low_parts->file_bytes;
    }
    saved.config = track->config();
    manifest.tracks.push_back(std::move(saved));
  }
  EMA_RETURN_IF_ERROR(WriteManifest(file_system, latch, path, manifest));
  EMA_RETURN_IF_ERROR(latch.Check(file_system.SyncDirectory(TracksPath(path))));
  EMA_RETURN_IF_ERROR(latch.Check(file_system.SyncDirectory(path)));
  return manifest;
}

}  // namespace ema
