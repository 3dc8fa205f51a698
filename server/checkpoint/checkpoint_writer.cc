// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/checkpoint/pacer.h"
#include "server/format/checkpoint_files.h"
#include "server/format/manifest_parts.h"
#include "server/format/safetensors.h"
#include "server/format/tensor_reader.h"

namespace ema {
namespace {

// Bytes that are asked of the device at once: bounds the host memory that a GPU's track needs.
constexpr int64_t kReadBytes = int64_t{32} << 20;

absl::Status SyncAndClose(WritableFile& file, SyncLatch& latch) {
  EMA_RETURN_IF_ERROR(latch.Check(file.Sync()));
  return file.Close();
}

// Where the files of a checkpoint are written.
struct Target {
  FileSystem& file_system;
  SyncLatch& latch;
  const std::string& path;
};

// The part of a model that is written.
struct WriteJob {
  const Target& to;
  Model& model;
  const Version& record;
  const WriteOptions& options;
  Pacer& pacer;
};

// Tensors in the order of the files: by falling element size, so that each is aligned to its own.
std::vector<int64_t> FileOrder(const StorageLayout& layout) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < static_cast<int64_t>(layout.entries().size()); ++i) {
    if (layout.entry(i).is_stored) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&layout](int64_t a, int64_t b) {
    return DtypeSize(layout.entry(a).dtype) > DtypeSize(layout.entry(b).dtype);
  });
  return order;
}

// The tensors of each file.
std::vector<std::vector<int64_t>> AssignToFiles(const StorageLayout& layout,
                                                int64_t max_file_bytes) {
  std::vector<std::vector<int64_t>> files;
  int64_t bytes = 0;
  for (const int64_t i : FileOrder(layout)) {
    const int64_t length_bytes = layout.entry(i).length_bytes;
    if (files.empty() || (bytes > 0 && length_bytes > max_file_bytes - bytes)) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(i);
    bytes += length_bytes;
  }
  return files;
}

// "format" is what transformers' from_pretrained insists on.
std::map<std::string, std::string> FileMetadata(const WriteJob& job, const Track& track) {
  return {{"format", "pt"},
          {"ema.model", job.model.config().name},
          {"ema.track", track.name()},
          {"ema.step", absl::StrCat(job.record.step)},
          {"ema.version", absl::StrCat(job.record.number)},
          {"ema.incarnation", absl::StrCat(job.record.incarnation)}};
}

absl::Status WriteSmallFile(const Target& to, const std::string& path, std::string_view text) {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file,
                       to.file_system.NewWritableFile(path));
  EMA_RETURN_IF_ERROR(file->Append(std::as_bytes(std::span(text))));
  return SyncAndClose(*file, to.latch);
}

SmallFile Describe(std::string_view name, std::string_view bytes) {
  return {std::string(name), static_cast<int64_t>(bytes.size()),
          Crc32c(0, std::as_bytes(std::span(bytes)))};
}

// A track's values, or weights that it keeps, and their number among these.
struct Source {
  const Track& track;
  const Blocks& blocks;
  size_t weights = 0;  // As for TensorFileName().
};

// Appends one tensor's bytes, and puts its checksums into `files`.
absl::Status WriteTensor(const WriteJob& job, const Source& source, int64_t tensor_index,
                         WritableFile& file, TensorFiles& files) {
  const StorageLayout::Entry& entry = source.track.layout().entry(tensor_index);
  uint32_t crc = 0;
  uint32_t piece_crc = 0;
  int64_t piece_bytes = 0;
  for (int64_t done = 0; done < entry.length_bytes; done += kReadBytes) {
    const int64_t n = std::min(kReadBytes, entry.length_bytes - done);
    EMA_ASSIGN_OR_RETURN(
        const std::vector<HostPiece> host_pieces,
        ReadBlocks(job.model.device(), source.track, source.blocks, entry.offset + done, n));
    for (const HostPiece& host_piece : host_pieces) {
      // A block may end inside a piece.
      for (auto rest = host_piece.bytes; !rest.empty();) {
        const auto bytes = rest.first(std::min<size_t>(rest.size(), kPieceBytes - piece_bytes));
        rest = rest.subspan(bytes.size());
        piece_crc = Crc32c(piece_crc, bytes);
        piece_bytes += static_cast<int64_t>(bytes.size());
        EMA_RETURN_IF_ERROR(file.Append(bytes));
        EMA_RETURN_IF_ERROR(job.pacer.Pause());
        if (piece_bytes < kPieceBytes) continue;
        crc = Crc32cCombine(crc, piece_crc, piece_bytes);
        files.piece_crc32c[tensor_index].push_back(std::exchange(piece_crc, 0));
        piece_bytes = 0;
      }
    }
  }
  if (piece_bytes > 0) files.piece_crc32c[tensor_index].push_back(piece_crc);
  if (entry.length_bytes <= kPieceBytes) files.piece_crc32c[tensor_index].clear();
  files.tensor_crc32c[tensor_index] = Crc32cCombine(crc, piece_crc, piece_bytes);
  return absl::OkStatus();
}

// Writes one file of a track, of the tensors `order`.
absl::Status WriteFile(const WriteJob& job, const Source& source, const std::vector<int64_t>& order,
                       TensorFile& saved, TensorFiles& files) {
  const Track& track = source.track;
  std::vector<TensorSpec> specs;
  specs.reserve(order.size());
  for (const int64_t i : order) {
    TensorSpec& spec = specs.emplace_back(job.model.manifest().tensor(i));
    spec.dtype = track.layout().entry(i).dtype;
  }
  const std::string header = EncodeSafetensorsHeader(specs, FileMetadata(job, track));
  if (static_cast<int64_t>(header.size()) > kMaxSafetensorsHeaderBytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("model \"", job.model.config().name, "\": its names and shapes take ",
                     header.size(), " bytes, expected at most ", kMaxSafetensorsHeaderBytes));
  }
  const auto header_bytes = std::as_bytes(std::span(header));
  saved.header_crc32c = Crc32c(0, header_bytes);
  saved.file_bytes = static_cast<int64_t>(header.size());
  const std::string path = JoinPath(TrackPath(job.to.path, track.name()), saved.name);
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file,
                       job.to.file_system.NewWritableFile(path));
  EMA_RETURN_IF_ERROR(file->Append(header_bytes));
  for (const int64_t i : order) {
    EMA_RETURN_IF_ERROR(WriteTensor(job, source, i, *file, files));
    saved.file_bytes += track.layout().entry(i).length_bytes;
  }
  EMA_RETURN_IF_ERROR(SyncAndClose(*file, job.to.latch));
  return job.pacer.Pause();
}

absl::StatusOr<WriteOptions::FileNumbers> NumbersOf(const WriteOptions& options,
                                                    const std::string& track, size_t count) {
  if (options.file_numbers.empty()) return WriteOptions::FileNumbers{.first = 0, .count = count};
  const auto it = options.file_numbers.find(track);
  if (it != options.file_numbers.end() && it->second.first + count <= it->second.count) {
    return it->second;
  }
  return MakeError(
      absl::StatusCode::kInternal, ErrorReason::kBug,
      it == options.file_numbers.end()
          ? absl::StrCat("track \"", track, "\": its files have no numbers")
          : absl::StrCat("track \"", track, "\": the partition has ", count, " files, expected ",
                         "numbers from ", it->second.first, " on of ", it->second.count));
}

absl::StatusOr<TensorFiles> WriteTensors(const WriteJob& job, const Source& source) {
  const Manifest& manifest = job.model.manifest();
  const StorageLayout& layout = source.track.layout();
  const std::vector<std::vector<int64_t>> dealt = AssignToFiles(layout, job.options.max_file_bytes);
  EMA_ASSIGN_OR_RETURN(const WriteOptions::FileNumbers numbers,
                       NumbersOf(job.options, source.track.name(), dealt.size()));
  TensorFiles files;
  files.tensor_crc32c.resize(manifest.tensor_count());
  files.piece_crc32c.resize(manifest.tensor_count());
  for (size_t f = 0; f < dealt.size(); ++f) {
    files.files.push_back(
        {.name = TensorFileName(numbers.first + f, numbers.count, source.weights)});
    EMA_RETURN_IF_ERROR(WriteFile(job, source, dealt[f], files.files.back(), files));
  }
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    files.digest =
        Crc32cCombine(files.digest, files.tensor_crc32c[i], layout.entry(i).length_bytes);
  }
  return files;
}

absl::StatusOr<CheckpointTrack> WriteTrack(const WriteJob& job, const TrackSnapshot& snapshot) {
  CheckpointTrack result{.config = snapshot.track->config(),
                         .state = snapshot.state,
                         .last_steps = snapshot.last_steps,
                         .frozen_digest = snapshot.frozen_digest};
  EMA_ASSIGN_OR_RETURN(result.weights, WriteTensors(job, {*snapshot.track, snapshot.blocks}));
  for (const BlocksRef& blocks : snapshot.latest_weights) {
    const Source source = {*snapshot.track, *blocks, result.latest_weights.size() + 1};
    EMA_ASSIGN_OR_RETURN(result.latest_weights.emplace_back(), WriteTensors(job, source));
  }
  EMA_RETURN_IF_ERROR(job.to.latch.Check(
      job.to.file_system.SyncDirectory(TrackPath(job.to.path, snapshot.track->name()))));
  return result;
}

// Says which tensor is in which file, as Hugging Face's tools write and read it. The files' headers
// say that, so an index never lists a tensor that its file does not have.
absl::StatusOr<std::string> IndexText(const Target& to, const Manifest& manifest,
                                      const CheckpointTrack& track) {
  const StorageLayout layout(manifest, ActionsOf(track.config, manifest), track.config.dtype);
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<TensorReader> reader,
                       TensorReader::Open(to.file_system, TrackPath(to.path, track.config.name),
                                          *track.weights, manifest, layout));
  // With sorted keys: adding a member to an ordered_json searches all members.
  nlohmann::json places = nlohmann::json::object();
  int64_t total_bytes = 0;
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    if (!layout.entry(i).is_stored) continue;
    places[manifest.tensor(i).name] = track.weights->files[reader->FileOf(i)].name;
    total_bytes += layout.entry(i).length_bytes;
  }
  const nlohmann::json index = {{"metadata", {{"total_size", total_bytes}}},
                                {"weight_map", std::move(places)}};
  return absl::StrCat(index.dump(2), "\n");
}

using AttachedFileRefs = std::vector<std::shared_ptr<const AttachedFile>>;

absl::Status WriteAttachedFiles(const Target& to, const std::string& directory,
                                const AttachedFileRefs& attached_files) {
  for (const auto& file : attached_files) {
    EMA_RETURN_IF_ERROR(WriteSmallFile(to, JoinPath(directory, file->name), file->bytes));
  }
  return to.latch.Check(to.file_system.SyncDirectory(directory));
}

// Adds the files of a track's folder that are of all parts, and syncs the folder.
absl::Status FinishTrack(const Target& to, const Manifest& manifest,
                         const AttachedFileRefs& attached_files, CheckpointTrack& track) {
  const std::string directory = TrackPath(to.path, track.config.name);
  if (track.weights->files.size() > 1) {
    absl::StatusOr<std::string> index = IndexText(to, manifest, track);
    if (absl::IsDataLoss(index.status())) {
      return WithPrefix(index.status(), absl::StrCat("track \"", track.config.name, "\": "));
    }
    EMA_RETURN_IF_ERROR(index.status());
    track.weights->index = Describe(kIndexFileName, *index);
    EMA_RETURN_IF_ERROR(WriteSmallFile(to, JoinPath(directory, kIndexFileName), *index));
  }
  return WriteAttachedFiles(to, directory, attached_files);
}

absl::Status WriteManifest(const Target& to, const CheckpointManifest& manifest,
                           ManifestScope scope = ManifestScope::kWhole) {
  const std::string text = EncodeCheckpointManifest(manifest);
  // What could not be read back must not become the newest checkpoint.
  if (const absl::Status status = ParseCheckpointManifest(text, scope).status(); !status.ok()) {
    return MakeError(absl::StatusCode::kInternal, ErrorReason::kBug,
                     absl::StrCat("the new manifest.json cannot be parsed: ", status.message()));
  }
  return WriteSmallFile(to, JoinPath(to.path, kManifestFileName), text);
}

// Whether the track `name` is to be written.
bool IsChosen(const WriteOptions& options, const std::string& name) {
  return options.tracks.empty() || absl::c_linear_search(options.tracks, name);
}

// The tracks that the model has now with their values in the snapshot, null where there are none.
using TrackValues = std::vector<std::pair<TrackRef, const TrackSnapshot*>>;

absl::StatusOr<TrackValues> ValuesOf(const Model& model, const Snapshot& snapshot,
                                     const WriteOptions& options) {
  std::vector<TrackRef> tracks = model.tracks().after_next_commit();
  if (options.tracks_revision.has_value()) {
    EMA_ASSIGN_OR_RETURN(tracks, model.tracks().After(*options.tracks_revision));
  }
  TrackValues values;
  for (const TrackRef& track : tracks) {
    values.emplace_back(track, snapshot.FindId(track->id()));
  }
  return values;
}

absl::Status CheckTracks(const WriteOptions& options, const TrackValues& values) {
  for (const std::string& name : options.tracks) {
    if (absl::c_any_of(values, [&](const auto& value) {
          return value.second != nullptr && value.first->name() == name;
        })) {
      continue;
    }
    return MakeError(absl::StatusCode::kNotFound, ErrorReason::kTrackNotFound,
                     absl::StrCat("track \"", name, "\" has no value in this version"));
  }
  return absl::OkStatus();
}

}  // namespace

std::map<std::string, size_t> FileCounts(const ModelConfig& config, int64_t max_file_bytes) {
  std::map<std::string, size_t> counts;
  for (const TrackConfig& track : config.tracks) {
    const StorageLayout layout(*config.manifest, ActionsOf(track, *config.manifest), track.dtype);
    counts[track.name] = AssignToFiles(layout, max_file_bytes).size();
  }
  return counts;
}

int64_t CheckpointDataBytes(const Model& model, const Snapshot& snapshot,
                            const WriteOptions& options) {
  int64_t attached_bytes = 0;
  for (const auto& file : model.attached_files().files()) {
    attached_bytes += static_cast<int64_t>(file->bytes.size());
  }
  int64_t bytes = 0;
  for (const TrackSnapshot& track : snapshot.tracks) {
    if (!IsChosen(options, track.track->name())) continue;
    const auto copies = static_cast<int64_t>(1 + track.latest_weights.size());
    bytes += copies * track.track->layout().total_bytes() + attached_bytes;
  }
  return bytes;
}

absl::Status MakeCheckpointFolders(FileSystem& file_system, const std::string& path,
                                   const Model& model, const Snapshot& snapshot,
                                   const WriteOptions& options) {
  EMA_ASSIGN_OR_RETURN(const TrackValues values, ValuesOf(model, snapshot, options));
  EMA_RETURN_IF_ERROR(CheckTracks(options, values));
  EMA_RETURN_IF_ERROR(file_system.CreateDirectory(path));
  EMA_RETURN_IF_ERROR(file_system.CreateDirectory(TracksPath(path)));
  for (const auto& [track, value] : values) {
    if (value == nullptr || !IsChosen(options, track->name())) continue;
    EMA_RETURN_IF_ERROR(file_system.CreateDirectory(TrackPath(path, track->name())));
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckpointManifest> WritePart(FileSystem& file_system, SyncLatch& latch,
                                             const std::string& path, Model& model,
                                             const Snapshot& snapshot,
                                             const WriteOptions& options) {
  EMA_ASSIGN_OR_RETURN(const TrackValues values, ValuesOf(model, snapshot, options));
  EMA_RETURN_IF_ERROR(CheckTracks(options, values));
  CheckpointManifest part{.model_name = model.config().name,
                          .manifest = model.manifest(),
                          .max_pinned_versions = model.config().max_pinned_versions,
                          .non_finite = model.config().non_finite,
                          .created_tracks = model.config().created_tracks,
                          .record = snapshot.record};
  if (part.created_tracks.empty()) part.created_tracks = model.config().tracks;
  part.is_partial = absl::c_any_of(values, [&](const auto& value) {
    return value.second != nullptr && !IsChosen(options, value.first->name());
  });
  Pacer pacer(model);
  const Target to{file_system, latch, path};
  const WriteJob job{to, model, snapshot.record, options, pacer};
  // All that the model has now, with the values that they had then.
  for (const auto& [track, value] : values) {
    if (part.is_partial && !IsChosen(options, track->name())) continue;
    CheckpointTrack saved{.config = track->config()};
    if (value != nullptr) {
      EMA_ASSIGN_OR_RETURN(saved, WriteTrack(job, *value));
      part.total_bytes += part.FolderBytes(saved);
    }
    saved.config = track->config();
    part.tracks.push_back(std::move(saved));
  }
  return part;
}

absl::StatusOr<CheckpointManifest> FinishPart(FileSystem& file_system, SyncLatch& latch,
                                              const std::string& path, const Model& model,
                                              CheckpointManifest part) {
  const AttachedFileRefs attached_files = model.attached_files().files();
  for (const auto& file : attached_files) {
    part.attached_files.push_back(Describe(file->name, file->bytes));
  }
  const Target to{file_system, latch, path};
  part.total_bytes = 0;
  for (const CheckpointTrack& track : part.tracks) {
    if (!track.weights.has_value()) continue;
    EMA_RETURN_IF_ERROR(WriteAttachedFiles(to, TrackPath(path, track.config.name), attached_files));
    part.total_bytes += part.FolderBytes(track);
  }
  EMA_RETURN_IF_ERROR(WriteManifest(to, part, ManifestScope::kPart));
  return part;
}

absl::StatusOr<CheckpointManifest> MergeParts(FileSystem& file_system, SyncLatch& latch,
                                              const std::string& path, const Model& model,
                                              std::vector<CheckpointManifest> parts) {
  EMA_ASSIGN_OR_RETURN(CheckpointManifest whole, MergeManifests(std::move(parts)));
  const AttachedFileRefs attached_files = model.attached_files().files();
  for (const auto& file : attached_files) {
    whole.attached_files.push_back(Describe(file->name, file->bytes));
  }
  const Target to{file_system, latch, path};
  whole.total_bytes = 0;
  for (CheckpointTrack& track : whole.tracks) {
    if (!track.weights.has_value()) continue;
    EMA_RETURN_IF_ERROR(FinishTrack(to, whole.manifest, attached_files, track));
    whole.total_bytes += whole.FolderBytes(track);
  }
  EMA_RETURN_IF_ERROR(WriteManifest(to, whole));
  EMA_RETURN_IF_ERROR(latch.Check(file_system.SyncDirectory(TracksPath(path))));
  EMA_RETURN_IF_ERROR(latch.Check(file_system.SyncDirectory(path)));
  return whole;
}

absl::StatusOr<CheckpointManifest> WriteCheckpoint(FileSystem& file_system, SyncLatch& latch,
                                                   const std::string& path, Model& model,
                                                   const Snapshot& snapshot,
                                                   const WriteOptions& options) {
  EMA_RETURN_IF_ERROR(MakeCheckpointFolders(file_system, path, model, snapshot, options));
  EMA_ASSIGN_OR_RETURN(CheckpointManifest all,
                       WritePart(file_system, latch, path, model, snapshot, options));
  return MergeParts(file_system, latch, path, model, {std::move(all)});
}

}  // namespace ema
