// SPDX-License-Identifier: Apache-2.0
#include "server/format/manifest_json.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "ema/attached_file.h"
#include "ema/internal/status_macros.h"
#include "server/format/checkpoint_files.h"
#include "server/format/json_file.h"
#include "server/format/record_json.h"

namespace ema {

template <>
CheckpointTrack Blank() {
  return {.config = Blank<TrackConfig>()};
}

void VisitFields(auto& io, MaybeConst<SmallFile> auto& file) {
  io("name", file.name);
  io("file_bytes", file.file_bytes);
  io("crc32c", file.crc32c);
}

void VisitFields(auto& io, MaybeConst<TensorFile> auto& file) {
  io("name", file.name);
  io("file_bytes", file.file_bytes);
  io("header_crc32c", file.header_crc32c);
}

void VisitFields(auto& io, MaybeConst<TensorFiles> auto& files) {
  io("files", files.files);
  io("index", files.index);
  io("digest", files.digest);
  io("tensor_crc32c", files.tensor_crc32c);
  io("piece_crc32c", files.piece_crc32c);
}

void VisitFields(auto& io, MaybeConst<Schedule::State> auto& state) {
  io("update_count", state.update_count);
  io("averaged_count", state.averaged_count);
  io("last_update", state.last_update);
  io("started", state.started);
}

void VisitFields(auto& io, MaybeConst<CheckpointTrack> auto& track) {
  io("config", track.config);
  io("states", track.state);
  io("last_steps", track.last_steps);
  io("frozen_digest", track.frozen_digest);
  io("weights", track.weights);
  io.IfAny("latest_weights", track.latest_weights);
}

void VisitFields(auto& io, MaybeConst<CheckpointManifest> auto& checkpoint) {
  io("model", checkpoint.model_name);
  io("max_pinned_versions", checkpoint.max_pinned_versions, 1);
  io("non_finite", checkpoint.non_finite);
  io("version", checkpoint.record);
  io("is_partial", checkpoint.is_partial);
  io("total_bytes", checkpoint.total_bytes);
  io("attached_files", checkpoint.attached_files);
  io("created_tracks", checkpoint.created_tracks);
  io("tracks", checkpoint.tracks);
  io("tensors", checkpoint.manifest);
}

namespace {

// The number of the first of `files`, and the count of all, by their names, if `scope` allows them.
FileNumber NumbersOf(const TensorFiles& files, size_t weights, ManifestScope scope) {
  const size_t count = files.files.size();
  if (scope == ManifestScope::kPart && count > 0) {
    const std::optional<FileNumber> first = ParseTensorFileName(files.files[0].name, weights);
    if (first.has_value() && count <= first->count - first->index) return *first;
  }
  return {.index = 0, .count = count};
}

// `place`: such as ".tracks[0].weights". `weights`: as for TensorFileName(). As all checks here,
// returns what is wrong; empty: nothing.
std::string CheckFiles(const std::string& place, const TensorFiles& files, size_t weights,
                       size_t tensor_count, ManifestScope scope) {
  if (files.tensor_crc32c.size() != tensor_count || files.piece_crc32c.size() != tensor_count) {
    return absl::StrCat(place, " has ", files.tensor_crc32c.size(), " tensor_crc32c and ",
                        files.piece_crc32c.size(), " piece_crc32c, expected ", tensor_count);
  }
  const bool is_whole = scope == ManifestScope::kWhole;
  if (is_whole && files.files.empty()) return absl::StrCat(place, ".files is empty");
  const FileNumber numbers = NumbersOf(files, weights, scope);
  // No other names: they become paths.
  for (size_t i = 0; i < files.files.size(); ++i) {
    const std::string expected = TensorFileName(numbers.index + i, numbers.count, weights);
    if (files.files[i].name != expected) {
      return absl::StrCat(place, ".files[", i, "].name is not \"", expected, "\"");
    }
  }
  const bool needs_index = is_whole && weights == 0 && files.files.size() > 1;
  if (files.index.has_value() != needs_index ||
      (needs_index && files.index->name != kIndexFileName)) {
    return absl::StrCat(place, ".index is not ",
                        needs_index ? std::string(kIndexFileName) : "null");
  }
  return "";
}

std::string CheckTrack(const std::string& place, const CheckpointTrack& track, size_t tensor_count,
                       ManifestScope scope) {
  // Without weights it had no updates, and states are of updates.
  const size_t state_count = track.weights.has_value() ? SchedulesOf(track.config).size() : 0;
  if (track.state.size() != state_count || track.last_steps.size() != state_count) {
    return absl::StrCat(place, " has ", track.state.size(), " states and ", track.last_steps.size(),
                        " last_steps, expected ", state_count);
  }
  for (const Schedule::State& state : track.state) {
    if (state.last_update.has_value()) continue;
    if (state.started.has_value() || state.update_count > 0) {
      return absl::StrCat(place, ".states: updates without a last_update");
    }
  }
  const int64_t kept_count = track.config.schedule.kept_weights_count();
  int64_t expected_count = 0;
  if (track.weights.has_value() && kept_count > 0) {
    expected_count = std::clamp<int64_t>(track.state[0].averaged_count, 1, kept_count);
  }
  if (std::ssize(track.latest_weights) != expected_count) {
    return absl::StrCat(place, " has ", track.latest_weights.size(), " latest_weights, expected ",
                        expected_count);
  }
  if (!track.weights.has_value()) return "";
  std::string problem = CheckFiles(place + ".weights", *track.weights, 0, tensor_count, scope);
  for (size_t i = 0; i < track.latest_weights.size() && problem.empty(); ++i) {
    problem = CheckFiles(absl::StrCat(place, ".latest_weights[", i, "]"), track.latest_weights[i],
                         i + 1, tensor_count, scope);
  }
  return problem;
}

std::string CheckAttachedFiles(const std::vector<SmallFile>& files) {
  if (files.size() > kMaxAttachedFiles) return "attached_files has too many elements";
  absl::flat_hash_set<std::string> names;
  for (const SmallFile& file : files) {
    if (const absl::Status status = ValidateAttachedName(file.name); !status.ok()) {
      return absl::StrCat("attached_files: ", status.message());
    }
    if (file.file_bytes > kMaxAttachedFileBytes || !names.insert(file.name).second) {
      return absl::StrCat("attached_files: \"", file.name, "\" is too large, or there twice");
    }
  }
  return "";
}

}  // namespace

const CheckpointTrack* CheckpointManifest::Find(std::string_view track_name) const {
  const auto it = std::find_if(tracks.begin(), tracks.end(), [&](const CheckpointTrack& track) {
    return track.config.name == track_name;
  });
  return it != tracks.end() ? &*it : nullptr;
}

int64_t CheckpointManifest::FolderBytes(const CheckpointTrack& track) const {
  if (!track.weights.has_value()) return 0;
  int64_t bytes = 0;
  for (const TensorFiles* const files : track.all_files()) {
    for (const TensorFile& file : files->files) bytes += file.file_bytes;
  }
  if (track.weights->index.has_value()) bytes += track.weights->index->file_bytes;
  for (const SmallFile& file : attached_files) bytes += file.file_bytes;
  return bytes;
}

std::string EncodeCheckpointManifest(const CheckpointManifest& manifest) {
  return FormatJsonFile(kCheckpointFormatVersion, manifest);
}

absl::StatusOr<CheckpointManifest> ParseCheckpointManifest(std::string_view text,
                                                           ManifestScope scope) {
  EMA_ASSIGN_OR_RETURN(const ParsedJson json,
                       ParseJsonFile(kManifestFileName, kCheckpointFormatVersion, text));
  CheckpointManifest checkpoint;
  std::string problem = ReadJson(json, checkpoint);
  if (problem.empty()) problem = CheckAttachedFiles(checkpoint.attached_files);
  for (size_t i = 0; i < checkpoint.tracks.size() && problem.empty(); ++i) {
    problem = CheckTrack(absl::StrCat("tracks[", i, "]"), checkpoint.tracks[i],
                         static_cast<size_t>(checkpoint.manifest.tensor_count()), scope);
  }
  if (!problem.empty()) return CorruptManifest(problem);
  return checkpoint;
}

absl::Status CorruptManifest(const std::string& problem) {
  return CorruptJsonFile(kManifestFileName, problem);
}

}  // namespace ema
