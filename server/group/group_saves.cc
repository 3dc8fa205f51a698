// SPDX-License-Identifier: Apache-2.0
#include "server/group/group_saves.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/steady_wait.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/data_directory.h"
#include "server/format/manifest_json.h"
#include "server/group/fan_out.h"
#include "server/group/group_errors.h"
#include "server/group/part_files.h"
#include "server/group/partition_config.h"
#include "server/group/synthesis_order.h"

namespace ema::group {
namespace {

// How long the other partitions may write after the home has written its files, besides ten times
// as long as the home would have needed for the bytes of the largest one: they share the disk. A
// server writes its partitions of several models one after another.
constexpr absl::Duration kSaveSlack = absl::Minutes(30);
constexpr double kMaxSlowness = 10;
// The timeout of those calls; the home stops waiting earlier.
constexpr absl::Duration kSaveTimeout = absl::Hours(24);
// The longest time in which a partition builds its tensors of a synthesized average. A lost
// connection ends the call sooner.
constexpr absl::Duration kSynthesisTimeout = absl::Hours(1);

// The options of each partition: those of the save, with the numbers of the partition's files.
absl::StatusOr<std::vector<WriteOptions>> NumberFiles(const GroupModels::Placement& placement,
                                                      const WriteOptions& options) {
  std::vector<WriteOptions> parts(placement.partitions.size(), options);
  std::map<std::string, size_t> totals;
  for (size_t i = 0; i < parts.size(); ++i) {
    EMA_ASSIGN_OR_RETURN(const ModelConfig config,
                         PartitionConfig(placement.config, placement.partitions[i]));
    for (const auto& [track, count] : FileCounts(config, options.max_file_bytes)) {
      parts[i].file_numbers[track].first = totals[track];
      totals[track] += count;
    }
  }
  for (WriteOptions& part : parts) {
    for (auto& [track, numbers] : part.file_numbers) numbers.count = totals[track];
  }
  return parts;
}

// How many times as many bytes as the home the largest partition has; 1 or more.
absl::StatusOr<double> LargestShare(const GroupModels::Placement& placement) {
  EMA_ASSIGN_OR_RETURN(const std::vector<int64_t> tensor_bytes, TensorBytes(placement.config));
  std::vector<double> part_bytes;
  for (const Partition& partition : placement.partitions) {
    const auto first = tensor_bytes.begin() + partition.first_tensor;
    part_bytes.push_back(std::accumulate(first, first + partition.tensor_count, 0.0));
  }
  const double largest = *std::max_element(part_bytes.begin(), part_bytes.end());
  return largest / std::max(part_bytes[0], 1.0);
}

v1::SavePartRequest RequestOf(const std::string& path, const Model& home, const Snapshot& snapshot,
                              const WriteOptions& options) {
  v1::SavePartRequest request;
  request.set_model(home.config().name);
  request.set_incarnation(home.incarnation());
  request.mutable_version()->set_version(snapshot.record.number);
  request.mutable_version()->set_incarnation(snapshot.record.incarnation);
  request.set_folder(path.substr(path.rfind('/') + 1));
  request.mutable_tracks()->Assign(options.tracks.begin(), options.tracks.end());
  request.set_max_file_bytes(options.max_file_bytes);
  request.set_tracks_revision(*options.tracks_revision);
  return request;
}

void SetFileNumbers(const WriteOptions& options, v1::SavePartRequest& request) {
  request.clear_file_numbers();
  for (const auto& [track, numbers] : options.file_numbers) {
    v1::FileNumbers& proto = (*request.mutable_file_numbers())[track];
    proto.set_first(static_cast<int64_t>(numbers.first));
    proto.set_count(static_cast<int64_t>(numbers.count));
  }
}

}  // namespace

void GroupSaves::Start(GroupModels* models, CheckpointStore* checkpoints) {
  absl::MutexLock lock(&mu_);
  models_ = models;
  checkpoints_ = checkpoints;
}

void GroupSaves::Stop() {
  absl::MutexLock lock(&mu_);
  models_ = nullptr;
}

absl::StatusOr<GroupModels*> GroupSaves::GetModels() const {
  absl::MutexLock lock(&mu_);
  if (models_ == nullptr) return NotMemberError();
  return models_;
}

absl::StatusOr<DataDirectory*> GroupSaves::GetData() const {
  absl::MutexLock lock(&mu_);
  if (models_ == nullptr) return NotMemberError();
  return &checkpoints_->data();
}

absl::StatusOr<CheckpointManifest> GroupSaves::Write(const std::string& path, Model& home,
                                                     const Snapshot& snapshot,
                                                     const WriteOptions& given) {
  EMA_ASSIGN_OR_RETURN(GroupModels* const models, GetModels());
  EMA_ASSIGN_OR_RETURN(DataDirectory* const data, GetData());
  EMA_ASSIGN_OR_RETURN(GroupModels::Placement placement,
                       models->PlacementOf(home.config().name, home.incarnation()));
  // All partitions write the same tracks, even if these are changed meanwhile.
  WriteOptions options = given;
  options.tracks_revision = home.tracks().state().accepted_change;
  EMA_ASSIGN_OR_RETURN(const std::vector<TrackRef> tracks,
                       home.tracks().After(*options.tracks_revision));
  placement.config.tracks.clear();
  for (const TrackRef& track : tracks) placement.config.tracks.push_back(track->config());
  EMA_ASSIGN_OR_RETURN(const std::vector<WriteOptions> part_options,
                       NumberFiles(placement, options));
  EMA_ASSIGN_OR_RETURN(const double largest_share, LargestShare(placement));
  v1::SavePartRequest request = RequestOf(path, home, snapshot, options);
  FanOut<v1::SavePartResponse> calls(placement.partitions);
  EMA_RETURN_IF_ERROR(models->StartAtOthers(
      placement, [&](Peers& peers, size_t partition, const std::string& address) {
        request.set_boot(placement.partitions[partition].boot);
        SetFileNumbers(part_options[partition], request);
        peers.SavePart(address, request, kSaveTimeout, calls.EndOf(partition));
      }));
  const SteadyTime begin = SteadyNow();
  absl::StatusOr<CheckpointManifest> own =
      WriteVerifiedPart(*data, path, home, snapshot, part_options[0]);
  // Also after an error: the folder is removed next, and the others should not write into it then.
  calls.EndOf(0)(v1::SavePartResponse());
  absl::StatusOr<std::vector<v1::SavePartResponse>> others =
      calls.Wait(After(SteadyNow(), kSaveSlack + kMaxSlowness * largest_share * Since(begin)));
  EMA_RETURN_IF_ERROR(own.status());
  EMA_RETURN_IF_ERROR(others.status());
  std::vector<CheckpointManifest> parts = {*std::move(own)};
  for (size_t i = 1; i < others->size(); ++i) {
    absl::StatusOr<CheckpointManifest> part =
        ParseCheckpointManifest((*others)[i].manifest(), ManifestScope::kPart);
    if (!part.ok()) {
      return WithPrefix(part.status(),
                        absl::StrCat("member \"", placement.partitions[i].member, "\": "));
    }
    parts.push_back(*std::move(part));
  }
  return MergeParts(data->file_system(), data->latch(), path, home, std::move(parts));
}

absl::Status GroupSaves::Commit(Model& home, const Version& record, int64_t total_bytes,
                                bool keep) {
  EMA_ASSIGN_OR_RETURN(GroupModels* const models, GetModels());
  const GroupCheckpoint checkpoint{
      .id = record.id(), .step = record.step, .total_bytes = total_bytes, .keep = keep};
  const int64_t incarnation = home.incarnation();
  return models->ChangeRecord(home.config().name, incarnation, [&](const ModelRecord& before) {
    return AddCheckpoint(before, incarnation, checkpoint);
  });
}

absl::StatusOr<RecordedCheckpoints> GroupSaves::Recorded(const std::string& model) const {
  EMA_ASSIGN_OR_RETURN(const GroupModels* const models, GetModels());
  EMA_ASSIGN_OR_RETURN(const ModelRecord record, models->RecordOf(model));
  RecordedCheckpoints recorded{.ids = {}, .history = record.History()};
  for (const GroupCheckpoint& checkpoint : record.checkpoints)
    recorded.ids.push_back(checkpoint.id);
  return recorded;
}

absl::Status GroupSaves::Remove(Model& home, const VersionId& id) {
  EMA_ASSIGN_OR_RETURN(GroupModels* const models, GetModels());
  const absl::Status status =
      models->ChangeRecord(home.config().name, home.incarnation(),
                           [&](const ModelRecord& before) { return RemoveCheckpoint(before, id); });
  // The model has been deleted.
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<std::shared_ptr<const Manifest>> GroupSaves::WholeManifest(const Model& home) {
  EMA_ASSIGN_OR_RETURN(GroupModels* const models, GetModels());
  EMA_ASSIGN_OR_RETURN(const GroupModels::Placement placement,
                       models->PlacementOf(home.config().name, home.incarnation()));
  return placement.config.manifest;
}

absl::Status GroupSaves::Synthesize(Model& home, const SynthesisOrder& order) {
  EMA_ASSIGN_OR_RETURN(GroupModels* const models, GetModels());
  EMA_ASSIGN_OR_RETURN(const GroupModels::Placement placement,
                       models->PlacementOf(home.config().name, home.incarnation()));
  v1::SynthesizePartRequest request = ToProto(order);
  request.set_model(home.config().name);
  request.set_incarnation(home.incarnation());
  FanOut<v1::SynthesizePartResponse> calls(placement.partitions);
  EMA_RETURN_IF_ERROR(models->StartAtOthers(
      placement, [&](Peers& peers, size_t partition, const std::string& address) {
        request.set_boot(placement.partitions[partition].boot);
        peers.SynthesizePart(address, request, kSynthesisTimeout, calls.EndOf(partition));
      }));
  request.set_boot(placement.partitions[0].boot);
  calls.EndOf(0)(models->SynthesizePart(request));
  return calls.Wait().status();
}

absl::Status GroupSaves::RollBack(Model& home, const VersionId& id) {
  EMA_ASSIGN_OR_RETURN(GroupModels* const models, GetModels());
  return models->RollBack(home.config().name, home.incarnation(), id, home.Describe().run_epoch);
}

}  // namespace ema::group
