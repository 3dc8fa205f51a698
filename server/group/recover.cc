// SPDX-License-Identifier: Apache-2.0
#include "server/group/recover.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "server/checkpoint/checkpoint_folder.h"
#include "server/checkpoint/folder_files.h"
#include "server/core/known_versions.h"
#include "server/format/checkpoint_name.h"
#include "server/format/manifest_json.h"
#include "server/format/verify.h"
#include "server/group/group_errors.h"
#include "server/group/next_incarnation.h"
#include "server/group/partition_config.h"
#include "server/group/placement.h"

namespace ema::group {
namespace {

bool IsWhole(const CheckpointEntry& entry) {
  return !entry.is_partial && !IsSetAsideLabelFile(entry.name);
}

// The checkpoints with all tracks whose manifests can be read, in the order of their commits.
absl::StatusOr<std::vector<GroupCheckpoint>> FindReadable(CheckpointFolder& folder,
                                                          const FolderFiles& files) {
  folder.Refresh();
  EMA_ASSIGN_OR_RETURN(std::vector<CheckpointEntry> entries, folder.List());
  std::vector<GroupCheckpoint> found;
  std::reverse(entries.begin(), entries.end());
  for (const CheckpointEntry& entry : entries) {
    if (absl::IsUnavailable(entry.read_error)) return entry.read_error;
    if (!IsWhole(entry) || !entry.problem.ok() || !entry.details.has_value()) continue;
    EMA_ASSIGN_OR_RETURN(const bool is_kept, files.IsKept(entry.name));
    found.push_back({.id = entry.id.version_id(),
                     .step = entry.id.step,
                     .total_bytes = entry.details->total_bytes,
                     .keep = is_kept});
  }
  return found;
}

// The manifest of the first of FindCheckpoints() that is among `readable`.
absl::StatusOr<CheckpointManifest> ReadNewest(const FolderFiles& files,
                                              const std::vector<GroupCheckpoint>& readable,
                                              const std::string& model) {
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointId> ids, files.FindCheckpoints());
  for (const CheckpointId& id : ids) {
    if (std::any_of(readable.begin(), readable.end(),
                    [&](const GroupCheckpoint& one) { return one.id == id.version_id(); })) {
      return files.ReadManifest(CheckpointName(id));
    }
  }
  return MakeError(absl::StatusCode::kNotFound, ErrorReason::kCheckpointNotFound,
                   absl::StrCat("model \"", model, "\": its folder has no checkpoint whose ",
                                "manifest can be read"));
}

// Finds the history of `newest` by the numbers and steps of its versions, as after a restart of a
// single server.
std::vector<EarlierBase> FindEarlierBases(const std::vector<GroupCheckpoint>& checkpoints,
                                          const Version& newest) {
  std::vector<EarlierBase> bases;
  BranchWalk walk(newest);
  int64_t incarnation = newest.incarnation;
  for (auto it = checkpoints.rbegin(); it != checkpoints.rend(); ++it) {
    const bool is_newest = it->id == newest.id();
    if (!walk.AdvanceIfOnBranch(it->id, it->step,
                                is_newest ? newest.restored_from : std::nullopt)) {
      continue;
    }
    if (it->id.incarnation != incarnation) bases.push_back({incarnation, it->id});
    incarnation = it->id.incarnation;
  }
  std::reverse(bases.begin(), bases.end());
  return bases;
}

absl::Status CheckIsOutdated(const std::string& model, const ModelRecord& record,
                             int64_t newest_stored_incarnation,
                             const std::vector<GroupCheckpoint>& stored) {
  if (record.state != ModelRecord::State::kActive) {
    return ModelBusyError(model, "is being created or deleted");
  }
  const GroupCheckpoint* const durable = record.NewestCheckpoint();
  const bool has_durable = durable != nullptr && std::any_of(stored.begin(), stored.end(),
                                                             [&](const GroupCheckpoint& one) {
                                                               return one.id == durable->id;
                                                             });
  if (!has_durable || newest_stored_incarnation > record.incarnation) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("model \"", model, "\": the registry has it in incarnation ", record.incarnation,
                   ", with the checkpoint of version ", durable->id.version, ", step ",
                   durable->step, ", which is on the disk: there is nothing to recover"));
}

}  // namespace

absl::Status CheckHasNoCheckpoints(CheckpointStore& checkpoints, const std::string& model) {
  CheckpointFolder& folder = checkpoints.FolderOf(model);
  folder.Refresh();
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, folder.ListNames());
  const auto newest = std::find_if(entries.begin(), entries.end(), IsWhole);
  if (newest == entries.end()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "model \"", model, "\": the group's registry does not have it, but the folder ",
      checkpoints.data().CheckpointsPath(model), " has checkpoints, the newest ", newest->name,
      ", step ", newest->id.step,
      ", and a new model would start a new average. Either continue from them with `emactl group "
      "recover ",
      model, "`, or restore the registry from a backup, or accept the loss with `emactl delete ",
      model, " --confirm ", model, "` (in Python Client.delete_model(\"", model,
      "\")) and create the model again"));
}

absl::StatusOr<ModelRecord> RecoverRecord(Member& member, CheckpointStore& checkpoints,
                                          const std::string& model, const LogSink& log) {
  EMA_RETURN_IF_ERROR(ValidateName("model", model));
  const auto stored = member.Read(model);
  if (!stored.ok()) return RegistryError(stored.status());
  const FolderFiles files(checkpoints.data(), model);
  EMA_ASSIGN_OR_RETURN(const int64_t newest_incarnation,
                       NewestStoredIncarnation(&checkpoints, model));
  ModelRecord record{.state = ModelRecord::State::kActive};
  EMA_ASSIGN_OR_RETURN(record.checkpoints, FindReadable(checkpoints.FolderOf(model), files));
  int64_t revision = 0;
  if (stored->has_value()) {
    const ModelRecord& before = (*stored)->record;
    EMA_ASSIGN_OR_RETURN(const std::optional<std::string> unrecorded,
                         FindUnrecordedLatest(checkpoints, model, before));
    if (!unrecorded.has_value()) {
      EMA_RETURN_IF_ERROR(CheckIsOutdated(model, before, newest_incarnation, record.checkpoints));
    }
    revision = (*stored)->revision;
    record.incarnation = before.incarnation;
    record.fenced_run_epoch = before.fenced_run_epoch;
  }
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest newest,
                       ReadNewest(files, record.checkpoints, model));
  EMA_ASSIGN_OR_RETURN(const std::vector<int64_t> tensor_bytes, TensorBytes(ConfigOf(newest)));
  EMA_ASSIGN_OR_RETURN(
      record.partitions,
      PlaceTensors(model, tensor_bytes, CandidatesFor(model, member.members(), member.models())));
  EMA_ASSIGN_OR_RETURN(
      record.incarnation,
      NextIncarnation(record.incarnation, absl::ToUnixMicros(absl::Now()), newest_incarnation));
  record.base = newest.record.id();
  record.earlier_bases = FindEarlierBases(record.checkpoints, newest.record);
  const absl::Status written = member.Write(model, record, revision).status();
  if (absl::IsAborted(written)) return ModelBusyError(model, "is being changed by another call");
  if (!written.ok()) return RegistryError(written);
  LogTo(log, LogLevel::kWarning, "model recovered from its checkpoints",
        {{"model", model},
         {"incarnation", record.incarnation},
         {"version", newest.record.number},
         {"step", newest.record.step},
         {"checkpoints", record.checkpoints.size()},
         {"partitions", record.partitions.size()},
         {"home", record.partitions[0].member}});
  return record;
}

}  // namespace ema::group
