// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/synthesis.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/synthesis_plan.h"
#include "server/core/known_versions.h"
#include "server/format/checkpoint_files.h"
#include "server/format/tensor_reader.h"

namespace ema {
namespace {

// Blocks of a track into which stored values are folded: two float32 for each average while it is
// built, so that the sum is as exact as its parts. Not thread-safe.
class BlocksMixer {
 public:
  // RESOURCE_EXHAUSTED: no memory.
  static absl::StatusOr<std::unique_ptr<BlocksMixer>> Create(Device& device, const Track& track) {
    std::unique_ptr<BlocksMixer> mixer(new BlocksMixer(track));
    EMA_ASSIGN_OR_RETURN(mixer->blocks_, AllocateBlocks(device, track));
    EMA_ASSIGN_OR_RETURN(mixer->low_blocks_, AllocateBlocks(device, track));
    EMA_ASSIGN_OR_RETURN(mixer->stream_, device.NewStream());
    // Between tensors, too: readers get those bytes.
    for (const std::shared_ptr<Block>& block : mixer->blocks_) {
      EMA_RETURN_IF_ERROR(mixer->stream_->Zero(block->data(), block->size_bytes()));
    }
    return mixer;
  }

  // Puts the bytes there as they are.
  absl::Status Copy(int64_t offset, std::span<const std::byte> bytes) {
    return ForEachBlock(offset, bytes,
                        [this](size_t i, int64_t in_block, std::span<const std::byte> piece) {
                          return stream_->CopyFromHost(blocks_[i]->data() + in_block, piece.data(),
                                                       static_cast<int64_t>(piece.size()));
                        });
  }

  // Moves float32 averages by `share` of the way to `bytes`; 1: to them, whatever there was.
  absl::Status Fold(int64_t offset, std::span<const std::byte> bytes, double share) {
    return ForEachBlock(
        offset, bytes, [this, share](size_t i, int64_t in_block, std::span<const std::byte> piece) {
          FoldTarget target;
          target.kind = share == 1 ? FoldTarget::Kind::kAssignCompensated
                                   : FoldTarget::Kind::kAverageCompensated;
          target.update_weight = share;
          target.next = blocks_[i]->data() + in_block;
          target.current = target.next;
          target.next_low = low_blocks_[i]->data() + in_block;
          target.current_low = target.next_low;
          // Averages that are not finite are what the model's owner has allowed.
          return stream_
              ->Fold({.source_dtype = Dtype::kFloat32,
                      .source = piece.data(),
                      .element_count = static_cast<int64_t>(piece.size() / sizeof(float)),
                      .targets = {&target, 1}})
              .status();
        });
  }

  // To be called between folds of the same place, whose order the stream does not keep.
  absl::Status EndSource() { return stream_->Synchronize().status(); }

  // The averages, rounded to float32. Ends the mixer. REQUIRES: EndSource().
  absl::StatusOr<Blocks> Finish() {
    low_blocks_.clear();
    return Blocks(blocks_.begin(), blocks_.end());
  }

 private:
  explicit BlocksMixer(const Track& track) : track_(track) {}

  template <typename Visit>
  absl::Status ForEachBlock(int64_t offset, std::span<const std::byte> bytes, const Visit& visit) {
    while (!bytes.empty()) {
      const int64_t i = track_.FindBlock(offset);
      const int64_t in_block = offset - track_.block_start(i);
      const int64_t n =
          std::min<int64_t>(static_cast<int64_t>(bytes.size()), track_.block_size(i) - in_block);
      EMA_RETURN_IF_ERROR(visit(i, in_block, bytes.first(n)));
      offset += n;
      bytes = bytes.subspan(n);
    }
    return absl::OkStatus();
  }

  const Track& track_;
  std::vector<std::shared_ptr<Block>> blocks_;
  std::vector<std::shared_ptr<Block>> low_blocks_;
  std::unique_ptr<DeviceStream> stream_;
};

// Which checkpoints there are on the branch of `latest`, newest first, and what they say.
absl::StatusOr<std::vector<StoredCheckpoint>> ReadManifests(FileSystem& file_system,
                                                            const CheckpointFolder::Held& held,
                                                            const Model& model,
                                                            const Version& latest,
                                                            ReadErrorHandler on_error) {
  std::vector<KnownVersion> on_disk;
  on_disk.reserve(held.ids().size());
  for (const CheckpointId& id : held.ids()) {
    on_disk.push_back({.id = id.version_id(), .step = id.step});
  }
  std::vector<StoredCheckpoint> checkpoints;
  BranchWalk walk(latest);
  // Those in memory, too: one of them may have been restored.
  for (const KnownVersion& known : MergeKnownVersions(model.history(), on_disk)) {
    const CheckpointId id{known.id.incarnation, known.id.version, known.step};
    if (!std::binary_search(held.ids().begin(), held.ids().end(), id, std::greater<>())) {
      walk.AdvanceIfOnBranch(known.id, known.step, known.restored_from);
      continue;
    }
    BranchWalk with_it = walk;
    if (!with_it.AdvanceIfOnBranch(known.id, known.step, std::nullopt)) continue;
    EMA_RETURN_IF_ERROR(model.closed());
    absl::StatusOr<CheckpointManifest> manifest =
        ReadCheckpointManifest(file_system, held.Path(id));
    if (!manifest.ok()) return on_error(CheckpointName(id), manifest.status());
    walk.AdvanceIfOnBranch(known.id, known.step, manifest->record.restored_from);
    if (manifest->manifest != model.manifest()) continue;
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
  const StorageLayout& layout = track.layout();
  const auto is_mixed = [&](int64_t i) {
    return track.action(i) == TensorAction::kAverage && !model.manifest().tensor(i).is_buffer;
  };
  const auto fold = [&](int64_t i, int64_t offset,
                        std::span<const std::byte> bytes) -> absl::Status {
    // A server that stops does not wait for this.
    EMA_RETURN_IF_ERROR(model.closed());
    const int64_t place = layout.entry(i).offset + offset;
    if (!is_mixed(i)) return gives_rest ? mixer.Copy(place, bytes) : absl::OkStatus();
    return share != 0 ? mixer.Fold(place, bytes, share) : absl::OkStatus();
  };
  const std::string& name = source.track->config.name;
  const absl::StatusOr<std::unique_ptr<TensorReader>> reader =
      TensorReader::Open(file_system, TrackPath(path, name), TensorKind::kWeights,
                         *source.track->weights, model.manifest(), track.actions(), layout);
  absl::Status status = reader.ok() ? (*reader)->ReadAll(fold) : reader.status();
  if (!absl::IsDataLoss(status)) return status;
  return on_error(CheckpointName(source.checkpoint->id),
                  WithPlace(status, absl::StrCat("track \"", name, "\": ")));
}

// All of the plan's sources in `track`'s blocks.
absl::StatusOr<Blocks> Mix(FileSystem& file_system, const CheckpointFolder::Held& held,
                           const Model& model, const SynthesisPlan& plan, const Track& track,
                           ReadErrorHandler on_error) {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<BlocksMixer> mixer,
                       BlocksMixer::Create(model.device(), track));
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
    EMA_RETURN_IF_ERROR(FoldSource(file_system, held.Path(source.checkpoint->id), model, track,
                                   source, share, gives_rest(source), *mixer, on_error));
    EMA_RETURN_IF_ERROR(mixer->EndSource());
  }
  return mixer->Finish();
}

absl::StatusOr<Synthesis> SynthesizeOpen(CheckpointFolder& folder, Model& model,
                                         const SynthesisRequest& request,
                                         ReadErrorHandler on_error) {
  EMA_RETURN_IF_ERROR(model.closed());
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
  EMA_ASSIGN_OR_RETURN(const auto held, folder.HoldAll());
  EMA_ASSIGN_OR_RETURN(const std::vector<StoredCheckpoint> checkpoints,
                       ReadManifests(folder.file_system(), *held, model, *latest, on_error));
  EMA_ASSIGN_OR_RETURN(const SynthesisPlan plan, PlanSynthesis(model, request, checkpoints));

  EMA_ASSIGN_OR_RETURN(TrackRef track, model.tracks().MakeSynthesizedTrack(plan.config));
  // The low parts; not used when this ends.
  EMA_ASSIGN_OR_RETURN(const auto low_parts_memory,
                       model.memory().Reserve(absl::StrCat("model \"", model.config().name,
                                                           "\": to build \"", request.name, "\""),
                                              track->layout().total_bytes()));
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->record = plan.record;
  TrackSnapshot& result = snapshot->tracks.emplace_back();
  result.track = track;
  result.last_steps = {plan.record.step};
  // Another call may have made another of that name and version.
  result.block_versions.assign(track->block_count(), INT64_MAX);
  EMA_ASSIGN_OR_RETURN(result.blocks,
                       Mix(folder.file_system(), *held, model, plan, *track, on_error));
  EMA_RETURN_IF_ERROR(model.tracks().AddSynthesized(std::move(snapshot)));

  Synthesis synthesis{.version = plan.record, .residual = plan.residual};
  for (const SynthesisPlan::Source& source : plan.sources) {
    synthesis.sources.push_back(
        {source.track->config.name, source.track->last_steps[0], source.weight});
  }
  return synthesis;
}

}  // namespace

absl::StatusOr<Synthesis> Synthesize(CheckpointFolder& folder, Model& model,
                                     const SynthesisRequest& request, ReadErrorHandler on_error) {
  absl::StatusOr<Synthesis> result = SynthesizeOpen(folder, model, request, on_error);
  if (result.ok()) return result;
  // Of a deleted model the files go, which is no fault of theirs.
  EMA_RETURN_IF_ERROR(model.closed());
  return result;
}

}  // namespace ema
