// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/restore.h"

#include <algorithm>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/format/checkpoint_files.h"
#include "server/format/tensor_reader.h"

namespace ema {
namespace {

// Where a checkpoint is read from, and into what.
struct Job {
  FileSystem& file_system;
  const std::string& path;
  const CheckpointManifest& checkpoint;
  Model& model;
  const RestBetweenReads& rest;
};

// Whoever restores has nothing else to do, and fresh memory costs more than the disk.
int MaxThreads() {
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
}

absl::StatusOr<Blocks> RestoreBlocks(const Job& job, const Track& track, TensorKind kind,
                                     const TensorFiles& saved) {
  EMA_ASSIGN_OR_RETURN(
      const std::unique_ptr<TensorReader> reader,
      TensorReader::Open(job.file_system, TrackPath(job.path, track.name()), kind, saved,
                         job.checkpoint.manifest, track.actions(), track.layout()));
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<BlocksWriter> writer,
                       BlocksWriter::Create(job.model.device(), track));
  const auto place = [&](int64_t index, int64_t offset, int64_t length_bytes) {
    return writer->InPlace(track.layout().entry(index).offset + offset, length_bytes);
  };
  const auto write = [&](int64_t index, int64_t offset, std::span<const std::byte> bytes) {
    if (job.rest) EMA_RETURN_IF_ERROR(job.rest());
    return writer->Write(track.layout().entry(index).offset + offset, bytes);
  };
  EMA_RETURN_IF_ERROR(reader->ReadAll(place, write, MaxThreads()));
  return writer->Finish();
}

absl::StatusOr<TrackSnapshot> RestoreTrack(const Job& job, const CheckpointTrack& saved,
                                           TrackRef track) {
  EMA_RETURN_IF_ERROR(VerifySmallFiles(job.file_system, job.path, job.checkpoint, saved));
  TrackSnapshot snapshot{.track = track,
                         .block_versions = std::vector<int64_t>(track->block_count()),
                         .state = saved.state,
                         .last_steps = saved.last_steps,
                         .frozen_digest = saved.frozen_digest};
  EMA_ASSIGN_OR_RETURN(snapshot.blocks,
                       RestoreBlocks(job, *track, TensorKind::kWeights, *saved.weights));
  if (saved.low_parts.has_value()) {
    EMA_ASSIGN_OR_RETURN(snapshot.low_blocks,
                         RestoreBlocks(job, *track, TensorKind::kLowParts, *saved.low_parts));
  }
  return snapshot;
}

}  // namespace

absl::Status LocateError(const absl::Status& status, std::string_view model,
                         std::string_view checkpoint) {
  return WithPlace(status, absl::StrCat("model \"", std::string(model), "\", checkpoint \"",
                                        std::string(checkpoint), "\": "));
}

absl::StatusOr<std::shared_ptr<Snapshot>> ReadCheckpoint(FileSystem& file_system,
                                                         const std::string& path,
                                                         const CheckpointManifest& checkpoint,
                                                         Model& model,
                                                         const RestBetweenReads& rest) {
  if (std::string difference = checkpoint.manifest.DifferenceFrom(model.manifest());
      !difference.empty()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kModelDiffers,
                     absl::StrCat("the checkpoint is of other tensors: ", difference));
  }
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->record = checkpoint.record;
  const Job job{file_system, path, checkpoint, model, rest};
  for (const TrackRef& track : model.Describe().tracks) {
    const CheckpointTrack* const saved = checkpoint.Find(track->name());
    if (saved == nullptr || !saved->weights.has_value() ||
        !track->HasFormOf(saved->config, checkpoint.manifest)) {
      continue;
    }
    absl::StatusOr<TrackSnapshot> restored = RestoreTrack(job, *saved, track);
    if (absl::IsDataLoss(restored.status())) {
      return WithPlace(restored.status(), absl::StrCat("track \"", track->name(), "\": "));
    }
    EMA_RETURN_IF_ERROR(restored.status());
    snapshot->tracks.push_back(*std::move(restored));
  }
  return snapshot;
}

}  // namespace ema
