// SPDX-License-Identifier: Apache-2.0
#include "server/format/manifest_parts.h"

#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/format/record_json.h"

namespace ema {
namespace {

// The fields that all parts of a checkpoint share, as JSON.
Json SharedFields(const CheckpointManifest& part) {
  Version record = part.record;
  record.statistics.clear();  // Each partition has those of its own tensors.
  Json fields = {{"model", part.model_name},
                 {"max_pinned_versions", part.max_pinned_versions},
                 {"non_finite", part.non_finite},
                 {"is_partial", part.is_partial},
                 {"created_tracks", part.created_tracks}};
  const Json version = record;
  for (const auto& [key, value] : version.items()) fields["version." + key] = value;
  return fields;
}

// The fields of a track that all parts share. A state has no JSON of its own here.
Json SharedFields(const CheckpointTrack& track) {
  return {{"config", track.config},
          {"last_steps", track.last_steps},
          {"has_weights", track.weights.has_value()},
          {"latest_weights", track.latest_weights.size()}};
}

absl::Status Differ(size_t part, std::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kModelDiffers,
                   absl::StrCat("partition ", part,
                                " has another checkpoint than partition 0: ", std::string(what)));
}

// REQUIRES: both have the same keys.
absl::Status CompareFields(size_t part, const std::string& place, const Json& there,
                           const Json& first) {
  for (const auto& [key, value] : first.items()) {
    const Json& other = there[key];
    if (other == value) continue;
    return Differ(part,
                  absl::StrCat(place, key, " is ", other.dump(), ", expected ", value.dump()));
  }
  return absl::OkStatus();
}

absl::Status CheckAgrees(size_t number, const CheckpointManifest& part,
                         const CheckpointManifest& first) {
  EMA_RETURN_IF_ERROR(CompareFields(number, "", SharedFields(part), SharedFields(first)));
  if (part.tracks.size() != first.tracks.size()) {
    return Differ(number, absl::StrCat("it has ", part.tracks.size(), " tracks, expected ",
                                       first.tracks.size()));
  }
  for (size_t t = 0; t < first.tracks.size(); ++t) {
    const CheckpointTrack& track = part.tracks[t];
    const std::string place = absl::StrCat("track \"", first.tracks[t].config.name, "\": ");
    EMA_RETURN_IF_ERROR(
        CompareFields(number, place, SharedFields(track), SharedFields(first.tracks[t])));
    if (track.state != first.tracks[t].state) {
      return Differ(number, place + "its schedules have other states");
    }
  }
  return absl::OkStatus();
}

template <typename T>
void Append(std::vector<T>& all, std::vector<T>&& more) {
  all.insert(all.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

void Append(TensorFiles& all, TensorFiles&& more) {
  Append(all.files, std::move(more.files));
  Append(all.tensor_crc32c, std::move(more.tensor_crc32c));
  Append(all.piece_crc32c, std::move(more.piece_crc32c));
}

void SetDigests(CheckpointTrack& track, const Manifest& manifest) {
  if (!track.weights.has_value()) return;
  const StorageLayout layout(manifest, ActionsOf(track.config, manifest), track.config.dtype);
  const auto set = [&layout](TensorFiles& files) {
    files.digest = 0;
    for (size_t i = 0; i < files.tensor_crc32c.size(); ++i) {
      files.digest =
          Crc32cCombine(files.digest, files.tensor_crc32c[i], layout.entries()[i].length_bytes);
    }
  };
  set(*track.weights);
  for (TensorFiles& files : track.latest_weights) set(files);
}

// Keeps the tensors of a part.
void Cut(TensorFiles& files, int64_t first, int64_t count) {
  const auto cut = [&](auto& by_tensor) {
    by_tensor.erase(by_tensor.begin() + first + count, by_tensor.end());
    by_tensor.erase(by_tensor.begin(), by_tensor.begin() + first);
  };
  cut(files.tensor_crc32c);
  cut(files.piece_crc32c);
  files.index.reset();
  files.has_other_tensors = true;
}

}  // namespace

absl::StatusOr<CheckpointManifest> MergeManifests(std::vector<CheckpointManifest> parts) {
  if (parts.size() == 1) return std::move(parts[0]);
  CheckpointManifest whole = std::move(parts[0]);
  std::vector<TensorSpec> tensors(whole.manifest.tensors().begin(), whole.manifest.tensors().end());
  for (size_t p = 1; p < parts.size(); ++p) {
    CheckpointManifest& part = parts[p];
    EMA_RETURN_IF_ERROR(CheckAgrees(p, part, whole));
    const auto more = part.manifest.tensors();
    tensors.insert(tensors.end(), more.begin(), more.end());
    for (size_t t = 0; t < whole.tracks.size(); ++t) {
      CheckpointTrack& track = whole.tracks[t];
      if (!track.weights.has_value()) continue;
      Append(*track.weights, std::move(*part.tracks[t].weights));
      for (size_t w = 0; w < track.latest_weights.size(); ++w) {
        Append(track.latest_weights[w], std::move(part.tracks[t].latest_weights[w]));
      }
    }
  }
  absl::StatusOr<Manifest> manifest = Manifest::Create(std::move(tensors));
  if (!manifest.ok()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kModelDiffers,
                     absl::StrCat("the partitions' tensors are not those of one model: ",
                                  manifest.status().message()));
  }
  whole.manifest = *std::move(manifest);
  for (CheckpointTrack& track : whole.tracks) {
    track.frozen_digest = 0;
    SetDigests(track, whole.manifest);
  }
  return whole;
}

absl::StatusOr<Manifest> SliceManifest(const Manifest& whole, int64_t first_tensor,
                                       int64_t tensor_count) {
  const int64_t all = whole.tensor_count();
  if (first_tensor < 0 || tensor_count < 1 || first_tensor > all - tensor_count) {
    return BadRequest(absl::StrCat("tensors: ", tensor_count, " from ", first_tensor,
                                   " on given, the model has ", all));
  }
  const auto tensors =
      whole.tensors().subspan(static_cast<size_t>(first_tensor), static_cast<size_t>(tensor_count));
  return Manifest::Create({tensors.begin(), tensors.end()});
}

absl::StatusOr<CheckpointManifest> PartOf(const CheckpointManifest& whole, int64_t first_tensor,
                                          int64_t tensor_count) {
  const int64_t all = whole.manifest.tensor_count();
  CheckpointManifest part = whole;
  EMA_ASSIGN_OR_RETURN(part.manifest, SliceManifest(whole.manifest, first_tensor, tensor_count));
  part.attached_files.clear();
  for (CheckpointTrack& track : part.tracks) {
    if (!track.weights.has_value()) continue;
    if (tensor_count < all) track.frozen_digest = 0;
    Cut(*track.weights, first_tensor, tensor_count);
    for (TensorFiles& files : track.latest_weights) Cut(files, first_tensor, tensor_count);
    SetDigests(track, part.manifest);
  }
  return part;
}

}  // namespace ema
