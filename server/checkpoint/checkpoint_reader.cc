// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/format/checkpoint_files.h"
#include "server/format/tensor_reader.h"

namespace ema {
namespace {

// Where a checkpoint is read from, and into what.
struct ReadJob {
  FileSystem& file_system;
  const std::string& path;
  const CheckpointManifest& checkpoint;
  Model& model;
  const PauseHook& pause;
};

// Whoever restores has nothing else to do, and fresh memory costs more than the disk.
int MaxThreads() {
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
}

absl::StatusOr<Blocks> RestoreBlocks(const ReadJob& job, const Track& track,
                                     const TensorFiles& saved) {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<TensorReader> reader,
                       TensorReader::Open(job.file_system, TrackPath(job.path, track.name()), saved,
                                          job.checkpoint.manifest, track.layout()));
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<BlocksWriter> writer,
                       BlocksWriter::Create(job.model.device(), track));
  const auto place = [&](int64_t index, int64_t offset, int64_t length_bytes) {
    return writer->InPlace(track.layout().entry(index).offset + offset, length_bytes);
  };
  const auto write = [&](int64_t index, int64_t offset, std::span<const std::byte> bytes) {
    if (job.pause) EMA_RETURN_IF_ERROR(job.pause());
    return writer->Write(track.layout().entry(index).offset + offset, bytes);
  };
  EMA_RETURN_IF_ERROR(reader->ReadAll(place, write, MaxThreads()));
  return writer->Finish();
}

absl::StatusOr<TrackSnapshot> RestoreTrack(const ReadJob& job, const CheckpointTrack& saved,
                                           TrackRef track) {
  EMA_RETURN_IF_ERROR(VerifySmallFiles(job.file_system, job.path, job.checkpoint, saved));
  TrackSnapshot snapshot{.track = track,
                         .block_versions = std::vector<int64_t>(track->block_count()),
                         .state = saved.state,
                         .last_steps = saved.last_steps,
                         .frozen_digest = saved.frozen_digest};
  EMA_ASSIGN_OR_RETURN(snapshot.blocks, RestoreBlocks(job, *track, *saved.weights));
  for (const TensorFiles& files : saved.latest_weights) {
    EMA_ASSIGN_OR_RETURN(Blocks blocks, RestoreBlocks(job, *track, files));
    snapshot.latest_weights.push_back(std::make_shared<const Blocks>(std::move(blocks)));
  }
  return snapshot;
}

// Readers of one track at the same time that each want the end of a piece after its beginning.
constexpr size_t kCachedPieces = 8;

class StoredTrackImpl final : public StoredTrack {
 public:
  StoredTrackImpl(std::unique_ptr<TensorReader> reader, StorageLayout layout, std::string name,
                  std::function<void(const absl::Status&)> on_corrupt)
      : reader_(std::move(reader)),
        layout_(std::move(layout)),
        name_(std::move(name)),
        on_corrupt_(std::move(on_corrupt)) {}

  absl::StatusOr<std::vector<HostPiece>> Read(int64_t offset, int64_t length_bytes) override {
    if (length_bytes == 0) return std::vector<HostPiece>();
    absl::StatusOr<HostPiece> piece = ReadRange(offset, offset + length_bytes);
    if (piece.ok()) return std::vector<HostPiece>{*std::move(piece)};
    if (!absl::IsDataLoss(piece.status())) return piece.status();
    absl::Status problem = WithPrefix(piece.status(), absl::StrCat("track \"", name_, "\": "));
    if (on_corrupt_) on_corrupt_(problem);
    return problem;
  }

 private:
  // A part of one piece of a tensor that is wanted; offsets in the track's bytes.
  struct Part {
    int64_t tensor = 0;
    int64_t piece = 0;
    int64_t piece_begin = 0;
    int64_t piece_end = 0;
    int64_t begin = 0;
    int64_t end = 0;

    bool is_whole() const { return begin == piece_begin && end == piece_end; }
  };
  using PieceBytes = std::shared_ptr<const std::byte>;
  struct CachedPiece {
    int64_t tensor = 0;
    int64_t piece = 0;
    PieceBytes bytes;
  };

  // What lies in [offset, end), in order.
  std::vector<Part> PartsIn(int64_t offset, int64_t end) const {
    const absl::Span<const StorageLayout::Entry> entries = layout_.entries();
    std::vector<Part> parts;
    auto entry = std::partition_point(entries.begin(), entries.end(), [offset](const auto& e) {
      return e.offset + e.length_bytes <= offset;
    });
    for (; entry != entries.end() && entry->offset < end; ++entry) {
      const int64_t entry_end = entry->offset + entry->length_bytes;
      const int64_t first = (std::max(offset, entry->offset) - entry->offset) / kPieceBytes;
      for (int64_t piece = first;; ++piece) {
        Part part{.tensor = entry - entries.begin(), .piece = piece};
        part.piece_begin = entry->offset + piece * kPieceBytes;
        part.piece_end = std::min(part.piece_begin + kPieceBytes, entry_end);
        part.begin = std::max(offset, part.piece_begin);
        part.end = std::min(end, part.piece_end);
        if (part.begin >= part.end) break;
        parts.push_back(part);
      }
    }
    return parts;
  }

  absl::StatusOr<HostPiece> ReadRange(int64_t offset, int64_t end) {
    const std::vector<Part> parts = PartsIn(offset, end);
    if (parts.size() == 1 && parts[0].begin == offset && parts[0].end == end) {
      EMA_ASSIGN_OR_RETURN(PieceBytes bytes, GetPiece(parts[0]));
      const std::span<const std::byte> range(bytes.get() + (offset - parts[0].piece_begin),
                                             end - offset);
      return HostPiece{std::move(bytes), range};
    }
    const std::shared_ptr<std::byte[]> bytes(new std::byte[end - offset]);
    int64_t filled = offset;
    for (const Part& part : parts) {
      std::byte* const to = bytes.get() + (part.begin - offset);
      std::memset(bytes.get() + (filled - offset), 0, part.begin - filled);
      filled = part.end;
      const std::span<std::byte> range(to, part.end - part.begin);
      if (part.is_whole()) {
        EMA_RETURN_IF_ERROR(ReadPiece(part, range));
      } else {
        EMA_ASSIGN_OR_RETURN(const PieceBytes piece, GetPiece(part));
        std::memcpy(to, piece.get() + (part.begin - part.piece_begin), range.size());
      }
    }
    std::memset(bytes.get() + (filled - offset), 0, end - filled);
    return HostPiece{PieceBytes(bytes, bytes.get()),
                     {bytes.get(), static_cast<size_t>(end - offset)}};
  }

  // All of the piece of which `part` is a part.
  absl::StatusOr<PieceBytes> GetPiece(const Part& part) ABSL_LOCKS_EXCLUDED(mu_) {
    if (PieceBytes known = FindPiece(part)) return known;
    const int64_t length_bytes = part.piece_end - part.piece_begin;
    const std::shared_ptr<std::byte[]> bytes(new std::byte[length_bytes]);
    EMA_RETURN_IF_ERROR(ReadPiece(part, {bytes.get(), static_cast<size_t>(length_bytes)}));
    PieceBytes result(bytes, bytes.get());
    absl::MutexLock lock(&mu_);
    pieces_.push_front({part.tensor, part.piece, result});
    if (pieces_.size() > kCachedPieces) pieces_.pop_back();
    return result;
  }

  PieceBytes FindPiece(const Part& part) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto it = std::find_if(pieces_.begin(), pieces_.end(), [&](const CachedPiece& cached) {
      return cached.tensor == part.tensor && cached.piece == part.piece;
    });
    if (it == pieces_.end()) return nullptr;
    std::rotate(pieces_.begin(), it, it + 1);
    return pieces_.front().bytes;
  }

  absl::Status ReadPiece(const Part& part, std::span<std::byte> bytes) {
    return reader_->ReadPiece(part.tensor, part.piece, bytes);
  }

  const std::unique_ptr<const TensorReader> reader_;
  const StorageLayout layout_;
  const std::string name_;
  const std::function<void(const absl::Status&)> on_corrupt_;

  absl::Mutex mu_;                                       // Never held across a call of reader_.
  std::deque<CachedPiece> pieces_ ABSL_GUARDED_BY(mu_);  // Used last first.
};

// The track, which has weights.
absl::StatusOr<const CheckpointTrack*> FindTrack(const CheckpointManifest& checkpoint,
                                                 std::string_view track_name) {
  const CheckpointTrack* const track = checkpoint.Find(track_name);
  if (track != nullptr && track->weights.has_value()) return track;
  std::vector<std::string> names;
  for (const CheckpointTrack& other : checkpoint.tracks) {
    if (other.weights.has_value()) names.push_back(other.config.name);
  }
  return MakeError(
      absl::StatusCode::kNotFound, ErrorReason::kTrackNotFound,
      absl::StrCat("the checkpoint of version ", checkpoint.record.number, " has no track \"",
                   std::string(track_name), "\"; it has ", absl::StrJoin(names, ", ")));
}

}  // namespace

absl::Status LocateError(const absl::Status& status, std::string_view model,
                         std::string_view checkpoint) {
  return WithPrefix(status, absl::StrCat("model \"", std::string(model), "\", checkpoint \"",
                                         std::string(checkpoint), "\": "));
}

absl::StatusOr<std::shared_ptr<Snapshot>> ReadCheckpoint(FileSystem& file_system,
                                                         const std::string& path,
                                                         const CheckpointManifest& checkpoint,
                                                         Model& model, const PauseHook& pause) {
  if (std::string difference = checkpoint.manifest.DifferenceFrom(model.manifest());
      !difference.empty()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kModelDiffers,
                     absl::StrCat("the checkpoint has other tensors than the model (here: the "
                                  "checkpoint, there: the model): ",
                                  difference));
  }
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->record = checkpoint.record;
  const ReadJob job{file_system, path, checkpoint, model, pause};
  for (const TrackRef& track : model.Describe().tracks) {
    const CheckpointTrack* const saved = checkpoint.Find(track->name());
    if (saved == nullptr || !saved->weights.has_value() ||
        !track->HasFormOf(saved->config, checkpoint.manifest)) {
      continue;
    }
    absl::StatusOr<TrackSnapshot> restored = RestoreTrack(job, *saved, track);
    if (absl::IsDataLoss(restored.status())) {
      return WithPrefix(restored.status(), absl::StrCat("track \"", track->name(), "\": "));
    }
    EMA_RETURN_IF_ERROR(restored.status());
    snapshot->tracks.push_back(*std::move(restored));
  }
  return snapshot;
}

absl::StatusOr<std::shared_ptr<StoredTrack>> OpenStoredTrack(
    FileSystem& file_system, const std::string& path, const CheckpointManifest& checkpoint,
    std::string_view track_name, const StorageLayout& layout,
    std::function<void(const absl::Status& problem)> on_corrupt) {
  EMA_ASSIGN_OR_RETURN(const CheckpointTrack* track, FindTrack(checkpoint, track_name));
  absl::StatusOr<std::unique_ptr<TensorReader>> reader = TensorReader::Open(
      file_system, TrackPath(path, track_name), *track->weights, checkpoint.manifest, layout);
  if (absl::IsDataLoss(reader.status())) {
    return WithPrefix(reader.status(), absl::StrCat("track \"", track->config.name, "\": "));
  }
  EMA_RETURN_IF_ERROR(reader.status());
  return std::make_shared<StoredTrackImpl>(*std::move(reader), layout, track->config.name,
                                           std::move(on_corrupt));
}

absl::StatusOr<SnapshotRef> OpenStoredVersion(
    FileSystem& file_system, const std::string& path, const CheckpointManifest& checkpoint,
    std::string_view track_name, std::function<void(const absl::Status& problem)> on_corrupt) {
  // Only what has changed since a version is asked of blocks that are not there.
  constexpr int64_t kBlockBytes = int64_t{32} << 20;
  EMA_ASSIGN_OR_RETURN(const CheckpointTrack* saved, FindTrack(checkpoint, track_name));
  // First that the files have all the bytes that the manifest says: a Track takes memory for them.
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<StoredTrack> stored,
                       OpenStoredTrack(file_system, path, checkpoint, track_name,
                                       StorageLayout(checkpoint.manifest,
                                                     ActionsOf(saved->config, checkpoint.manifest),
                                                     saved->config.dtype),
                                       std::move(on_corrupt)));
  const auto made = std::make_shared<Track>(saved->config, checkpoint.manifest);
  made->CutIntoBlocks(kBlockBytes);
  TrackSnapshot track{.track = made,
                      .stored = std::move(stored),
                      .state = saved->state,
                      .last_steps = saved->last_steps};
  track.block_versions.assign(track.track->block_count(), INT64_MAX);
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->record = checkpoint.record;
  snapshot->tracks.push_back(std::move(track));
  return snapshot;
}

}  // namespace ema
