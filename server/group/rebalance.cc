// SPDX-License-Identifier: Apache-2.0
#include "server/group/rebalance.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"
#include "server/format/verify.h"
#include "server/group/group_errors.h"
#include "server/group/hosted_partition.h"
#include "server/group/member.h"
#include "server/group/model_record.h"
#include "server/group/next_incarnation.h"
#include "server/group/part_files.h"
#include "server/group/partition_config.h"
#include "server/group/placement.h"

namespace ema::group {
namespace {

using Names = google::protobuf::RepeatedPtrField<std::string>;
using Members = std::map<std::string, MemberRecord>;

bool Contains(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

absl::StatusOr<ModelRecord> ReadActive(Member& member, const std::string& model) {
  const auto stored = member.Read(model);
  if (!stored.ok()) return RegistryError(stored.status());
  if (!stored->has_value()) return ModelNotFoundError(model);
  if ((*stored)->record.state != ModelRecord::State::kActive) {
    return ModelBusyError(model, "is being created or deleted");
  }
  return (*stored)->record;
}

absl::Status NotRunningError(const std::string& model, const std::string& member) {
  return absl::FailedPreconditionError(absl::StrCat(
      "model \"", model, "\": member \"", member,
      "\" does not run, or has just restarted. Start it, and the model returns to "
      "its newest checkpoint or copy; if it is lost for good, pass it in `without` (emactl: "
      "--without)"));
}

absl::Status CheckNames(const Names& without, const Members& members, const ModelRecord& record) {
  for (const std::string& name : without) {
    const bool has_part =
        std::any_of(record.partitions.begin(), record.partitions.end(),
                    [&](const Partition& partition) { return partition.member == name; });
    if (has_part || members.contains(name)) continue;
    return BadRequest(absl::StrCat("without: ", Quoted(name),
                                   " given, expected a running server of the group, or a server of "
                                   "the model"));
  }
  return absl::OkStatus();
}

// Whether the processes of all partitions run. FAILED_PRECONDITION: one does not run, and its
// member is not in `without`, so it may come back.
absl::StatusOr<bool> AllRun(const std::string& model, const ModelRecord& record,
                            const Member& member, const Names& without) {
  bool all_run = true;
  for (const Partition& partition : record.partitions) {
    if (member.AddressOf(partition.member, partition.boot).has_value()) continue;
    all_run = false;
    if (!Contains(without, partition.member)) return NotRunningError(model, partition.member);
  }
  return all_run;
}

// The configuration of the whole model, from the checkpoint to which it returns.
absl::StatusOr<ModelConfig> StoredConfig(CheckpointStore& checkpoints, const std::string& model,
                                         const ModelRecord& record) {
  const GroupCheckpoint* const durable = record.NewestCheckpoint();
  if (durable == nullptr) {
    return MakeError(absl::StatusCode::kNotFound, ErrorReason::kCheckpointNotFound,
                     absl::StrCat("model \"", model,
                                  "\": it has no checkpoint, so its averages were lost with the "
                                  "server that does not run; delete it and create it again"));
  }
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest manifest,
                       ReadGroupCheckpoint(checkpoints, model, *durable));
  return ConfigOf(manifest);
}

bool HaveSamePlacement(const std::vector<Partition>& some, const std::vector<Partition>& others) {
  const auto place = [](const Partition& one) {
    return std::tie(one.member, one.boot, one.first_tensor, one.tensor_count);
  };
  return std::equal(some.begin(), some.end(), others.begin(), others.end(),
                    [&](const Partition& a, const Partition& b) { return place(a) == place(b); });
}

v1::RebalanceModelResponse ResponseOf(const ModelRecord& record, bool has_changed) {
  v1::RebalanceModelResponse response;
  response.set_has_changed(has_changed);
  response.set_incarnation(record.incarnation);
  if (const GroupCheckpoint* const base = record.NewestCheckpoint(); base != nullptr) {
    response.mutable_base()->set_version(base->id.version);
    response.mutable_base()->set_incarnation(base->id.incarnation);
    response.set_step(base->step);
  }
  for (const Partition& partition : record.partitions) response.add_members(partition.member);
  return response;
}

// Places the model on all members but those in `without`. INVALID_ARGUMENT: `without` names all
// members. Errors also as PlaceTensors().
absl::StatusOr<std::vector<Partition>> PlaceWithout(const Names& without, const Member& member,
                                                    const std::string& model,
                                                    const ModelConfig& config) {
  EMA_ASSIGN_OR_RETURN(const std::vector<int64_t> tensor_bytes, TensorBytes(config));
  // The model's own memory counts as free: it is freed before the model is loaded again.
  Candidates candidates = CandidatesFor(model, member.members(), member.models());
  const size_t running_count = candidates.size();
  std::erase_if(candidates, [&](const auto& one) { return Contains(without, one.first); });
  if (candidates.empty()) {
    return BadRequest(absl::StrCat("without: names all ", running_count,
                                   " servers that run; at least one must remain"));
  }
  return PlaceTensors(model, tensor_bytes, candidates);
}

// Begins the incarnation in which the model has its tensors there. Errors as
// GroupModels::ChangeRecord().
absl::StatusOr<v1::RebalanceModelResponse> MoveTo(const std::vector<Partition>& partitions,
                                                  GroupModels& models, HostedModels& hosted,
                                                  CheckpointStore& checkpoints,
                                                  const std::string& model, int64_t incarnation,
                                                  const LogSink& log) {
  EMA_ASSIGN_OR_RETURN(const int64_t stored, NewestStoredIncarnation(&checkpoints, model));
  ModelRecord after;
  EMA_RETURN_IF_ERROR(models.ChangeRecord(
      model, incarnation, [&](const ModelRecord& record) -> absl::StatusOr<ModelRecord> {
        EMA_ASSIGN_OR_RETURN(
            after, BeginIncarnation(record, {.now_micros = absl::ToUnixMicros(absl::Now()),
                                             .newest_stored_incarnation = stored,
                                             .partitions = partitions}));
        return after;
      }));
  {
    absl::MutexLock lock(&hosted.change_mu());
    hosted.Drop(model, incarnation, /*why_deleted=*/"");
  }
  const v1::RebalanceModelResponse response = ResponseOf(after, /*has_changed=*/true);
  LogTo(log, LogLevel::kWarning, "model moves to other servers",
        {{"model", model},
         {"incarnation", after.incarnation},
         {"version", response.base().version()},
         {"step", response.step()},
         {"members", absl::StrJoin(response.members(), ",")}});
  return response;
}

}  // namespace

absl::StatusOr<v1::RebalanceModelResponse> RebalanceModel(GroupModels& models, HostedModels& hosted,
                                                          CheckpointStore* checkpoints,
                                                          const v1::RebalanceModelRequest& request,
                                                          absl::FunctionRef<absl::Status()> save,
                                                          const LogSink& log) {
  const std::string& model = request.model();
  if (checkpoints == nullptr) return NoDataDirError();
  EMA_ASSIGN_OR_RETURN(Member* const member, hosted.GetMember());
  EMA_ASSIGN_OR_RETURN(const ModelRecord before, ReadActive(*member, model));
  EMA_RETURN_IF_ERROR(CheckNames(request.without(), member->members(), before));
  EMA_ASSIGN_OR_RETURN(const bool all_run, AllRun(model, before, *member, request.without()));
  const absl::Status is_home = all_run ? models.CheckHome(model) : absl::OkStatus();
  // A server cannot load its part, so no step was committed since the checkpoint.
  const bool is_stuck = GetErrorReason(is_home) == ErrorReason::kGroupDegraded &&
                        before.IsHome(member->name(), member->boot());
  if (!is_stuck) EMA_RETURN_IF_ERROR(is_home);
  if (is_stuck && before.BeginsWithCopy()) return ModelBusyError(model, "is loading a copy");
  const bool must_save = all_run && !is_stuck;

  const std::shared_ptr<const HostedModel> home = must_save ? hosted.Find(model) : nullptr;
  if (must_save && (home == nullptr || home->partition->id().incarnation != before.incarnation)) {
    return ModelBusyError(model, "is beginning another incarnation");
  }
  absl::StatusOr<ModelConfig> config =
      home != nullptr ? models.CurrentConfig(model) : StoredConfig(*checkpoints, model, before);
  EMA_RETURN_IF_ERROR(config.status());
  EMA_ASSIGN_OR_RETURN(const std::vector<Partition> partitions,
                       PlaceWithout(request.without(), *member, model, *config));
  if (HaveSamePlacement(partitions, before.partitions)) {
    return ResponseOf(before, /*has_changed=*/false);
  }

  if (home != nullptr) EMA_RETURN_IF_ERROR(home->partition->RejectPushesForMove());
  const absl::Cleanup accept_pushes = [&] {
    if (home != nullptr) home->partition->AcceptPushesAfterMove();
  };
  if (home != nullptr) EMA_RETURN_IF_ERROR(save());
  return MoveTo(partitions, models, hosted, *checkpoints, model, before.incarnation, log);
}

absl::StatusOr<v1::RebalanceModelResponse> ReplaceMembers(GroupModels& models, HostedModels& hosted,
                                                          CheckpointStore& checkpoints,
                                                          const std::string& model,
                                                          int64_t incarnation,
                                                          const std::vector<std::string>& lost,
                                                          const LogSink& log) {
  const Names without(lost.begin(), lost.end());
  EMA_ASSIGN_OR_RETURN(Member* const member, hosted.GetMember());
  EMA_ASSIGN_OR_RETURN(const ModelRecord before, ReadActive(*member, model));
  if (before.incarnation != incarnation) {
    return FencedError(model, absl::StrCat("incarnation ", incarnation, " has ended"));
  }
  const Members members = member->members();
  for (const Partition& partition : before.partitions) {
    const bool is_lost = Contains(without, partition.member);
    // Even with another boot: the model returns to its checkpoint on the restarted server.
    if (is_lost && members.contains(partition.member)) {
      return absl::AbortedError(absl::StrCat("member \"", partition.member, "\" is back"));
    }
    if (!is_lost && !member->AddressOf(partition.member, partition.boot).has_value()) {
      return NotRunningError(model, partition.member);
    }
  }
  EMA_ASSIGN_OR_RETURN(const std::optional<std::string> unrecorded,
                       FindUnrecordedLatest(checkpoints, model, before));
  if (unrecorded.has_value()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "model \"", model, "\": its record in the registry does not have its newest checkpoint ",
        *unrecorded, ", as after the restore of an old backup: use emactl group recover"));
  }
  EMA_ASSIGN_OR_RETURN(const ModelConfig config, StoredConfig(checkpoints, model, before));
  EMA_ASSIGN_OR_RETURN(const std::vector<Partition> partitions,
                       PlaceWithout(without, *member, model, config));
  return MoveTo(partitions, models, hosted, checkpoints, model, incarnation, log);
}

}  // namespace ema::group
