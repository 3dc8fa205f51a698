// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/synthesis.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/partitioned_saves.h"
#include "server/checkpoint/synthesis_plan.h"
#include "server/core/known_versions.h"
#include "server/format/checkpoint_files.h"
#include "server/format/manifest_parts.h"
#include "server/format/tensor_reader.h"
#include "server/kernel/cast.h"

namespace ema {
namespace {

// Builds a track from stored values: the averages in float64, so that the sum is as exact as its
// parts, until Finish() rounds them. Not thread-safe.
class BlocksMixer {
 public:
  // RESOURCE_EXHAUSTED: no memory.
  static absl::StatusOr<std::unique_ptr<BlocksMixer>> Create(Device& device, const Track& track,
                                                             const Track& exact_track) {
    std::unique_ptr<BlocksMixer> mixer(new BlocksMixer(device, track, exact_track));
    EMA_ASSIGN_OR_RETURN(mixer->exact_blocks_, AllocateBlocks(device, exact_track));
    EMA_ASSIGN_OR_RETURN(mixer->stream_, device.NewStream());
    EMA_ASSIGN_OR_RETURN(mixer->writer_, BlocksWriter::Create(device, track));
    return mixer;
  }

  // Puts bytes of a copied tensor there as they are.
  absl::Status Copy(int64_t tensor, int64_t offset, std::span<const std::byte> bytes) {
    return writer_->Write(track_.layout().entry(tensor).offset + offset, bytes);
  }

  // Moves averages by `share` of the way to the `elements` of `dtype`, float32 or float64, which
  // begin at `byte` of the tensor. 1: the elements replace the averages, even if these are NaN.
  absl::Status Fold(int64_t tensor, int64_t byte, Dtype dtype, std::span<const std::byte> elements,
                    double share) {
    constexpr int64_t kBytes = sizeof(double);
    int64_t offset = exact_track_.layout().entry(tensor).offset + byte / DtypeSize(dtype) * kBytes;
    while (!elements.empty()) {
      const int64_t i = exact_track_.FindBlock(offset);
      const int64_t in_block = offset - exact_track_.block_start(i);
      const int64_t count = std::min(static_cast<int64_t>(elements.size()) / DtypeSize(dtype),
                                     (exact_track_.block_size(i) - in_block) / kBytes);
      FoldTarget target = {
          .kind = share == 1 ? FoldKind::kAssignFloat64 : FoldKind::kAverageFloat64,
          .update_weight = share};
      target.next = exact_blocks_[i]->data() + in_block;
      target.current = target.next;
      // Averages that are not finite are what the model's owner has allowed.
      EMA_RETURN_IF_ERROR(stream_
                              ->Fold({.source_dtype = dtype,
                                      .source = elements.data(),
                                      .element_count = count,
                                      .targets = {&target, 1}})
                              .status());
      offset += count * kBytes;
      elements = elements.subspan(count * DtypeSize(dtype));
    }
    return absl::OkStatus();
  }

  // To be called between folds of the same place, whose order the stream does not keep.
  absl::Status EndSource() { return stream_->Synchronize().status(); }

  // Ends the mixer. REQUIRES: EndSource().
  absl::StatusOr<Blocks> Finish() {
    constexpr int64_t kReadBytes = int64_t{4} << 20;  // Exact ones.
    const Blocks exact_blocks(exact_blocks_.begin(), exact_blocks_.end());
    std::vector<std::byte> rounded(kReadBytes / 2);
    for (int64_t tensor = 0; tensor < std::ssize(track_.actions()); ++tensor) {
      if (track_.action(tensor) != TensorAction::kAverage) continue;
      const StorageLayout::Entry& entry = exact_track_.layout().entry(tensor);
      int64_t to = track_.layout().entry(tensor).offset;
      for (int64_t done = 0; done < entry.length_bytes; done += kReadBytes) {
        EMA_ASSIGN_OR_RETURN(const std::vector<HostPiece> pieces,
                             ReadBlocks(device_, exact_track_, exact_blocks, entry.offset + done,
                                        std::min(kReadBytes, entry.length_bytes - done)));
        for (const HostPiece& piece : pieces) {
          const auto bytes = static_cast<int64_t>(piece.bytes.size()) / 2;
          CastOnCpu(Dtype::kFloat64, piece.bytes.data(), Dtype::kFloat32, rounded.data(),
                    bytes / DtypeSize(Dtype::kFloat32));
          EMA_RETURN_IF_ERROR(writer_->Write(to, std::span(rounded).first(bytes)));
          to += bytes;
        }
      }
    }
    return writer_->Finish();
  }

 private:
  BlocksMixer(Device& device, const Track& track, const Track& exact_track)
      : device_(device), track_(track), exact_track_(exact_track) {}

  Device& device_;
  const Track& track_;
  const Track& exact_track_;  // The same track with dtype float64.
  std::vector<std::shared_ptr<Block>> exact_blocks_;
  std::unique_ptr<DeviceStream> stream_;
  std::unique_ptr<BlocksWriter> writer_;
};

// Those of `held` that may be used, newest first. In a group these are the ones of the model's
// current history, which the registry has.
absl::StatusOr<std::vector<CheckpointId>> UsableIds(const CheckpointFolder& folder,
                                                    const CheckpointFolder::Held& held) {
  std::vector<CheckpointId> ids = held.ids();
  if (folder.partitions() == nullptr) return ids;
  EMA_ASSIGN_OR_RETURN(const RecordedCheckpoints recorded,
                       folder.partitions()->Recorded(folder.model_name()));
  std::erase_if(ids, [&](const CheckpointId& id) {
    return !recorded.Has(id.version_id()) || !recorded.IsInHistory(id.version_id());
  });
  return ids;
}

// Which of these checkpoints are on the branch of `latest`, newest first, and what they say.
absl::StatusOr<std::vector<StoredCheckpoint>> ReadManifests(
    const CheckpointFolder& folder, const std::vector<CheckpointId>& ids, const Model& model,
    const Manifest& whole, const Version& latest, ReadErrorHandler on_error) {
  std::vector<KnownVersion> on_disk;
  on_disk.reserve(ids.size());
  for (const CheckpointId& id : ids) {
    on_disk.push_back({.id = id.version_id(), .step = id.step});
  }
  std::vector<StoredCheckpoint> checkpoints;
  BranchWalk walk(latest);
  // Those in memory, too: one of them may have been restored.
  for (const KnownVersion& known : MergeKnownVersions(model.history(), on_disk)) {
    const CheckpointId id{known.id.incarnation, known.id.version, known.step};
    if (!std::binary_search(ids.begin(), ids.end(), id, std::greater<>())) {
      walk.AdvanceIfOnBranch(known.id, known.step, known.restored_from);
      continue;
    }
    BranchWalk with_it = walk;
    if (!with_it.AdvanceIfOnBranch(known.id, known.step, std::nullopt)) continue;
    EMA_RETURN_IF_ERROR(model.CheckOpen());
    absl::StatusOr<CheckpointManifest> manifest =
        ReadCheckpointManifest(folder.file_system(), folder.Path(CheckpointName(id)));
    if (!manifest.ok()) return on_error(CheckpointName(id), manifest.status());
    walk.AdvanceIfOnBranch(known.id, known.step, manifest->record.restored_from);
    if (manifest->manifest != whole) continue;
    // The largest parts, which are not needed: there may be hundreds of checkpoints.
    manifest->manifest = Manifest();
    manifest->created_tracks.clear();
    manifest->record.tracks.clear();
    checkpoints.push_back({id, *std::move(manifest)});
  }
  return checkpoints;
}

// Reads one source into the result. `share`: of the way from what is there to the source's
// averages; 0: they are not wanted.
absl::Status FoldSource(FileSystem& file_system, const std::string& path, const Model& model,
                        const Track& track, const SynthesisPlan::Source& source, double share,
                        bool gives_rest, BlocksMixer& mixer, ReadErrorHandler on_error) {
  const StorageLayout layout(model.manifest(), track.actions(), source.track->config.dtype);
  const auto fold = [&](int64_t i, int64_t offset,
                        std::span<const std::byte> bytes) -> absl::Status {
    // A server that stops does not wait for this.
    EMA_RETURN_IF_ERROR(model.CheckOpen());
    if (track.action(i) != TensorAction::kAverage) {
      return gives_rest ? mixer.Copy(i, offset, bytes) : absl::OkStatus();
    }
    const double buffer_share = gives_rest ? 1 : 0;
    const double own_share = model.manifest().tensor(i).is_buffer ? buffer_share : share;
    return own_share != 0 ? mixer.Fold(i, offset, layout.entry(i).dtype, bytes, own_share)
                          : absl::OkStatus();
  };
  const std::string& name = source.track->config.name;
  const absl::StatusOr<std::unique_ptr<TensorReader>> reader = TensorReader::Open(
      file_system, TrackPath(path, name), *source.track->weights, model.manifest(), layout);
  absl::Status status = reader.ok() ? (*reader)->ReadAll(fold) : reader.status();
  if (!absl::IsDataLoss(status)) return status;
  return on_error(CheckpointName(source.checkpoint->id),
                  WithPrefix(status, absl::StrCat("track \"", name, "\": ")));
}

// All of the plan's sources in `track`'s blocks.
absl::StatusOr<Blocks> Mix(const CheckpointFolder& folder, const Model& model,
                           const SynthesisPlan& plan, const Track& track, const Track& exact_track,
                           ReadErrorHandler on_error) {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<BlocksMixer> mixer,
                       BlocksMixer::Create(model.device(), track, exact_track));
  // The positive weights first, the largest first: then every sum on the way is positive, and the
  // share of each source in the average so far is its weight over that sum.
  std::vector<SynthesisPlan::Source> sources = plan.sources;
  std::stable_sort(sources.begin(), sources.end(),
                   [](const auto& a, const auto& b) { return a.weight > b.weight; });
  const auto gives_rest = [&](const SynthesisPlan::Source& source) {
    return source.track == plan.newest.track;
  };
  if (std::none_of(sources.begin(), sources.end(), gives_rest)) {
    sources.push_back(plan.newest);
    sources.back().weight = 0;
  }
  double sum = 0;
  for (const SynthesisPlan::Source& source : sources) {
    sum += source.weight;
    const double share = &source == &sources.front() ? 1 : source.weight / sum;
    const std::string path = folder.Path(CheckpointName(source.checkpoint->id));
    EMA_RETURN_IF_ERROR(FoldSource(folder.file_system(), path, model, track, source, share,
                                   gives_rest(source), *mixer, on_error));
    EMA_RETURN_IF_ERROR(mixer->EndSource());
  }
  return mixer->Finish();
}

// Adds the average to the model.
absl::Status Build(const CheckpointFolder& folder, Model& model, const SynthesisPlan& plan,
                   ReadErrorHandler on_error) {
  EMA_ASSIGN_OR_RETURN(TrackRef track, model.tracks().MakeSynthesizedTrack(plan.config));
  TrackConfig exact_config = plan.config;
  exact_config.dtype = Dtype::kFloat64;
  Track exact_track(std::move(exact_config), model.manifest());
  constexpr int64_t kBlockBytes = int64_t{32} << 20;
  exact_track.CutIntoBlocks(kBlockBytes);
  // Not used when this ends.
  EMA_ASSIGN_OR_RETURN(
      const auto exact_memory,
      model.memory().Reserve(
          absl::StrCat("model \"", model.config().name, "\": to build \"", plan.config.name, "\""),
          exact_track.layout().total_bytes()));
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->record = plan.record;
  TrackSnapshot& result = snapshot->tracks.emplace_back();
  result.track = track;
  result.last_steps = {plan.record.step};
  // Another call may have made another of that name and version.
  result.block_versions.assign(track->block_count(), INT64_MAX);
  EMA_ASSIGN_OR_RETURN(result.blocks, Mix(folder, model, plan, *track, exact_track, on_error));
  return model.tracks().AddSynthesized(std::move(snapshot));
}

absl::StatusOr<Synthesis> SynthesizeOpen(CheckpointFolder& folder, Model& model,
                                         const SynthesisRequest& request,
                                         ReadErrorHandler on_error) {
  EMA_RETURN_IF_ERROR(model.CheckOpen());
  EMA_RETURN_IF_ERROR(ValidateName("name", request.name));
  const std::optional<Version> latest = model.history().latest();
  if (!latest.has_value()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kNoVersion,
        absl::StrCat("model \"", model.config().name, "\": nothing has been committed yet"));
  }
  if (request.step < 0) {
    return BadRequest(absl::StrCat("step: ", request.step,
                                   " given, expected 0 (the newest snapshot) or more, such as ",
                                   latest->step));
  }
  if (request.step > latest->step) {
    return StepNotYetError(model.config().name, request.step, latest->id(), latest->step);
  }
  PartitionedSaves* const partitions = folder.partitions();
  std::shared_ptr<const Manifest> whole = model.config().manifest;
  if (partitions != nullptr) {
    EMA_ASSIGN_OR_RETURN(whole, partitions->WholeManifest(model));
  }
  EMA_ASSIGN_OR_RETURN(const auto held, folder.HoldAll());
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointId> ids, UsableIds(folder, *held));
  EMA_ASSIGN_OR_RETURN(const std::vector<StoredCheckpoint> checkpoints,
                       ReadManifests(folder, ids, model, *whole, *latest, on_error));
  EMA_ASSIGN_OR_RETURN(const SynthesisPlan plan,
                       PlanSynthesis(model, *whole, request, checkpoints));
  EMA_RETURN_IF_ERROR(partitions != nullptr ? partitions->Synthesize(model, OrderOf(plan))
                                            : Build(folder, model, plan, on_error));
  Synthesis synthesis{.version = plan.record, .residual = plan.residual};
  for (const SynthesisPlan::Source& source : plan.sources) {
    synthesis.sources.push_back(
        {source.track->config.name, source.track->last_steps[0], source.weight});
  }
  return synthesis;
}

// The sources of one partition. Not thread-safe.
class PartSources {
 public:
  PartSources(const CheckpointFolder& folder, const Model& partition, int64_t first_tensor)
      : folder_(folder), partition_(partition), first_tensor_(first_tensor) {}

  // The result refers to this object.
  absl::StatusOr<SynthesisPlan::Source> Find(const SynthesisOrder::Source& source) {
    EMA_ASSIGN_OR_RETURN(const StoredCheckpoint* const checkpoint, Read(source.checkpoint));
    for (const CheckpointTrack& track : checkpoint->manifest.tracks) {
      if (track.config.name != source.track || !track.weights.has_value()) continue;
      return SynthesisPlan::Source{checkpoint, &track, source.weight};
    }
    return absl::InternalError(absl::StrCat("checkpoint \"", CheckpointName(source.checkpoint),
                                            "\" has no values of track \"", source.track, "\""));
  }

 private:
  absl::StatusOr<const StoredCheckpoint*> Read(const CheckpointId& id) {
    for (const StoredCheckpoint& known : checkpoints_) {
      if (known.id == id) return &known;
    }
    EMA_RETURN_IF_ERROR(partition_.CheckOpen());
    const std::string name = CheckpointName(id);
    const absl::StatusOr<CheckpointManifest> whole =
        ReadCheckpointManifest(folder_.file_system(), folder_.Path(name));
    if (!whole.ok()) return LocateError(whole.status(), folder_.model_name(), name);
    EMA_ASSIGN_OR_RETURN(CheckpointManifest part,
                         PartOf(*whole, first_tensor_, partition_.manifest().tensor_count()));
    return &checkpoints_.emplace_back(StoredCheckpoint{id, std::move(part)});
  }

  const CheckpointFolder& folder_;
  const Model& partition_;
  const int64_t first_tensor_;
  std::list<StoredCheckpoint> checkpoints_;  // A list, as its elements are not moved.
};

}  // namespace

absl::StatusOr<Synthesis> Synthesize(CheckpointFolder& folder, Model& model,
                                     const SynthesisRequest& request, ReadErrorHandler on_error) {
  absl::StatusOr<Synthesis> result = SynthesizeOpen(folder, model, request, on_error);
  if (result.ok()) return result;
  // Of a deleted model the files go, which is no fault of theirs.
  EMA_RETURN_IF_ERROR(model.CheckOpen());
  return result;
}

absl::Status SynthesizePart(CheckpointFolder& folder, Model& partition, int64_t first_tensor,
                            const SynthesisOrder& order) {
  PartSources sources(folder, partition, first_tensor);
  SynthesisPlan plan{.config = order.config, .record = order.record};
  for (const SynthesisOrder::Source& source : order.sources) {
    EMA_ASSIGN_OR_RETURN(plan.sources.emplace_back(), sources.Find(source));
  }
  EMA_ASSIGN_OR_RETURN(plan.newest, sources.Find(order.newest));
  const auto on_error = [&](const std::string& checkpoint, const absl::Status& status) {
    return LocateError(status, folder.model_name(), checkpoint);
  };
  absl::Status status = Build(folder, partition, plan, on_error);
  if (!status.ok()) EMA_RETURN_IF_ERROR(partition.CheckOpen());
  return status;
}

}  // namespace ema
