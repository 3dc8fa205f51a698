// SPDX-License-Identifier: Apache-2.0
#include "server/format/verify.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/format/checkpoint_files.h"
#include "server/format/checkpoint_name.h"
#include "server/format/tensor_reader.h"

namespace ema {
namespace {

std::string InTrack(const std::string& name) { return absl::StrCat("track \"", name, "\": "); }

// The places and dtypes of a stored track's tensors.
StorageLayout LayoutOf(const CheckpointTrack& track, const Manifest& manifest) {
  return StorageLayout(manifest, ActionsOf(track.config, manifest), track.config.dtype);
}

// Checks that the checksums of the tensors fit their sizes and each other.
absl::Status CheckTensorFiles(const StorageLayout& layout, const TensorFiles& files) {
  uint32_t digest = 0;
  for (size_t i = 0; i < layout.entries().size(); ++i) {
    const std::vector<uint32_t>& pieces = files.piece_crc32c[i];
    const bool is_there = layout.entries()[i].is_stored;
    const int64_t bytes = layout.entries()[i].length_bytes;
    const bool has_pieces = bytes > kPieceBytes;
    const int64_t expected = has_pieces ? (bytes + kPieceBytes - 1) / kPieceBytes : 0;
    if (static_cast<int64_t>(pieces.size()) != expected) {
      return CorruptManifest(absl::StrCat("a tensor of ", bytes, " bytes has ", pieces.size(),
                                          " pieces, expected ", expected));
    }
    uint32_t crc = 0;
    for (int64_t p = 0; p < expected; ++p) {
      crc = Crc32cCombine(crc, pieces[p], std::min(kPieceBytes, bytes - p * kPieceBytes));
    }
    if (has_pieces && crc != files.tensor_crc32c[i]) {
      return CorruptManifest("the checksums of a tensor's pieces are not the tensor's");
    }
    digest = Crc32cCombine(digest, files.tensor_crc32c[i], bytes);
    if (is_there || files.tensor_crc32c[i] == 0) continue;
    return CorruptManifest("a tensor that is in no file has a checksum");
  }
  if (files.digest != digest) return CorruptManifest("a digest is not that of its tensors");
  return absl::OkStatus();
}

absl::Status CheckTrack(const Manifest& manifest, const CheckpointTrack& track) {
  if (!track.weights.has_value()) return absl::OkStatus();
  const StorageLayout layout = LayoutOf(track, manifest);
  for (const TensorFiles* const files : track.all_files()) {
    EMA_RETURN_IF_ERROR(CheckTensorFiles(layout, *files));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadSmall(FileSystem& file_system, const std::string& track_path,
                                      const SmallFile& saved, int64_t max_bytes) {
  absl::StatusOr<std::string> bytes =
      file_system.ReadSmallFile(JoinPath(track_path, saved.name), max_bytes);
  if (!bytes.ok()) return ToCorruptionError(bytes.status());
  const std::string where = absl::StrCat("file \"", saved.name, "\": ");
  if (static_cast<int64_t>(bytes->size()) != saved.file_bytes) {
    return CorruptCheckpoint(
        absl::StrCat(where, "it has ", bytes->size(), " bytes, expected ", saved.file_bytes));
  }
  if (Crc32c(0, std::as_bytes(std::span(*bytes))) != saved.crc32c) {
    return CorruptCheckpoint(absl::StrCat(where, "its checksum is wrong"));
  }
  return bytes;
}

// Makes what is read of a file from here on come from the disk, where the system can do that.
absl::Status DropCache(FileSystem& file_system, const std::string& path) {
  const absl::StatusOr<std::unique_ptr<RandomAccessFile>> file = file_system.OpenFile(path);
  if (!file.ok()) return ToCorruptionError(file.status());
  (*file)->DropCache();
  return absl::OkStatus();
}

// What a folder must hold.
struct Contents {
  std::set<std::string> files;
  std::set<std::string> directories;
  std::set<std::string> optional_files;
};

// What is made of names that are no part of a checkpoint.
enum class Others { kIgnored, kRefused };

// Compares a folder with what it must hold, and drops the caches of its files.
absl::Status CheckFolder(FileSystem& file_system, const std::string& path, Contents expected,
                         Others others) {
  absl::StatusOr<std::vector<DirectoryEntry>> entries = file_system.ListDirectory(path);
  if (!entries.ok()) return ToCorruptionError(entries.status());
  for (const DirectoryEntry& entry : *entries) {
    if (!entry.is_directory && expected.optional_files.contains(entry.name)) continue;
    std::set<std::string>& names = entry.is_directory ? expected.directories : expected.files;
    if (names.erase(entry.name) == 0) {
      if (others == Others::kIgnored) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("\"", entry.name, "\" does not belong to the checkpoint"));
    }
    if (!entry.is_directory) {
      EMA_RETURN_IF_ERROR(DropCache(file_system, JoinPath(path, entry.name)));
    }
  }
  for (const std::set<std::string>* missing : {&expected.files, &expected.directories}) {
    if (!missing->empty()) {
      return CorruptCheckpoint(absl::StrCat("\"", *missing->begin(), "\" is missing"));
    }
  }
  return absl::OkStatus();
}

// The checkpoint's folder, and that of its tracks.
absl::Status CheckFolders(FileSystem& file_system, const std::string& path,
                          const CheckpointManifest& checkpoint, Others others) {
  EMA_RETURN_IF_ERROR(CheckFolder(file_system, path,
                                  {.files = {std::string(kManifestFileName)},
                                   .directories = {"tracks"},
                                   .optional_files = {std::string(kKeepFileName)}},
                                  others));
  Contents tracks;
  for (const CheckpointTrack& track : checkpoint.tracks) {
    if (track.weights.has_value()) tracks.directories.insert(track.config.name);
  }
  return CheckFolder(file_system, TracksPath(path), std::move(tracks), others);
}

absl::Status CheckTrackFolder(FileSystem& file_system, const std::string& path,
                              const CheckpointManifest& checkpoint, const CheckpointTrack& track,
                              Others others) {
  Contents contents;
  for (const TensorFiles* const files : track.all_files()) {
    for (const TensorFile& file : files->files) contents.files.insert(file.name);
  }
  if (track.weights->index.has_value()) contents.files.insert(track.weights->index->name);
  for (const SmallFile& file : checkpoint.attached_files) contents.files.insert(file.name);
  return CheckFolder(file_system, TrackPath(path, track.config.name), std::move(contents), others);
}

absl::Status VerifyWeights(FileSystem& file_system, const std::string& path,
                           const CheckpointManifest& checkpoint, const CheckpointTrack& track,
                           const PauseHook& pause) {
  const StorageLayout layout = LayoutOf(track, checkpoint.manifest);
  for (const TensorFiles* const files : track.all_files()) {
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<TensorReader> reader,
                         TensorReader::Open(file_system, TrackPath(path, track.config.name), *files,
                                            checkpoint.manifest, layout));
    const auto after_read = [&pause](int64_t, int64_t, std::span<const std::byte>) {
      return pause != nullptr ? pause() : absl::OkStatus();
    };
    EMA_RETURN_IF_ERROR(reader->ReadAll(after_read));
  }
  return absl::OkStatus();
}

// Everything in the folder of a track but the weights.
absl::Status VerifyTrackFolder(FileSystem& file_system, const std::string& path,
                               const CheckpointManifest& checkpoint, const CheckpointTrack& track) {
  EMA_RETURN_IF_ERROR(CheckTrackFolder(file_system, path, checkpoint, track, Others::kIgnored));
  return VerifySmallFiles(file_system, path, checkpoint, track);
}

// A renamed checkpoint would otherwise be served as another version.
absl::Status CheckName(const std::string& path, const CheckpointManifest& checkpoint) {
  const std::optional<CheckpointId> id = ParseCheckpointName(BaseName(path));
  if (!id.has_value() || *id == IdOf(checkpoint.record)) return absl::OkStatus();
  return CorruptManifest(absl::StrCat("it belongs to ", CheckpointName(IdOf(checkpoint.record))));
}

// VerifyCheckpoint(), with the check of a track's weights.
absl::StatusOr<CheckpointManifest> Verify(
    FileSystem& file_system, const std::string& path, const TrackVerdict& on_track,
    absl::FunctionRef<absl::Status(const CheckpointManifest&, const CheckpointTrack&)>
        verify_weights) {
  EMA_ASSIGN_OR_RETURN(const bool exists, file_system.Exists(path));
  if (!exists) return absl::NotFoundError("there is no such checkpoint");
  EMA_RETURN_IF_ERROR(DropCache(file_system, JoinPath(path, kManifestFileName)));
  EMA_ASSIGN_OR_RETURN(CheckpointManifest checkpoint, ReadCheckpointManifest(file_system, path));
  absl::Status problem = CheckName(path, checkpoint);
  problem.Update(CheckFolders(file_system, path, checkpoint, Others::kIgnored));
  for (const CheckpointTrack& track : checkpoint.tracks) {
    if (!problem.ok() && on_track == nullptr) break;
    if (!track.weights.has_value()) continue;
    absl::Status status = VerifyTrackFolder(file_system, path, checkpoint, track);
    if (status.ok()) status = verify_weights(checkpoint, track);
    if (on_track != nullptr) on_track(checkpoint, track, status);
    if (!status.ok()) problem.Update(WithPrefix(status, InTrack(track.config.name)));
  }
  EMA_RETURN_IF_ERROR(problem);
  return checkpoint;
}

absl::StatusOr<std::string> ReadManifestFile(FileSystem& file_system, const std::string& path) {
  absl::StatusOr<std::string> text =
      file_system.ReadSmallFile(JoinPath(path, kManifestFileName), kMaxManifestFileBytes);
  if (!text.ok()) return ToCorruptionError(text.status());
  return text;
}

}  // namespace

absl::StatusOr<CheckpointManifest> ReadCheckpointManifest(FileSystem& file_system,
                                                          const std::string& path) {
  EMA_ASSIGN_OR_RETURN(const std::string text, ReadManifestFile(file_system, path));
  EMA_ASSIGN_OR_RETURN(CheckpointManifest checkpoint, ParseCheckpointManifest(text));
  ModelConfig config = ConfigOf(checkpoint);
  absl::Status status = config.Validate();
  config.tracks = checkpoint.created_tracks;
  status.Update(config.Validate());
  if (!status.ok()) return CorruptManifest(std::string(status.message()));
  for (const CheckpointTrack& track : checkpoint.tracks) {
    EMA_RETURN_IF_ERROR(CheckTrack(checkpoint.manifest, track));
  }
  return checkpoint;
}

absl::StatusOr<CheckpointManifest> ReadPartManifest(FileSystem& file_system,
                                                    const std::string& path) {
  EMA_ASSIGN_OR_RETURN(const std::string text, ReadManifestFile(file_system, path));
  return ParsePartManifest(text);
}

absl::StatusOr<CheckpointManifest> ParsePartManifest(std::string_view text) {
  EMA_ASSIGN_OR_RETURN(CheckpointManifest part,
                       ParseCheckpointManifest(text, ManifestScope::kPart));
  // The rules are those of the whole model, so ModelConfig::Validate() might refuse the part.
  for (const CheckpointTrack& track : part.tracks) {
    EMA_RETURN_IF_ERROR(ValidateName("track", track.config.name));
    EMA_RETURN_IF_ERROR(CheckTrack(part.manifest, track));
  }
  return part;
}

absl::Status CheckIdentity(const CheckpointManifest& checkpoint, std::string_view model_name,
                           const CheckpointId& id, bool is_partial) {
  if (checkpoint.model_name == model_name && IdOf(checkpoint.record) == id &&
      checkpoint.is_partial == is_partial) {
    return absl::OkStatus();
  }
  return CorruptManifest(absl::StrCat("it belongs to model \"", checkpoint.model_name, "\", ",
                                      CheckpointName(IdOf(checkpoint.record)),
                                      checkpoint.is_partial ? ", with some tracks only" : ""));
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

absl::StatusOr<std::vector<AttachedFile>> ReadAttachedFiles(FileSystem& file_system,
                                                            const std::string& path,
                                                            const CheckpointManifest& checkpoint) {
  std::vector<AttachedFile> files;
  const auto track = std::find_if(checkpoint.tracks.begin(), checkpoint.tracks.end(),
                                  [](const CheckpointTrack& t) { return t.weights.has_value(); });
  if (track == checkpoint.tracks.end()) return files;
  for (const SmallFile& saved : checkpoint.attached_files) {
    EMA_ASSIGN_OR_RETURN(
        std::string bytes,
        ReadSmall(file_system, TrackPath(path, track->config.name), saved, kMaxAttachedFileBytes));
    files.push_back({saved.name, std::move(bytes)});
  }
  return files;
}

absl::Status VerifySmallFiles(FileSystem& file_system, const std::string& path,
                              const CheckpointManifest& checkpoint, const CheckpointTrack& track) {
  const std::string track_path = TrackPath(path, track.config.name);
  if (track.weights.has_value() && track.weights->index.has_value()) {
    EMA_RETURN_IF_ERROR(
        ReadSmall(file_system, track_path, *track.weights->index, kMaxIndexFileBytes).status());
  }
  for (const SmallFile& saved : checkpoint.attached_files) {
    EMA_RETURN_IF_ERROR(ReadSmall(file_system, track_path, saved, kMaxAttachedFileBytes).status());
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckpointManifest> VerifyCheckpoint(FileSystem& file_system,
                                                    const std::string& path,
                                                    const TrackVerdict& on_track,
                                                    const PauseHook& pause) {
  return Verify(file_system, path, on_track,
                [&](const CheckpointManifest& checkpoint, const CheckpointTrack& track) {
                  return VerifyWeights(file_system, path, checkpoint, track, pause);
                });
}

absl::Status VerifyPart(FileSystem& file_system, const std::string& path,
                        const CheckpointManifest& part, const PauseHook& pause) {
  for (const CheckpointTrack& track : part.tracks) {
    if (!track.weights.has_value()) continue;
    absl::Status status = VerifyTrackFolder(file_system, path, part, track);
    if (status.ok()) status = VerifyWeights(file_system, path, part, track, pause);
    if (!status.ok()) return WithPrefix(status, InTrack(track.config.name));
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckpointManifest> VerifyAllButWeights(FileSystem& file_system,
                                                       const std::string& path) {
  return Verify(file_system, path, /*on_track=*/nullptr,
                [](const CheckpointManifest&, const CheckpointTrack&) { return absl::OkStatus(); });
}

absl::Status CheckNoUnknownFiles(FileSystem& file_system, const std::string& path,
                                 const CheckpointManifest& checkpoint) {
  EMA_RETURN_IF_ERROR(CheckFolders(file_system, path, checkpoint, Others::kRefused));
  for (const CheckpointTrack& track : checkpoint.tracks) {
    if (!track.weights.has_value()) continue;
    const absl::Status status =
        CheckTrackFolder(file_system, path, checkpoint, track, Others::kRefused);
    if (!status.ok()) return WithPrefix(status, InTrack(track.config.name));
  }
  return absl::OkStatus();
}

}  // namespace ema
